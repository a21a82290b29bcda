"""`racerd` and `python -m racerd`."""

from __future__ import annotations

import sys

from racerd.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
