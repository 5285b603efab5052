"""The head of a run: lost with its machine while a member has all state, or started a second time."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hosts import LIMIT_S, PORT, like, spread, until
from elastic_runs import assert_unharmed
from network_hosts import NamespaceHost, cut, needs_network, two_hosts

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.83.0") as made:
        yield made


@pytest.mark.further
@needs_network
def test_a_second_head_in_the_directory_of_a_paused_one_is_refused_and_the_first_goes_on(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """Another host that shares the disk: process numbers there say nothing about the first one."""
    alone = {"hosts": 1, "head": None, "token_file": None, "run_dir": str(tmp_path / "east" / "run")}
    with spread(tmp_path, hosts[0], job=alone) as job:
        first = job.start(hosts[0])
        job.reached(3)
        first.process.send_signal(signal.SIGSTOP)
        second = job.start(hosts[1])
        assert second.end() == 1, second.output  # a PlanError in the script that calls paceline.run
        first.process.send_signal(signal.SIGCONT)
        run = job.end()
    assert f"is in use: process {first.process.pid} on host east runs attempt 1 there" in second.output
    assert [path.name for path in run.folder.glob("run/attempt_*")] == ["attempt_1"]
    assert_unharmed(run, like())


@needs_network
def test_where_the_heads_machine_is_gone_a_member_with_all_state_goes_on_as_the_new_head(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    plan = "replicas=1-2+batch(size=20,micro=2)+compute(precision=fp64)"
    fields = {"workers": 2, "silence_s": 3.0, "grace_s": 5.0, "save_every": 3, "max_steps": 10_000}
    with spread(tmp_path, hosts[0], plan=plan, job=fields) as job:
        east, west = [job.start(host) for host in hosts]
        job.reached(3)
        os.kill(east.pid_of(0), signal.SIGTERM)
        job.happened("WorkerLeft")
        until(lambda: max(west.ledger_steps(), default=0) >= 12, west, "it does not go on alone")
        cut(hosts[0])
        east.process.kill()
        assert west.end() == 75, west.output
        (step,) = re.findall(r"this one goes on from step (\d+), the newest saved here", " ".join(west.output.split()))
        assert int(step) == max(west.ledger_steps()), "no step is lost"
        said = f"--hosts 1 --head west:{PORT} --run-dir {west.folder / 'run'}"
        assert said in " ".join(west.output.split())
        head = f"{hosts[1].address}:{PORT}"
        again = job.start(hosts[1], job={"hosts": 1, "head": head, "max_steps": int(step) + 4})
        assert again.end() == 0, again.output
    rows = map(json.loads, (again.folder / "run" / "metrics.jsonl").read_text().splitlines())
    assert min(row["step"] for row in rows if row["attempt"] == 2) == int(step) + 1
    assert sorted(path.name for path in again.folder.glob("run/attempt_*")) == ["attempt_1", "attempt_2"]
