"""What a start brings from a store: the newest good checkpoint, if it is newer than the disk's."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, find
from paceline.checkpoint.remote.download import fetch_newest
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.checkpoint.remote.uploader import Uploader
from paceline.errors import CheckpointError
from paceline.storage.retries import StorageError
from remote_runs import BreakingStore, put_checkpoint


@pytest.fixture
def remote(tmp_path: Path) -> RemoteCheckpoints:
    """A store that has steps 10, 20 and 30 of a run."""
    remote = RemoteCheckpoints(BreakingStore(f"file://{tmp_path}/far/run"))
    for step in (10, 20, 30):
        put_checkpoint(tmp_path / "old", step)
    uploader = Uploader(tmp_path / "old", remote, keep=3)
    while uploader.waiting():
        uploader.turn()
    return remote


def fetched(directory: Path, remote: RemoteCheckpoints, said: list[str] | None = None) -> int | None:
    return fetch_newest(directory, remote, found=remote.look(), say=[].append if said is None else said.append)


def folder(remote: RemoteCheckpoints, step: int) -> Path:
    return Path(remote.store.root) / f"step_{step:08d}"


def test_a_new_machine_gets_the_newest(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    assert fetched(tmp_path / "new", remote) == 30
    found = find(tmp_path / "new", verified=True)
    assert found.step == 30 and found.newest is not None and not found.skipped
    old = tmp_path / "old" / "checkpoints" / found.newest.name
    assert {path.name: path.read_bytes() for path in found.newest.iterdir()} == {
        path.name: path.read_bytes() for path in old.iterdir()
    }
    assert fetched(tmp_path / "new", remote) is None  # it is there


def test_a_disk_that_has_a_newer_one_is_left_alone(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    put_checkpoint(tmp_path / "run", 40)
    assert fetched(tmp_path / "run" / "checkpoints", remote) is None


def test_a_damaged_one_of_the_disk_is_replaced(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    path = put_checkpoint(tmp_path / "run", 30)
    (path / "__0_0.distcp").write_bytes(b"x" * 100)
    assert fetched(path.parent, remote) == 30
    assert find(path.parent, verified=True).step == 30


def test_half_uploads_and_damaged_ones_are_passed_over(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    (folder(remote, 30) / COMMIT_MARKER).unlink()
    (folder(remote, 20) / "__0_0.distcp").write_bytes(b"x" * 100)
    said: list[str] = []
    assert fetched(tmp_path / "new", remote, said) == 10
    assert any("step_00000020 was passed over: the file __0_0.distcp is damaged" in text for text in said)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["step_00000010"]


def test_one_of_a_newer_format_is_refused_by_name(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    marker = folder(remote, 30) / COMMIT_MARKER
    marker.write_text(marker.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(CheckpointError, match="step_00000030 is newer than what this Paceline reads"):
        fetched(tmp_path / "new", remote)


def test_a_marker_that_names_files_elsewhere_is_none(tmp_path: Path, remote: RemoteCheckpoints) -> None:
    marker = folder(remote, 30) / COMMIT_MARKER
    text = marker.read_text().replace("__0_0.distcp", "../../x")
    marker.write_text(text[: text.index('"crc32"')].rstrip().rstrip(",") + "}")
    assert fetched(tmp_path / "new", remote) == 20


def test_a_full_disk_is_found_before_anything_is_written(
    tmp_path: Path, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 0))
    with pytest.raises(CheckpointError, match="0 B are free"):
        fetched(tmp_path / "new", remote)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_download_that_breaks_off_leaves_nothing(
    tmp_path: Path, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = remote.look()

    def fail(*_: object) -> bytes:
        raise StorageError("the store went away")

    monkeypatch.setattr(remote.store, "read", fail)
    with pytest.raises(StorageError, match="went away"):
        fetch_newest(tmp_path / "new", remote, found=found, say=print)
    assert list((tmp_path / "new").iterdir()) == []
