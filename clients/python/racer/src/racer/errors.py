"""What can go wrong, by the wire's codes.

Layer: bottom, pure. Every error of this package is a `RacerError`; its `code` is the wire's (or,
for what the daemon never saw, one of this module's own), so that programs branch on the class or
on `code` and people read `message` and `hint`. Errors survive pickling: worker processes raise
them.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

Retry = Literal["never", "same", "elsewhere"]


class RacerError(Exception):
    """Base of all errors.

    `code` is stable; `retry` says whether the same request may succeed later (`same`), through
    another node or path (`elsewhere`), or not (`never`). `retry_after` is in seconds, where the
    daemon named a time. `status` is the HTTP status, where the daemon answered at all.
    """

    default_code: ClassVar[str] = "internal"
    default_retry: ClassVar[Retry] = "never"

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        hint: str = "",
        retry: Retry | None = None,
        retry_after: float | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.retry: Retry = retry or self.default_retry
        self.retry_after = retry_after
        self.status = status

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(kind: type[RacerError], message: str, state: dict[str, Any]) -> RacerError:
    error = kind(message)
    error.__dict__.update(state)
    return error


class BadUrl(RacerError, ValueError):
    """A `racer://` URL that names nothing. Found before anything is sent."""

    default_code = "bad_url"


class BadRequest(RacerError):
    """The daemon does not understand or allow the request."""

    default_code = "bad_request"


class Forbidden(RacerError):
    """The origin, or a policy of the node, says no."""

    default_code = "forbidden"


class NotFound(RacerError):
    """There is no such object (or operation)."""

    default_code = "not_found"


class VersionChanged(RacerError):
    """The object is not, or no longer, the version the read was pinned to.

    `etag` is the current version's, where the daemon knows it.
    """

    default_code = "version_changed"
    etag: str | None = None


class RangeNotSatisfiable(RacerError):
    """The range starts at or past the end. `size` is the object's, where known."""

    default_code = "range_not_satisfiable"
    size: int | None = None


class TargetRefused(RacerError):
    """The daemon does not write into this memory; `code` says why."""

    default_code = "target_not_memory"


class GpuUnavailable(RacerError):
    """A GPU cannot be used for this, here or by the daemon, now or ever; `code` says why.

    `read_into` does not raise it: it goes on through host memory, and the log says so once.
    """

    default_code = "gpu_unavailable"
    default_retry = "same"


class GpuError(RacerError):
    """A call of the NVIDIA driver failed in this process; `native` is its CUresult."""

    default_code = "gpu_error"
    native: int = 0


class OriginUnavailable(RacerError):
    """The origin cannot be reached, or answers what it must not."""

    default_code = "origin_unavailable"
    default_retry = "same"


class Corrupt(RacerError):
    """Bytes failed verification and no source had good ones."""

    default_code = "corrupt"
    default_retry = "same"


class Overloaded(RacerError):
    """The daemon has no room now; `retry_after` says when to come back."""

    default_code = "overloaded"
    default_retry = "same"


class ShareRefused(RacerError):
    """The daemon shares no memory with us, at all or now: read into memory of your own."""

    default_code = "share_off"


class PinRefused(RacerError):
    """There is no room for the pin, or no disk to keep it on."""

    default_code = "pin_refused"


class Draining(Overloaded):
    """The daemon is shutting down; its successor will answer."""

    default_code = "draining"


class DeadlineExceeded(RacerError):
    """The request did not end within its time."""

    default_code = "deadline_exceeded"
    default_retry = "same"


class InternalError(RacerError):
    """A defect of the daemon; its log has the trace."""

    default_code = "internal"


class DaemonUnavailable(RacerError):
    """No daemon answers at the socket. The message says which socket, the hint what to check."""

    default_code = "daemon_unavailable"
    default_retry = "same"


class ConnectionLost(DaemonUnavailable):
    """The daemon went away, or broke an answer off, in the middle of an exchange.

    `unsent` is true where it is certain that the daemon never saw the request.
    """

    default_code = "connection_lost"
    unsent: bool = False


class ProtocolError(RacerError):
    """The daemon answered something that version 1 of the protocol does not allow."""

    default_code = "protocol"


class MemoryUnavailable(RacerError):
    """The system does not give the memory that a read needs."""

    default_code = "memory_unavailable"


class MemoryLost(RacerError):
    """A read into this memory was not answered, so that the daemon may still be writing to it."""

    default_code = "memory_lost"


class Closed(RacerError):
    """The client, landing or mapping was closed before."""

    default_code = "closed"


class Forked(RacerError):
    """Something that belongs to the parent process was used in a forked child."""

    default_code = "forked"


_KINDS: dict[str, type[RacerError]] = {
    "bad_request": BadRequest,
    "head_too_large": BadRequest,
    "method_not_allowed": BadRequest,
    "unknown_operation": BadRequest,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "version_changed": VersionChanged,
    "range_not_satisfiable": RangeNotSatisfiable,
    "descriptor_missing": TargetRefused,
    "descriptor_unexpected": TargetRefused,
    "target_not_memory": TargetRefused,
    "target_hugetlb": TargetRefused,
    "target_unsealed": TargetRefused,
    "target_read_only": TargetRefused,
    "target_sparse": TargetRefused,
    "target_too_small": TargetRefused,
    "target_unknown": TargetRefused,
    "target_misaligned": TargetRefused,
    "target_not_gpu_memory": TargetRefused,
    "target_wrong_gpu": TargetRefused,
    "target_wrong_kind": TargetRefused,
    "targets_too_many": Overloaded,
    "gpu_unknown": GpuUnavailable,
    "gpu_unavailable": GpuUnavailable,
    "gpu_lost": GpuUnavailable,
    "gpu_out_of_memory": GpuUnavailable,
    "overloaded": Overloaded,
    "draining": Draining,
    "pin_refused": PinRefused,
    "share_off": ShareRefused,
    "share_full": ShareRefused,
    "origin_unavailable": OriginUnavailable,
    "origin_protocol": OriginUnavailable,
    "corrupt": Corrupt,
    "deadline_exceeded": DeadlineExceeded,
    "internal": InternalError,
}

# An answer to HEAD has no body, so that the status alone has to name the kind.
_CODES_BY_STATUS = {
    400: "bad_request",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    412: "version_changed",
    416: "range_not_satisfiable",
    422: "target_not_memory",
    431: "head_too_large",
    502: "origin_unavailable",
    503: "overloaded",
    504: "deadline_exceeded",
}


def code_for_status(status: int) -> str:
    """Returns the code that `status` stands for where the answer does not say it itself."""
    return _CODES_BY_STATUS.get(status, "internal" if status >= 500 else "bad_request")


def kind_for_code(code: str) -> type[RacerError]:
    """Returns the class for a wire code; a code of a later daemon is a plain `RacerError`."""
    return _KINDS.get(code, RacerError)
