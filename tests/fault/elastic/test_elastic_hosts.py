"""An elastic run over two hosts: one of them is lost, cut off or told to go, and the other one goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_hosts import GATE, LIMIT_S, like, spread, until
from elastic_runs import assert_unharmed, undisturbed
from network_hosts import NamespaceHost, cut, mend, needs_network, two_hosts

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.81.0") as made:
        yield made


@needs_network
def test_a_host_that_is_lost_costs_no_step(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    with spread(tmp_path, hosts[0]) as job:
        _, west = [job.start(host) for host in hosts]
        job.reached(5)
        west.process.kill()  # its supervisor; the kernel ends the workers with it
        run = job.end()
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]
    assert "host west" in run.output
    assert sum(event["steps_lost"] for event in run.events("Regrouped")) == 0


@pytest.mark.further
@needs_network
def test_a_large_sum_in_place_that_loses_a_peer_in_its_middle_begins_again_from_what_was_kept(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """Eight megabytes of gradients are added up where they lie, and another host's worker is killed meanwhile."""
    job: dict[str, Any] = {"max_steps": 5, "save_every": None, "save_at_end": False}
    fault = {"worker": 2, "step": 3, "where": "sum"}
    with spread(tmp_path, hosts[0], faults=[fault], width=60_000, no_joins=True, pause_s=0.0, job=job) as spread_job:
        for host in hosts:
            spread_job.start(host)
        run = spread_job.end()
    assert_unharmed(run, undisturbed(json.dumps({"width": 60_000, "job": job})))
    (regrouped,) = run.events("Regrouped")
    assert (regrouped["members"], regrouped["steps_lost"]) == ([0, 1, 3], 0)


@needs_network
def test_a_cut_link_leaves_one_side_that_goes_on_and_one_that_commits_nothing_and_ends(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], job={"silence_s": 3.0, "grace_s": 5.0}) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(5)
        cut(hosts[1])
        run = job.end()
        mend(hosts[1])
        assert west.end() == 76  # the other side has lost the head, and says so
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]
    (regrouped, *_) = run.events("Regrouped")
    # No split brain: what the cut-off workers have committed, the others have, too; and nothing after that. Where the
    # votes of the step in hand came to the one side alone, the others hold what all have made of it, and take that:
    # what the cut-off ones have run they have not.
    last = max(west.ledger_steps())
    assert last <= regrouped["step"] + 1
    if last > regrouped["step"]:
        lines = [line for line in east.ledger_lines() + west.ledger_lines() if line["step"] == last]
        ran = [place for line in lines for span in line["ranges"] for place in range(*span)]
        assert sorted(ran) == list(range(*lines[0]["whole"]))
    assert "the coordinator" in west.output and "was lost" in west.output


@pytest.mark.further
@needs_network
def test_where_all_who_have_the_state_are_cut_off_the_others_begin_again_when_these_have_ended(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """Their supervisor stands still: nobody tells them that the head is lost, and they would go on for ever."""
    plan = "replicas=1-2+batch(size=20,micro=2)+compute(precision=fp64)+guard(snapshot_every=2)"
    fields = {"workers": 2, "silence_s": 2.0, "grace_s": 1.0, "save_every": None, "max_steps": 10_000}
    with spread(tmp_path, hosts[0], plan=plan, job=fields, pause_s=0.1) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(3)
        os.kill(east.pid_of(0), signal.SIGTERM)
        job.happened("WorkerLeft")
        told = west.events_of(1)
        left_at = told.read_text().count("StateKept")
        # When it takes the third one, the second is in the memory of the head's host.
        until(lambda: told.read_text().count("StateKept") >= left_at + 3, west, "it has kept nothing")
        before = len(west.ledger_steps())
        west.process.send_signal(signal.SIGSTOP)
        cut(hosts[1])
        metrics = job.run_dir / "metrics.jsonl"
        rows: list[dict[str, Any]] = []

        def has_begun_again() -> bool:
            rows[:] = [row for row in map(json.loads, metrics.read_text().splitlines()) if row["attempt"] == 2]
            return bool(rows)

        until(has_begun_again, east, "nobody has begun again")
    assert "workers on unreachable hosts may still be taking steps" in " ".join(east.output.split())
    assert "the worker starts again at step" in " ".join(east.output.split())
    (ledger,) = (west.folder / "run" / "attempt_1").glob("worker_1/ledger.jsonl")
    assert len(west.ledger_steps()) > before, "it has gone on by itself"
    assert ledger.stat().st_mtime < rows[0]["time"]


@needs_network
def test_a_host_that_is_asked_to_leave_leaves_alone_and_comes_back_with_the_same_command(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], gate=GATE) as job:
        _, west = [job.start(host) for host in hosts]
        job.reached(3)
        west.process.send_signal(signal.SIGTERM)
        assert west.end() == 75, west.output
        left_after = max(west.ledger_steps())
        west.forget(2, 3)
        again = job.start(hosts[1])
        again.started(2, 3)
        job.open_gate()
        run = job.end()
        assert again.end() == 0, again.output
    assert_unharmed(run, like())
    assert 3 <= left_after <= GATE
    said = "workers 2, 3 leave between two steps, the run goes on without this host"
    assert f"SIGTERM came on host west ({hosts[1].address}): {said}" in job.head.output.replace("\n", " ")
    assert "host west was asked to leave, and the run goes on without it" in west.output.replace("\n", " ")
    assert not run.events("WorkerLost", "Regrouped")


