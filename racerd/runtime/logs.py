"""How the daemon logs: one line a record on standard error, as text or as JSON.

Layer: bottom. Called once by the command; importing racerd configures nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import time


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up_logs(level: str, format_: str) -> None:
    """Sends records of `level` and above to standard error in `format_`. Times are UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = (
        _JsonFormatter()
        if format_ == "json"
        else logging.Formatter("%(asctime)s.%(msecs)03dZ %(levelname)-7s %(name)s: %(message)s",
                               "%Y-%m-%dT%H:%M:%S")
    )  # fmt: skip
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("racerd")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
