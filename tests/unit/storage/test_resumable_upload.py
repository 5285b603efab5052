"""A resumable upload of Google's asks what is there after each failure, and begins again where all is forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.storage.object_store import ObjectStore
from paceline.storage.resumable_upload import UNIT_BYTES, send_resumable
from paceline.storage.retries import BoundedRetries, StorageError

PART = 2 * UNIT_BYTES


class Note:
    def __init__(self) -> None:
        self.fields: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        return self.fields

    def write(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)


class Google:
    """Sessions in memory. `before`: raises, or keeps only so many bytes of a part."""

    _location = "http://store"

    def __init__(self) -> None:
        self.sessions: dict[str, bytearray] = {}
        self.begun, self.parts = 0, list[str]()
        self.before: Callable[[int], int | None] = lambda number: None
        self.lost: set[int] = set()  # parts whose answers are lost

    def _call(self, method: str, url: str, *arguments: Any, **named: Any) -> Any:
        self.begun += 1
        self.sessions[f"session-{self.begun}"] = bytearray()
        return {"Location": f"session-{self.begun}"}, b""

    def _request(self, method: str, uri: str, *, headers: Mapping[str, str], data: bytes) -> Any:
        if uri not in self.sessions:
            raise FileNotFoundError(uri)
        kept, asked = self.sessions[uri], headers["Content-Range"]
        if "*" not in asked:
            self.parts.append(asked)
            limit = self.before(len(self.parts))
            start = int(asked.removeprefix("bytes ").partition("-")[0])
            assert start <= len(kept)
            kept[start:] = data if limit is None else data[:limit]
            if len(self.parts) in self.lost:
                raise ConnectionError("the answer was lost")
        if len(kept) == int(asked.rpartition("/")[2]):
            return 200, {}, None, b"{}"
        return 308, {"Range": f"bytes=0-{len(kept) - 1}"} if kept else {}, None, b""


class Store:
    """What `send_resumable` asks of an `ObjectStore`."""

    def __init__(self, files: Google, *, tries: int = 5) -> None:
        self.files = files
        self._retries = BoundedRetries(tries=tries, sleep=lambda _: None)

    def bucket_and_key(self, name: str) -> tuple[str, str]:
        return "bucket", name

    def where(self, name: str) -> str:
        return f"gs://bucket/{name}"

    def run_async(self, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = request(*arguments, **named)
        if hasattr(result, "send"):  # a coroutine that awaits nothing real
            return run_at_once(result)
        return result

    def request(self, what: str, name: str, request: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        return self._retries.call(what, self.where(name), lambda: request(*arguments, **named))


def run_at_once(coroutine: Any) -> Any:
    try:
        coroutine.send(None)
    except StopIteration as over:
        return over.value
    raise AssertionError("it awaits")


def send(google: Google, path: Path, note: Note | None = None, *, tries: int = 5) -> list[int]:
    sent = list[int]()
    store = cast(ObjectStore, Store(google, tries=tries))
    send_resumable(store, path, "file", part_bytes=PART + 1, note=note, on_sent=sent.append)
    return sent


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Google:
    made = Google()

    async def call(*arguments: Any, **named: Any) -> Any:
        return Google._call(made, *arguments, **named)

    monkeypatch.setattr(made, "_call", call)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_bytes(random.Random(1).randbytes(3 * PART + 17))
    return made


def test_parts_are_whole_units_and_come_in_order(google: Google, path: Path) -> None:
    assert send(google, path) == [PART, PART, PART, 17]
    assert bytes(google.sessions["session-1"]) == path.read_bytes()


def test_a_part_whose_answer_was_lost_is_not_sent_again(google: Google, path: Path) -> None:
    google.lost = {1, 4}  # also the last one, which makes the object
    send(google, path)
    assert len(google.parts) == 4 and bytes(google.sessions["session-1"]) == path.read_bytes()


def test_what_the_store_kept_of_a_part_counts_in_whole_units(google: Google, path: Path) -> None:
    google.before = lambda number: UNIT_BYTES + 5 if number == 2 else None
    send(google, path)
    starts = [int(part.removeprefix("bytes ").partition("-")[0]) for part in google.parts]
    assert starts == [0, PART, PART + UNIT_BYTES, 2 * PART + UNIT_BYTES]
    assert bytes(google.sessions["session-1"]) == path.read_bytes()


def test_a_later_process_goes_on_behind_what_is_there(google: Google, path: Path) -> None:
    def is_away(number: int) -> None:
        if number > 2:
            raise ConnectionError("away")

    note, google.before = Note(), is_away
    with pytest.raises(StorageError, match=r"could not write a part of gs://bucket/file \(2 tries\)"):
        send(google, path, note, tries=2)
    google.before = lambda number: None
    assert sum(send(google, path, note)) == PART + 17 and google.begun == 1
    assert bytes(google.sessions["session-1"]) == path.read_bytes()


def test_a_session_that_is_forgotten_or_of_another_size_is_begun_again(google: Google, path: Path) -> None:
    note = Note()
    note.write({"session": "session-9", "num_bytes": path.stat().st_size})
    send(google, path, note)
    assert google.begun == 1 and bytes(google.sessions["session-1"]) == path.read_bytes()
    path.write_bytes(b"x" * (PART + 1))
    send(google, path, note)
    assert google.begun == 2 and bytes(google.sessions["session-2"]) == path.read_bytes()


def test_a_store_that_forgets_every_session_ends_the_upload(google: Google, path: Path) -> None:
    def forget(number: int) -> None:
        google.sessions.clear()
        raise ConnectionError("away")

    google.before = forget
    with pytest.raises(StorageError, match="the store has forgotten 3 uploads of it"):
        send(google, path)
    assert google.begun == 3
