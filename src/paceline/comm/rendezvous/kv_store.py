"""The key-value store by which the process groups of a job find each other, as requests and replies of plain data.

Values are bytes and travel as base64 text. A counter is a value like any other: its number in decimal. The store never
waits: a client that waits for a key asks again, so a slow worker never delays the request of another.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["KeyValueStore"]


MAX_AMOUNT = 2**63


class KeyValueStore:
    """The store itself; it lives in the supervisor of the coordinator's host."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self.on_change: Callable[[str, str | None], None] = _unheard  # a key, and its new value as base64 text, or None

    def to_json(self) -> dict[str, str]:
        """Return all values, as base64 text."""
        return {key: base64.b64encode(value).decode() for key, value in self._values.items()}

    def restore(self, values: Mapping[str, str]) -> None:
        """Take over what another store had; raise ValueError where a value is no base64 text."""
        self._values.update({key: base64.b64decode(value, validate=True) for key, value in values.items()})

    def handle(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one request: `{"value": ...}`, or `{"error": text}` where it is malformed; an `id` is repeated.

        Ops: `set key value`, `get key` (null when absent), `add key amount` (the new number), `check keys` (are all
        there?), `compare_set key expected desired` (the value that holds now), `delete key` (was it there?),
        `num_keys`.
        """
        reply: dict[str, Any] = {"id": request["id"]} if "id" in request else {}
        op = OPS.get(str(request.get("op")))
        if op is None:
            return reply | {"error": f"there is no op {request.get('op')!r}; the store knows {', '.join(OPS)}"}
        key = str(request.get("key")) if op in CHANGES else ""
        before = self._values.get(key)
        try:
            answer = reply | {"value": op(self._values, request)}
            after = self._values.get(key)
            if op in CHANGES and after != before:
                self.on_change(key, None if after is None else base64.b64encode(after).decode())
            return answer
        except _Malformed as error:
            return reply | {"error": str(error)}


class _Malformed(Exception):
    """A request lacks a field, or the field has the wrong form."""


def _set(values: dict[str, bytes], request: Mapping[str, Any]) -> None:
    values[_text(request, "key")] = _bytes(request, "value")


def _get(values: dict[str, bytes], request: Mapping[str, Any]) -> str | None:
    value = values.get(_text(request, "key"))
    return None if value is None else base64.b64encode(value).decode()


def _add(values: dict[str, bytes], request: Mapping[str, Any]) -> int:
    key, amount = _text(request, "key"), request.get("amount")
    if not isinstance(amount, int) or abs(amount) > MAX_AMOUNT:
        raise _Malformed(f"amount is {amount!r}; it must be a whole number")
    try:
        held = values.get(key, b"0")
        if len(held) > len(str(MAX_AMOUNT)) + 1:
            raise ValueError
        number = int(held) + amount
    except ValueError:
        raise _Malformed(f"{key!r} holds {values[key][:40]!r}, which is no number to add to") from None
    values[key] = str(number).encode()
    return number


def _check(values: dict[str, bytes], request: Mapping[str, Any]) -> bool:
    keys = request.get("keys")
    if not isinstance(keys, list):
        raise _Malformed(f"keys is {keys!r}; it must be a list of keys")
    return all(key in values for key in map(str, keys))


def _compare_set(values: dict[str, bytes], request: Mapping[str, Any]) -> str:
    """Set `desired` where the key holds `expected`; an absent key counts as empty, as in torch's own stores."""
    key, expected, desired = _text(request, "key"), _bytes(request, "expected"), _bytes(request, "desired")
    if values.get(key, b"") == expected:
        values[key] = desired
    return base64.b64encode(values.get(key, expected)).decode()


def _delete(values: dict[str, bytes], request: Mapping[str, Any]) -> bool:
    return values.pop(_text(request, "key"), None) is not None


def _num_keys(values: dict[str, bytes], request: Mapping[str, Any]) -> int:
    return len(values)


OPS: Mapping[str, Callable[[dict[str, bytes], Mapping[str, Any]], Any]] = {
    "set": _set,
    "get": _get,
    "add": _add,
    "check": _check,
    "compare_set": _compare_set,
    "delete": _delete,
    "num_keys": _num_keys,
}


CHANGES = (_set, _add, _compare_set, _delete)


def _unheard(key: str, value: str | None) -> None:
    """Do nothing: nobody keeps a copy."""


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise _Malformed(f"{name} is {value!r}; it must be text")
    return value


def _bytes(request: Mapping[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(_text(request, name), validate=True)
    except (binascii.Error, ValueError):
        raise _Malformed(f"{name} is {request[name][:40]!r}; it must be base64 text") from None
