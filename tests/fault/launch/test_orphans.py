"""The supervisor is killed: workers that are all there save and leave by themselves, and the next start goes on."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

import quick
from elastic_runs import LIMIT_S, Run, assert_unharmed, finish, start, trained, undisturbed
from fake_hosts import MemberAndHead
from network_hosts import free_port
from paceline.errors import LaunchError
from paceline.launch.fork.worker_locks import lock_worker_log, running_workers, wait_until_workers_ended
from paceline.monitor.records.run_record import RunRecord
from paceline.plan import Job
from paceline.runs.attempt import Attempt
from paceline.runs.attempt_start import wait_for_orphans
from programs import checkpoints

pytestmark = pytest.mark.timeout(2 * LIMIT_S)

FIXED = {"plan": "replicas=3+batch(size=20,micro=2)+compute(precision=fp64)", "job": {"workers": 3}}
ELASTIC = {"plan": "replicas=2-3+batch(size=20,micro=2)+compute(precision=fp64)", "job": {"workers": 3}}
ALONE = json.dumps({"plan": "replicas=1+batch(size=20,micro=2)+compute(precision=fp64)", "job": {"workers": 1}})
KILLED = -signal.SIGKILL


def job(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**options, "job": {"save_every": None, **options["job"], **more}}


def committed(run: Run, attempt: int) -> set[int]:
    """The steps that are in any worker's ledger."""
    lines = [
        json.loads(line)
        for path in run.run_dir.glob(f"attempt_{attempt}/worker_*/ledger.jsonl")
        for line in path.read_text().splitlines()
    ]
    return {line["step"] for line in lines if "step" in line}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        pytest.param(FIXED, "forward", id="fixed-forward"),
        pytest.param(ELASTIC, "committed", id="elastic-committed"),
        quick.further(FIXED, "committed", id="fixed-committed"),
        quick.further(ELASTIC, "forward", id="elastic-forward"),
    ],
)
def test_a_killed_supervisor_costs_no_step(options: dict[str, Any], where: str, tmp_path: Path) -> None:
    fault = {"worker": 1, "step": 6, "where": where, "target": "supervisor"}
    first = trained(tmp_path / "a", fault, pause_s=0.05, **job(options))
    assert first.code == KILLED
    second = trained(tmp_path / "a", fault, **job(options))  # at once: it waits until they have saved
    assert_unharmed(second, undisturbed(ALONE))
    done, more = committed(second, 1), committed(second, 2)
    assert max(done) >= 5
    assert done == set(range(1, max(done) + 1)) and more == set(range(max(done) + 1, 13)), "a step was taken twice"
    assert f"resumed from step {max(done)} " in second.output


@pytest.mark.parametrize("options", [pytest.param(FIXED, id="fixed"), quick.further(ELASTIC, id="elastic")])
def test_where_a_worker_is_killed_as_well_nobody_writes(options: dict[str, Any], tmp_path: Path) -> None:
    place = {"worker": 1, "step": 7, "where": "forward"}
    faults = [{**place, "target": "supervisor"}, place]
    first = trained(tmp_path / "a", *faults, **job(options, save_every=4))
    assert first.code == KILLED
    second = trained(tmp_path / "a", *faults, **job(options, save_every=4))
    assert "resumed from step 4 " in second.output, second.output
    assert_unharmed(second, undisturbed(ALONE))
    assert {6} <= committed(second, 1) <= set(range(1, 8)), "it was not lost behind the checkpoint"


@pytest.mark.parametrize("options", [quick.further(FIXED, id="fixed"), pytest.param(ELASTIC, id="elastic")])
def test_a_stopped_orphan_is_killed_in_time_and_nobody_writes(options: dict[str, Any], tmp_path: Path) -> None:
    place = {"worker": 2, "step": 7, "where": "forward"}
    faults = [{**place, "target": "supervisor"}, {**place, "signal": int(signal.SIGSTOP)}]
    options = job(options, save_every=4, grace_s=4.0)
    assert trained(tmp_path / "a", *faults, **options).code == KILLED
    began = time.monotonic()
    wait_until_workers_ended(tmp_path / "a" / "run", limit_s=30.0, say=lambda _: None)
    assert time.monotonic() - began < 4.0 + 10.0
    second = trained(tmp_path / "a", *faults, **options)
    assert "resumed from step 4 " in second.output
    assert_unharmed(second, undisturbed(ALONE))


def test_the_next_start_waits_for_workers_that_are_still_there(tmp_path: Path) -> None:
    options = job(FIXED, max_steps=4)
    first = trained(tmp_path / "a", **options)
    assert first.code == 0, first.output
    with occupied(first.run_dir / "attempt_1" / "worker_1"):  # as by worker 1 itself, if it were still there
        assert running_workers(first.run_dir) == [1]
        second = start(tmp_path / "a", **job(FIXED))
        if second.stdout is None:
            raise ValueError("its output is not read")
        said = next(line for line in second.stdout if "paceline: " in line)
        assert "the supervisor of the previous start is lost: waiting for worker 1 to save and leave" in said
        assert not (first.run_dir / "attempt_2").exists()
    assert_unharmed(finish(tmp_path / "a", second), undisturbed(ALONE))


