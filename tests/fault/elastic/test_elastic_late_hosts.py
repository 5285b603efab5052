"""Hosts that come while an elastic run is at work: a new one, one that was lost, one with spare slots."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hosts import GATE, LIMIT_S, PORT, like, spread
from elastic_runs import assert_unharmed
from network_hosts import NamespaceHost, needs_network, two_hosts

pytestmark = pytest.mark.timeout(3 * LIMIT_S)

LONG = 60  # steps: what comes later has time to leave
SIZES = "batch(size=20,micro=2)+compute(precision=fp64)"


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.82.0") as made:
        yield made


@needs_network
def test_a_second_host_joins_a_run_that_was_begun_on_one(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    """Snapshots in memory go on meanwhile, though only the first host has room for them."""
    east, west = hosts
    plan = f"replicas=1-4+{SIZES}+guard(snapshot_every=4)"
    with spread(tmp_path, east, plan=plan, gate=GATE, job={"hosts": 1, "workers": 2}) as job:
        job.start(east)
        job.reached(GATE - 1)
        late = job.start(west)
        late.started(2, 3)
        job.open_gate()
        run = job.end()
        assert late.end() == 0, late.output
    assert_unharmed(run, like())
    assert run.workers() == [0, 1, 2, 3]
    joined = {event["rank"]: event for event in run.events("WorkerJoined")}
    assert {worker: event["after_s"] for worker, event in joined.items()} == {2: None, 3: None}
    assert min(late.ledger_steps()) == min(event["step"] for event in joined.values()) > GATE
    assert f"host west ({west.address}) has joined: 2 more replicas" in job.head.output
    assert f"worker 2 (pid {joined[2]['pid']}) joined at step {joined[2]['step']}\n" in job.head.output
    assert f"at {east.address}:{PORT}; waiting for work" in late.output
    assert not run.events("WorkerLost", "Regrouped")
    told = (run.run_dir / "attempt_1" / "worker_0" / "events.jsonl").read_text().splitlines()
    assert [one["step"] for one in map(json.loads, told) if one["event"] == "StateKept"] == [4, 8, 12, 16, 20, 24]


@needs_network
def test_a_lost_host_comes_back_with_the_same_command(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    with spread(tmp_path, hosts[0], plan=f"replicas=1-4+{SIZES}", gate=GATE) as job:
        _, before = [job.start(host) for host in hosts]
        job.reached(5)
        before.process.kill()  # its supervisor; the kernel ends the workers with it
        job.happened("Regrouped")
        (before.folder / "run").rename(before.folder / "run before")  # it has lost its disk, too
        again = job.start(hosts[1])
        again.started(2, 3)
        job.open_gate()
        run = job.end()
        assert again.end() == 0, again.output
    assert_unharmed(run, like())
    assert run.workers() == [0, 1, 2, 3]
    (regrouped,) = run.events("Regrouped")
    (cause,) = regrouped[
        "causes"
    ]  # one for both of its workers; how the connection ended depends on what was under way
    assert cause.startswith(f"host west ({hosts[1].address}) was lost: ")
    assert {event["host"] for event in run.events("WorkerLost")} == {"west"}
    assert all(event["after_s"] > 0 for event in run.events("WorkerJoined"))
    assert sorted(event["rank"] for event in run.events("WorkerJoined")) == [2, 3]


@pytest.mark.further
@needs_network
def test_who_comes_late_and_does_not_fit_is_told_why_and_harms_nobody(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    east, west = hosts
    with spread(tmp_path, east, plan=f"replicas=2+{SIZES}", gate=GATE, job={"hosts": 1, "workers": 2}) as job:
        job.start(east)
        job.reached(1)
        for changes, reason in (
            ({}, "its plan has a fixed number of replicas: Layout(replicas=(least, most)) lets hosts come later"),
            ({"job": {"token_file": job.token("other", "f" * 32)}}, "it holds another token than this host"),
            ({"plan": f"replicas=1-4+{SIZES}"}, "it was started for another job (plan: "),
        ):
            late = job.start(west, **changes)
            assert late.end() != 0
            assert reason in late.output.replace("\n", " "), late.output
        job.open_gate()
        run = job.end()
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]


@pytest.mark.further
@needs_network
def test_spare_slots_of_a_host_that_came_later_replace_a_lost_host(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    east, west = hosts
    north = dataclasses.replace(east, name="north")  # a second supervisor on one machine is another host
    with spread(tmp_path, east, plan=f"replicas=1-2+{SIZES}", gate=GATE, job={"workers": 2}) as job:
        job.start(east)
        lost = job.start(west)
        job.reached(5)
        spare = job.start(north)
        job.head.says(f"host north ({east.address}) has joined: its slots are spare")
        lost.process.kill()
        spare.started(1)
        job.open_gate()
        run = job.end()
        assert spare.end() == 0, spare.output
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]
    (joined,) = run.events("WorkerJoined")
    assert joined["rank"] == 1 and joined["after_s"] is not None
    assert min(spare.ledger_steps()) == joined["step"]


@pytest.mark.further
@needs_network
def test_a_resize_grows_onto_the_spare_slots_of_a_host_that_came_later(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    east, west = hosts
    with spread(tmp_path, east, plan=f"replicas=1-4+{SIZES}", gate=GATE, job={"hosts": 1, "workers": 2}) as job:
        job.start(east)
        job.reached(GATE - 1)
        late = job.start(west)
        late.started(2, 3)
        job.resize(2)  # both had taken no step yet: their slots are spare
        late.forget(2, 3)
        job.resize(4)
        late.started(2, 3)
        job.open_gate()
        run = job.end()
        assert late.end() == 0, late.output
    assert_unharmed(run, like())
    assert run.workers() == [0, 1, 2, 3]
    assert sorted(event["rank"] for event in run.events("WorkerJoined")) == [2, 3]
    assert min(late.ledger_steps()) > GATE


@pytest.mark.further
@needs_network
def test_replicas_are_shared_out_among_hosts_and_none_is_lost(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    """A pool gives a device of each host to other runs."""
    east, west = hosts
    with spread(tmp_path, east, plan=f"replicas=1-4+{SIZES}", gate=GATE, job={"hosts": 1, "workers": 2}) as job:
        job.start(east)
        job.reached(GATE - 1)
        late = job.start(west)
        late.started(2, 3)
        job.share_out(east=1, west=1)
        job.open_gate()
        run = job.end()
        assert late.end() == 0, late.output
    assert_unharmed(run, like())
    assert [event["rank"] for event in run.events("WorkerLeft")] == [1]
    assert [event["rank"] for event in run.events("WorkerJoined")] == [2]
    assert not run.events("WorkerLost", "Regrouped")


@pytest.mark.further
@needs_network
def test_a_host_that_came_later_leaves_alone_as_the_others_do(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    east, west = hosts
    fields = {"hosts": 1, "workers": 2, "max_steps": LONG}
    with spread(tmp_path, east, plan=f"replicas=1-4+{SIZES}", gate=GATE, job=fields) as job:
        job.start(east)
        job.reached(GATE - 1)
        late = job.start(west)
        late.started(2, 3)
        job.open_gate()
        job.happened("WorkerJoined", times=2)
        late.process.send_signal(signal.SIGTERM)
        assert late.end() == 75, late.output
        run = job.end()
    assert_unharmed(run, like(LONG))
    assert run.workers() == [0, 1]
    assert GATE < max(late.ledger_steps()) < LONG
    assert "the run goes on without this host" in job.head.output.replace("\n", " ")
    assert not run.events("WorkerLost", "Regrouped")
