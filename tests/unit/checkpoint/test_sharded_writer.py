"""A checkpoint that several writers make: its checksums, and what becomes of it when one of them fails."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.dcp_shards import TensorRegion, combined_crc32
from paceline.checkpoint.export import main_export
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.sharded_writer import ShardWriter, WriterGroup
from paceline.errors import CheckpointError
from paceline.events import CheckpointFailed, CheckpointSaved, Event


class Box:
    """Mail within a process."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def put(self, name: str, text: str) -> None:
        self.texts[name] = text

    def look(self, name: str) -> str | None:
        return self.texts.get(name)

    def forget(self, name: str) -> None:
        self.texts.pop(name, None)


WHOLE = {"w": torch.arange(10.0).view(5, 2), "n": torch.arange(7)}
ROWS = ({"w": TensorRegion("w", (5, 2), (0, 0))}, {"w": TensorRegion("w", (5, 2), (3, 0))})


def writers(directory: Path, told: list[Event], *, timeout_s: float = 30.0) -> tuple[AsyncWriter, ShardWriter, Box]:
    mail = Box()
    first, second = (WriterGroup(index=index, count=2, mail=mail, timeout_s=timeout_s) for index in range(2))
    return AsyncWriter(directory, keep=2, on_event=told.append, parts=first), ShardWriter(second), mail


def save(first: AsyncWriter, second: ShardWriter, step: int) -> None:
    first.save(step, {"w": WHOLE["w"][:3], "n": WHOLE["n"]}, {"plain": 1}, {}, where=ROWS[0])
    second.save({"w": WHOLE["w"][3:].clone()}, ROWS[1])


def change_a_byte(path: Path, *, of: Tensor) -> None:
    data = path.read_bytes()
    at = data.index(of.numpy().tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


@given(st.lists(st.binary(max_size=40), max_size=6))
def test_a_checksum_follows_from_those_of_the_parts(parts: list[bytes]) -> None:
    expected = zlib.crc32(b"".join(parts))
    assert combined_crc32((zlib.crc32(part), len(part)) for part in parts) == expected


def test_two_writers_make_one_checkpoint(tmp_path: Path) -> None:
    told: list[Event] = []
    first, second, mail = writers(tmp_path, told)
    for step in (1, 1, 2):  # the same step again: its directory has the same name
        save(first, second, step)
    second.close()
    newest = first.close()
    assert newest is not None and not mail.texts
    assert [type(event) for event in told] == [CheckpointSaved] * 3
    found = open_checkpoint(newest).load()
    assert all(torch.equal(found[name], value) for name, value in WHOLE.items())


def test_names_that_any_writer_has_tied_are_in_the_index(tmp_path: Path) -> None:
    """Whole tensors of one writer alone, and rows that all of them have."""
    first, second, _ = writers(tmp_path, [])
    rows = [{name: TensorRegion(name, (5, 2), (begin, 0)) for name in ("w", "v")} for begin in (0, 3)]
    here, there, late = WHOLE["w"][:3].clone(), WHOLE["w"][3:].clone(), torch.arange(4.0)
    first.save(1, {"n": WHOLE["n"], "m": WHOLE["n"], "w": here, "v": here}, {}, {}, where=rows[0])
    second.save({"a": late, "b": late, "w": there, "v": there}, rows[1])
    second.close()
    path = first.close()
    assert path is not None
    checkpoint = open_checkpoint(path)
    assert checkpoint.ties(sorted(checkpoint.names)) == {"b": "a", "n": "m", "w": "v"}
    expected = {"a": late, "n": WHOLE["n"], "v": WHOLE["w"]}
    assert all(torch.equal(checkpoint.load([name])[name], value) for name, value in expected.items())


def test_a_damaged_row_is_found_by_the_checksum_of_the_whole(tmp_path: Path) -> None:
    first, second, _ = writers(tmp_path, [])
    save(first, second, 1)
    second.close()
    path = first.close()
    assert path is not None
    change_a_byte(path / "__1_0.distcp", of=WHOLE["w"][3:])
    with pytest.raises(CheckpointError, match=r"w cannot be read.*damaged"):
        open_checkpoint(path).load(["w"])


def test_a_damaged_part_that_is_no_rows_is_found_by_the_checksum_of_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, _ = writers(tmp_path / "checkpoints", [])
    parts = [WHOLE["w"][:, :1].clone(), WHOLE["w"][:, 1:].clone()]
    columns = [{"model.w": TensorRegion("model.w", (5, 2), (0, at))} for at in range(2)]
    first.save(1, {"model.w": parts[0]}, {}, {}, where=columns[0])
    second.save({"model.w": parts[1]}, columns[1])
    second.close()
    path = first.close()
    assert path is not None and torch.equal(open_checkpoint(path, verified=True).load()["model.w"], WHOLE["w"])
    change_a_byte(path / "__1_0.distcp", of=parts[1])
    assert not torch.equal(open_checkpoint(path).load()["model.w"], WHOLE["w"]), "nothing else shows it"
    damage = r"step_00000001 cannot be used: the file __1_0\.distcp is damaged"
    with pytest.raises(CheckpointError, match=damage):
        open_checkpoint(path, verified=True)
    assert main_export(path, tmp_path / "model.safetensors") == 1
    assert re.search(damage, capsys.readouterr().err)
    assert not (tmp_path / "model.safetensors").exists()


def fails_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 0}))
    return "No space left"


