"""The mail between writers of one checkpoint, when the key-value store that carries it is gone."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.dcp_shards import TensorRegion
from paceline.checkpoint.sharded_writer import ShardWriter, WriterGroup
from paceline.comm.messages.json_channel import ChannelClosed
from paceline.worker.state.checkpoint_shards import WriterMessages

LIMIT_S = 30.0


class FakeStore:
    """A store that may go away."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.has_gone = False

    def set(self, key: str, value: str) -> None:
        self._there()[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._there()[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._there() for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._there().pop(key, None) is not None

    def _there(self) -> dict[str, bytes]:
        if self.has_gone:
            raise ChannelClosed("the other end has gone")
        return self.texts


def pair(folder: Path) -> tuple[Any, WriterMessages, WriterMessages]:
    kv_store: Any = FakeStore()
    first, second = (WriterMessages(kv_store, prefix="save", folder=folder / "mail") for _ in range(2))
    return kv_store, first, second


def test_as_long_as_there_is_a_kv_store_nothing_is_written(tmp_path: Path) -> None:
    kv_store, first, second = pair(tmp_path)
    assert second.look("1/begin") is None
    first.put("1/begin", "here")
    assert second.look("1/begin") == "here"
    second.forget("1/begin")
    assert first.look("1/begin") is None and not kv_store.texts
    assert not list(tmp_path.iterdir())


def test_what_nobody_has_heard_when_the_kv_store_goes_is_found_all_the_same(tmp_path: Path) -> None:
    kv_store, first, second = pair(tmp_path)
    first.put("7/begin", "here")
    second.put("7/part_1", "done")  # and has nothing more to say
    kv_store.has_gone = True
    assert second.look("8/begin") is None  # as it waits for the next save
    assert first.look("7/part_1") == "done"
    assert second.look("7/begin") == "here"
    first.put("8/begin", "there")
    assert second.look("8/begin") == "there"
    for name in ("7/begin", "7/part_1", "8/begin"):
        first.forget(name)
        assert second.look(name) is None
    assert not list((tmp_path / "mail").iterdir())


def test_what_finds_no_room_when_the_kv_store_goes_is_said_as_soon_as_there_is_some(tmp_path: Path) -> None:
    kv_store, first, second = pair(tmp_path)
    second.put("7/part_1", "done")
    kv_store.has_gone = True
    (tmp_path / "mail").touch()  # no folder can be made
    with pytest.raises(OSError):
        second.look("8/begin")
    (tmp_path / "mail").unlink()
    assert second.look("8/begin") is None
    assert first.look("7/part_1") == "done"


def test_a_part_that_was_told_to_the_kv_store_before_it_went_is_in_the_checkpoint(tmp_path: Path) -> None:
    class Leaving(FakeStore):
        def set(self, key: str, value: str) -> None:
            super().set(key, value)
            self.has_gone = key.endswith("part_1")

    kv_store: Any = Leaving()
    mails = (WriterMessages(kv_store, prefix="save", folder=tmp_path / "mail") for _ in range(2))
    parts = [WriterGroup(index=index, count=2, mail=mail, timeout_s=LIMIT_S) for index, mail in enumerate(mails)]
    first, second = (
        AsyncWriter(tmp_path / "saved", keep=1, on_event=lambda _: None, parts=parts[0]),
        ShardWriter(parts[1]),
    )
    first.save(1, {"w": torch.ones(2, 2)}, {}, {}, where={"w": TensorRegion("w", (3, 2), (0, 0))})
    second.save({"w": torch.ones(1, 2)}, {"w": TensorRegion("w", (3, 2), (2, 0))})
    deadline = time.monotonic() + LIMIT_S
    while not first.is_written(0.01) and time.monotonic() < deadline:
        second.is_written(0.01)  # as all who wait until nobody writes
    second.close()
    assert first.close(timeout_s=0) == tmp_path / "saved" / "step_00000001"


def test_who_looks_whether_the_kv_store_is_there_asks_for_nothing_that_another_may_forget_meanwhile(
    tmp_path: Path,
) -> None:
    kv_store, _, mail = pair(tmp_path)
    kv_store.texts["save/1/begin"] = json.dumps({"directory": str(tmp_path)}).encode()
    writer = ShardWriter(WriterGroup(index=1, count=2, mail=mail, timeout_s=LIMIT_S))
    writer.save({"w": torch.ones(1, 2)}, {"w": TensorRegion("w", (3, 2), (2, 0))})
    writer.wait()
    kv_store.get = lambda key: pytest.fail(f"{key} was there a moment ago")
    assert writer.is_written(0.0)
    writer.close()


def test_only_the_newest_words_are_kept_in_mind(tmp_path: Path) -> None:
    kv_store, first, second = pair(tmp_path)
    for number in range(5):
        first.put(f"{number}/begin", "here")
    kv_store.has_gone = True
    assert first.look("9/begin") is None
    assert [second.look(f"{number}/begin") for number in range(5)] == [None, None, None, "here", "here"]
