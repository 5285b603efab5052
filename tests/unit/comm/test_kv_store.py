"""The key-value store: what torch's process groups expect of a store."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from paceline.comm.rendezvous.kv_store import KeyValueStore


def text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def ask(kv_store: KeyValueStore, op: str, **fields: Any) -> Any:
    reply = kv_store.handle({"id": 5, "op": op, **fields})
    assert reply["id"] == 5
    return reply["value"]


def test_a_value_is_there_after_it_was_set() -> None:
    kv_store = KeyValueStore()
    assert ask(kv_store, "get", key="k") is None
    assert ask(kv_store, "set", key="k", value=text(b"\0\xff")) is None
    assert ask(kv_store, "get", key="k") == text(b"\0\xff")


def test_a_counter_counts_and_reads_as_decimal_text() -> None:
    kv_store = KeyValueStore()
    assert [ask(kv_store, "add", key="n", amount=amount) for amount in (3, 0, -1)] == [3, 3, 2]
    assert ask(kv_store, "get", key="n") == text(b"2")
    ask(kv_store, "set", key="n", value=text(b"40"))
    assert ask(kv_store, "add", key="n", amount=2) == 42


def test_check_wants_all_keys() -> None:
    kv_store = KeyValueStore()
    ask(kv_store, "set", key="a", value="")
    assert ask(kv_store, "check", keys=["a"])
    assert not ask(kv_store, "check", keys=["a", "b"])
    assert ask(kv_store, "check", keys=[])


@pytest.mark.parametrize(
    ("before", "expected", "after", "returned"),
    [
        (None, b"", b"new", b"new"),
        (None, b"old", None, b"old"),
        (b"old", b"old", b"new", b"new"),
        (b"other", b"old", b"other", b"other"),
    ],
)
def test_compare_set_sets_only_what_is_as_expected(
    before: bytes | None, expected: bytes, after: bytes | None, returned: bytes
) -> None:
    kv_store = KeyValueStore()
    if before is not None:
        ask(kv_store, "set", key="k", value=text(before))
    assert ask(kv_store, "compare_set", key="k", expected=text(expected), desired=text(b"new")) == text(returned)
    assert ask(kv_store, "get", key="k") == (None if after is None else text(after))


def test_deleted_keys_are_gone_and_not_counted() -> None:
    kv_store = KeyValueStore()
    ask(kv_store, "set", key="a", value="")
    ask(kv_store, "add", key="b", amount=1)
    assert ask(kv_store, "num_keys") == 2
    assert ask(kv_store, "delete", key="a")
    assert not ask(kv_store, "delete", key="a")
    assert ask(kv_store, "num_keys") == 1


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"op": "take"}, "there is no op 'take'; the store knows set, get, add"),
        ({}, "there is no op None"),
        ({"op": "get"}, "key is None; it must be text"),
        ({"op": "get", "key": 3}, "key is 3; it must be text"),
        ({"op": "set", "key": "k", "value": "not base64!"}, "value is 'not base64!'; it must be base64 text"),
        ({"op": "set", "key": "k", "value": "é"}, "it must be base64 text"),
        ({"op": "add", "key": "k", "amount": "1"}, "amount is '1'; it must be a whole number"),
        ({"op": "check", "keys": "k"}, "keys is 'k'; it must be a list of keys"),
        ({"op": "add", "key": "word", "amount": 1}, "'word' holds b'abc', which is no number to add to"),
    ],
)
def test_a_malformed_request_is_answered_with_what_is_wrong(request_: dict[str, Any], reason: str) -> None:
    kv_store = KeyValueStore()
    ask(kv_store, "set", key="word", value=text(b"abc"))
    reply = kv_store.handle({"id": 9, **request_})
    assert reply["id"] == 9
    assert reason in reply["error"]
    assert kv_store.handle({"op": "num_keys"})["value"] == 1
