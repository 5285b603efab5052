"""Ctrl-C and SIGTERM are heard in every wait of a sweep; the second one ends the wait for runs that save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.sweep import own_pool as own_pool_module
from paceline.sweep import sweep as sweep_module
from paceline.sweep.own_pool import OwnPool
from simulated_trials import SimulatedPool
from sweep_in_test import SweepInTest

optuna = pytest.importorskip("optuna")
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SweepInTest]:
    found = SweepInTest(tmp_path)
    yield found
    found.release()


class Asking:
    """Is asked to end at the look with this number."""

    def __init__(self, *at: int) -> None:
        self.at, self.num_looks = at, 0

    def __call__(self) -> int:
        self.num_looks += 1
        return sum(self.num_looks > at for at in self.at)


class DeafPools:
    """Starts processes that ignore SIGTERM and serve nothing, in the place of pools."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self._begin: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
        monkeypatch.setattr(own_pool_module.subprocess, "Popen", self._start)

    def _start(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        options["stdout"] = subprocess.PIPE
        process = self._begin([sys.executable, "-c", DEAF], **options)
        assert process.stdout is not None
        process.stdout.readline()  # from here on it is deaf
        self.started.append(process)
        return process

    def end(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeafPools]:
    monkeypatch.setattr(own_pool_module, "LOOK_S", 0.001)
    found = DeafPools(monkeypatch)
    yield found
    found.end()


def test_a_sweep_that_waits_for_the_pool_of_an_earlier_start_ends_and_starts_none(
    tmp_path: Path, deaf: DeafPools
) -> None:
    former, said, asking = SimulatedPool(tmp_path / "pool"), list[str](), Asking(3)
    pool = OwnPool(former.folder, slots=1, say=said.append, num_asked=asking)
    pool.start()
    pool.end()
    assert said == ["waits until the runs of the earlier start have saved and ended"]
    assert asking.num_looks >= 4
    assert not deaf.started


def test_a_sweep_that_waits_for_its_pools_start_ends(tmp_path: Path, deaf: DeafPools) -> None:
    asking = Asking(4)
    OwnPool(tmp_path / "pool", slots=1, say=print, num_asked=asking).start()
    assert len(deaf.started) == 1
    assert asking.num_looks == 5


def test_the_second_request_ends_the_wait_for_the_pools_end(tmp_path: Path, deaf: DeafPools) -> None:
    said, asking = list[str](), Asking(4, 9)
    pool = OwnPool(tmp_path / "pool", slots=1, say=said.append, num_asked=asking)
    pool.start()
    pool.end()
    (process,) = deaf.started
    assert process.poll() is None, "it is not killed: its runs save"
    assert said == [f"asked again: the sweep ends now, and its pool (process {process.pid}) by itself"]
    assert asking.num_looks == 10


def test_the_wait_for_a_pools_end_is_longer_than_what_a_pool_takes_for_it() -> None:
    from paceline.pool import node_agent, service

    for limit_s in (own_pool_module.END_S, own_pool_module.FORMER_S):
        assert limit_s > service.END_S + node_agent.END_S


def test_the_second_ctrl_c_ends_the_wait_for_runs_that_were_taken_out(
    own: SweepInTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep, num_asked = own.start(), 0

    def interrupt(*args: Any) -> bool:
        nonlocal num_asked
        num_asked += 1
        os.kill(os.getpid(), signal.SIGINT)
        return True

    monkeypatch.setattr(sweep_module, "LOOK_S", 0.001)
    monkeypatch.setattr(sweep_module, "PARTING_S", 5.0)
    monkeypatch.setattr(sweep_module, "_is_there", interrupt)
    monkeypatch.setattr(sweep, "look", lambda: not interrupt())
    sweep._parting = [sweep_module.pool_run(sweep._study, 0, {"x": 0.5})]
    record = sweep.run()
    assert (record.state, sweep.signal, num_asked) == ("stopped", signal.SIGINT, 2)


def test_a_sweep_that_is_asked_between_two_trials_has_not_finished(tmp_path: Path) -> None:
    own = SweepInTest(tmp_path, trials=2, at_once=1)
    sweep = own.start()
    for _ in range(4):
        assert not sweep.look()
        own.pool.pass_time()
    sweep._asked_to_end(signal.SIGINT, None)
    assert not sweep.look(), "one more trial is wanted"
    assert own.states() == ["finished"]
    assert own.start() and own.run().state == "running"
    assert own.states() == ["finished"] * 2
    own.release()