def test_workers_that_stay_too_long_are_named_in_an_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    worker_dir = made(run_dir / "attempt_3" / "worker_0")
    said: list[str] = []
    wait_until_workers_ended(run_dir, limit_s=0.1, say=said.append)
    assert said == []
    error = r"and worker 0 did not leave .* within 0 s\. End them"
    with occupied(worker_dir), pytest.raises(LaunchError, match=error):
        wait_until_workers_ended(run_dir, limit_s=0.1, say=said.append)
    assert len(said) == 1
    assert running_workers(run_dir) == []


def test_two_starts_that_look_at_once_do_not_take_each_other_for_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "attempt_1" / "worker_0")
    seen: list[list[int]] = []

    def close(fd: int) -> None:
        monkeypatch.undo()
        seen.append(running_workers(tmp_path))  # another one looks while the first has the file open
        os.close(fd)

    monkeypatch.setattr("paceline.launch.fork.worker_locks.os.close", close)
    seen.append(running_workers(tmp_path))
    assert seen == [[], []]


def test_a_host_that_has_not_got_the_runs_record_waits_for_its_own_workers(tmp_path: Path) -> None:
    job, said = Job(workers=4, hosts=2, head="a:29500", run_dir=str(tmp_path)), list[str]()
    worker_dir = made(tmp_path / "attempt_1" / "worker_2")
    wait_for_orphans(job, say=said.append, limit_s=0.0)
    assert said == []
    with occupied(worker_dir), pytest.raises(LaunchError, match="worker 2 did not leave"):
        wait_for_orphans(job, say=said.append, limit_s=0.1)
    assert said == ["another start is at work here: waiting for worker 2 to save and leave"]


def test_a_host_that_comes_back_to_a_run_at_work_elsewhere_waits_for_its_own_workers_alone(tmp_path: Path) -> None:
    job, said = Job(workers=2, hosts=2, head="a:29500", run_dir=str(tmp_path)), list[str]()
    record = RunRecord.begin_attempt(tmp_path, job={}, workers=2)
    dataclasses.replace(record, host="elsewhere").save()  # whose worker 0 is at work, and its lock seen from here
    others, own = (made(tmp_path / "attempt_1" / f"worker_{worker}") for worker in range(2))
    with occupied(others, host="elsewhere"):
        wait_for_orphans(job, say=said.append, limit_s=0.1)
        assert said == [] and running_workers(tmp_path) == [0]
        with occupied(own), pytest.raises(LaunchError, match="worker 1 did not leave"):
            wait_for_orphans(job, say=said.append, limit_s=0.1)


def test_a_host_that_follows_a_head_looks_for_its_own_workers_where_the_head_says_that_the_run_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.runs.attempt.WHILE_MET_S", 0.1)
    worker_dir = made(tmp_path / "run" / "attempt_1" / "worker_2")
    job = Job(workers=4, hosts=2, head="a:29500", run_dir=str(tmp_path / "chosen"))
    attempt = Attempt(job, plan=None, command_started=0.0, follow=True)
    with occupied(worker_dir), closing(MemberAndHead()) as pair:
        pair.member.run_dir = str(tmp_path / "run")
        assert attempt._begin(pair.member) == tmp_path / "run"
    said = capsys.readouterr().out
    assert "waiting for worker 2 to save and leave" in said
    assert "workers of the previous start are still running after 0 s" in said


def made(worker_dir: Path) -> Path:
    worker_dir.mkdir(parents=True)
    (worker_dir / "stdout.log").touch()
    return worker_dir


@contextmanager
def occupied(worker_dir: Path, *, host: str | None = None) -> Iterator[None]:
    """A process that is this worker, as far as can be seen, on this host or another one."""
    release, hold = os.pipe()
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(hold)
        if host is not None:
            socket.gethostname = lambda: host
        lock_worker_log(worker_dir)
        os.write(tell, b".")
        os.read(release, 1)  # to the end of the body
        os._exit(0)
    try:
        os.read(ready, 1)
        yield
    finally:
        os.close(hold)
        os.waitpid(pid, 0)
        for fd in (release, ready, tell):
            os.close(fd)


def test_where_the_heads_supervisor_is_killed_a_fixed_number_of_workers_saves_and_says_run_me_again(
    tmp_path: Path,
) -> None:
    token = tmp_path / "token"
    token.write_text("a token of a test, long enough")
    token.chmod(0o600)
    fault = {"worker": 2, "step": 6, "where": "forward", "target": "supervisor"}

    def attempt() -> list[Run]:
        options_here = job(FIXED, hosts=2, head=f"127.0.0.1:{free_port()}", token_file=str(token))
        hosts = [start(tmp_path / "a", fault, pause_s=0.05, **options_here) for _ in range(2)]  # they share a disk
        return [finish(tmp_path / "a", host) for host in hosts]

    killed, other = sorted(attempt(), key=lambda run: run.code)
    assert (killed.code, other.code) == (KILLED, 75), killed.output + other.output
    assert "everything is saved" in other.output
    (saved,) = checkpoints(other.run_dir)
    assert saved >= 6
    ends = attempt()
    assert [run.code for run in ends] == [0, 0], ends[0].output + ends[1].output
    assert any(f"resumed from step {saved} " in run.output for run in ends)
    assert_unharmed(ends[0], undisturbed(ALONE))
