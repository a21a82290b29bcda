"""The client protocol without I/O: heads, ranges, descriptor ownership, message types.

Layer: wire. No socket, no loop, no clock in here; see `docs/protocol.md`.
"""
