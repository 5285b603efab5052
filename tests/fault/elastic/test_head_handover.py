"""The coordinator's host is asked to leave: another one takes over, unless the signal is for the whole run."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import quick
from elastic_hosts import GATE, LIMIT_S, like, outcome, shared, spread, until
from elastic_runs import Run, assert_unharmed
from network_hosts import NamespaceHost, needs_network, two_hosts
from programs import checkpoints

SIZES = "batch(size=20,micro=2)+compute(precision=fp64)"
SLOW = 60  # steps of a quarter of a second; with more of them, sums of other members' orders would differ by more
LONG = 20_000  # steps: more than there is time for

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.85.0") as made:
        yield made


@needs_network
def test_sigterm_at_the_coordinators_host_makes_that_host_leave_and_another_one_takes_over(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], plan=f"replicas=1-4+{SIZES}", gate=GATE, job=shared(tmp_path)) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(5)
        east.process.send_signal(signal.SIGTERM)
        east.says("SIGTERM came on host east: workers 0, 1 leave between two steps, another host takes over")
        job.open_gate()
        assert east.end() == 75, east.output
        assert west.end() == 0, west.output
        run = outcome(job)
    assert_unharmed(run, like())
    assert run.workers() == [2, 3]
    assert sorted(event["rank"] for event in run.events("WorkerLeft") if event["host"] == "east") == [0, 1]
    assert not run.events("WorkerLost", "Restarted")
    assert "this host has left, and the run goes on without it" in east.output
    assert "stopped after step" not in east.output and "paceline: go on with:" in east.output
    assert "has left: SIGTERM came on host east. Another host takes its place" in " ".join(west.output.split())
    assert (
        "host west leads the run now: the coordinator's host east has left (SIGTERM came on host east)" in west.output
    )
    assert json.loads((run.run_dir / "run.json").read_text())["state"] == "finished"


@pytest.mark.further
@needs_network
def test_the_one_that_has_taken_over_leaves_too_and_the_first_host_which_came_back_leads_again(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    fields = shared(tmp_path, max_steps=SLOW)
    with spread(tmp_path, hosts[0], plan=f"replicas=1-4+{SIZES}", pause_s=0.25, job=fields) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(3)
        east.process.send_signal(signal.SIGTERM)
        assert east.end() == 75, east.output
        west.says("host west leads the run now")
        (east.folder / "output").rename(east.folder / "output before")
        again = job.start(hosts[0])
        run = Run(east.folder, 0, "")
        until(lambda: len(run.events("WorkerJoined")) == 2, west, "the first host's workers have not joined")
        west.process.send_signal(signal.SIGTERM)
        assert west.end() == 75, west.output
        again.says("host east leads the run now: the coordinator's host west has left")
        assert again.end() == 0, again.output
        run = outcome(job)
    assert_unharmed(run, like(SLOW))
    assert not run.events("WorkerLost", "Restarted")


@pytest.mark.further
@needs_network
def test_a_second_sigterm_ends_that_hosts_workers_at_once_and_the_run_goes_on(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """The workers wait in the user's function, and would not leave before the gate opens."""
    with spread(tmp_path, hosts[0], plan=f"replicas=1-4+{SIZES}", gate=GATE, job=shared(tmp_path)) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(GATE - 1)
        for _ in range(2):
            east.process.send_signal(signal.SIGTERM)
            east.says("another host takes over")
        assert east.end() == 75, east.output
        job.open_gate()
        assert west.end() == 0, west.output
        run = outcome(job)
    assert_unharmed(run, like())
    assert run.workers() == [2, 3]


