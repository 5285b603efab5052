"""A study belongs to its folder, wherever that is used from, and to no other one."""

from __future__ import annotations

import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import run_lock
from paceline.errors import PlanError
from paceline.sweep.study_file import read_study_file
from paceline.sweep.study_owner import FILE, StudyOwner
from paceline.sweep.trial_store import TrialStore
from simulated_trials import write_study
from sweep_in_test import SweepInTest

optuna = pytest.importorskip("optuna")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SweepInTest]:
    found = SweepInTest(tmp_path)
    yield found
    found.release()


def on_another_host(own: SweepInTest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go on as if the folder were used from a host that shares its disk."""
    own.release()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    own.pool.serve()


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_a_sweep_goes_on_from_another_host(own: SweepInTest, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    sweep = own.start()
    sweep.look()
    sweep._progress.note(state, {})
    before = [trial.params for trial in own.study.trials]
    on_another_host(own, monkeypatch)
    own.start()
    record = own.run()
    assert (record.host, own.states()) == ("another", ["finished"] * 4)
    assert [trial.params for trial in own.study.trials][: len(before)] == before
    assert own.pool.starts == {f"study-trial-000{number}": 1 for number in range(4)}


def test_on_a_disk_without_locks_a_sweep_that_may_still_run_on_another_host_is_refused(
    own: SweepInTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = own.start()
    sweep.look()
    on_another_host(own, monkeypatch)
    monkeypatch.setattr(run_lock, "is_held", lambda folder: False)
    with pytest.raises(PlanError, match=r"may still run on .* has no locks .*If it is gone, remove .*sweep\.json"):
        own.start()
    sweep._progress.note("stopped", {})
    own.start()


def opened(folder: Path) -> TrialStore:
    study = read_study_file(folder / "study.toml")
    return TrialStore(study)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A folder with a study whose storage is elsewhere, and a finished trial in it."""
    folder = tmp_path / "first"
    folder.mkdir()
    write_study(folder, storage=f"journal:{tmp_path}/trials.log")
    (folder / "runs" / "study").mkdir(parents=True)
    store = opened(folder)
    store.finish(store.ask(), 1.0)
    return folder


def test_a_folder_that_is_moved_keeps_its_study_and_a_copy_beside_it_is_refused(begun: Path) -> None:
    moved = begun.parent / "second"
    shutil.copytree(begun, moved)
    with pytest.raises(PlanError, match=r"second/runs/study is a copy of .*first/runs/study, which is still there"):
        opened(moved)
    shutil.rmtree(begun)
    assert [one.value for one in opened(moved).trials()] == [1.0]


def test_the_same_folder_under_another_path_is_no_copy(begun: Path) -> None:
    (begun.parent / "link").symlink_to(begun)
    assert len(opened(begun.parent / "link").trials()) == 1


def test_a_folder_without_the_studys_secret_is_refused(begun: Path) -> None:
    (begun / "runs" / "study" / FILE).unlink()
    with pytest.raises(PlanError, match=r"has a study 'study' of .*first/runs/study.* Give this study another name"):
        opened(begun)


def test_the_secret_is_for_its_user_alone_and_is_not_in_the_storage(begun: Path) -> None:
    path = begun / "runs" / "study" / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stored = (begun.parent / "trials.log").read_bytes()
    owner = StudyOwner(path.parent)
    assert owner.identity.encode() in stored
    assert path.read_bytes().hex().encode() not in stored
    assert list(path.parent.iterdir()) == [path], "nothing else is left"


def test_half_a_secret_is_replaced_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"")
    first = StudyOwner(tmp_path)
    assert StudyOwner(tmp_path).identity == first.identity
    (tmp_path / FILE).unlink()
    assert StudyOwner(tmp_path).identity != first.identity
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    with pytest.raises(PlanError, match=r"\.secret cannot be used: .*directory"):
        StudyOwner(tmp_path)
