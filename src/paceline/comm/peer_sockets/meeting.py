"""How the members of a group connect to each other: one connection for each pair.

On one host each member listens at a Unix socket in a directory of its own (mode 0700), so other users cannot even
connect; the kernel also tells whose process the other side is. Between hosts it listens at a TCP port until all have
come. There every connection proves the group's secret and is encrypted (`comm/messages/secure_socket.py`). The secret
travels through the key-value store, as the addresses do. What a stranger sends is compared, and never parsed. A
connection that a flood has driven out is made again.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from paceline.comm.group import Disrupted
from paceline.comm.messages.secure_socket import encrypt, prove_and_encrypt, user_of
from paceline.comm.messages.socket_directory import make_socket_directory
from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenRefused
from paceline.comm.messages.unproved_connections import TokenGate
from paceline.errors import SyncError

__all__ = ["connect_members", "file_namespace"]

POLL_S = 0.002
BACKLOG = 4096
RETRY_S = 0.02  # after a connection that ended before it was proved
INDEX_BYTES = 4
ACCEPT_S = 0.05  # between two looks whether all have come


def file_namespace() -> str:
    """Return a text that is the same for processes of one host that see the same files, and so each other's sockets."""
    boot, mounts = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/mnt")
    known = (boot.read_text().strip(), os.readlink(mounts)) if boot.exists() and os.path.lexists(mounts) else ("", "")
    return " ".join((socket.gethostname() if not known[0] else "", *known))


def connect_members(
    store: dist.Store, *, index: int, size: int, address: str | None, timeout_s: float, check: Callable[[], None]
) -> dict[int, socket.socket]:
    """Return a connection to each other member, by its index; blocks until all have come.

    `address`: of this host, where members are on several hosts; None: all are on this host. `check()` is called in the
    wait, and may raise to end it. Raises Disrupted where not all come in time.
    """
    with contextlib.closing(_Listener(address, store, index=index)) as listener:
        store.set(f"peer_{index}", json.dumps(listener.place))
        deadline = time.monotonic() + timeout_s
        connected: dict[int, socket.socket] = {}
        try:
            for other in range(index):
                while not store.check([f"peer_{other}"]):
                    _go_on(deadline, check, [other])
                place = json.loads(store.get(f"peer_{other}"))
                while (sock := _connect(place, listener.secret, index=index)) is None:
                    _go_on(deadline, check, [other], pause_s=RETRY_S)
                connected[other] = sock
            while missing := [one for one in range(size) if one != index and one not in connected]:
                try:
                    other, sock = listener.proved.get(timeout=POLL_S)
                except queue.Empty:
                    _go_on(deadline, check, missing)
                    continue
                if other in connected or other not in missing:
                    sock.close()  # only a member can come this far, and each comes once
                    continue
                connected[other] = sock
        except BaseException:
            for sock in connected.values():
                sock.close()
            raise
    return connected


class _Listener:
    """Accepts connections in a thread; `proved` gets those that are a member's, with its index."""

    def __init__(self, address: str | None, store: dist.Store, *, index: int) -> None:
        self.proved: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()
        self.secret = b""
        self._directory: Path | None = None
        self._is_closed = False
        self._gate: TokenGate | None = None
        if address is None:
            self._directory = make_socket_directory()
            self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.place: str | tuple[str, int] = str(self._directory / "s")
            self._sock.bind(self.place)
        else:
            if index == 0:
                store.set("secret", secrets.token_hex(32))
            self.secret = bytes.fromhex(store.get("secret").decode())
            self._sock = socket.create_server(
                (address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET, backlog=BACKLOG
            )
            self.place = (address, self._sock.getsockname()[1])
        self._sock.listen(BACKLOG)
        if address is not None:
            self._gate = TokenGate(self._sock, self.secret, admit=self._admit)
            return
        self._sock.settimeout(ACCEPT_S)
        threading.Thread(target=self._accept, name="paceline-meeting", daemon=True).start()

    def close(self) -> None:
        self._is_closed = True
        if self._gate is not None:
            self._gate.close()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _accept(self) -> None:
        """Accept processes of this host."""
        while not self._is_closed:
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                continue
            except OSError:
                if not self._is_closed:  # no more files, say
                    time.sleep(ACCEPT_S)
                continue
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        """Hear which member it is; between hosts it has proved the secret."""
        try:
            if self._directory is None:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock = encrypt(sock, self.secret, is_head=True)
            elif user_of(sock) != os.getuid():
                raise TokenRefused("it belongs to another user")
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            said = b""
            while len(said) < INDEX_BYTES:
                data = sock.recv(INDEX_BYTES - len(said))
                if not data:
                    raise TokenRefused("it closed the connection")
                said += data
            sock.settimeout(None)
        except (TokenRefused, OSError):
            sock.close()
            return
        self.proved.put((int.from_bytes(said, "big"), sock))


def _connect(place: str | Sequence[str | int], secret: bytes, *, index: int) -> socket.socket | None:
    """Connect to a member that listens already, and tell which one this is. None: the connection was lost before it was
    proved, as in a flood, and may be made again."""
    try:
        if isinstance(place, str):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(place)
                if (user := user_of(sock)) != os.getuid():
                    raise SyncError(f"the socket {place} belongs to user {user}, not to this one")
            except BaseException:
                sock.close()
                raise
        else:
            host, port = place
            sock = socket.create_connection((str(host), int(port)), timeout=HANDSHAKE_TIMEOUT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock = prove_and_encrypt(sock, secret, is_head=False)
        sock.sendall(index.to_bytes(INDEX_BYTES, "big"))
        return sock
    except (TokenRefused, OSError) as error:
        is_lost = isinstance(error, TimeoutError | ConnectionResetError | BrokenPipeError | ssl.SSLEOFError)
        if is_lost and not isinstance(place, str):
            return None
        raise Disrupted(f"the workers could not all meet: {error}") from error


def _go_on(deadline: float, check: Callable[[], None], missing: Sequence[int], *, pause_s: float = POLL_S) -> None:
    check()
    if time.monotonic() > deadline:
        named = ", ".join(map(str, missing))
        raise Disrupted(f"the workers could not all meet: member {named} of the group did not come in time (timed out)")
    time.sleep(pause_s)
