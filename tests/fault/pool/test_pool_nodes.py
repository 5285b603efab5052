"""A pool on several nodes: runs span them, and a node that is killed costs its replicas only. Files are shared."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridged_hosts import end_host
from network_hosts import NamespaceHost, needs_network, two_hosts
from paceline.monitor.records.run_record import RunRecord
from pool_folders import PoolFolder, is_over


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("east", "west"), subnet="10.84.0") as made:
        yield made


@pytest.fixture
def pool(tmp_path: Path) -> PoolFolder:
    return PoolFolder(tmp_path)


@contextlib.contextmanager
def both_nodes(pool: PoolFolder, first: NamespaceHost, second: NamespaceHost) -> Iterator[subprocess.Popen[str]]:
    """The first one is the pool; gives the process of the second one."""
    with pool.served(host=first):
        pool.until(lambda: pool.nodes() == {first.name: "here"}, what="the pool serves")
        with pool.served("--node", host=second) as agent:
            pool.until(lambda: len(pool.nodes()) == 2, what="both nodes here")
            yield agent


@needs_network
@pytest.mark.timeout(180)
def test_a_run_spans_two_nodes_and_the_kill_of_one_costs_its_replicas_only(
    pool: PoolFolder, hosts: list[NamespaceHost]
) -> None:
    east, west = hosts
    with pool.served("--node", host=east), pool.served("--node", host=west):
        pool.until(lambda: pool.nodes() == {"east": "here", "west": "here"}, what="both nodes here")
        pool.queue("run", "--steps", "3000", replicas="1-4")
        pool.until(lambda: pool.workers_on("run") == {"east": 2, "west": 2}, what="on both nodes")
        kept, lost = (east, west) if pool.facts()["host"] == "east" else (west, east)
        end_host(lost)
        pool.until(lambda: pool.shares("run") == {kept.name: 2}, what="without the lost node")
        assert pool.nodes() == {kept.name: "here"}
        pool.until_later("run", 5)
    record = RunRecord.load(pool.folder / "runs" / "run")
    assert (record.attempt, record.exit_code) == (1, 75), "the others went on, until the pool ended"
    assert pool.entry("run")["phase"] == "waiting"
    assert len(pool.losses("run")) == pool.entry("run")["step"], "no step twice, none left out"
    rows = [json.loads(row) for row in (pool.folder / "pool" / "decisions.jsonl").open()]
    assert {"east": 2, "west": 2} in [row["nodes"] for row in rows]
    assert any("on nodes east, west" in row["why"] for row in rows)


@pytest.mark.further
@needs_network
@pytest.mark.timeout(300)
def test_runs_outlive_the_pool_and_agents_and_are_found_again_from_any_node(
    pool: PoolFolder, hosts: list[NamespaceHost]
) -> None:
    east, west = hosts
    with both_nodes(pool, east, west) as agent:
        pool.queue("run", "--steps", "900", "--seconds", "0.4", replicas="1-4")
        pool.until(lambda: pool.workers_on("run") == {"east": 2, "west": 2}, what="on both nodes")
        pool.until_later("run", 5)
        agent.kill()
        pool.until(lambda: pool.nodes()["west"] == "silent", what="silent")
        pool.until_later("run", 20)
        assert pool.workers_on("run") == {"east": 2, "west": 2}, "its part goes on without its agent"
        with pool.served("--node", host=west):
            pool.until(lambda: pool.nodes()["west"] == "here", what="back")
            pool.until(lambda: "found the part of run again" in pool.said, what="found")
            end_host(east)  # the pool, and the host that leads the run
            pool.until(lambda: pool.facts()["host"] == "west", what="the other node is the pool")
            pool.until(lambda: pool.shares("run") == {"west": 2}, what="found by it")
            pool.until_later("run", 5)
            with pool.served("--node", host=east):
                pool.until(lambda: pool.workers_on("run") == {"east": 2, "west": 2}, what="on both again")
                pool.queue("short", "--steps", "5", replicas="2")
                pool.until(lambda: is_over(pool, "short"), what="a run with a node of its own")
                assert pool.entry("short")["phase"] == "finished"
                pool.until(lambda: pool.workers_on("run") == {"east": 2, "west": 2}, what="on both again")
                assert RunRecord.load(pool.folder / "runs" / "run").attempt == 1, "it never stopped"
    assert pool.entry("run")["phase"] == "waiting", "all have ended, and everything is saved"
    assert len(pool.losses("run")) == pool.entry("run")["step"], "no step twice, none left out"


@pytest.mark.further
@needs_network
@pytest.mark.timeout(240)
def test_a_fixed_run_whose_node_is_killed_goes_on_from_its_checkpoint_on_another(
    pool: PoolFolder, hosts: list[NamespaceHost]
) -> None:
    east, west = hosts
    with both_nodes(pool, east, west):
        pool.queue("fixed", "--steps", "300", replicas="2", options=("--save-every", "5"))
        pool.queue("other", "--steps", "300", replicas="2", options=("--save-every", "5"))
        pool.until(lambda: pool.entry("fixed")["step"] > 7 and pool.entry("other")["step"] > 7, what="both under way")
        on_west = next(name for name in ("fixed", "other") if pool.shares(name) == {"west": 2})
        end_host(west)
        pool.until(lambda: is_over(pool, "fixed", "other"), what="both done on one node", limit_s=150)
    assert [pool.entry(name)["phase"] for name in ("fixed", "other")] == ["finished", "finished"]
    assert f"{on_west} was lost at step" in pool.said and "with node west" in pool.said
    assert RunRecord.load(pool.folder / "runs" / on_west).attempt == 2
    assert (len(pool.losses("fixed")), len(pool.losses("other"))) == (300, 300)


@pytest.mark.further
@needs_network
@pytest.mark.timeout(240)
def test_a_fixed_run_that_needs_two_nodes_gets_both(pool: PoolFolder, hosts: list[NamespaceHost]) -> None:
    east, west = hosts
    with both_nodes(pool, east, west):
        pool.queue("wide", "--steps", "30", replicas="3")
        pool.until(lambda: sum(pool.workers_on("wide").values()) == 3, what="on both nodes")
        assert sorted(pool.workers_on("wide").values()) == [1, 2]
        pool.until(lambda: is_over(pool, "wide"), what="done")
    assert pool.entry("wide")["phase"] == "finished"
    assert len(pool.losses("wide")) == 30