def broken(*_: Any) -> None:
    raise OSError(5, "Input/output error")


def fails_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("paceline.checkpoint.sharded_writer.write_shard", broken)
    return "worker 1 could not write its part: .*Input/output error"


@pytest.mark.parametrize("fails", [fails_first, fails_second])
def test_a_save_that_fails_on_one_writer_fails_at_once_and_the_next_one_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[Path, pytest.MonkeyPatch], str]
) -> None:
    told: list[Event] = []
    first, second, mail = writers(tmp_path, told)
    with monkeypatch.context() as context:
        reason = fails(tmp_path, context)
        save(first, second, 1)
        with pytest.raises(CheckpointError, match=reason):
            first.wait()
        second._settle(None)
    assert isinstance(told[0], CheckpointFailed) and not list(tmp_path.iterdir())
    save(first, second, 2)
    first.wait()
    assert {name.partition("/")[0] for name in mail.texts} == {"1"}, "one of them may not have read it yet"
    save(first, second, 3)
    second.close()
    assert first.close() == tmp_path / "step_00000003"
    assert not mail.texts


@pytest.mark.parametrize("who", [0, 1])
def test_no_room_for_the_copies_of_one_writer_fails_the_save_at_once_and_the_next_one_succeeds(
    tmp_path: Path, who: int
) -> None:
    place, told, mail = tmp_path / "disk", list[Event](), Box()
    parts = [WriterGroup(index=index, count=2, mail=mail, timeout_s=30.0) for index in range(2)]
    staging = [place if who == index else None for index in range(2)]
    first = AsyncWriter(tmp_path / "all", keep=2, on_event=told.append, parts=parts[0], staging=staging[0])
    second = ShardWriter(parts[1], staging=staging[1])
    save(first, second, 1)
    by = "worker 1 could not write its part: " if who == 1 else ""
    with pytest.raises(CheckpointError, match=f"step 1 was not written: {by}no room in {place} .* No such file"):
        first.wait()
    second._settle(None)
    assert (second._failure is None) == (who == 0), "one of them tells why"
    place.mkdir()
    save(first, second, 2)
    second.close()
    assert first.close() == tmp_path / "all" / "step_00000002"
    assert [type(event) for event in told] == [CheckpointFailed, CheckpointSaved]


def test_a_tensor_that_cannot_be_stored_is_an_error_where_it_is_and_fails_the_save_of_the_others(
    tmp_path: Path,
) -> None:
    first, second, _ = writers(tmp_path, [])
    first.save(1, {"w": WHOLE["w"][:3]}, {}, {}, where=ROWS[0])
    with pytest.raises(CheckpointError, match="cannot store w: it is a meta tensor"):
        second.save({"w": WHOLE["w"][3:].to("meta")}, ROWS[1])
    with pytest.raises(CheckpointError, match="worker 1 could not write its part: cannot store w: it is a meta"):
        first.wait()


def test_who_looks_only_when_the_save_has_failed_leaves_the_reason_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, mail = writers(tmp_path, [])
    with monkeypatch.context() as context:
        context.setattr("paceline.checkpoint.dcp_shards.write_shard", broken)
        first.save(1, {"w": WHOLE["w"][:3]}, {}, {}, where=ROWS[0])
        with pytest.raises(CheckpointError, match="Input/output error"):
            first.wait()
    assert not list(tmp_path.iterdir())
    second.save({"w": WHOLE["w"][3:].clone()}, ROWS[1])
    second.wait()
    for step in (2, 3):
        save(first, second, step)
    second.close()
    assert first.close() == tmp_path / "step_00000003"
    assert not mail.texts


def test_who_is_writing_when_the_directory_goes_leaves_the_reason_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (
        WriterGroup(index=index, count=2, mail=mail, timeout_s=30.0) for mail in [Box()] for index in range(2)
    )

    def left(directory: Path, *_: Any) -> None:
        first.give_up(1, "No space left on device")
        directory.rmdir()
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr("paceline.checkpoint.sharded_writer.write_shard", left)
    (tmp_path / "step").mkdir()
    first.begin(1, tmp_path / "step")
    writer = ShardWriter(second)
    writer.save({"w": WHOLE["w"][3:].clone()}, ROWS[1])
    writer.close()


def test_a_part_that_never_comes_is_named(tmp_path: Path) -> None:
    first, _, _ = writers(tmp_path, [], timeout_s=0.1)
    first.save(1, {"w": WHOLE["w"][:3]}, {}, {}, where=ROWS[0])
    with pytest.raises(CheckpointError, match=r"waited 0\.1 s in vain for the part of worker 1"):
        first.close()


def test_a_directory_that_the_other_host_does_not_have_is_explained(tmp_path: Path) -> None:
    mail = Box()
    first, second = (WriterGroup(index=index, count=2, mail=mail, timeout_s=30.0) for index in range(2))
    first.begin(1, tmp_path / "only_there")
    writer = ShardWriter(second)
    writer.save({"w": WHOLE["w"][3:].clone()}, ROWS[1])
    with pytest.raises(CheckpointError, match="run_dir on a disk that all hosts share"):
        writer.close()
    with pytest.raises(CheckpointError, match=r"worker 1 could not write its part: .* disk that all hosts share"):
        first.collect(1, tmp_path)
