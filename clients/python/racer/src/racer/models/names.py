"""Which files of a model directory hold its weights: decided by names and the index alone.

Layer: models, pure. The rules:

1. With an index, it decides: exactly the files it names are read. A weight file that it does not
   name is refused, because index and directory then disagree; the caller may have such files left
   out instead. Files of the other common layout, `consolidated*.safetensors`, are always left out.
2. Without an index all `*.safetensors` files are read, `consolidated*` only where there is nothing
   else. A file called `…-00002-of-00005…` needs all its siblings.
3. Files come in natural order: `shard-2` before `shard-10`.
4. Names from an index stay inside the directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from racer.safetensors.errors import SafetensorsError, quoted
from racer.safetensors.strict_json import StrictJsonError, loads_untrusted

SUFFIX: Final = ".safetensors"
INDEX_SUFFIX: Final = ".safetensors.index.json"
DEFAULT_INDEX: Final = "model.safetensors.index.json"

ExtraShards = Literal["refuse", "ignore"]

_OTHER_LAYOUT = "consolidated"
_DIGITS = re.compile(r"([0-9]+)")
_NUMBERED = re.compile(r"(.*)-([0-9]{1,9})-of-([0-9]{1,9})(\..*)?\.safetensors", re.DOTALL)


@dataclass(frozen=True)
class ShardNames:
    """The files to read, in natural order, and those that were left out by a rule."""

    names: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def no_model(location: str) -> SafetensorsError:
    """What to say of one file that is given where a model is wanted."""
    return SafetensorsError(
        f"one file, and not one that ends in {SUFFIX}",
        file=location,
        hint=f"give the directory of a model, or one {SUFFIX} file",
    )


def natural_key(name: str) -> tuple[object, ...]:
    """Sorts digits by their value and everything else by its characters."""
    parts = _DIGITS.split(name)  # Text and digits take turns.
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


def find_index(names: Iterable[str]) -> str | None:
    """The name of the index that counts, None where there is none."""
    found = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    if DEFAULT_INDEX in found:
        return DEFAULT_INDEX
    candidates = [name for name in found if not name.startswith(_OTHER_LAYOUT)] or found
    if len(candidates) > 1:
        raise SafetensorsError(
            f"{len(candidates)} indexes, none of them {DEFAULT_INDEX}:"
            f" {', '.join(map(ascii, candidates))}",
            hint="give each model a directory of its own",
        )
    return candidates[0] if candidates else None


def read_index_untrusted(text: bytes) -> dict[str, str]:
    """The tensors of an index, and the file each is in. Raises SafetensorsError."""
    try:
        index: Any = loads_untrusted(text)
    except StrictJsonError as error:
        raise SafetensorsError(error.reason) from error
    mapped = index.get("weight_map") if type(index) is dict else None
    if type(mapped) is not dict:
        raise SafetensorsError("weight_map is missing, or no object")
    if not mapped:
        raise SafetensorsError("weight_map names no tensor")
    for tensor, name in mapped.items():
        if type(name) is not str:
            raise SafetensorsError("is mapped to something that is no file name", tensor=tensor)
        _check_inside(name, tensor)
    return mapped


def _check_inside(name: str, tensor: str) -> None:
    """What an index names must be a safetensors file in or below its own directory."""
    segments = name.split("/")
    outside = name.startswith("/") or ".." in segments or "\\" in name or "\0" in name
    if outside:
        raise SafetensorsError(
            f"is mapped to {quoted(name)}, which leaves the model directory", tensor=tensor
        )
    if "" in segments or "." in segments or not name.endswith(SUFFIX) or name == SUFFIX:
        raise SafetensorsError(
            f"is mapped to {quoted(name)}, which is no name of a safetensors file", tensor=tensor
        )


def with_index(
    names: Iterable[str], weight_map: Mapping[str, str], extra: ExtraShards
) -> ShardNames:
    """Rule 1. Whether the files it names are there is for the caller to find out."""
    mapped = set(weight_map.values())
    others = [name for name in _weights(names) if name not in mapped]
    unexpected = [name for name in others if not name.startswith(_OTHER_LAYOUT)]
    if unexpected and extra == "refuse":
        raise SafetensorsError(
            "the index names no tensor in it"
            + (f", nor in {len(unexpected) - 1} more" if len(unexpected) > 1 else ""),
            file=unexpected[0],
            hint="remove the file, correct the index, or load with extra_shards='ignore'",
        )
    return ShardNames(tuple(sorted(mapped, key=natural_key)), tuple(others))


def without_index(names: Iterable[str]) -> ShardNames:
    """Rule 2."""
    found = _weights(names)
    chosen = [name for name in found if not name.startswith(_OTHER_LAYOUT)] or found
    if not chosen:
        raise SafetensorsError(
            "no safetensors file and no index",
            hint="is this the directory of the model? Other formats (.bin, .gguf) are not read",
        )
    _check_siblings(chosen)
    return ShardNames(tuple(chosen), tuple(name for name in found if name not in chosen))


def _weights(names: Iterable[str]) -> Sequence[str]:
    return sorted((name for name in names if name.endswith(SUFFIX)), key=natural_key)


def _check_siblings(names: Sequence[str]) -> None:
    families: dict[tuple[str, int, str], dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            stem, number, count, rest = match.groups()
            families.setdefault((stem, int(count), rest or ""), {})[int(number)] = name
    for (_, count, _), members in families.items():
        start = 0 if 0 in members else 1
        due = range(start, start + count)
        missing = next((number for number in due if number not in members), None)
        if missing is not None:
            held = sum(number in due for number in members)
            raise SafetensorsError(
                f"{held} of {count} shards are there; number {missing} is missing",
                file=next(iter(members.values())),
                hint="upload the missing files, or remove those of an older version",
            )
        if len(members) > count:
            raise SafetensorsError(
                f"is one of {len(members)} shards where its name counts {count}",
                file=members[max(members)],
                hint="remove the files of another version",
            )
