"""Who is at the other end of a connection, and whether this node lets them in.

Layer: serve, loop thread. The socket file's owner, group and mode decide first, in the kernel;
a policy may be stricter.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from racerd.errors import RequestError

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Process, user and group that connected, as the kernel knows them (SO_PEERCRED)."""

    pid: int
    uid: int
    gid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return PeerCredentials(*_UCRED.unpack(data))


class AccessPolicy(Protocol):
    """Decides, once for each connection, whether a peer may use a cache."""

    def check(self, cache: str, peer: PeerCredentials) -> None:
        """Returns, or raises RequestError `forbidden` (see `refuse_peer`)."""


class SocketModeDecides:
    """Lets in whoever the socket file lets in."""

    def check(self, cache: str, peer: PeerCredentials) -> None:
        return None


class OnlyUsers:
    """Lets in some users only, whatever the socket file says."""

    def __init__(self, users: frozenset[int]) -> None:
        self.users = users

    def check(self, cache: str, peer: PeerCredentials) -> None:
        if peer.uid not in self.users:
            raise refuse_peer(cache, peer)


def refuse_peer(cache: str, peer: PeerCredentials) -> RequestError:
    return RequestError(
        "forbidden",
        f"user {peer.uid} may not use the cache {cache}",
        hint="this node's settings say which users may",
    )
