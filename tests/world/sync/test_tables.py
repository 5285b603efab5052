"""Embeddings whose rows lie on parameter servers: trained like one process, and only rows that were touched move."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from forked import World
from layout_runs import EXACT, assert_same, beside, used_in
from paceline.comm.remote_tensors import is_remote
from paceline.plan import Batch, Cast, Layout, ParameterServer, Plan
from paceline.schedule.sample_order import sample_indices
from server_kills import MIRROR, SERVER, arm

ROWS, WIDTH, LENGTH, PADDING = 101, 6, 5, 3
BATCH = Batch(size=14, micro=3)  # 50 samples: uneven shares, accumulation, and a last batch of 8


class Words(nn.Module):
    """Two tables, one of them for words of two kinds, beside layers that are ordinary."""

    def __init__(self, *, sparse: bool, double: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING, sparse=sparse)
        self.bags = nn.EmbeddingBag(7, WIDTH, mode="mean", padding_idx=2, sparse=sparse)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words).mean(1) + self.words(words.flip(1) % 11).sum(1)
        return self.head(x + self.bags(words % 7))


class Text(Dataset[tuple[Tensor, Tensor]]):
    """Few words come often, in a batch several times, and most of them never."""

    def __init__(self, count: int = 50) -> None:
        drawn = torch.rand(count, LENGTH, generator=torch.Generator().manual_seed(1))
        self.words = (ROWS * drawn**3).long()
        self.kinds = self.words.sum(1) % 3

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.words[number], self.kinds[number]


class OnRows(torch.optim.SparseAdam):
    """What one process needs to step as servers do, since gradients are dense there: those that are not zero."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.to_sparse(1)
        return super().step(closure)


def optimizers_of(worker: Any, model: Words, kind: str, *, sparse: bool) -> list[Any]:
    tables = [model.words.weight, model.bags.weight]
    if kind == "sgd":
        return [worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5))]
    if kind == "adagrad":
        return [worker.prepare(torch.optim.Adagrad(model.parameters(), lr=0.2))]
    adam = (torch.optim.SparseAdam if sparse else OnRows)(
        [{"params": tables[:1]}, {"params": tables[1:], "lr": 0.1}], lr=0.05
    )
    return [worker.prepare(adam), worker.prepare(torch.optim.AdamW(model.head.parameters(), lr=0.02))]


