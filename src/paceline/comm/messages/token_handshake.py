"""How two hosts prove to each other that they hold the job's token, without sending it: HMAC-SHA256 of random numbers.

    head    -> member   MAGIC, nonce_h
    member  -> head     MAGIC, nonce_m, HMAC(token, "member", nonce_h, nonce_m)
    head    -> member   HMAC(token, "head", nonce_h, nonce_m)        or 32 zero bytes: refused

"head" is the listening side (the coordinator), "member" the connecting one; the wire format keeps these labels. Every
message has a fixed size, nothing in it is parsed, and nothing after it is read before it has passed. The connecting
side proves first, so a stranger who finds the open port learns nothing with which to test a guess of the token. The two
labels keep a proof from being sent back as the other side's. The proof is given once per connection: it keeps strangers
out, but does not hide later messages from someone who can listen on the network.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

__all__ = ["HANDSHAKE_TIMEOUT_S", "TokenHandshake", "TokenRefused"]

HANDSHAKE_TIMEOUT_S = 5.0  # from connecting to the last proof
MAGIC = b"PACELIN2"
NONCE_BYTES = PROOF_BYTES = 32
REFUSAL = bytes(PROOF_BYTES)


class TokenRefused(Exception):
    """The other side did not prove the token; `farewell` are the last bytes to send to it."""

    def __init__(self, reason: str, farewell: bytes = b"") -> None:
        super().__init__(reason)
        self.farewell = farewell


class TokenHandshake:
    """One side of the exchange, without the socket: send `greeting`, then what `feed` returns, until `wanted` is 0."""

    def __init__(self, token: bytes, *, is_head: bool) -> None:
        if not token:
            raise ValueError("the job's token is empty: it must hold at least one byte")
        self._token, self._is_head = token, is_head
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._received = b""
        self._wanted = len(MAGIC) + NONCE_BYTES + (PROOF_BYTES if is_head else 0)
        self.greeting = MAGIC + self._nonce if is_head else b""

    @property
    def wanted(self) -> int:
        """How many bytes to read at most before the next `feed`; 0 when the other side has proved the token."""
        return self._wanted - len(self._received)

    def feed(self, data: bytes) -> bytes:
        """Take at most `wanted` bytes that came in, return what to send. Raises Refused."""
        self._received += data
        if not self._peer_nonce and not self._received.startswith(MAGIC[: len(self._received)]):
            raise TokenRefused("it does not speak Paceline's protocol")
        if self.wanted > 0:
            return b""
        received, self._received, self._wanted = self._received, b"", 0
        if self._is_head:
            return self._judge(received)
        if not self._peer_nonce:
            self._peer_nonce, self._wanted = received[len(MAGIC) :], PROOF_BYTES
            return MAGIC + self._nonce + self._proof(b"member")
        if received == REFUSAL:
            raise TokenRefused("it holds another token than this host")
        if not hmac.compare_digest(received, self._proof(b"head")):
            raise TokenRefused("it accepted this host's proof, but does not hold the token itself")
        return b""

    def _judge(self, received: bytes) -> bytes:
        self._peer_nonce = received[len(MAGIC) : len(MAGIC) + NONCE_BYTES]
        if not hmac.compare_digest(received[-PROOF_BYTES:], self._proof(b"member")):
            raise TokenRefused("its token is wrong", farewell=REFUSAL)
        return self._proof(b"head")

    def _proof(self, who: bytes) -> bytes:
        head, member = (self._nonce, self._peer_nonce) if self._is_head else (self._peer_nonce, self._nonce)
        return hmac.digest(self._token, b"paceline " + who + b"\0" + head + member, hashlib.sha256)
