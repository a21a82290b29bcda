"""The one exception of the format.

Layer: bottom, pure. Names come from files that nobody vouches for: messages quote them escaped and
cut, so that a name of a megabyte, or one with line feeds, cannot flood or forge a log.
"""

from __future__ import annotations

from racer.errors import RacerError

_QUOTED_CHARS_MAX = 120


def quoted(name: str) -> str:
    """`name` for a message: printable ASCII in quotes, cut where it is long."""
    if len(name) <= _QUOTED_CHARS_MAX:
        return ascii(name)
    return f"{name[:_QUOTED_CHARS_MAX]!a}… ({len(name)} characters)"


class SafetensorsError(RacerError, ValueError):
    """A file, or a model made of files, that cannot be read as it claims; nothing was loaded.

    `reason` says what is wrong; `file` and `tensor` say where, as far as that is known.
    `unsupported` tells legal bytes that no type is there for from broken ones.
    """

    default_code = "safetensors"

    def __init__(
        self,
        reason: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        hint: str = "",
        unsupported: bool = False,
    ) -> None:
        super().__init__(reason, hint=hint)
        self.reason = reason
        self.file = file
        self.tensor = tensor
        self.unsupported = unsupported

    def __str__(self) -> str:
        parts = []
        if self.file is not None:
            parts.append(self.file if self.file.isprintable() else ascii(self.file))
        if self.tensor is not None:
            parts.append(f"tensor {quoted(self.tensor)}")
        message = ": ".join([*parts, self.reason])
        return f"{message} ({self.hint})" if self.hint else message
