"""Rendezvous of workers that another launcher started (srun, mpirun): worker 0 serves the key-value store from a
thread.

On one host the rendezvous is a Unix socket without a name in the file system. The kernel says whose process is at the
other end, and both sides refuse another user's. Where another user has taken the name, the next of `NAMES` is used. On
several hosts worker 0 listens on the first host's address, and every worker first proves the job's
token.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil

from paceline.comm.messages.json_channel import Channel, ChannelClosed
from paceline.comm.messages.secure_socket import encrypt, prove_and_encrypt, user_of
from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenRefused
from paceline.comm.messages.unproved_connections import TokenGate
from paceline.comm.rendezvous.kv_store import KeyValueStore
from paceline.errors import LaunchError

__all__ = ["KeyValueServer", "join_external_launch", "own_address", "rendezvous_port"]

RETRY_S = 0.02
PAUSE_S = 1.0  # after an accept that failed
NAMES = 32  # of the Unix socket, of which other users may take some
MAX_REPORTED = 10  # refusals that are reported one by one
PROBE_ADDRESS = ("192.0.2.1", 9)  # an address that no host has: the way to it is the way out of this host
Address = str | tuple[str, int]


def rendezvous_port(job_id: str) -> int:
    """Return the port of the rendezvous, from 20000 to 29999; all workers compute the same one from the job's id."""
    number = 0
    for letter in job_id.encode():
        number = (number * 131 + letter) % 1_000_003
    return 20_000 + number % 10_000


def join_external_launch(
    *,
    worker_rank: int,
    address: Address,
    token: bytes | None,
    timeout_s: float,
    log: Callable[[str], None],
    publish: Callable[[int], None] | None = None,
) -> tuple[Channel, KeyValueServer | None]:
    """Return this worker's channel to the key-value store; worker 0 also gets the thread that serves it, and must close
    it.

    `address` is (host, port), or the name of a Unix socket. Worker 0 passes the port at which it listens, which may be
    any (0), to `publish`. Raise LaunchError if worker 0 does not appear in time, or refuses.
    """
    server: KeyValueServer | None = None
    if worker_rank == 0:
        server = KeyValueServer(address, token, log)
        if publish is not None and not isinstance(address, str):
            address = address[0], server.port
            publish(server.port)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            sock = _connect(address)
            if token is not None:
                sock = prove_and_encrypt(sock, token, is_head=False)
            break
        except (TokenRefused, OSError) as error:
            if isinstance(error, TokenRefused | ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                raise LaunchError(
                    f"worker 0 at {_address_text(address)} refused worker {worker_rank}: {error}"
                ) from error
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"worker {worker_rank} could not reach worker 0 at {_address_text(address)} within "
                    f"{timeout_s:.0f} s ({error.strerror or error}). Is worker 0 running, and is that address "
                    "reachable from here?"
                ) from error
            time.sleep(RETRY_S)
    sock.settimeout(None)
    return Channel(sock), server


