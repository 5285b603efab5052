"""Encrypts and authenticates a TCP connection between two processes that hold the same secret.

First each side proves the secret (`paceline.comm.messages.token_handshake`): a stranger gets no further, and has cost a
few bytes. Then TLS encrypts the connection, with keys that are drawn for it alone. TLS knows no names here, so a relay
could sit between the two and decrypt. Therefore each side finally sends an HMAC of TLS's own channel binding, which
differs on the two sides of a relay. From then on every byte that arrives is the other side's, in its order, or the
connection ends.

The cipher suite is ephemeral Diffie-Hellman over an elliptic curve with AES-256-GCM: what was recorded cannot be
decrypted by those who learn the secret later. Its certificate is a form (`paceline.comm.messages.tls_identity`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import socket
import ssl
import struct
import tempfile
import time

from paceline.comm.messages.tls_identity import CERTIFICATE, PUBLIC_KEY_PAIR
from paceline.comm.messages.token_handshake import HANDSHAKE_TIMEOUT_S, TokenHandshake, TokenRefused

__all__ = ["PROOF_BYTES", "channel_proof", "encrypt", "prove_and_encrypt", "prove_token", "tls_context", "user_of"]

CIPHERS = "ECDHE-ECDSA-AES256-GCM-SHA384:ECDHE-ECDSA-AES128-GCM-SHA256"
PROOF_BYTES = 32


@functools.cache
def tls_context(*, is_head: bool) -> ssl.SSLContext:
    """Return the TLS settings of one side. Raises TokenRefused where this Python's OpenSSL has no such cipher."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_head else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    try:
        context.set_ciphers(CIPHERS)
        if is_head:
            with tempfile.NamedTemporaryFile("w", suffix=".pem", encoding="ascii") as file:
                file.write(PUBLIC_KEY_PAIR + CERTIFICATE)
                file.flush()
                context.load_cert_chain(file.name)
    except ssl.SSLError as error:
        raise TokenRefused(
            f"this Python's {ssl.OPENSSL_VERSION} does not offer what encrypts connections between hosts, "
            f"{CIPHERS.partition(':')[0]} ({error.reason or error})"
        ) from None
    return context


def channel_proof(secret: bytes, sock: ssl.SSLSocket, *, is_head: bool) -> bytes:
    """Return what a side sends first over TLS: it shows that both sides see the same encrypted connection."""
    binding = sock.get_channel_binding("tls-unique") or b""
    if not binding:
        raise TokenRefused("TLS has no channel binding")
    side = b"head" if is_head else b"member"
    return hmac.digest(secret, b"paceline channel " + side + b"\0" + binding, hashlib.sha256)


def prove_token(sock: socket.socket, secret: bytes, *, is_head: bool) -> None:
    """Prove the secret over a connection, and have the other side prove it; blocks. Raises TokenRefused, OSError."""
    handshake = TokenHandshake(secret, is_head=is_head)
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S
    sock.settimeout(HANDSHAKE_TIMEOUT_S)
    sock.sendall(handshake.greeting)
    while handshake.wanted:
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        data = sock.recv(handshake.wanted)
        if not data:
            raise ConnectionResetError("it closed the connection")
        try:
            sock.sendall(handshake.feed(data))
        except TokenRefused as refused:
            if refused.farewell:
                sock.sendall(refused.farewell)
            raise


def prove_and_encrypt(sock: socket.socket, secret: bytes, *, is_head: bool) -> ssl.SSLSocket:
    """Return the connection, encrypted, once both sides have proved the secret; blocks, with a time limit for all.

    `sock` must not be used any more. Raises TokenRefused where the other side does not hold the secret or a relay sits
    between, OSError where the connection fails. The socket is closed then.
    """
    try:
        prove_token(sock, secret, is_head=is_head)
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise
    return encrypt(sock, secret, is_head=is_head)


def encrypt(sock: socket.socket, secret: bytes, *, is_head: bool) -> ssl.SSLSocket:
    """Return a connection whose sides have proved the secret, encrypted; blocks, and raises, as `prove_and_encrypt`."""
    try:
        sock.settimeout(HANDSHAKE_TIMEOUT_S)
        sock = tls_context(is_head=is_head).wrap_socket(sock, server_side=is_head)
        sock.sendall(channel_proof(secret, sock, is_head=is_head))
        received = b""
        while len(received) < PROOF_BYTES:
            data = sock.recv(PROOF_BYTES - len(received))
            if not data:
                raise ConnectionResetError("it closed the connection")
            received += data
        if not hmac.compare_digest(received, channel_proof(secret, sock, is_head=not is_head)):
            raise TokenRefused("another program relays the connection")
        sock.settimeout(None)
        return sock
    except BaseException:
        with contextlib.suppress(OSError):
            sock.close()
        raise


def user_of(sock: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return os.getuid()
    _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, option, struct.calcsize("3i")))
    return user
