"""Which checkpoints stay: a newer format, links, and what lost writers have left."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import retention
from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, NewerFormatError, find, read_commit_marker
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.retention import IDLE_S, discard, tidy
from paceline.events import Event, Warned
from paceline.launch.job.outcome import STUCK, interrupted, lost_worker
from paceline.monitor.records.run_record import RunRecord
from paceline.plan.job import Job
from paceline.runs.attempt import Attempt


def saved(directory: Path, *steps: int, keep: int = 2) -> list[Event]:
    events: list[Event] = []
    writer = AsyncWriter(directory, keep=keep, on_event=events.append)
    for step in steps:
        writer.save(step, {"w": torch.full((3,), float(step))}, {"step": step}, {})
    writer.close()
    return events


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def of_newer_format(path: Path) -> None:
    marker = path / COMMIT_MARKER
    marker.write_text(json.dumps({**json.loads(marker.read_text()), "format": 2, "shape": "of tomorrow"}))


def test_a_newer_format_is_named_and_never_deleted(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2)
    of_newer_format(tmp_path / "step_00000002")
    with pytest.raises(NewerFormatError, match="it is of format 2, and this Paceline reads format 1"):
        read_commit_marker(tmp_path / "step_00000002")
    found = find(tmp_path, verified=True)
    assert (found.step, [path.name for path in found.newer]) == (1, ["step_00000002"])
    saved(tmp_path, 3, 4, 5, keep=1)
    assert names(tmp_path) == ["step_00000002", "step_00000005"]
    assert find(tmp_path).newer == (), "older than what is read: it is in nobody's way"
    discard(tmp_path, after_step=-1)
    tidy(tmp_path)
    assert names(tmp_path) == ["step_00000002"]


def test_links_are_followed_and_only_the_link_is_deleted(tmp_path: Path) -> None:
    elsewhere, directory = tmp_path / "big disk", tmp_path / "checkpoints"
    saved(elsewhere, 1, 2)
    directory.mkdir()
    for name in names(elsewhere):
        (directory / name).symlink_to(elsewhere / name)
    (directory / "step_00000003").symlink_to(tmp_path / "nowhere")
    assert find(directory, verified=True).step == 2
    assert open_checkpoint(directory / "step_00000002").step == 2
    events = saved(directory, 2, 3, 4, keep=2)
    assert not [event for event in events if isinstance(event, Warned)], events
    assert names(directory) == ["step_00000003", "step_00000004"]
    assert names(elsewhere) == ["step_00000001", "step_00000002"], "what the links led to stays"
    assert open_checkpoint(elsewhere / "step_00000002").step == 2


def test_what_lost_writers_have_left_is_cleared_by_later_saves_whatever_the_time_of_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, events = [0.0], list[Event]()
    monkeypatch.setattr(retention.time, "monotonic", lambda: now[0])
    writer = AsyncWriter(tmp_path, keep=9, on_event=events.append, tidies=False)  # it has taken over from a lost one

    def save(step: int) -> list[str]:
        writer.save(step, {"w": torch.zeros(1)}, {}, {})
        writer.wait()
        return [name for name in names(tmp_path) if "." in name]

    for name in ("step_00000004.partial-17", "step_00000003.removed-17", "step_00000009.partial-18"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
        os.utime(tmp_path / name / "__0_0.distcp", (0, 0))  # the clock may have been set since: that proves nothing
        os.utime(tmp_path / name, (0, 0))
    written, later = "step_00000004.partial-17", "step_00000009.partial-18"
    assert save(5) == ["step_00000003.removed-17", written, later], "they may still be written"
    now[0] += IDLE_S
    (tmp_path / written / "__0_1.distcp").write_bytes(b"more")
    assert save(6) == [written, later], "one has changed, and one may be of a later save"
    now[0] += IDLE_S
    assert save(7) == [later]
    assert save(10) == [later], "it was not looked at before"
    now[0] += IDLE_S
    assert save(11) == []
    writer.close()


@pytest.mark.parametrize("head", [None, "a:29500"])
@pytest.mark.parametrize("kind", ["", STUCK])
def test_a_save_that_a_second_ctrl_c_has_cut_short_is_removed_once_nobody_can_write_it(
    tmp_path: Path, head: str | None, kind: str
) -> None:
    partial = tmp_path / "checkpoints" / "step_00000004.partial-7"
    partial.mkdir(parents=True)
    attempt = Attempt(Job(workers=1, run_dir=str(tmp_path), head=head), command_started=0.0)
    attempt.number, attempt._record = 1, RunRecord.begin_attempt(tmp_path, job={}, workers=1)
    ended = lost_worker(0, host="a", pid=7, kind=kind, message="it was ended")
    assert attempt._end(interrupted(signal.SIGINT, (ended,)), ()) == 130
    assert partial.exists() == (head is not None or kind == STUCK)