def trained(kind: str, *, sparse: bool = True, epochs: int = 2) -> Callable[[Any], dict[str, Any]]:
    def run(worker: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        model = worker.prepare(Words(sparse=sparse))
        optimizers = optimizers_of(worker, model, kind, sparse=sparse)
        step = worker.stepper(model, optimizers, F.cross_entropy, clip_norm=0.7)
        before = worker.evaluate(model, Text(23), F.cross_entropy)["loss"]
        losses: dict[int, float] = {}
        norms: list[float] = []
        for batch in worker.batches(Text(), epochs=epochs):
            loss = float(step(batch))
            losses[worker.step] = loss
            norms.append(float(step.grad_norm))
        after = worker.evaluate(model, Text(23), F.cross_entropy)["loss"]
        state = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
        return {"losses": losses, "norms": norms, "evaluated": [before, after], "state": state["words.weight"]}

    return run


def served(replicas: int, *, servers: int = 2, batch: Batch = BATCH, **sync_fields: Any) -> Plan:
    sync = ParameterServer(servers=servers, bucket_bytes=200, **sync_fields)
    return Plan(layout=Layout(replicas=replicas), batch=batch, compute=EXACT, sync=sync)


def whole(replicas: int = 1, batch: Batch = BATCH) -> Plan:
    return Plan(layout=Layout(replicas=replicas), batch=batch, compute=EXACT)


def test_tables_on_servers_train_like_one_process(world: World) -> None:
    results = world(trained("adagrad"), 3, served(3))
    oracle = world.one_process(trained("adagrad", sparse=False), whole())
    found = torch.tensor([result.pop("state") for result in results])
    torch.testing.assert_close(found, torch.tensor(oracle.pop("state")).expand_as(found), rtol=1e-6, atol=1e-9)
    assert_same(results, oracle)


def test_checkpoints_with_tables_are_anybodys_and_anybodys_are_theirs(world: World, tmp_path: Path) -> None:
    def losses(world: World, workers: int, plan: Plan, *, sparse: bool, **job: Any) -> dict[int, float]:
        return world(trained("sparseadam", sparse=sparse, epochs=3), workers, plan, **job)[0]["losses"]

    oracle = losses(beside(tmp_path), 1, whole(), sparse=False)
    first = losses(world, 2, served(2), sparse=True, max_steps=4)
    second = losses(world, 2, whole(2), sparse=False, max_steps=7)
    third = losses(world, 3, served(3, servers=3), sparse=True)
    assert [min(second), min(third)] == [5, 8]
    assert {**first, **second, **third} == pytest.approx(oracle, rel=1e-9)


def counting(worker: Any) -> dict[str, Any]:
    """What this worker has of its tables, and how many of their rows its micro-batches touch in each step."""
    torch.manual_seed(3)
    model = worker.prepare(Words(sparse=True))
    step = worker.stepper(model, optimizers_of(worker, model, "sparseadam", sparse=True), F.cross_entropy)
    rows: list[int] = []
    for batch in worker.batches(Text(), epochs=2):
        words = torch.cat([batch.read(place)[0] for place in range(len(batch.micros))])
        numbers = torch.cat([words, words % 11]).unique()
        rows.append(len(numbers) + len((words % 7).unique()))
        pushed = len(numbers[numbers != PADDING]) + len((words % 7).unique()) - int((words % 7 == 2).any())
        rows[-1] = rows[-1] * 4 + pushed * (4 + 8 * WIDTH)
        step(batch)
    tables = [module._parameters["weight"] for module in (model.words, model.bags)]
    held = sum(one.untyped_storage().nbytes() for one in tables)
    return {
        "bytes": rows,
        "held": held,
        "away": all(map(is_remote, tables)),
        "state": worker._prepared.registry.num_bytes,
    }


def test_a_worker_has_no_table_and_sends_no_more_than_the_rows_that_it_touched(world: World) -> None:
    results = world(counting, 2, served(2))
    for rank, result in enumerate(results):
        assert result["away"] and result["held"] <= 16
        dense = 8 * (WIDTH * 3 + 3)
        assert result["state"] == dense
        lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
        done = [event for event in map(json.loads, lines) if event["event"] == "StepDone"]
        assert [event["num_wire_bytes"] - dense for event in done] == result["bytes"]
        assert all(event["num_raw_bytes"] == dense + 8 * WIDTH * (ROWS + 7) for event in done)


def test_one_replica_in_turns_trains_tables_like_one_process(world: World) -> None:
    results = world(trained("sparseadam"), 1, served(1, staleness=None))
    oracle = world.one_process(trained("sparseadam", sparse=False), whole())
    found = torch.tensor(results[0].pop("state"))
    torch.testing.assert_close(found, torch.tensor(oracle.pop("state")), rtol=1e-6, atol=1e-9)
    assert_same(results, oracle)


def test_mirrors_have_the_rows_of_tables_too(world: World, tmp_path: Path) -> None:
    deaths = {
        2: (SERVER, "_push_rows", "after"),
        4: (SERVER, "_before_sum", "after"),
        5: (SERVER, "_after_step", "before"),
        6: (SERVER, "_send_weights", "after"),  # the next forward asks for rows
        7: (MIRROR, "_add_sums", "after"),
    }

    def run(worker: Any) -> dict[str, Any]:
        arm(tmp_path, deaths)
        return trained("adagrad")(worker)

    results = world(run, 2, served(2, mirrored=True), fresh=True)
    oracle = world.one_process(trained("adagrad", sparse=False), whole())
    assert len([*tmp_path.glob("exited_*")]) == len(deaths)
    found = torch.tensor([result.pop("state") for result in results])
    torch.testing.assert_close(found, torch.tensor(oracle.pop("state")).expand_as(found), rtol=1e-6, atol=1e-9)
    assert_same(results, oracle)


def test_rounded_rows_train_nearly_as_well(world: World) -> None:
    plan = Plan(layout=Layout(replicas=2), batch=BATCH, sync=ParameterServer(servers=2), wire=Cast(dtype="bf16"))
    losses = world(trained("sgd", epochs=1), 2, plan)[0]["losses"]
    exact = world.one_process(trained("sgd", sparse=False, epochs=1), Plan(layout=Layout(), batch=BATCH))["losses"]
    assert losses == pytest.approx(exact, rel=0.02) and losses != pytest.approx(exact, rel=1e-7)


def test_backup_workers_step_on_the_rows_of_the_shares_that_came_in_time(world: World) -> None:
    results = world(trained("sgd"), 3, served(3, drop=1), threads=1)
    torch.manual_seed(3)
    model, text = Words(sparse=False).double(), Text()
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch, places in dict(sorted(used_in(world, 3).items())).values():
        order = sample_indices(seed=0, epoch=epoch, num_samples=50, positions=np.array(places), shuffle=True)
        words, kinds = (torch.stack(some) for some in zip(*(text[int(one)] for one in order), strict=True))
        optim.zero_grad()
        F.cross_entropy(model(words), kinds).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optim.step()
    for result in results:
        torch.testing.assert_close(torch.tensor(result["state"], dtype=torch.float64), model.words.weight.detach())
