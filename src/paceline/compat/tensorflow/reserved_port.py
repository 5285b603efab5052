"""A TCP port that is reserved for one task, from before all have told their addresses to after its server has bound it.

The socket is bound, and never listens: the kernel gives its port to nobody, and connections reach only the server.
TensorFlow's server shares the port because both say SO_REUSEPORT, which the kernel allows one user's processes alone.
It says so where TF_GRPC_REUSE_PORT is set. So no moment is left in which another process could take the port, also
where the program is started again.
"""

from __future__ import annotations

import socket
from pathlib import Path

__all__ = ["REUSE_PORT", "ReservedPort"]

REUSE_PORT = "TF_GRPC_REUSE_PORT"
LISTENING = "0A"  # TCP_LISTEN


class ReservedPort:
    """Reserves a free port of this host until it is closed. Raises OSError where there is none."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(("", 0))
        except OSError:
            self._socket.close()
            raise

    @property
    def number(self) -> int:
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        self._socket.close()

    @property
    def has_listener(self) -> bool:
        """Whether a server listens at this port by now, as /proc/net shows it; False where there is no /proc."""
        wanted = f":{self.number:04X}"
        return any(
            len(fields) > 3 and fields[1].endswith(wanted) and fields[3] == LISTENING
            for name in ("tcp", "tcp6")
            for fields in _rows(Path("/proc/net") / name)
        )


def _rows(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return []
