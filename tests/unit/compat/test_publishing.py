"""A checkpoint takes the place of the one before: a whole copy is there at every instant, and nothing else goes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.checkpoint_dir import CommitMarker, find, is_whole, verify, write_commit_marker
from paceline.compat.publishing import fill_directory, publish_checkpoint
from paceline.errors import CheckpointError


def checkpoint(folder: Path, step: int, content: bytes) -> Path:
    path = folder / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "state.pt").write_bytes(content)
    mark = CommitMarker(step=step, about={}, files={"state.pt": len(content)}, file_crc32={}, tensor_crc32={})
    write_commit_marker(path, mark)
    return path


def looking_first(call: Callable[..., Any], folder: Path, seen: list[tuple[bytes, bytes]]) -> Callable[..., Any]:
    """What a kill before each of these calls would leave."""

    def called(*args: Any, **named: Any) -> Any:
        newest = find(folder).newest
        assert newest is not None
        seen.append(((newest / "state.pt").read_bytes(), (newest / "client").read_bytes()))
        return call(*args, **named)

    return called


@pytest.mark.parametrize("step", [1, 2])
def test_a_whole_copy_is_there_at_every_instant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    target, seen = tmp_path / "saved", list[tuple[bytes, bytes]]()
    publish_checkpoint(checkpoint(tmp_path / "a", 1, b"old"), target, beside={"client": b"of the old"})
    source = checkpoint(tmp_path / "b", step, b"new")
    with monkeypatch.context() as patched:
        for owner, name in ((os, "link"), (os, "unlink"), (os, "rmdir"), (shutil, "rmtree"), (Path, "rename")):
            patched.setattr(owner, name, looking_first(getattr(owner, name), target, seen))
        publish_checkpoint(source, target, beside={"client": b"of the new"})
    assert set(seen) == {(b"old", b"of the old"), (b"new", b"of the new")}
    assert [one.name for one in target.iterdir()] == [f"step_{step:08d}"]
    assert (target / source.name / "client").read_bytes() == b"of the new"


def test_what_is_no_checkpoint_stays(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    for name in ("step_notes", "step_1", "step_00000007"):
        (target / name).mkdir(parents=True)
    publish_checkpoint(checkpoint(tmp_path, 1, b"one"), target, beside={})
    assert sorted(one.name for one in target.iterdir()) == ["step_00000001", "step_00000007", "step_1", "step_notes"]
    with pytest.raises(CheckpointError, match="step_00000007 is there, and is no complete checkpoint"):
        publish_checkpoint(checkpoint(tmp_path, 7, b"seven"), target, beside={})


def test_a_copy_that_was_cut_short_is_finished_or_removed(tmp_path: Path) -> None:
    target = tmp_path / "saved"
    checkpoint(target, 1, b"one").rename(target / "step_00000001.partial-1")
    (target / "step_00000001.partial-2").mkdir()
    publish_checkpoint(checkpoint(tmp_path, 2, b"two"), target, beside={})
    assert [one.name for one in target.iterdir()] == ["step_00000002"]


def test_a_directory_is_filled_again_and_is_no_checkpoint_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, whole = tmp_path / "state", list[bool]()
    fill_directory(checkpoint(tmp_path / "a", 1, b"old"), target)
    (target / "notes").write_text("the program's own")
    source, link = checkpoint(tmp_path / "b", 2, b"new"), os.link

    def linking(*args: Any) -> None:
        whole.append(is_whole(target))
        link(*args)

    monkeypatch.setattr(os, "link", linking)
    fill_directory(source, target)
    assert whole == [False, False]
    assert verify(target).step == 2 and (target / "state.pt").read_bytes() == b"new"
    assert (target / "notes").exists()


def test_a_directory_on_another_disk_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refused)
    fill_directory(checkpoint(tmp_path, 1, b"one"), tmp_path / "state")
    assert (tmp_path / "state" / "state.pt").read_bytes() == b"one"
    with pytest.raises(CheckpointError, match="there is no such directory"):
        fill_directory(tmp_path / "nothing", tmp_path / "state")
    assert is_whole(tmp_path / "state"), "what was there stays"