@needs_network
@pytest.mark.parametrize("how", [quick.further("sigterm to all"), "the command"])
def test_what_is_for_the_whole_run_ends_it_on_all_hosts_and_all_is_saved(
    how: str, hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    fields = shared(tmp_path, max_steps=LONG)
    third = dataclasses.replace(hosts[1], name="north")
    with spread(tmp_path, hosts[0], plan=f"replicas=1-6+{SIZES}", job={**fields, "hosts": 3, "workers": 3}) as job:
        commands = [job.start(host) for host in (*hosts, third)]
        job.reached(5)
        if how == "the command":
            assert "and everything is saved" in job.command("stop")
        else:
            for one in commands:
                one.process.send_signal(signal.SIGTERM)
        codes = [one.end() for one in commands]
        assert codes == [75, 75, 75], job.outputs()
    run_dir = tmp_path / "east" / "run"
    record = json.loads((run_dir / "run.json").read_text())
    assert (record["state"], record["exit_code"]) == ("stopped", 75)
    last = len((run_dir / "metrics.jsonl").read_text().splitlines())
    assert max(checkpoints(run_dir)) == last < LONG


@needs_network
def test_where_other_hosts_do_not_see_the_runs_directory_all_save_on_the_coordinators_disk(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    fields = {"max_steps": LONG, "save_every": None}
    with spread(tmp_path, hosts[0], plan=f"replicas=1-4+{SIZES}", job=fields) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(5)
        east.process.send_signal(signal.SIGTERM)
        assert (east.end(), west.end()) == (75, 75), job.outputs()
    assert checkpoints(east.folder / "run")
    assert json.loads((east.folder / "run" / "run.json").read_text())["state"] == "stopped"


@needs_network
@pytest.mark.further
def test_two_of_three_hosts_leave_one_after_the_other_and_the_third_goes_on(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """The second one is asked while the first one waits; its workers leave a step later."""
    third = dataclasses.replace(hosts[1], name="north")
    fields = shared(tmp_path, hosts=3, workers=3)
    with spread(tmp_path, hosts[0], plan=f"replicas=1-3+{SIZES}", pause_s=0.5, job=fields) as job:
        east, west, north = [job.start(host) for host in (*hosts, third)]
        job.reached(2)
        east.process.send_signal(signal.SIGTERM)
        east.says("SIGTERM came on host east")
        west.process.send_signal(signal.SIGTERM)
        assert (east.end(), west.end()) == (75, 75), job.outputs()
        assert north.end() == 0, north.output
        run = outcome(job)
    assert_unharmed(run, like())
    assert not run.events("WorkerLost", "Restarted")


@pytest.mark.further
@needs_network
def test_a_host_that_is_asked_to_leave_while_another_takes_over_leaves_by_that_one(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    third = dataclasses.replace(hosts[1], name="north")
    fields = shared(tmp_path, hosts=3, workers=3, max_steps=45)
    with spread(tmp_path, hosts[0], plan=f"replicas=1-3+{SIZES}", pause_s=0.2, job=fields) as job:
        east, west, north = [job.start(host) for host in (*hosts, third)]
        job.reached(2)
        east.process.send_signal(signal.SIGTERM)
        west.says("Another host takes its place")
        west.process.send_signal(signal.SIGTERM)
        assert (east.end(), west.end()) == (75, 75), job.outputs()
        assert north.end() == 0, north.output
        run = outcome(job)
    assert_unharmed(run, like(45))
    assert not run.events("WorkerLost", "Restarted")


@pytest.mark.further
@needs_network
def test_the_last_other_worker_is_lost_while_the_coordinators_host_leaves_and_all_go_on_from_memory(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    fields = shared(tmp_path, workers=2, max_steps=45)
    plan = f"replicas=1-4+{SIZES}+guard(snapshot_every=2)"
    with spread(tmp_path, hosts[0], plan=plan, pause_s=0.2, job=fields) as job:
        east, _ = [job.start(host) for host in hosts]
        job.reached(8)
        east.process.send_signal(signal.SIGTERM)
        east.says("has left (SIGTERM")
        told = (job.run_dir / "attempt_1" / "worker_1" / "events.jsonl").read_text().splitlines()
        os.kill(next(int(json.loads(line)["pid"]) for line in told if "WorkerStarted" in line), signal.SIGKILL)
        run = job.end()
    assert run.code == 0, run.output
    assert run.losses() == pytest.approx(like(45).losses(), rel=1e-9)