def own_address(head: tuple[str, int], *, is_head: bool) -> str:
    """Return the address at which the other hosts of a job reach this one; nothing is sent.

    It is the address that faces the first host. If that host's own name means loopback there (Debian's 127.0.1.1), it
    is the one that faces the outside.
    """
    family, _, _, _, address = socket.getaddrinfo(*head, type=socket.SOCK_DGRAM)[0]
    facing = _local_address_towards(family, address)
    if not is_head or not facing.startswith("127."):
        return facing
    try:
        return _local_address_towards(socket.AF_INET, PROBE_ADDRESS)
    except OSError:  # there is no way out: an address of a local network, or all hosts of this job are this machine
        found = [one.address for each in psutil.net_if_addrs().values() for one in each if one.family == socket.AF_INET]
        return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def _local_address_towards(family: int, address: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class KeyValueServer:
    """Serves a key-value store: one daemon thread accepts, and one serves each connection."""

    def __init__(self, address: Address, token: bytes | None, log: Callable[[str], None]) -> None:
        self._token, self._log = token, log
        self._store, self._lock = KeyValueStore(), threading.Lock()
        self._listener = _listener(address, log)
        self.port = 0 if isinstance(address, str) else int(self._listener.getsockname()[1])
        self._closed = threading.Event()
        self._num_refused = 0
        self._gate: TokenGate | None = None
        if token is not None:
            self._gate = TokenGate(self._listener, token, admit=self._encrypt, refused=self._refuse)
        else:
            threading.Thread(target=self._accept, name="paceline-kv-store", daemon=True).start()

    def close(self) -> None:
        """Accept no more connections; open ones end with their workers."""
        self._closed.set()
        if self._gate is not None:
            self._gate.close()
            return
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        """Accept processes of this host."""
        told = ""
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
                if (user := user_of(sock)) != os.getuid():
                    self._refuse("another process", f"it runs as user {user}")
                    sock.close()
                    continue
                try:
                    threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
                except RuntimeError:
                    sock.close()
                    raise
            except ConnectionError:
                continue  # it went away before it was let in
            except (OSError, RuntimeError) as error:  # no more files, or threads; what is closed fails too
                if not self._closed.is_set() and str(error) != told:
                    told = str(error)
                    self._log(f"worker 0 cannot accept a connection, and tries again: {error}")
                self._closed.wait(PAUSE_S)

    def _refuse(self, address: str, reason: str) -> None:
        self._num_refused += 1
        if self._num_refused <= MAX_REPORTED:
            self._log(f"refused a connection from {address}: {reason}")

    def _encrypt(self, sock: socket.socket) -> None:
        """Serve a connection that has proved the token."""
        address = "another process"
        try:
            address = str(sock.getpeername()[0])
            self._serve(encrypt(sock, self._token or b"", is_head=True))
        except (TokenRefused, OSError) as error:
            sock.close()
            self._refuse(address, str(error))

    def _serve(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        channel = Channel(sock)
        with contextlib.suppress(ChannelClosed):
            while True:
                request = channel.receive()
                with self._lock:
                    reply = self._store.handle(request)
                channel.send(reply)


def _listener(address: Address, log: Callable[[str], None]) -> socket.socket:
    """Return worker 0's listening socket. Raises LaunchError."""
    listener: socket.socket | None = None
    try:
        if isinstance(address, str):
            listener = _unix_listener(address)
        else:
            family, place = _listen_address(address, log)
            listener = socket.socket(family, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        listener.listen(4096)
        return listener
    except OSError as error:
        if listener is not None:
            listener.close()
        raise LaunchError(
            f"worker 0 cannot listen at {_address_text(address)} ({error.strerror}). Set MASTER_ADDR and "
            "MASTER_PORT to an address of its host and a free port, for all workers"
        ) from error


def _unix_listener(name: str) -> socket.socket:
    """Return a socket at the first name that no other user has taken. Raises OSError."""
    for one in _names(name):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(one)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE or _is_own(one):
                raise
    raise OSError(errno.EADDRINUSE, "other users have taken all of its names")


def _is_own(name: str) -> bool:
    """Whether a process of this user listens at a Unix socket."""
    try:
        _connect_unix(name).close()
        return True
    except (OSError, _AnotherUser):
        return False


def _names(name: str) -> list[str]:
    return [name, *(f"{name}.{number}" for number in range(1, NAMES))]


def _listen_address(address: tuple[str, int], log: Callable[[str], None]) -> tuple[int, Any]:
    """Where worker 0 listens: address family and address."""
    family, _, _, _, place = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    if str(place[0]).startswith("127.") and address[0] not in ("localhost", place[0]):
        log(
            f"{address[0]} means {place[0]} on its own host, where other hosts do not reach it: "
            f"worker 0 listens at port {address[1]} of all its addresses"
        )
        return family, ("", address[1])
    return family, place


def _connect(address: Address) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address, timeout=HANDSHAKE_TIMEOUT_S)
    failure: OSError = ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    for name in _names(address):
        try:
            return _connect_unix(name)
        except _AnotherUser as error:
            failure = ConnectionRefusedError(str(error))
        except OSError:  # nobody listens there, or somebody who does not answer
            continue
    raise failure


class _AnotherUser(Exception):
    """The process at the other end belongs to another user."""


def _connect_unix(name: str) -> socket.socket:
    """Connect without waiting: a listener that accepts nothing, with a full queue, holds nobody up."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.connect(name)
        if (user := user_of(sock)) != os.getuid():
            raise _AnotherUser(f"it belongs to user {user}")
        sock.setblocking(True)
        return sock
    except BaseException:
        sock.close()
        raise


def _address_text(address: Address) -> str:
    return repr(address) if isinstance(address, str) else f"{address[0]}:{address[1]}"
