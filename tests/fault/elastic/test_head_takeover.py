"""The coordinator's host is lost, and another one takes over: the others go on in their processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hosts import GATE, LIMIT_S, like, outcome, shared, spread, until
from elastic_runs import assert_unharmed
from network_hosts import NamespaceHost, needs_network, two_hosts

PLAN = "replicas={}+batch(size=20,micro=2)+compute(precision=fp64)"

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.84.0") as made:
        yield made


@needs_network
def test_the_coordinators_host_is_lost_and_the_other_one_goes_on_without_it(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], job=shared(tmp_path)) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(5)
        east.process.kill()
        assert west.end() == 0, west.output
        run = outcome(job)
    assert_unharmed(run, like())
    assert run.workers() == [2, 3]
    assert sum(event["steps_lost"] for event in run.events("Regrouped")) == 0
    assert "host west leads the run now: the coordinator's host east was lost" in west.output
    assert west.output.count("finished at step") == 1


@needs_network
@pytest.mark.further
def test_the_one_that_has_taken_over_is_lost_too_and_a_host_that_comes_back_joins_the_third(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    third = dataclasses.replace(hosts[1], name="north")
    fields = shared(tmp_path, hosts=3, workers=3)
    with spread(tmp_path, hosts[0], job=fields, plan=PLAN.format("1-3"), gate=GATE) as job:
        east, west = [job.start(host) for host in hosts]
        east.says("host west")  # hosts have their numbers as they come, and take over in that order
        north = job.start(third)
        job.reached(3)
        east.process.kill()
        west.says("host west leads the run now")
        west.process.kill()
        north.says("leads the run now: the coordinator's host west was lost")
        again = job.start(hosts[0])
        until(lambda: "joined the run" in again.output, again, "it does not join")
        until(lambda: again.output.count("waiting for work") > 0, again, "it does not join")
        job.open_gate()
        assert north.end() == 0, north.output
        run = outcome(job)
    assert_unharmed(run, like())
    assert sum(event["steps_lost"] for event in run.events("Regrouped")) == 0


@pytest.mark.further
@needs_network
def test_a_coordinator_that_stood_still_finds_that_another_leads_and_ends(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], job=shared(tmp_path, silence_s=3.0, grace_s=5.0), gate=GATE) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(3)
        east.process.send_signal(signal.SIGSTOP)
        west.says("host west leads the run now")
        east.process.send_signal(signal.SIGCONT)
        assert east.end() == 76, east.output
        assert "the run is led by host west" in east.output
        job.open_gate()
        assert west.end() == 0, west.output
        run = outcome(job)
    assert_unharmed(run, like())
    assert json.loads((run.run_dir / "run.json").read_text())["state"] == "finished"


@pytest.mark.further
@needs_network
def test_a_fixed_number_of_workers_goes_on_from_memory_when_another_host_has_come(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """The state of the lost coordinator's workers is in its neighbour's memory; nothing was saved on disk."""
    fields = shared(tmp_path, workers=2, save_every=None, save_every_s=0, save_at_end=False, patience_s=60.0)
    plan = PLAN.format("2") + "+guard(snapshot_every=1)"
    with spread(tmp_path, hosts[0], job=fields, plan=plan) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(5)
        worker = east.pid_of(0)
        east.process.kill()
        os.kill(worker, signal.SIGKILL)  # with its whole machine
        west.says("waiting up to 60 s for another host")
        again = job.start(hosts[0])
        assert west.end() == 0, west.output
        assert again.end() == 0, again.output
        run = outcome(job)
    events = [json.loads(line) for line in (run.run_dir / "attempt_2" / "events.jsonl").read_text().splitlines()]
    (restarted,) = [event for event in events if event["event"] == "Restarted"]
    assert restarted["source"] == "memory"
    assert 0 < restarted["step"] <= restarted["at_step"]
    assert run.losses() == pytest.approx(like().losses(), rel=1e-12)
