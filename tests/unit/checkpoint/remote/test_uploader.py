"""Uploads of a run's checkpoints: committed last, kept in number, gone on with, and in nobody's way."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.checkpoint.remote.run_identity import SupersededError, claim
from paceline.checkpoint.remote.staged_upload import UPLOADS, StagedUpload, staged_steps
from paceline.checkpoint.remote.uploader import Uploader
from paceline.errors import CheckpointError
from remote_runs import BreakingStore, complete_steps, drop_checkpoint, put_checkpoint


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def store(tmp_path: Path) -> BreakingStore:
    return BreakingStore(f"file://{tmp_path}/far/run")


@pytest.fixture
def remote(store: BreakingStore) -> RemoteCheckpoints:
    return RemoteCheckpoints(store)


def upload_all(uploader: Uploader) -> list[int]:
    """Upload until nothing waits; returns the steps in their order."""
    done: list[int] = []
    while uploader.waiting():
        report = uploader.turn()
        if report is not None:
            assert report.reason is None and report.remains is None, report
            done.append(report.step)
    return done


def test_the_marker_is_written_last_and_the_newest_goes_first(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    for step in (10, 20):
        put_checkpoint(run_dir, step)
    assert upload_all(Uploader(run_dir, remote, keep=3)) == [20, 10]
    written = [name for what, name in store.changes if what in ("write", "send")]
    for step in ("step_00000020", "step_00000010"):
        own = [name for name in written if name.startswith(step)]
        assert own[-1] == f"{step}/{COMMIT_MARKER}" and own.count(f"{step}/{COMMIT_MARKER}") == 1
    assert complete_steps(remote) == [10, 20] and staged_steps(run_dir) == []
    for one in remote.look():
        local = run_dir / "checkpoints" / f"step_{one.step:08d}"
        assert {path.name: path.read_bytes() for path in local.iterdir()} == {
            name: store.read(f"{local.name}/{name}") for name in one.files
        }


def test_what_is_there_is_not_sent_again_by_a_later_process(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10)
    upload_all(Uploader(run_dir, remote, keep=3))
    store.changes.clear()
    assert upload_all(Uploader(run_dir, remote, keep=3)) == [] and store.changes == []


def test_as_many_stay_there_as_the_run_keeps_and_the_marker_goes_first(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    uploader = Uploader(run_dir, remote, keep=2)
    for step in (10, 20, 30, 40):
        put_checkpoint(run_dir, step)
        upload_all(uploader)
    assert complete_steps(remote) == [30, 40]
    gone = [name for what, name in store.changes if what == "delete" and name.startswith("step_00000010")]
    assert gone[0] == f"step_00000010/{COMMIT_MARKER}" and len(gone) == 3


def test_the_scripts_own_keep_counts(run_dir: Path, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    uploader = Uploader(run_dir, remote, keep=3)
    for step in (10, 20):
        path = put_checkpoint(run_dir, step)
        text = (path / COMMIT_MARKER).read_text().replace('"saved_at"', '"keep": 1, "saved_at"')
        (path / COMMIT_MARKER).write_text(
            text[: text.index('"crc32"')].rstrip().rstrip(",") + "}"
        )  # early markers have none
        upload_all(uploader)
    assert complete_steps(remote) == [20]


def test_a_checkpoint_that_retention_deletes_during_its_upload_is_sent_whole(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10)

    def delete(what: str, name: str) -> None:
        if what == "send" and (run_dir / "checkpoints" / "step_00000010").exists():
            drop_checkpoint(run_dir, 10)
            put_checkpoint(run_dir, 20)

    store.before = delete
    uploader = Uploader(run_dir, remote, keep=1)
    report = uploader.turn()
    assert report is not None and report.step == 10 and report.reason is None
    assert complete_steps(remote) == [10]
    assert upload_all(uploader) == [20] and complete_steps(remote) == [20]


def test_the_disk_holds_one_more_than_the_run_keeps_while_the_store_is_away(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    uploader = Uploader(run_dir, remote, keep=2)
    store.break_at(-1)
    for step in range(10, 100, 10):
        put_checkpoint(run_dir, step)
        if step > 20:
            drop_checkpoint(run_dir, step - 20)
        report = uploader.turn()
        assert report is not None and "broken off" in str(report.reason)
        assert len(staged_steps(run_dir)) == 1
    store.break_at(10_000)
    upload_all(uploader)
    assert complete_steps(remote) == [80, 90] and staged_steps(run_dir) == []


@pytest.mark.parametrize("number", range(9))
def test_an_upload_that_breaks_off_anywhere_is_no_checkpoint_and_is_gone_on_with(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints, number: int
) -> None:
    """Keep 1, and a step that is replaced by another one of its number: all kinds of changes are broken off."""
    put_checkpoint(run_dir, 10)
    put_checkpoint(run_dir, 20)
    upload_all(Uploader(run_dir, remote, keep=2))
    drop_checkpoint(run_dir, 20)
    put_checkpoint(run_dir, 20, saved_at=99.0)
    store.changes.clear()
    store.break_at(number)
    Uploader(run_dir, remote, keep=1).turn()
    for one in remote.look():
        if one.problem is None:  # what is taken for a checkpoint is one, of one save
            saves = {store.read(f"step_{one.step:08d}/{name}").split(b" ")[1] for name in one.files if name[0] == "_"}
            assert one.mark is not None and saves == {str(one.mark.about["saved_at"]).encode()}
    store.break_at(10_000)
    upload_all(Uploader(run_dir, remote, keep=1))
    put_checkpoint(run_dir, 30)
    upload_all(Uploader(run_dir, remote, keep=1))
    assert complete_steps(remote) == [30] and len(remote.look()) == 1


def test_files_that_are_there_are_not_sent_again_after_a_kill(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10, files=6)
    store.break_at(3)
    Uploader(run_dir, remote, keep=1).turn()
    sent = [name for what, name in store.changes[:3] if what == "send"]
    store.changes.clear()
    store.break_at(10_000)
    assert upload_all(Uploader(run_dir, remote, keep=1)) == [10]
    again = [name for what, name in store.changes if what == "send"]
    assert sent and not {*sent} & {*again} and len({*sent, *again}) == 6


def test_a_damaged_checkpoint_never_replaces_a_good_one(run_dir: Path, remote: RemoteCheckpoints) -> None:
    put_checkpoint(run_dir, 10)
    upload_all(Uploader(run_dir, remote, keep=2))
    path = put_checkpoint(run_dir, 20) / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)
    report = Uploader(run_dir, remote, keep=2).turn()
    assert report is not None and "is damaged" in str(report.reason)
    assert complete_steps(remote) == [10]


def test_objects_that_were_deleted_by_hand_are_sent_again(
    run_dir: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10)

    def delete(what: str, name: str) -> None:
        if what == "write" and name.endswith(COMMIT_MARKER):
            store.before = lambda *_: None
            os.remove(f"{store.root}/step_00000010/__1_0.distcp")

    uploader = Uploader(run_dir, remote, keep=1)
    staged = StagedUpload(run_dir, 10)
    staged.stage(run_dir / "checkpoints" / "step_00000010")
    with staged.taking("__1_0.distcp") as note:
        assert note is not None
        note.write({"is_done": True})
    report = uploader.turn()
    assert report is not None and "has no bytes" in str(report.reason) and complete_steps(remote) == []
    assert upload_all(uploader) == [10] and complete_steps(remote) == [10]


def test_steps_that_the_run_has_gone_back_from_go_there_too(run_dir: Path, remote: RemoteCheckpoints) -> None:
    for step in (10, 20, 30):
        put_checkpoint(run_dir, step)
    upload_all(Uploader(run_dir, remote, keep=3))
    for step in (20, 30):
        drop_checkpoint(run_dir, step)
    put_checkpoint(run_dir, 15, saved_at=100.0)  # it went on from 10
    upload_all(Uploader(run_dir, remote, keep=3))
    assert complete_steps(remote) == [10, 15]


def test_of_a_run_that_starts_over_nothing_old_stays(run_dir: Path, tmp_path: Path, remote: RemoteCheckpoints) -> None:
    for step in (10, 20, 30):
        put_checkpoint(run_dir, step)
    upload_all(Uploader(run_dir, remote, keep=3))
    shutil.rmtree(run_dir)
    uploader = Uploader(run_dir, remote, keep=3, is_fresh=True)
    put_checkpoint(run_dir, 25, saved_at=100.0)
    upload_all(uploader)
    assert complete_steps(remote) == [25]


def test_what_lies_on_the_disk_of_a_run_that_starts_over_is_not_uploaded(
    run_dir: Path, remote: RemoteCheckpoints
) -> None:
    for step in (10, 20):
        put_checkpoint(run_dir, step)
    uploader = Uploader(run_dir, remote, keep=3, is_fresh=True)
    assert uploader.waiting() == []
    put_checkpoint(run_dir, 5, saved_at=100.0)
    assert upload_all(uploader) == [5] and complete_steps(remote) == [5]


def test_a_later_start_ends_the_uploads_of_an_earlier_one(
    run_dir: Path, tmp_path: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10)
    earlier = claim(store, run_dir, remote=[], is_fresh=False)
    earlier.check()
    claim(store, tmp_path / "other", remote=remote.look(), is_fresh=False)
    with pytest.raises(SupersededError, match="uploads nothing any more"):
        Uploader(run_dir, remote, keep=1, claim=earlier).turn()
    assert complete_steps(remote) == []


def test_an_address_with_another_runs_checkpoints_is_refused(
    run_dir: Path, tmp_path: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10)
    claim(store, run_dir, remote=[], is_fresh=False)
    upload_all(Uploader(run_dir, remote, keep=1))
    other = tmp_path / "other"
    put_checkpoint(other, 5, saved_at=7.0)
    with pytest.raises(CheckpointError, match="has checkpoints of another run"):
        claim(store, other, remote=remote.look(), is_fresh=False)
    claim(store, tmp_path / "empty", remote=remote.look(), is_fresh=False)  # a new machine of the same run
    put_checkpoint(tmp_path / "empty", 12)
    claim(store, tmp_path / "empty", remote=remote.look(), is_fresh=False)
    claim(store, other, remote=remote.look(), is_fresh=True)  # which replaces them


def test_hosts_that_share_the_disk_divide_the_files(
    run_dir: Path, tmp_path: Path, store: BreakingStore, remote: RemoteCheckpoints
) -> None:
    put_checkpoint(run_dir, 10, files=4)
    held = StagedUpload(run_dir, 10)
    held.stage(run_dir / "checkpoints" / "step_00000010")
    other = BreakingStore(store.address)
    with held.taking("__2_0.distcp") as mine:  # this host is at one of them
        assert mine is not None
        second = Uploader(run_dir, RemoteCheckpoints(other), keep=1)
        with held.taking("__2_0.distcp") as again:
            assert again is None
        sender: Any = _CountingSender()
        assert second._send(held, sender, "__2_0.distcp") is False and sender.sent == []
        mine.write({"is_done": True})
        store.send("step_00000010/__2_0.distcp", str(held.directory / "__2_0.distcp"))
    assert upload_all(Uploader(run_dir, RemoteCheckpoints(other), keep=1)) == [10]
    assert "step_00000010/__2_0.distcp" not in [name for what, name in other.changes if what == "send"]
    assert complete_steps(remote) == [10]


class _CountingSender:
    """Counts what it is asked to send."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, path: Path, name: str, note: object) -> None:
        self.sent.append(name)


def test_a_full_disk_fails_the_upload_and_nothing_else(
    run_dir: Path, remote: RemoteCheckpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_checkpoint(run_dir, 10)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    uploader = Uploader(run_dir, remote, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", full)
        report = uploader.turn()
    assert report is not None and "No space left" in str(report.reason) and complete_steps(remote) == []
    assert upload_all(uploader) == [10] and complete_steps(remote) == [10]


def test_disks_without_hard_links_get_copies(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_checkpoint(run_dir, 10)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    staged = StagedUpload(run_dir, 10)
    staged.stage(run_dir / "checkpoints" / "step_00000010")
    assert (staged.directory / "__0_0.distcp").stat().st_nlink == 1
    assert (run_dir / UPLOADS).is_dir() and staged_steps(run_dir) == [10]