@pytest.mark.further
@needs_network
def test_a_second_sigterm_on_a_host_that_leaves_ends_its_workers_at_once_and_costs_the_others_no_step(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], gate=GATE) as job:
        _, west = [job.start(host) for host in hosts]
        job.reached(GATE - 1)  # there everybody waits, so that nobody comes to the end of a step and leaves
        west.process.send_signal(signal.SIGTERM)
        job.head.says("leave between")
        west.process.send_signal(signal.SIGTERM)
        assert west.end() == 128 + signal.SIGTERM, west.output
        job.happened("WorkerLost", times=2)
        job.open_gate()
        run = job.end()
    assert_unharmed(run, like())
    assert run.workers() == [0, 1]


@needs_network
def test_sigterm_on_one_host_has_everybody_save_and_leave_where_too_few_would_be_left(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    plan = "replicas=3-4+batch(size=20,micro=2)+compute(precision=fp64)"
    with spread(tmp_path, hosts[0], plan=plan) as job:
        _, west = [job.start(host) for host in hosts]
        job.reached(5)
        west.process.send_signal(signal.SIGTERM)
        codes = [command.end() for command in job.commands]
    assert codes == [75, 75], job.outputs()
    steps = [json.loads(line)["step"] for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert (job.run_dir / "checkpoints" / f"step_{steps[-1]:08}").is_dir()


@pytest.mark.further
@needs_network
def test_where_the_heads_supervisor_is_killed_both_hosts_save_and_the_next_start_goes_on(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    with spread(tmp_path, hosts[0], job={"save_every": None}) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(5)
        east.process.kill()  # not its workers, nor those of the other host
        assert east.end() == -signal.SIGKILL
        assert west.end() == 75, west.output
        done = max(west.ledger_steps())
        job.commands.clear()
        for host in hosts:
            job.start(host)
        run = job.end()
        assert job.commands[1].end() == 0
    assert "the coordinator" in west.output and "everything is saved" in west.output
    assert f"resumed from step {done} " in run.output.replace("\n", " "), run.output
    assert_unharmed(run, like())


@pytest.mark.further
@needs_network
def test_a_stopped_worker_of_another_host_that_came_after_the_first_ones_is_named(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    plan = "replicas=1-4+batch(size=20,micro=2)+compute(precision=fp64)"
    job_fields = {"hosts": 1, "workers": 2, "timeout_s": 20.0, "silence_s": 60.0, "max_steps": 400}
    with spread(tmp_path, hosts[0], plan=plan, gate=GATE, job=job_fields) as job:
        job.start(hosts[0])
        job.reached(GATE - 1)
        late = job.start(hosts[1])
        late.started(2, 3)
        job.open_gate()
        job.happened("WorkerJoined", times=2)
        pid = late.pid_of(3)
        os.kill(pid, signal.SIGSTOP)
        try:
            job.head.says("worker 3 (west, pid")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        told = " ".join(job.head.output.split())
    assert f"worker 3 (west, pid {pid}) is stopped (SIGSTOP, or a debugger)" in told, told
