"""What a worker says that it held is what it held, and layouts that split a replica's state really split it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from forked import World
from layout_runs import EXACT, RESUME, Text, next_word, prepared
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.command import report_facts
from paceline.monitor.report.report import read_report, report_text
from paceline.plan import Layout, Plan
from paceline.units import bytes_text


def train(worker: Any) -> int:
    """The bytes of parameters, buffers and optimizer state that are here, counted by hand."""
    model, optim = prepared(worker)
    step = worker.stepper(model, optim, next_word)
    for batch in worker.batches(Text(16)):
        step(batch)
    state = [one for entries in optim.state.values() for one in entries.values() if isinstance(one, torch.Tensor)]
    tensors = {id(one): one for one in [*model.parameters(), *model.buffers(), *state] if not one.is_meta}
    rows = [one.to_local() for one in tensors.values() if isinstance(one, DTensor)]  # their memory may be padded
    others = [one for one in tensors.values() if not isinstance(one, DTensor)]  # a split one says the whole's numel()
    return sum(one.nbytes for one in rows) + sum(one.untyped_storage().nbytes() for one in others)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> int:
    return World(tmp_path_factory.mktemp("alone")).one_process(train, Plan(batch=RESUME, compute=EXACT))


@pytest.mark.parametrize(
    ("layout", "most"),
    [
        (Layout(shard=2), 0.55),
        (Layout(tensor=2), 0.62),  # positions, norms, and the layer that nobody uses are whole
        (Layout(stages=2), 0.75),  # tied embeddings are on both
        (Layout(context=2), 1.0),
    ],
    ids=str,
)
def test_each_worker_tells_the_bytes_that_it_holds(world: World, alone: int, layout: Layout, most: float) -> None:
    held = world(train, 2, Plan(layout=layout, batch=RESUME, compute=EXACT), save_at_end=False)
    told = []
    for rank in range(2):
        lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
        [finished] = [one for one in map(json.loads, lines) if one["event"] == "WorkerFinished"]
        told.append(finished["state_bytes"])
        assert finished["peak_memory_bytes"] > finished["state_bytes"]
    assert told == held
    assert max(told) <= most * alone
    assert sum(told) >= alone, "nothing is left out"


def test_the_report_has_a_row_for_each_worker(world: World) -> None:
    held = world(train, 2, Plan(layout=Layout(stages=2), batch=RESUME, compute=EXACT), save_at_end=False)
    record = RunRecord.begin_attempt(world.run_dir, job={"program": "train.py"}, workers=2)
    record.end_attempt("finished", 0)
    report = read_report(world.run_dir)
    assert [report_facts(report)["memory"][rank]["state_bytes"] for rank in range(2)] == held
    lines = report_text(report).splitlines()
    first = next(number for number, line in enumerate(lines) if "peak memory" in line)
    assert [line.split()[0] for line in lines[first + 1 : first + 3]] == ["0", "1"]
    assert all(line.endswith(bytes_text(num)) for line, num in zip(lines[first + 1 :], held, strict=False))
