"""Runs obstore's requests for blocking callers, and says what their failures mean.

Layer: origin. The one place where exceptions of obstore are caught.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from racerd.errors import RacerError, RequestError
from racerd.ids import ObjectId, ObjectVersion
from racerd.origin.background import BackgroundLoop
from racerd.origin.call import Call
from racerd.origin.failures import Transient, version_changed
from racerd.origin.obstore_failures import RangeIgnored, meaning


class Requests:
    """Requests to the origin called `where`. Owns `background`."""

    def __init__(self, where: str, background: BackgroundLoop) -> None:
        self.where = where
        self._background = background

    def run(
        self,
        request: Callable[[], Awaitable[Any]],
        about: ObjectId,
        call: Call,
        version: ObjectVersion | None = None,
    ) -> Any:
        """Awaits `request` elsewhere. Raises declared errors, Transient and RangeIgnored only."""
        try:
            return self._background.run(request, call)
        except (RacerError, Transient):
            raise
        except Exception as error:  # noqa: BLE001  obstore's classes are open-ended
            raise self._meaning(error, about, version) from None

    def _meaning(
        self, error: Exception, about: ObjectId, version: ObjectVersion | None
    ) -> RacerError | Transient | RangeIgnored:
        if version is None:
            return meaning(error, about, self.where)
        found = meaning(error, about, self.where, expected=version.etag)
        if version.origin_token and isinstance(found, RequestError) and found.code == "not_found":
            # The generation is gone, which says nothing of the object.
            return version_changed(about, version.etag, None)
        return found

    def close(self) -> None:
        self._background.close()
