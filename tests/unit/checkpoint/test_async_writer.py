"""The writer beside training: what is kept, what failures and dead processes leave, full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.checkpoint import async_writer as writer_module
from paceline.checkpoint import checkpoint_dir, retention
from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.reader import find, open_checkpoint
from paceline.errors import CheckpointError
from paceline.events import CheckpointFailed, CheckpointSaved, Event, Warned


class Killed(BaseException):
    """Ends a save in the middle, as a kill would: nothing below catches it."""


def tensors_of(step: int, num_elements: int = 1000) -> dict[str, Tensor]:
    return {"model.weight": torch.full((num_elements,), float(step)), "model.bias": torch.full((3,), -float(step))}


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name.removeprefix("step_0000") for path in directory.iterdir())


def change_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def assert_loadable(path: Path | None, step: int) -> None:
    assert path is not None
    checkpoint = open_checkpoint(path)
    assert checkpoint.step == step and checkpoint.state == {"step": step}
    assert all(abs(float(value)) == step for tensor in checkpoint.load().values() for value in tensor[:3])


@contextlib.contextmanager
def writing(directory: Path, events: list[Event], keep: int = 3) -> Iterator[AsyncWriter]:
    writer = AsyncWriter(directory, keep=keep, on_event=events.append)
    try:
        yield writer
    finally:
        with contextlib.suppress(CheckpointError):
            writer.close()


def test_save_returns_before_it_is_written_and_reports_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    fill = writer_module._fill

    def held(*arguments: Any) -> int:
        assert gate.wait(30)
        return fill(*arguments)

    monkeypatch.setattr(writer_module, "_fill", held)
    events: list[Event] = []
    with writing(tmp_path, events) as writer:
        tensors = tensors_of(1)
        stall_s = writer.save(1, tensors, {"step": 1}, {})
        tensors["model.weight"].zero_()  # training goes on
        assert events == [] and find(tmp_path).newest is None
        with pytest.raises(CheckpointError, match=r"was not written within 0\.01 s"):
            writer.close(timeout_s=0.01)
        gate.set()
        path = writer.wait()
    assert_loadable(path, 1)
    [saved] = events
    assert isinstance(saved, CheckpointSaved)
    assert (saved.step, saved.path, saved.stall_s) == (1, str(path), stall_s)
    assert saved.num_bytes == sum(file.stat().st_size for file in Path(saved.path).iterdir())


def test_the_writing_thread_has_low_priority_and_ends_with_close(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def note(event: Event) -> None:
        seen.append((threading.current_thread().name, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    writer = AsyncWriter(tmp_path, keep=1, on_event=note)
    writer.save(1, tensors_of(1), {}, {})
    writer.close()
    writer.close()  # once more does no harm
    [(thread, niceness)] = seen
    assert thread.startswith("checkpoint") and niceness == min(19, before + 10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("checkpoint")]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    events: list[Event] = []
    with writing(tmp_path, events, keep=2) as writer:
        for step in range(1, 6):
            writer.save(step, tensors_of(step), {"step": step}, {})
        assert writer.wait() == tmp_path / "step_00000005"
    assert steps_in(tmp_path) == ["0004", "0005"]
    for step in (4, 5):
        assert_loadable(tmp_path / f"step_{step:08d}", step)


def test_damaged_ones_do_not_count_as_kept_and_the_only_good_one_stays(tmp_path: Path) -> None:
    with writing(tmp_path, [], keep=1) as writer:
        writer.save(1, tensors_of(1), {"step": 1}, {})
        writer.wait()
        shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000009")
        (tmp_path / "step_00000009" / "__0_0.distcp").unlink()
        writer.save(2, tensors_of(2), {"step": 2}, {})
        writer.wait()
    assert steps_in(tmp_path) == ["0002", "0009"]
    assert_loadable(find(tmp_path).newest, 2)


def test_damaged_ones_stay_until_there_are_enough_newer_ones(tmp_path: Path) -> None:
    with writing(tmp_path, [], keep=2) as writer:
        for step in (1, 2, 3):
            writer.save(step, tensors_of(step), {"step": step}, {})
            writer.wait()
            if step == 2:
                (tmp_path / "step_00000002" / "__0_0.distcp").unlink()
        assert steps_in(tmp_path) == ["0001", "0002", "0003"]
        writer.save(4, tensors_of(4), {"step": 4}, {})
        writer.wait()
    assert steps_in(tmp_path) == ["0003", "0004"]


def test_one_whose_bytes_changed_does_not_count_as_kept_and_that_is_said_once(tmp_path: Path) -> None:
    with writing(tmp_path, [], keep=9) as writer:
        for step in (1, 2, 3):
            writer.save(step, tensors_of(step), {"step": step}, {})
    change_a_byte(tmp_path / "step_00000003" / "__0_0.distcp")
    events: list[Event] = []
    with writing(tmp_path, events, keep=2) as writer:  # a later start
        writer.save(4, tensors_of(4), {"step": 4}, {})
        writer.wait()
        assert steps_in(tmp_path) == ["0002", "0003", "0004"]
        change_a_byte(tmp_path / "step_00000004" / "state.pt")  # one of its own
        writer.save(5, tensors_of(5), {"step": 5}, {})
        writer.wait()
        assert steps_in(tmp_path) == ["0002", "0003", "0004", "0005"]
        writer.save(6, tensors_of(6), {"step": 6}, {})
        writer.wait()
    assert steps_in(tmp_path) == ["0005", "0006"]
    first, second = (event.text for event in events if isinstance(event, Warned))
    assert "step_00000003 does not count among the 2 to keep: the file __0_0.distcp is damaged" in first
    assert "step_00000004 does not count among the 2 to keep: the file state.pt is damaged" in second


def test_the_one_just_saved_is_never_pruned_even_below_older_ones(tmp_path: Path) -> None:
    with writing(tmp_path, [], keep=2) as writer:
        for step in (50, 60, 10):
            writer.save(step, tensors_of(step), {"step": step}, {})
        writer.wait()
    assert steps_in(tmp_path) == ["0010", "0060"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    with writing(tmp_path, []) as writer:
        writer.save(1, tensors_of(9), {"step": 9}, {})
        writer.save(1, tensors_of(1), {"step": 1}, {})
        path = writer.wait()
    assert steps_in(tmp_path) == ["0001"]
    assert_loadable(path, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("again", [False, True], ids=["a new step", "a step that was saved before"])
def test_a_kill_between_any_two_calls_that_change_the_disk_leaves_a_good_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """Stop the second save before its n-th rename, fsync or deletion, for every n."""
    calls = 0
    limit = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > limit:
                raise Killed
            return function(*arguments, **options)

        return call

    step = 1 if again else 2
    reached_end = False
    while not reached_end:
        directory = tmp_path / str(limit)
        with writing(directory, [], keep=1) as writer:
            writer.save(1, tensors_of(1), {"step": 1}, {})
        calls = 0
        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", counted(Path.rename))
            patched.setattr(os, "fsync", counted(os.fsync))
            patched.setattr(os, "unlink", counted(os.unlink))
            patched.setattr(os, "rmdir", counted(os.rmdir))
            patched.setattr(Path, "mkdir", counted(Path.mkdir))
            writer = AsyncWriter(directory, keep=1, on_event=lambda event: None)
            writer.save(step, tensors_of(step), {"step": step}, {})
            try:
                writer.close()
                reached_end = True
            except Killed:
                pass
        found = find(directory)
        assert found.step in (1, step)
        assert_loadable(found.newest, found.step)
        leftovers = [path for path in directory.iterdir() if path != found.newest]
        named = {path for path, _ in found.skipped}
        assert all(path in named or path.name == "step_00000001" for path in leftovers)
        with writing(directory, [], keep=1) as writer:  # the next attempt tidies up
            writer.save(3, tensors_of(3), {"step": 3}, {})
        assert steps_in(directory) == ["0003"]
        limit += 1
    assert limit > 10, "the save was stopped at many places"


def test_what_a_dead_process_left_is_published_or_removed_by_the_next_save(tmp_path: Path) -> None:
    with writing(tmp_path, []) as writer:
        for step in (1, 2):
            writer.save(step, tensors_of(step), {"step": step}, {})
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002.partial-77")  # killed before the rename
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000003.partial-77")
    (tmp_path / "step_00000003.partial-77" / "checkpoint.json").unlink()
    shutil.copytree(tmp_path / "step_00000001", tmp_path / "step_00000000.removed-77")
    assert_loadable(find(tmp_path).newest, 2)
    with writing(tmp_path, []) as writer:
        writer.save(4, tensors_of(4), {"step": 4}, {})
    assert steps_in(tmp_path) == ["0001", "0002", "0004"]
    assert find(tmp_path).skipped == ()


def test_what_another_writer_of_the_run_may_still_be_writing_is_left_alone(tmp_path: Path) -> None:
    with writing(tmp_path, []) as writer:
        writer.save(1, tensors_of(1), {"step": 1}, {})
    other = tmp_path / "step_00000002.partial-77"
    other.mkdir()
    successor = AsyncWriter(tmp_path, keep=1, on_event=[].append, tidies=False)
    successor.save(3, tensors_of(3), {"step": 3}, {})
    successor.close()
    assert other.is_dir()
    assert_loadable(find(tmp_path).newest, 3)


def test_a_run_that_starts_over_can_discard_what_lies_ahead(tmp_path: Path) -> None:
    with writing(tmp_path, []) as writer:
        for step in (1, 2, 3):
            writer.save(step, tensors_of(step), {"step": step}, {})
    (tmp_path / "step_00000009.partial-77").mkdir()
    retention.discard(tmp_path, after_step=1, keeping={2})
    assert steps_in(tmp_path) == ["0001", "0002"]
    retention.discard(tmp_path, after_step=1)
    assert steps_in(tmp_path) == ["0001"]
    retention.discard(tmp_path, after_step=-1)
    assert steps_in(tmp_path) == []


def test_a_value_that_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    events: list[Event] = []
    with writing(tmp_path, events) as writer:
        with pytest.raises(CheckpointError, match=r"scheduler\.lr_lambdas\[0\]: <function>"):
            writer.save(1, tensors_of(1), {"scheduler": {"lr_lambdas": [lambda epoch: 1.0]}}, {})
        with pytest.raises(CheckpointError, match="cannot store about"):
            writer.save(1, tensors_of(1), {}, {"plan": object()})
        assert writer.wait() is None
    assert list(tmp_path.iterdir()) == [] and events == []
    with pytest.raises(ValueError, match="keep is 0"):
        AsyncWriter(tmp_path, keep=0, on_event=events.append)


# ------------------------------------------------------------------------------------------------------- a full disk


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Any]:
    """A function that mounts a tiny file system, removed at the end."""
    mounted: list[Path] = []

    def mount_with(options: str) -> Path:
        place = tmp_path / f"disk_{len(mounted)}"
        place.mkdir()
        if os.geteuid() != 0:
            pytest.skip("needs root: a small tmpfs is mounted to fill it")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount_with
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True, timeout=10)


BLOCKS = namedtuple("BLOCKS", "total used free")


# From Python 3.13 on, a file object that cannot be flushed at its end says so: torch's is left by the failed write.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*NoCloseWriter:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("free_is_known", [True, False], ids=["seen in advance", "met while writing"])
def test_a_full_disk_fails_the_save_alone(mount: Any, monkeypatch: pytest.MonkeyPatch, free_is_known: bool) -> None:
    directory = mount("size=3m") / "checkpoints"
    if not free_is_known:  # a quota, say
        monkeypatch.setattr(writer_module.shutil, "disk_usage", lambda path: BLOCKS(1 << 40, 0, 1 << 40))
    events: list[Event] = []
    with writing(directory, events) as writer:
        writer.save(1, tensors_of(1), {"step": 1}, {})
        writer.save(2, tensors_of(2, num_elements=2_000_000), {"step": 2}, {})
        with pytest.raises(CheckpointError, match=r"checkpoint of step 2 was not written: .*No space left.* needed\)"):
            writer.wait()
        assert steps_in(directory) == ["0001"], "what was written of it is gone"
        assert_loadable(find(directory).newest, 1)
        writer.save(3, tensors_of(3), {"step": 3}, {})  # training went on, and saves again
        assert_loadable(writer.wait(), 3)
    failed = events[1]
    assert isinstance(failed, CheckpointFailed) and failed.step == 2
    assert "Older checkpoints are untouched. Free space there" in failed.reason
    assert [type(event).__name__ for event in events] == ["CheckpointSaved", "CheckpointFailed", "CheckpointSaved"]


def test_a_disk_that_fills_at_any_file_leaves_nothing_behind(mount: Any) -> None:
    """Each file needs an inode: with n of them, the n-th file cannot be made."""
    outcomes = []
    for num_inodes in range(3, 11):
        directory = mount(f"size=3m,nr_inodes={num_inodes}") / "checkpoints"
        events: list[Event] = []
        with writing(directory, events) as writer:
            writer.save(1, tensors_of(1), {"step": 1}, {})
        outcomes.append(type(events[0]).__name__)
        assert steps_in(directory) == (["0001"] if outcomes[-1] == "CheckpointSaved" else [])
    num_failed = outcomes.count("CheckpointFailed")
    assert num_failed >= 4, "each of the four files was refused once"
    assert outcomes == ["CheckpointFailed"] * num_failed + ["CheckpointSaved"] * (len(outcomes) - num_failed)


@pytest.mark.parametrize("is_warm", [False, True])
def test_no_room_for_the_copy_fails_the_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_warm: bool
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    events: list[Event] = []
    writer = AsyncWriter(tmp_path / "all", keep=3, on_event=events.append, staging=tmp_path)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", refuse)
        if is_warm:
            writer.warm(tensors_of(1))
        writer.save(1, tensors_of(1), {"step": 1}, {})
        with pytest.raises(
            CheckpointError, match=rf"no room in {tmp_path} for the copy of .*No space left.*offload_path"
        ):
            writer.wait()
    writer.save(2, tensors_of(2), {"step": 2}, {})
    assert_loadable(writer.close(), 2)
    assert [type(event).__name__ for event in events] == ["CheckpointFailed", "CheckpointSaved"]


def test_an_error_of_another_kind_names_it(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the directory should be")
    events: list[Event] = []
    with writing(tmp_path / "checkpoints", events) as writer:
        writer.save(1, tensors_of(1), {"step": 1}, {})
        with pytest.raises(CheckpointError, match=r"File exists.*Look at"):
            writer.close()
    [failed] = events
    assert isinstance(failed, CheckpointFailed)


@pytest.mark.parametrize("step", [1, 2], ids=["the same step", "another step"])
def test_an_old_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    events: list[Event] = []
    with writing(tmp_path, events, keep=1) as writer:
        writer.save(1, tensors_of(1), {"step": 1}, {})
        writer.wait()
        monkeypatch.setattr(shutil, "rmtree", refuse)
        writer.save(step, tensors_of(step), {"step": step}, {})
        assert_loadable(writer.wait(), step)
        assert_loadable(find(tmp_path).newest, step)
    assert [type(event).__name__ for event in events] == ["CheckpointSaved", "Warned", "CheckpointSaved"]


def test_what_an_earlier_start_left_and_cannot_be_deleted_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    (tmp_path / "step_00000009.removed-77").mkdir()
    monkeypatch.setattr(shutil, "rmtree", refuse)
    events: list[Event] = []
    with writing(tmp_path, events) as writer:
        for step in (1, 2):
            writer.save(step, tensors_of(step), {"step": step}, {})
        assert_loadable(writer.wait(), 2)
    assert [type(event).__name__ for event in events] == ["Warned", "CheckpointSaved", "CheckpointSaved"]


def test_one_that_cannot_be_deleted_keeps_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(tmp_path, []) as writer:
        for step in (1, 2, 3):
            writer.save(step, tensors_of(step), {"step": step}, {})
    remove = checkpoint_dir.remove

    def refuse(path: Path) -> None:
        if path.name == "step_00000002":
            raise OSError(errno.EBUSY, "Device or resource busy")
        remove(path)

    monkeypatch.setattr(retention, "remove", refuse)
    with pytest.raises(OSError, match="busy"):
        retention.discard(tmp_path, after_step=0)
    assert steps_in(tmp_path) == ["0002"]


def test_nothing_is_committed_once_a_later_start_has_taken_over_the_directory(tmp_path: Path) -> None:
    events, later = list[Event](), list[str]()
    writer = AsyncWriter(tmp_path, keep=3, on_event=events.append, newer_start=lambda: later[0] if later else None)
    writer.save(1, tensors_of(1), {}, {})
    writer.wait()
    later.append("attempt 2, process 7 on host b")
    (tmp_path / "step_00000002.partial-7").mkdir()  # of the later one
    writer.save(2, tensors_of(2), {}, {})
    with pytest.raises(
        CheckpointError, match=r"a later start of the run has taken over \(attempt 2, process 7 on host b"
    ):
        writer.close()
    assert steps_in(tmp_path) == ["0001", "0002.partial-7"]
