"""What `--model-loader-extra-config` may say for load format `racer`.

Layer: bottom, pure. Every option is known by name and checked before anything is opened: a
misspelt or mistyped one is an error that lists what there is, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final, Literal, cast

from racer.loading.plan import CHUNK_BYTES_MIN
from racer.loading.stream import IN_FLIGHT, IN_FLIGHT_MAX, STAGING_BYTES

LOAD_FORMAT: Final = "racer"

Share = Literal["auto", "off"]

_SHARES: Final = ("auto", "off")


@dataclass(frozen=True, slots=True)
class LoaderOptions:
    """`staging_bytes`, `in_flight`, `share` and `socket` are those of `racer.load`.

    `verify` decides about parameters that no tensor of the model initialised: with True each is an
    error, with False none is looked for; None (not given) makes errors of those that vLLM's own
    loader checks, and warnings of the others.
    """

    staging_bytes: int = STAGING_BYTES
    in_flight: int = IN_FLIGHT
    share: Share = "auto"
    socket: str | None = None
    verify: bool | None = None


def parse_options(given: object) -> LoaderOptions:
    """Reads vLLM's `model_loader_extra_config`. Raises ValueError with all that is wrong."""
    if given is None:
        return LoaderOptions()
    if not isinstance(given, Mapping):
        raise ValueError(
            "--model-loader-extra-config of load format racer is a JSON object,"
            f" not {type(given).__name__}"
        )
    allowed = [field.name for field in fields(LoaderOptions)]
    wrong = [f"there is no option {name!r}" for name in given if name not in allowed]
    wrong += [text for name in allowed if name in given and (text := _wrong(name, given[name]))]
    if not wrong:
        options = LoaderOptions(**cast("Mapping[str, object]", given))  # type: ignore[arg-type]
        wrong = _wrong_together(options)
    if wrong:
        raise ValueError(
            f"--model-loader-extra-config of load format racer: {'; '.join(wrong)}"
            f" (options: {', '.join(allowed)})"
        )
    return options


def _wrong(name: str, value: object) -> str:
    """What is wrong with one value; nothing where it is right."""
    match name:
        case "staging_bytes" if type(value) is not int or value <= 0:
            return f"staging_bytes is {value!r}: a number of bytes"
        case "in_flight" if type(value) is not int or not 1 <= value <= IN_FLIGHT_MAX:
            return f"in_flight is {value!r}: 1 to {IN_FLIGHT_MAX}"
        case "share" if value not in _SHARES:
            return f"share is {value!r}: {' or '.join(map(repr, _SHARES))}"
        case "socket" if type(value) is not str or not value:
            return f"socket is {value!r}: the path of racerd's socket"
        case "verify" if type(value) is not bool:
            return f"verify is {value!r}: true or false"
    return ""


def _wrong_together(options: LoaderOptions) -> list[str]:
    least = 2 * CHUNK_BYTES_MIN * options.in_flight
    if options.staging_bytes >= least:
        return []
    return [
        f"staging_bytes is {options.staging_bytes:,}:"
        f" {options.in_flight} in flight need at least {least:,}"
    ]
