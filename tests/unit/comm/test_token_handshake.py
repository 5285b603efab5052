"""The handshake: only who holds the token passes, in both directions."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.messages.token_handshake import MAGIC, REFUSAL, TokenHandshake, TokenRefused

TOKEN = b"a token of sufficient length"


def exchange(head: TokenHandshake, member: TokenHandshake, *, piece: int = 1000) -> None:
    """Carry the bytes of each to the other, `piece` at a time, until both are content."""
    to_member, to_head = head.greeting, member.greeting
    while to_member or to_head:
        assert len(to_member) <= 1000 and len(to_head) <= 1000
        data, to_member = to_member, b""
        for start in range(0, len(data), piece):
            to_head += member.feed(data[start : start + piece])
        data, to_head = to_head, b""
        for start in range(0, len(data), piece):
            to_member += head.feed(data[start : start + piece])


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_two_sides_with_the_same_token_pass(piece: int) -> None:
    head, member = TokenHandshake(TOKEN, is_head=True), TokenHandshake(TOKEN, is_head=False)
    exchange(head, member, piece=piece)
    assert (head.wanted, member.wanted) == (0, 0)


def test_a_member_with_another_token_is_refused_and_told_so() -> None:
    head, member = TokenHandshake(TOKEN, is_head=True), TokenHandshake(b"another token", is_head=False)
    proof = member.feed(head.greeting)
    with pytest.raises(TokenRefused, match="its token is wrong") as refused:
        head.feed(proof)
    with pytest.raises(TokenRefused, match="another token than this host"):
        member.feed(refused.value.farewell)


def test_a_head_that_does_not_hold_the_token_is_refused() -> None:
    member = TokenHandshake(TOKEN, is_head=False)
    member.feed(MAGIC + bytes(32))
    with pytest.raises(TokenRefused, match="does not hold the token itself"):
        member.feed(b"x" * 32)


def test_a_members_proof_sent_back_is_no_heads_proof() -> None:
    member = TokenHandshake(TOKEN, is_head=False)
    proof = member.feed(MAGIC + bytes(32))[-32:]
    with pytest.raises(TokenRefused):
        member.feed(proof)


def test_a_recorded_proof_is_worth_nothing_the_next_time() -> None:
    head, member = TokenHandshake(TOKEN, is_head=True), TokenHandshake(TOKEN, is_head=False)
    recorded = member.feed(head.greeting)
    head.feed(recorded)
    with pytest.raises(TokenRefused, match="its token is wrong"):
        TokenHandshake(TOKEN, is_head=True).feed(recorded)


def test_the_proof_is_hmac_sha256_of_both_nonces() -> None:
    head, member = TokenHandshake(TOKEN, is_head=True), TokenHandshake(TOKEN, is_head=False)
    answer = member.feed(head.greeting)
    nonces = head.greeting[8:] + answer[8:40]
    assert answer[40:] == hmac.new(TOKEN, b"paceline member\0" + nonces, hashlib.sha256).digest()
    assert head.feed(answer) == hmac.new(TOKEN, b"paceline head\0" + nonces, hashlib.sha256).digest()


@given(st.binary(min_size=1, max_size=72))
def test_strangers_bytes_are_refused_or_waited_for_and_never_pass(data: bytes) -> None:
    head = TokenHandshake(TOKEN, is_head=True)
    try:
        answer = head.feed(data)
    except TokenRefused as refused:
        assert refused.farewell in (b"", REFUSAL)
    else:
        assert answer == b""
        assert head.wanted > 0


def test_an_empty_token_is_no_token() -> None:
    with pytest.raises(ValueError, match="token is empty"):
        TokenHandshake(b"", is_head=True)
