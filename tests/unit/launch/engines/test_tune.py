"""Trials of Ray Tune, as far as no Ray is needed: arguments, results, checkpoints."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.checkpoint.checkpoint_dir import CommitMarker, checksum, write_commit_marker
from paceline.errors import PlanError
from paceline.runs import tune as runs_tune


class FakeCheckpoint:
    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def from_directory(cls, path: Path) -> FakeCheckpoint:
        return cls(path)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        yield str(self.path)


class FakeTune(types.ModuleType):
    """Keeps what it is told, as `ray.tune` would."""

    Checkpoint = FakeCheckpoint

    def __init__(self) -> None:
        super().__init__("ray.tune")
        self.results: list[tuple[dict[str, Any], list[str] | None]] = []

    def with_resources(self, trainable: Any, resources: Any) -> tuple[Any, Any]:
        return trainable, resources

    def PlacementGroupFactory(self, bundles: list[dict[str, float]], *, strategy: str) -> tuple[Any, str]:
        return bundles, strategy

    def report(self, result: dict[str, Any], *, checkpoint: FakeCheckpoint | None = None) -> None:
        files = None if checkpoint is None else sorted(path.name for path in checkpoint.path.iterdir())
        self.results.append((result, files))


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch) -> FakeTune:
    made = FakeTune()
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setitem(sys.modules, "ray.tune", made)
    return made


def train(worker: paceline.Worker, config: dict[str, Any]) -> None:
    """Never called."""


def checkpoint(run_dir: Path, step: int, *, text: str = "weights") -> Path:
    """A complete checkpoint."""
    place = run_dir / "checkpoints" / f"step_{step:08d}"
    place.mkdir(parents=True)
    (place / "state.pt").write_text(text)
    files = {"state.pt": len(text)}
    crc32 = {"state.pt": checksum(place / "state.pt")}
    write_commit_marker(
        place, CommitMarker(step=step, about={"text": text}, files=files, file_crc32=crc32, tensor_crc32={})
    )
    return place


@pytest.mark.parametrize(
    ("options", "bundle"),
    [
        ({"workers": 4, "hosts": 2}, {"CPU": 2.0}),
        ({"workers": 3, "hosts": 2}, {"CPU": 2.0}),
        ({"plan": "replicas=4", "hosts": 2}, {"CPU": 2.0}),
        ({"hosts": 2}, {"CPU": 1.0}),
        ({"workers": 2, "hosts": 2, "on": paceline.Ray(cpus=6, gpus=1)}, {"CPU": 6.0, "GPU": 1.0}),
    ],
)
def test_a_trial_takes_a_bundle_for_each_host(
    tune: FakeTune, options: dict[str, Any], bundle: dict[str, float]
) -> None:
    trainable, (bundles, strategy) = paceline.tune_trainable(train, **options)
    assert trainable.__name__ == "train"
    assert bundles == [{}, bundle, bundle]
    assert strategy == "SPREAD"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 0}, "every is 0; it must be at least 1"),
        ({"run_dir": "r", "fresh": True}, "got fresh, run_dir, which each trial has of its own"),
        ({"save_evry": 3}, "save_every"),
        ({"plan": "replicas=no"}, "replicas"),
    ],
)
def test_what_cannot_work_is_refused_before_a_trial_begins(tune: FakeTune, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        paceline.tune_trainable(train, **options)


def test_without_ray_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.tune", None)
    with pytest.raises(PlanError, match=r"paceline\[ray\]"):
        paceline.tune_trainable(train)


def test_results_have_what_is_known_and_each_new_checkpoint_once(
    tune: FakeTune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_tune, "LOOK_S", 0.0)
    checkpoint(tmp_path / "run", 1)
    reports = runs_tune._Reports(tune, tmp_path, every=2, save_every=None)
    for step in range(2, 7):
        if step == 4:
            checkpoint(tmp_path / "run", 3)
        reports.take({"step": step, "loss": 1 / step, "samples_per_s": None})
    checkpoint(tmp_path / "run", 6)
    reports.finish({"score": 7})
    files = ["checkpoint.json", "state.pt"]
    assert tune.results == [
        ({"step": 2, "loss": 1 / 2}, None),
        ({"step": 4, "loss": 1 / 4}, files),
        ({"step": 6, "loss": 1 / 6}, None),
        ({"step": 6, "loss": 1 / 6, "score": 7}, files),
    ]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"], "no copy is left"


def test_with_save_every_a_result_waits_for_its_own_steps_checkpoint_and_takes_no_later_one(
    tune: FakeTune, tmp_path: Path
) -> None:
    reports = runs_tune._Reports(tune, tmp_path, every=1, save_every=2)
    checkpoint(tmp_path / "run", 2)
    reports.take({"step": 1})
    late = threading.Timer(0.2, lambda: checkpoint(tmp_path / "run", 4))
    reports.take({"step": 2})
    reports.take({"step": 3})
    late.start()
    reports.take({"step": 4})
    late.join()
    reports.finish(None)
    files = ["checkpoint.json", "state.pt"]
    assert tune.results == [({"step": 1}, None), ({"step": 2}, files), ({"step": 3}, None), ({"step": 4}, files)]


def test_a_checkpoint_that_never_comes_is_waited_for_once(
    tune: FakeTune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_tune, "SAVE_S", 0.1)
    reports = runs_tune._Reports(tune, tmp_path, every=1, save_every=1)
    reports.take({"step": 1})
    monkeypatch.setattr(runs_tune, "SAVE_S", 1e6)
    reports.take({"step": 2})
    assert tune.results == [({"step": 1}, None), ({"step": 2}, None)]


def test_a_checkpoint_that_the_run_has_just_removed_is_left_out(
    tune: FakeTune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = runs_tune._Reports(tune, tmp_path, every=1, save_every=1)
    gone = checkpoint(tmp_path / "run", 1)
    monkeypatch.setattr(runs_tune.os, "link", lambda *_: shutil.rmtree(gone) or os.stat(gone))
    reports.take({"step": 1})
    assert tune.results == [({"step": 1}, None)]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"], "no copy is left"


def test_without_news_nothing_is_added_at_the_end(tune: FakeTune, tmp_path: Path) -> None:
    reports = runs_tune._Reports(tune, tmp_path, every=1, save_every=None)
    reports.take({"step": 1})
    reports.finish(None)
    assert tune.results == [({"step": 1}, None)]


def test_a_trials_own_checkpoint_changes_nothing(tmp_path: Path) -> None:
    given = checkpoint(tmp_path / "run", 5)
    checkpoint(tmp_path / "run", 10)
    runs_tune._take_over(FakeCheckpoint(given), tmp_path / "run")
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_00000005",
        "step_00000010",
    ]


def test_another_trials_checkpoint_replaces_the_run_which_is_kept(tmp_path: Path) -> None:
    checkpoint(tmp_path / "run", 5, text="mine")
    checkpoint(tmp_path / "run", 10, text="mine")
    given = checkpoint(tmp_path / "other", 5, text="better")
    runs_tune._take_over(FakeCheckpoint(given), tmp_path / "run")
    (now,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert (now / "state.pt").read_text() == "better"
    (kept,) = tmp_path.glob("run-*")
    assert len(list((kept / "checkpoints").iterdir())) == 2


def test_a_trial_that_comes_to_another_node_brings_its_checkpoint(tmp_path: Path) -> None:
    given = checkpoint(tmp_path / "elsewhere", 5)
    runs_tune._take_over(FakeCheckpoint(given), tmp_path / "run")
    assert (tmp_path / "run" / "checkpoints" / "step_00000005" / "state.pt").exists()
    runs_tune._take_over(None, tmp_path / "run")
