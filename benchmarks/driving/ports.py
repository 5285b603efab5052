"""Ports of this machine."""

from __future__ import annotations

import socket

__all__ = ["free_port"]


def free_port() -> int:
    """Return a port at which nobody listens now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
