"""A flight record shows what a worker does: its calls, its steps, and the user's own collectives."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.comm.flight_recorder import (
    NUM_CALLS,
    FlightRecorder,
    WorkTotals,
    read_flight_record,
)
from paceline.monitor.hang.worker_activity import WorkerActivity, read_activity
from paceline.worker.record.flight_recording import COLLECTIVES, KEYWORDS, recording_user_collectives

# ------------------------------------------------------------------------------------------------------------- the ring


def test_a_ring_tells_what_was_written_to_it(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=2, limit_s=600.0)
    recorder.join("generation 3", [0, 2, 5, 6, 7], is_main=True)
    recorder.begin("forward and backward", 812)
    recorder.enter("all_reduce", "all_reduce of layers.4", dtype="torch.float32", numel=1234)
    serial = recorder.enter("barrier", "")
    recorder.wait(serial)
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert (image.worker, image.pid) == (2, os.getpid())
    assert (image.step, image.phase, image.limit_s) == (812, "forward and backward", 600.0)
    (group,) = image.groups
    assert (group.name, group.members, group.entered) == ("generation 3", (0, 2, 5, 6, 7), 2)
    first, second = image.calls
    assert (first.sequence, first.kind, first.what) == (1, "all_reduce", "all_reduce of layers.4")
    assert (first.dtype, first.numel, first.step, first.group) == ("float32", 1234, 812, group.id)
    assert first.line.startswith("test_flight_records.py:") and first.line.endswith(
        "in test_a_ring_tells_what_was_written_to_it"
    )
    assert image.waits_for == second.serial == serial
    recorder.leave()
    image = read_flight_record(tmp_path / "doing", with_calls=False)
    assert image is not None
    assert (image.waits_for, image.calls) == (0, ())


def test_a_ring_keeps_the_newest_calls_and_counts_all(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    recorder.join("generation 0", [0, 1], is_main=True)
    for _ in range(NUM_CALLS + 10):
        recorder.enter("all_reduce", "x")
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert [one.sequence for one in image.calls] == list(range(11, NUM_CALLS + 11))
    assert image.groups[0].entered == NUM_CALLS + 10


def test_a_new_generation_counts_from_the_beginning_and_other_groups_stay(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    recorder.join("generation 0", [0, 1], is_main=True)
    recorder.join("torch group 0", [0, 1])
    recorder.enter("all_reduce", "x")
    recorder.enter("all_gather", "", group="torch group 0")
    recorder.join("generation 1", [0, 2], is_main=True)
    recorder.enter("all_reduce", "x")
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert [(group.name, group.members, group.entered) for group in image.groups] == [
        ("generation 1", (0, 2), 1),
        ("torch group 0", (0, 1), 1),
    ]


def test_steps_and_work_are_told_without_the_first_step(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    for step in (1, 2, 3):
        recorder.begin("waiting for data", step)
    recorder.add_work(3, {"data": 1.0, "compute": 2.0, "communication": 3.0, "optimizer": 4.0, "total": 11.0})
    recorder.add_work(2, {"data": 1.0, "compute": 2.0, "communication": 3.0, "optimizer": 4.0, "total": 11.0})
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert len(image.steps_s) == 2 and all(0 < seconds < 1 for seconds in image.steps_s)
    assert image.work == WorkTotals(steps=2, micros=5, data_s=2, compute_s=4, communication_s=6, optimizer_s=8)


@pytest.mark.parametrize("content", [b"", b"PACERNG1", b"x" * 100_000])
def test_what_is_no_ring_is_not_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "doing").write_bytes(content)
    assert read_flight_record(tmp_path / "doing") is None
    assert read_flight_record(tmp_path / "absent") is None


def test_a_look_says_how_the_process_is_and_travels_as_json(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=1, limit_s=1.0)
    recorder.join("generation 0", [0, 1], is_main=True)
    recorder.enter("all_reduce", "x")
    seen = read_activity(tmp_path, 1, host="a")
    assert seen is not None
    assert (seen.state, seen.pid, seen.entered(seen.groups[0].id)) == ("running", os.getpid(), 1)
    assert WorkerActivity.from_json(json.loads(json.dumps(seen.to_json()))) == seen
    assert read_activity(tmp_path, 2, host="a") is None, "the file is another worker's"


# ------------------------------------------------------------------------------------------- the user's own collectives


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely_group")
def test_the_users_own_collectives_are_noted_while_a_run_lasts_and_put_back_afterwards(tmp_path: Path) -> None:
    recorder = FlightRecorder.create(tmp_path / "doing", worker=0, limit_s=1.0)
    names: dict[str, Any] = {"reduce_them": dist.all_reduce, "dist": dist}  # as after an import by name
    exec(compile("def train(x):\n    reduce_them(x)\n    dist.barrier()", "train.py", "exec"), names)
    before = {name: getattr(dist, name) for name in COLLECTIVES}
    with recording_user_collectives(recorder, names["train"]):
        names["train"](torch.ones(3))
        assert names["reduce_them"] is dist.all_reduce is not before["all_reduce"]
        distributed_c10d.all_reduce(torch.ones(4))  # torch's own way
    assert {name: getattr(dist, name) for name in COLLECTIVES} == before
    assert names["reduce_them"] is before["all_reduce"]
    image = read_flight_record(tmp_path / "doing")
    assert image is not None
    assert [(one.kind, one.sequence, one.numel, one.dtype) for one in image.calls] == [
        ("torch.distributed.all_reduce", 1, 3, "float32"),
        ("torch.distributed.barrier", 2, 0, ""),
    ]
    assert [(group.members, group.entered) for group in image.groups] == [((0,), 2)]
    assert image.waits_for == 0


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize("name", sorted(COLLECTIVES))
def test_every_collective_that_is_followed_has_the_parameters_that_the_table_says(name: str) -> None:
    parameters = list(inspect.signature(getattr(dist, name)).parameters)
    tensor_at, group_at = COLLECTIVES[name]
    assert parameters[group_at] == "group"
    assert tensor_at is None or parameters[tensor_at] == KEYWORDS.get(name, "tensor")
