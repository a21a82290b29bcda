"""A folder that may not be searched, also where the tests run as root.

Root may search every folder, so that the process is `nobody` for as long as the folder is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def out_of_reach(parent: Path) -> Iterator[Path]:
    """Yields a folder in `parent` in which whoever runs this process may not look."""
    folder = parent / "shut"
    folder.mkdir()
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(_NOBODY)
    try:
        yield folder
    finally:
        os.seteuid(user)
        folder.chmod(0o700)
