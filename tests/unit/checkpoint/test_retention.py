"""Which checkpoints stay: a newer format, links, and what lost writers have left."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, NewerFormatError, find, read_commit_marker
from paceline.checkpoint.reader import open_checkpoint
from paceline.checkpoint.retention import IDLE_S, discard, tidy
from paceline.events import Event, Warned


def saved(directory: Path, *steps: int, keep: int = 2) -> list[Event]:
    events: list[Event] = []
    writer = AsyncWriter(directory, keep=keep, on_event=events.append)
    for step in steps:
        writer.save(step, {"w": torch.full((3,), float(step))}, {"step": step}, {})
    writer.close()
    return events


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def make_old(path: Path) -> None:
    long_ago = time.time() - 2 * IDLE_S
    os.utime(path, (long_ago, long_ago))


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


def test_what_lost_writers_have_left_is_cleared_by_the_next_save(tmp_path: Path) -> None:
    events: list[Event] = []
    writer = AsyncWriter(tmp_path, keep=3, on_event=events.append, tidies=False)  # it has taken over from a lost one
    for name in ("step_00000004.partial-17", "step_00000003.removed-17", "step_00000009.partial-18"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
        for path in (tmp_path / name / "__0_0.distcp", tmp_path / name):
            make_old(path)
    (tmp_path / "step_00000002.partial-19").mkdir()
    writer.save(5, {"w": torch.zeros(1)}, {}, {})
    writer.wait()
    late = "step_00000002.partial-19"
    assert names(tmp_path) == [late, "step_00000005", "step_00000009.partial-18"], "these may still be written"
    make_old(tmp_path / late)
    writer.save(10, {"w": torch.zeros(1)}, {}, {})
    writer.close()
    assert names(tmp_path) == ["step_00000005", "step_00000010"]
