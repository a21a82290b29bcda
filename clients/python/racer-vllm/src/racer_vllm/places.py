"""Files of a model's place by pattern, for the models that name theirs.

Layer: on the client. vLLM lets a model say in which files its weights are, as shell patterns
relative to its directory; the first pattern that any file matches decides.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import racer
from racer.models.names import SUFFIX, natural_key
from racer.urls import SCHEME
from racer_vllm.record import ModelPlace


def matching_places(
    place: ModelPlace, patterns: Sequence[str], *, socket: str | None
) -> list[ModelPlace]:
    """The safetensors files below `place`, each as a place of its own, in natural order.

    Raises NotFound where no pattern matches any.
    """
    names = list(_names(place.location, socket))
    for pattern in patterns:
        found = [name for name in names if _matches(name, pattern)]
        if found:
            return [place.below(name) for name in sorted(found, key=natural_key)]
    raise racer.NotFound(
        f"no safetensors file under {place.location}/ matches {', '.join(patterns)}",
        hint="the model's code asks for these files: is the copy of the model complete?",
    )


def _names(location: str, socket: str | None) -> Iterable[str]:
    if not location.startswith(SCHEME):
        return glob.glob(f"**/*{SUFFIX}", root_dir=location, recursive=True)
    folder = racer.RacerUrl.parse(f"{location.rstrip('/')}/")
    with racer.Client(socket=socket) as client:
        keys = [racer.RacerUrl.parse(entry.url).key for entry in client.list(folder)]
    names = [os.fsdecode(key[len(folder.key) :]) for key in keys]
    return [name for name in names if name.endswith(SUFFIX)]


def _matches(name: str, pattern: str) -> bool:
    """Level by level: a star does not reach over a slash."""
    parts, wanted = name.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
