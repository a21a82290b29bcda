"""Exit statuses, and how errors are told.

0    done
1    failed, for another reason than those below
2    the command line or a URL is wrong
3    there is no such object
4    no daemon answers
5    the object changed while it was read, or is not the version that was asked for
6    not allowed
7    the daemon or the origin cannot serve now: trying later may help
8    the bytes failed verification everywhere
130  interrupted (Ctrl-C)
141  whoever read the output closed it
"""

from __future__ import annotations

import sys

from racer.errors import (
    BadRequest,
    BadUrl,
    Corrupt,
    DaemonUnavailable,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    OriginUnavailable,
    Overloaded,
    PinRefused,
    RacerError,
    VersionChanged,
)

FAILED = 1
USAGE = 2
INTERRUPTED = 130
PIPE_CLOSED = 141

_STATUSES: tuple[tuple[type[RacerError], int], ...] = (
    (BadUrl, USAGE),
    (BadRequest, USAGE),
    (NotFound, 3),
    (DaemonUnavailable, 4),
    (VersionChanged, 5),
    (Forbidden, 6),
    (PinRefused, 6),
    (Overloaded, 7),
    (DeadlineExceeded, 7),
    (OriginUnavailable, 7),
    (Corrupt, 8),
)


def status_of(error: RacerError | OSError) -> int:
    """The exit status that tells of `error`."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), FAILED)


def report(error: RacerError | OSError, *, as_json: bool) -> int:
    """Says on standard error what happened and what to do; returns the exit status."""
    if isinstance(error, RacerError):
        told = {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "retry": error.retry,
        }
    else:
        told = {"code": "os", "message": str(error), "hint": "", "retry": "never"}
    if as_json:
        import json

        print(json.dumps({"error": told}), file=sys.stderr)
    else:
        print(f"racer: {told['message']}", file=sys.stderr)
        if told["hint"]:
            print(f"       {told['hint']}", file=sys.stderr)
    return status_of(error)
