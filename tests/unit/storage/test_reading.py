"""A file in a store is read in requests of the block's size, however it is read."""

from __future__ import annotations

import os
from typing import Any

import pytest

from paceline import open_file
from paceline.storage import reading

DATA = os.urandom(100_001)
BLOCK = 30_000


class Store:
    """Counts the requests for a part of its one object."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, int]] = []

    def size(self, name: str) -> int:
        return len(DATA)

    def read(self, name: str, start: int, stop: int) -> bytes:
        self.parts.append((start, stop))
        return DATA[start:stop]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(reading, "_store_of", lambda address: (store, "data.bin"))
    return store


@pytest.mark.parametrize(
    "read",
    [
        lambda file: file.read(),
        lambda file: file.read(len(DATA)),
        lambda file: b"".join(iter(lambda: file.read(1000), b"")),
        lambda file: b"".join(file),
    ],
    ids=["whole", "by its size", "in small parts", "by lines"],
)
def test_each_request_has_a_block(store: Store, read: Any) -> None:
    with open_file("s3://bucket/data.bin", block_bytes=BLOCK) as file:
        assert read(file) == DATA
    assert store.parts == [(start, min(start + BLOCK, len(DATA))) for start in range(0, len(DATA), BLOCK)]


def test_the_rest_behind_what_was_read_comes_in_blocks_too(store: Store) -> None:
    with open_file("s3://bucket/data.bin", block_bytes=BLOCK) as file:
        assert file.read(10) == DATA[:10]
        assert file.read() == DATA[10:] and file.read() == b""
    assert len(store.parts) == 4
