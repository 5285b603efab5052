"""Runs that leave the queue: a pool has them end, whether it was there then or not, and takes no fault for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.pool.node_files import NodeRecord, WantedParts, make_node_dir
from paceline.pool.pool_run import PoolRun
from paceline.pool.pool_state import PartEntry, PoolRecord, RunEntry
from paceline.pool.service import Pool

RUN = PoolRun(
    name="run",
    command=("train.py",),
    folder="/",
    environment={},
    run_dir="/nowhere/run",
    script="train.py",
    least=1,
    most=2,
    workers_each=1,
    submitted=1.0,
)
UNDER_WAY = RunEntry(
    phase="running",
    submitted=1.0,
    run_dir="/nowhere/run",
    replicas=2,
    devices=2,
    step=7,
    starts=1,
    parts={"b": PartEntry(replicas=2, start=1)},
)


class Folder:
    """A pool's folder with one run, which goes on on a node whose agent does not answer."""

    def __init__(self, path: Path) -> None:
        self.path, self.said, self._pools = path, list[str](), list[Pool]()
        RUN.add_to(path)
        make_node_dir(path, "b")
        NodeRecord(name="b", host="b", slots=2).save(path)
        PoolRecord(runs={"run": dataclasses.replace(UNDER_WAY)}).save(path)

    def new_pool(self) -> Pool:
        self.close()
        self._pools = [Pool(self.path, agent=None, say=self.said.append)]
        return self._pools[0]

    def close(self) -> None:
        for pool in self._pools:
            pool.close()

    @property
    def record(self) -> PoolRecord:
        return PoolRecord.load(self.path)

    @property
    def is_asked_to_end(self) -> bool:
        wanted = WantedParts.load(self.path, "b")
        assert wanted is not None
        return wanted.parts["run"].leaves


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path)
    yield made
    made.close()


def test_a_run_that_left_while_no_pool_was_there_ends_and_holds_its_devices_until_then(folder: Folder) -> None:
    RUN.remove_from(folder.path)
    for _ in range(2):  # also by a pool that was killed afterwards
        pool = folder.new_pool()
        pool.look()
        assert folder.record.runs == {}
        assert {name: entry.run_dir for name, entry in folder.record.taken_out.items()} == {"run": "/nowhere/run"}
        assert folder.is_asked_to_end
        assert pool._parts.held() == {"b": 2}
    assert folder.said.count("run is taken out") == 1


def test_a_run_that_was_never_given_a_device_leaves_nothing_behind(folder: Folder) -> None:
    PoolRecord(runs={"run": RunEntry(submitted=1.0, run_dir="/nowhere/run")}).save(folder.path)
    RUN.remove_from(folder.path)
    folder.new_pool().look()
    assert (folder.record.runs, folder.record.taken_out) == ({}, {})


def test_a_name_that_was_queued_again_while_no_pool_was_there_is_another_run(folder: Folder) -> None:
    RUN.remove_from(folder.path)
    dataclasses.replace(RUN, submitted=2.0, run_dir="/else/run").add_to(folder.path)
    folder.new_pool().look()
    now = folder.record
    assert (now.taken_out["run"].submitted, now.taken_out["run"].step) == (1.0, 7)
    assert (now.runs["run"].submitted, now.runs["run"].step, now.runs["run"].phase) == (2.0, 0, "waiting")
    assert folder.is_asked_to_end


@pytest.mark.parametrize("is_known", [True, False])
def test_a_queue_that_cannot_be_read_takes_no_run_out(folder: Folder, is_known: bool) -> None:
    pool = folder.new_pool()
    if is_known:
        pool.look()
    (folder.path / "queue").rename(folder.path / "away")
    pool.look()
    assert folder.record.runs["run"].phase == "running" and not folder.is_asked_to_end
    (folder.path / "away").rename(folder.path / "queue")
    pool.look()
    assert folder.record.runs["run"].phase == "running" and not folder.is_asked_to_end
    assert not any("taken out" in text for text in folder.said)


def test_a_run_whose_file_is_damaged_when_a_pool_starts_goes_on(folder: Folder) -> None:
    (folder.path / "queue" / "run.json").write_text("{")
    folder.new_pool().look()
    assert folder.record.runs["run"].phase == "running" and not folder.is_asked_to_end
    assert any("is no queued run" in text for text in folder.said)
