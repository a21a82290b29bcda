"""Descriptors with an owner from their first moment.

Layer: bottom. A number that a system call returned is nobody's until it is stored somewhere, and an
interrupt may come before that.
"""

from __future__ import annotations

from collections.abc import Callable
from io import FileIO
from typing import Any


def owned(make: Callable[..., int], *arguments: Any) -> FileIO:
    """What `make(*arguments)`, a call of the system, returns, as an object that closes it.

    No step of Python lies between the call and its owner, where `make` is built in. Raises OSError.
    """
    return next(map(FileIO, map(make, *((argument,) for argument in arguments))))
