"""From what a user writes to a source: `racer://…`, a directory, or one file of either.

Layer: models.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from racer.errors import BadUrl
from racer.models.local import LocalSource
from racer.models.names import SUFFIX
from racer.models.source import Source
from racer.urls import SCHEME, RacerUrl

Location = str | RacerUrl | os.PathLike[str]

_OTHER_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def open_source(
    location: Location,
    *,
    names: Sequence[str] | None = None,
    socket: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    share: bool = False,
) -> tuple[Source, str | None]:
    """The source of `location`, and the one file in it that is meant, if one is.

    Does no I/O. Whatever ends in `.safetensors` names a file, everything else a directory. `names`
    are those of the files behind a URL, where they are known. `share` says that shared memory is
    wanted, where there is any. Raises BadUrl, also for the URLs of others.
    """
    text = str(location) if isinstance(location, RacerUrl) else os.fsdecode(location)
    if _OTHER_SCHEME.match(text) and not text.startswith(SCHEME):
        raise BadUrl(
            f"{text[:100]!a} is neither a {SCHEME} URL nor a path",
            hint="write racer://<cache>/<bucket>/<prefix>, or the path of a directory",
        )
    folder, name = text, None
    if text.endswith(SUFFIX):
        folder, _, name = text.rpartition("/")
    if not text.startswith(SCHEME):
        return LocalSource(folder or ("/" if text.startswith("/") else ".")), name
    from racer.models.prefix import RacerSource  # The client is not needed for local files.

    if name is not None:
        name = RacerUrl.parse(text).key.rpartition(b"/")[2].decode()
    return RacerSource(folder, names=names, socket=socket, timeout=timeout, share=share), name
