"""A second head beside one that is alive, where each host has a disk of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_hosts import GATE, LIMIT_S, PORT, like, spread
from elastic_runs import assert_unharmed
from network_hosts import NamespaceHost, needs_network, two_hosts


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.84.0") as made:
        yield made


@pytest.mark.timeout(3 * LIMIT_S)
@needs_network
def test_a_head_in_the_directory_of_a_member_at_work_is_refused_and_one_beside_it_harms_nothing(
    hosts: list[NamespaceHost], tmp_path: Path
) -> None:
    """Each host has a disk of its own, and somebody takes the head for lost: it is only slow to answer."""
    fields = {"workers": 2, "silence_s": 20.0, "grace_s": 2.0}
    plan = "replicas=1-2+batch(size=20,micro=2)+compute(precision=fp64)"
    with spread(tmp_path, hosts[0], plan=plan, job=fields) as job:
        _, west = [job.start(host, gate=GATE) for host in hosts]
        job.reached(3)
        alone = {"hosts": 1, "workers": 1, "head": f"{hosts[1].address}:{PORT}"}
        again = job.start(hosts[1], job=alone | {"run_dir": str(west.folder / "run")})
        assert again.end() == 1, again.output  # a LaunchError in the script that calls paceline.run
        beside = job.start(hosts[1], job=alone | {"run_dir": str(west.folder / "another")})
        assert beside.end() == 0, beside.output
        job.open_gate()
        run = job.end()
        assert west.end() == 0, west.output
    assert "another start is at work here: waiting for worker 1 to save and leave" in again.output
    assert "worker 1 did not leave" in again.output
    assert_unharmed(run, like())
