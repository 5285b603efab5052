"""A trial that needs more devices than its pool has, now or ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.sweep import sweep as sweep_module
from paceline.sweep.own_pool import OwnPool
from simulated_trials import STUDY, SimulatedPool, write_study
from sweep_in_test import SweepInTest

optuna = pytest.importorskip("optuna")
TOO_LARGE = "it needs 3 devices at least, and the pool has 2. Give `replicas` a smaller least, or "


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SweepInTest]:
    found = SweepInTest(tmp_path)
    yield found
    found.release()


def test_a_trial_that_is_larger_than_the_pool_waits_until_the_pool_has_grown_and_that_is_said_once(
    tmp_path: Path,
) -> None:
    own = SweepInTest(tmp_path, replicas="3-4", trials=1)
    sweep = own.start()
    for _ in range(4):
        assert not sweep.look()
    assert [text for text in own.said if "waits" in text] == [f"trial 0 waits: {TOO_LARGE}the pool more devices"]
    assert own.states() == ["waiting"]
    own.pool.serve(slots=3)
    sweep.look()
    own.pool.serve(slots=2)
    sweep.look()
    assert len([text for text in own.said if "waits" in text]) == 2, "a fault that comes back is said again"
    own.pool.serve(slots=3)
    own.run()
    assert own.states() == ["finished"]


@pytest.mark.parametrize("slots", [0, 1])
def test_a_pool_whose_nodes_are_not_there_yet_fails_no_trial(own: SweepInTest, slots: int) -> None:
    write_study(own.file.parent, replicas=2)
    own.pool.serve(slots=slots)
    sweep = own.start()
    for _ in range(5):
        sweep.look()
    assert set(own.states()) == {"waiting"}
    assert any("waits" in text for text in own.said) == (slots == 1), "with none it has just been started"
    own.pool.serve()
    own.run()
    assert own.states() == ["finished"] * 4


def test_trials_that_are_larger_than_the_sweeps_own_pool_fail_after_some_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = STUDY.replace('pool = "pool"\n', "")
    own = SweepInTest(tmp_path)
    write_study(tmp_path, text, replicas="3-4")
    own.pool = SimulatedPool(own.folder / "pool")
    monkeypatch.setattr(OwnPool, "keep", lambda pool: None)
    sweep = own.start()
    sweep.look()
    sweep.look()
    assert set(own.states()) == {"waiting"}
    monkeypatch.setattr(sweep_module, "ROOM_S", 0.0)
    with pytest.raises(PacelineError, match=re.escape(f"{TOO_LARGE}more `slots`.")):
        own.run()
    assert not own.pool.starts
