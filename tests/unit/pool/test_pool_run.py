"""Queued runs lie on disk, whole or not at all, for their user alone."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import PlanError
from paceline.pool.devices import NodeOffer
from paceline.pool.follow import pool_lines
from paceline.pool.pool_run import PoolRun, queued_runs
from paceline.pool.pool_state import NodeEntry, PartEntry, PoolRecord, RunEntry
from paceline.pool.serve import serve, serve_node
from paceline.pool.service import Pool

ONE = PoolRun(
    name="first",
    command=("train.py", "--lr", "1"),
    folder="/",
    environment={"SECRET": "x"},
    run_dir="/runs/first",
    script="train.py",
    least=1,
    most=4,
    workers_each=2,
    submitted=2.0,
    deadline=9.0,
)


def test_what_was_queued_is_read_again_in_the_order_in_which_it_came(tmp_path: Path) -> None:
    pool = tmp_path / "pool"
    ONE.add_to(pool)
    earlier = dataclasses.replace(ONE, name="zebra", submitted=1.0, least=4)
    earlier.add_to(pool)
    assert list(queued_runs(pool, known={}).items()) == [("zebra", earlier), ("first", ONE)]
    assert (ONE.is_elastic, earlier.is_elastic) == (True, False)
    assert {path.name for path in (pool / "queue").iterdir()} == {"first.json", "zebra.json"}
    for path in (pool, pool / "queue", pool / "queue" / "first.json"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, "it has the environment of its terminal"
    assert "SECRET" not in repr(ONE)
    earlier.remove_from(pool)
    assert list(queued_runs(pool, known={"first": ONE})) == ["first"]


def test_a_name_is_taken_once_and_is_a_file_name(tmp_path: Path) -> None:
    ONE.add_to(tmp_path / "pool")
    with pytest.raises(PlanError, match="has a run named first already"):
        dataclasses.replace(ONE, submitted=5.0).add_to(tmp_path / "pool")
    assert queued_runs(tmp_path / "pool", known={})["first"].submitted == 2.0
    for name in ("../first", "", ".hidden", "a b", "x" * 101):
        with pytest.raises(PlanError, match="cannot name a run"):
            dataclasses.replace(ONE, name=name)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    ONE.add_to(tmp_path)
    (tmp_path / "queue" / "second.json").write_text("{")
    with pytest.raises(PlanError, match=r"second\.json is no queued run"):
        queued_runs(tmp_path, known={})
    told: list[str] = []
    assert list(queued_runs(tmp_path, known={}, problem=told.append)) == ["first"], "the others go on"
    assert len(told) == 1
    (tmp_path / "pool.json").write_text("[]")
    with pytest.raises(PlanError, match=r"pool\.json cannot be read"):
        PoolRecord.load(tmp_path)


def test_runs_stay_where_the_queue_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = dataclasses.replace(ONE, name="second", submitted=3.0)
    for run in (ONE, second):
        run.add_to(tmp_path)
    known = {"first": ONE, "second": second}
    told: list[str] = []
    assert queued_runs(tmp_path / "none", known={}) == {}, "nothing was ever queued there"
    (tmp_path / "queue").rename(tmp_path / "away")
    assert queued_runs(tmp_path, known=known, problem=told.append) == known
    (tmp_path / "away").rename(tmp_path / "queue")
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", _refuses)
        assert queued_runs(tmp_path, known=known, problem=told.append) == known
        with pytest.raises(PlanError, match="cannot be listed"):
            queued_runs(tmp_path, known=known)
    assert [text.count("runs stay as they are") for text in told] == [1, 1]
    with monkeypatch.context() as patched:  # a listing that misses what is there
        patched.setattr(os, "scandir", lambda path: contextlib.nullcontext(iter(())))
        second.remove_from(tmp_path)
        assert queued_runs(tmp_path, known=known) == {"first": ONE}


def _refuses(path: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o720])
def test_a_folder_into_which_others_may_write_is_no_pool(tmp_path: Path, mode: int) -> None:
    pool = tmp_path / "pool"
    pool.mkdir()
    pool.chmod(mode)
    PoolRecord(host="forged", pid=7).save(pool)
    offer = NodeOffer(slots=1, cores=1)
    uses = (
        lambda: ONE.add_to(pool),
        lambda: Pool(pool, agent=None, say=print),
        lambda: serve(pool, offer, say=print),
        lambda: serve_node(pool, offer, say=print),
    )
    for use in uses:
        with pytest.raises(PlanError, match=f"Other users may write to .*mode {mode:04o}.*chmod go-w"):
            use()
    assert [path.name for path in pool.iterdir()] == ["pool.json"]
    pool.chmod(0o755)
    ONE.add_to(pool)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to another user")
def test_another_users_folder_is_no_pool(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(PlanError, match="belongs to user 12345, not to you"):
        ONE.add_to(tmp_path)


def test_what_the_pool_knows_outlives_it(tmp_path: Path) -> None:
    assert PoolRecord.load(tmp_path) == PoolRecord()
    record = PoolRecord(host="a", pid=1, slots=4, runs={"first": RunEntry(phase="running", step_s={"2": 0.5})})
    record.save(tmp_path)
    again = PoolRecord.load(tmp_path)
    assert again == record
    assert again.runs["first"].measured == {2: 0.5}
    assert not again.is_alive(tmp_path), "on another host"


def test_another_hosts_clock_is_not_compared_with_that_of_the_next_pool() -> None:
    def taken_over(host: str) -> tuple[float, float, float]:
        runs = {"first": RunEntry(since=40.0, let_in=10.0), "second": RunEntry()}
        record = PoolRecord(host="a", pid=1, term=3, updated=100.0, has_ended=True, runs=runs)
        record.take_over(host, 7, 1.0, now=9100.0)
        assert (record.host, record.pid, record.pid_started_s, record.term, record.has_ended) == (
            host,
            7,
            1.0,
            4,
            False,
        )
        assert record.runs["second"].let_in == 0.0, "it never had devices"
        return record.runs["first"].since, record.runs["first"].let_in, record.runs["second"].since

    assert taken_over("b") == (9040.0, 9010.0, 0.0), "60 s and 90 s ago, as it was when the other pool wrote last"
    assert taken_over("a") == (40.0, 10.0, 0.0)


def test_a_pool_that_has_lost_its_folder_to_another_one_ends_and_writes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    pool = Pool(tmp_path, agent=None, say=said.append)
    try:
        pool.look()
        other = PoolRecord(host="elsewhere", pid=7, term=2)
        other.save(tmp_path)
        with pytest.raises(PlanError, match="has another pool now: process 7 on elsewhere"):
            pool.run(lambda: False)
        assert PoolRecord.load(tmp_path) == other
    finally:
        pool.close()


def test_a_pool_is_alive_by_its_process_here_and_by_its_lock_elsewhere(tmp_path: Path) -> None:
    pool = Pool(tmp_path, agent=None, say=lambda text: None)
    try:
        record = PoolRecord.load(tmp_path)
        assert record.is_alive(tmp_path) and record.pid == os.getpid()
        assert dataclasses.replace(record, host="elsewhere").is_alive(tmp_path)
        assert not dataclasses.replace(record, pid=0).is_alive(tmp_path)
    finally:
        pool.close()
    assert not dataclasses.replace(record, host="elsewhere").is_alive(tmp_path)


def test_the_nodes_of_a_pool_are_shown_and_where_runs_are(tmp_path: Path) -> None:
    nodes = {"a": NodeEntry(state="here", slots=4, gpus=4, used=2), "b": NodeEntry(state="silent", slots=2, used=1)}
    parts = {"a": PartEntry(replicas=2, start=1), "b": PartEntry(replicas=1, start=2)}
    entry = RunEntry(phase="running", replicas=3, parts=parts, why="as decided")
    record = PoolRecord(slots=6, nodes=nodes, runs={"first": entry})
    record.save(tmp_path)
    assert PoolRecord.load(tmp_path) == record
    lines = pool_lines(tmp_path, record, {"first": ONE})
    assert "  node a: 2 of 4 GPUs in use" in lines
    assert "  node b: does not answer; 1 of its devices in use, as far as runs say" in lines
    assert lines[-1].endswith("[a (2), b (1)] as decided")
    assert not any("  node" in line for line in pool_lines(tmp_path, PoolRecord(nodes={"a": nodes["a"]}), {}))


def test_a_second_pool_of_a_folder_is_refused_and_told_how_to_be_a_node(tmp_path: Path) -> None:
    PoolRecord(host="first", pid=7).save(tmp_path)
    holds = "from pathlib import Path; from paceline import run_lock; print(run_lock.hold(Path('.'))); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holds], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        with pytest.raises(PlanError, match=r"in use: process 7 on first is its pool\. .*paceline pool .* --node"):
            serve(tmp_path, NodeOffer(slots=1, cores=1), say=lambda text: None)
        other.communicate("\n", timeout=10)
