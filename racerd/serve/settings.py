"""Settings of a client socket, with the defaults of a node.

Layer: serve, pure values. `app` fills them from the configuration; tests make their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from racerd.units import MIB


@dataclass(frozen=True, slots=True)
class ClientSocketSettings:
    """Where one cache listens, who may connect, and what a connection may hold.

    `mode` and `group` (a group id) are those of the socket file; None keeps the process's group.
    """

    run_dir: Path
    mode: int = 0o660
    group: int | None = None
    backlog: int = 512

    connections_max: int = 1024
    waiting_max: int = 512  # Taken off the backlog and not let in yet.
    surplus_max: int = 64  # Beyond the limit, so many at a time are answered 503; others are cut.
    targets_per_connection_max: int = 64
    targets_max: int = 16_384  # Each is a mapping, and a process has 65,530 of them.

    send_buffers_bytes: int = 64 * MIB  # Kernel memory for the large ones of all connections.
    answers_bytes: int = 64 * MIB  # Listings and explanations, from their making to their end.

    head_seconds: float = 10.0  # From the first byte of a head to its last.
    stall_seconds: float = 30.0  # For a client to take any of the bytes that wait for it…
    stall_step_seconds: float = 2.0  # … and while others wait for the room that these take up.
    turn_seconds: float = 10.0  # For a listing or explanation to get its share of `answers_bytes`.
    error_seconds: float = 5.0  # To take an error answer once the request's own time is over.
    linger_seconds: float = 1.0  # For a refused client to read why, before its connection goes.
