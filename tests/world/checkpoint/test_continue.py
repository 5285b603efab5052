"""What a continued run must not do silently: another order, another dataset, a loop that is over, a state not saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from forked import WorkersFailed, World
from paceline.events import CheckpointSaved, decode
from paceline.monitor.audit.audit import AuditResult, audit
from paceline.plan import Batch, Plan
from paceline.worker.data.stream_position import stream_seed
from paceline.worker.loop import save_timer

BATCH = Batch(size=8, micro=2)
PLAN = Plan(batch=BATCH)
SAMPLES = 48  # 6 steps an epoch


class Numbers:
    def __init__(self, count: int = SAMPLES) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.tensor([float(index)]), torch.tensor([0.0])


class Lines(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.count):
            yield torch.tensor([float(index)]), torch.tensor([0.0])


class Kept:
    """Something with a state that the code around the loop sets."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def trained(worker: Any) -> tuple[Callable[[Any], Any], Kept]:
    """A stepper whose model stays as it is, and an object with a state."""
    model = worker.prepare(nn.Linear(1, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    return worker.stepper(model, optim, F.mse_loss), worker.prepare(Kept())


def run_over(dataset: Any, *, before: Callable[[Any], Any] = lambda worker: None, **options: Any) -> Any:
    """A training function: (epoch, start, stop) of each step's positions."""

    def train(worker: Any) -> list[tuple[int, int, int]]:
        before(worker)
        step, _ = trained(worker)
        found = []
        for batch in worker.batches(dataset, **options):
            step(batch)
            found.append((batch.epoch, batch.start, batch.stop))
        return found

    return train


def told(world: World, kind: str, rank: int = 0) -> list[str]:
    """The texts of the events of a kind ("Warned", "Note") of the last attempt."""
    lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
    return [event["text"] for event in map(json.loads, lines) if event["event"] == kind]


def changed(**options: Any) -> Plan:
    return Plan(batch=dataclasses.replace(BATCH, **options))


def verdicts(result: AuditResult) -> list[tuple[int, str]]:
    assert result.is_clean, (result.problems, [epoch.says for epoch in result.epochs])
    return [(epoch.epoch, epoch.state) for epoch in result.epochs]


# ---------------------------------------------------------------------------------------------------- the order of each


def test_streams_over_the_same_dataset_have_orders_of_their_own(world: World) -> None:
    def train(worker: Any) -> dict[str, list[float]]:
        step, _ = trained(worker)
        orders: dict[str, list[float]] = {}
        for name in (None, None, "real", "noise"):
            for batch in worker.batches(Numbers(), name=name):
                step(batch)
                orders.setdefault(batch.stream, []).extend(x for micro in batch._kept for x in micro[0][:, 0].tolist())
        return orders

    first, second = world(train, 1, PLAN)[0], world.one_process(train, PLAN)
    assert first == second
    assert sorted(first) == ["noise", "real", "train", "train_2"]
    assert all(sorted(order) == list(range(SAMPLES)) for order in first.values())
    assert len({tuple(order) for order in first.values()}) == 4
    assert {epoch.state for epoch in audit(world.run_dir).epochs} == {"exact"}


def test_the_ledger_tells_the_seed_that_a_stream_really_has(world: World) -> None:
    world(run_over(Numbers(), name="noise"), 1, changed(seed=5))
    lines = [json.loads(line) for line in (world.worker_dir(0) / "ledger.jsonl").read_text().splitlines()]
    (opened,) = (line for line in lines if "seed" in line)
    assert opened["seed"] == stream_seed(changed(seed=5).batch, "noise") != 5
    assert stream_seed(changed(seed=5).batch, "train") == 5


# ------------------------------------------------------------------------------------------------- loops that were over


def test_a_stream_that_was_finished_is_warned_of_once(world: World) -> None:
    def train(worker: Any) -> int:
        step, kept = trained(worker)
        for _ in range(4):
            for batch in worker.batches(Numbers(16)):
                step(batch)
            kept.value += 1
        return kept.value

    world(train, 2, PLAN, max_steps=5)  # in the third of four streams
    assert told(world, "Warned") == []
    world(train, 2, PLAN)
    assert told(world, "Warned") == [
        "stream 'train' was finished before the checkpoint, so its loop is empty now. Code after the loop runs again: "
        "what is to run once belongs into it (if batch.ends_epoch: ...)"
    ]
    assert told(world, "Warned", rank=1) == []


def test_a_finished_iterable_is_warned_of(world: World) -> None:
    world(run_over(Lines(20), epochs=2), 1, PLAN)
    assert world(run_over(Lines(20), epochs=2), 2, PLAN)[0] == []
    assert "stream 'train' was finished" in told(world, "Warned")[0]
    assert world(run_over(Lines(20), epochs=3), 1, PLAN)[0] == [(2, 0, 8), (2, 8, 16), (2, 16, 20)]
    assert told(world, "Warned") == []


def around(worker: Any) -> int:
    """What the object held at the beginning of a loop; code after the loop sets it."""
    step, kept = trained(worker)
    begun = kept.value
    for batch in worker.batches(Numbers()):
        step(batch)
    kept.value = 7
    return begun


def test_max_steps_saves_the_state_in_which_the_loop_ended(world: World) -> None:
    assert world(around, 2, PLAN, max_steps=4) == [0, 0]
    assert world(around, 2, PLAN, max_steps=4) == [0, 0]  # nothing to do, and nothing new to save
    assert world(around, 2, PLAN) == [0, 0]
    assert world(around, 2, PLAN) == [7, 7]


def test_max_steps_without_a_save_at_the_end_saves_nothing(world: World) -> None:
    world(around, 1, PLAN, max_steps=4, save_at_end=False)
    assert not (world.run_dir / "checkpoints").exists()


def test_what_code_after_the_loop_changed_is_saved_though_its_step_was_saved_before(world: World) -> None:
    world(around, 1, PLAN, save_every=3)
    assert world(around, 1, PLAN) == [7]


# -------------------------------------------------------------------------------------------------------- other samples


@pytest.mark.parametrize(
    ("dataset", "plan", "says"),
    [
        (Numbers(), changed(seed=5), "48 samples, seed 0, shuffled; now it has 48 samples, seed 5, shuffled"),
        (Numbers(), changed(shuffle=False), "shuffled; now it has 48 samples, seed 0, not shuffled"),
        (Numbers(64), PLAN, "48 samples, seed 0, shuffled; now it has 64 samples"),
        (Numbers(20), PLAN, "48 samples, seed 0, shuffled; now it has 20 samples"),
        (Lines(48), PLAN, "48 samples, seed 0, shuffled; now it has an iterable"),
    ],
)
def test_another_order_inside_an_epoch_is_refused_on_all_workers(
    world: World, dataset: Any, plan: Plan, says: str
) -> None:
    world(run_over(Numbers()), 1, PLAN, max_steps=2)
    with pytest.raises(WorkersFailed) as failed:
        world(run_over(dataset), 2, plan)
    assert sorted(failed.value.errors) == [0, 1]
    for text in failed.value.errors.values():
        assert "CheckpointError: the checkpoint stands at sample 16 of epoch 1 of stream 'train'" in text
        assert says in text and "or another run_dir, or fresh=True" in text
    assert len(world(run_over(Numbers()), 1, PLAN)[0]) == 4  # nothing was lost


def test_another_order_between_epochs_is_accepted_and_said(world: World) -> None:
    world(run_over(Numbers(), epochs=2), 1, PLAN, max_steps=6)
    found = world(run_over(Numbers(64), epochs=2), 2, changed(seed=5))[0]
    assert found == [(1, start, start + 8) for start in range(0, 64, 8)]
    assert told(world, "Note")[1:] == [
        "stream 'train' goes on in epoch 2 with another order of samples: 64 samples, seed 5, shuffled; before: "
        "48 samples, seed 0, shuffled"
    ]
    assert verdicts(audit(world.run_dir)) == [(0, "exact"), (1, "exact")]


def test_other_steps_of_the_same_order_are_said_and_use_each_sample_once(world: World) -> None:
    world(run_over(Numbers()), 1, PLAN, max_steps=2)
    found = world(run_over(Numbers()), 2, changed(size=12, micro=3))[0]
    assert found == [(0, 16, 28), (0, 28, 40), (0, 40, 48)]
    assert told(world, "Note")[1:] == [
        "stream 'train' goes on at sample 16 of epoch 1 in other steps: batch 12 in micro-batches of 3; before: "
        "batch 8 in micro-batches of 2"
    ]
    assert verdicts(audit(world.run_dir)) == [(0, "exact")]


def test_the_last_step_is_known_after_a_change_of_the_batch_that_drops_the_rest(world: World) -> None:
    def ends(worker: Any) -> list[tuple[int, bool]]:
        step, _ = trained(worker)
        return [(batch.stop, batch.ends_epoch) for batch in worker.batches(Numbers(50)) if step(batch) is not None]

    world(ends, 1, changed(drop_last=True), max_steps=2)
    assert world(ends, 1, changed(size=12, drop_last=True))[0] == [(28, False), (40, True)]
    lines = map(json.loads, (world.worker_dir(0) / "events.jsonl").read_text().splitlines())
    assert [event["last_step"] for event in lines if event["event"] == "StreamOpened"] == [4]


def test_a_dataset_that_drop_last_drops_whole_is_refused(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"has 5 samples, which Batch\(size=8, drop_last=True\) all drops"):
        world(run_over(Numbers(5)), 1, changed(drop_last=True))


# ---------------------------------------------------------------------------------------------- restored by name, audit


def checkpoint(world: World, step: int) -> Path:
    return world.run_dir / "checkpoints" / f"step_{step:08d}"


def restored(path: Path) -> Callable[[Any], int]:
    return lambda worker: worker.restore(str(path))


def test_an_older_checkpoint_of_the_same_run_voids_the_later_steps(world: World) -> None:
    world(run_over(Numbers(), epochs=2), 2, PLAN, max_steps=8, save_every=3)
    found = world(run_over(Numbers(), epochs=2, before=restored(checkpoint(world, 3))), 3, PLAN)[0]
    assert found[0] == (0, 24, 32)
    result = audit(world.run_dir)
    assert verdicts(result) == [(0, "exact"), (1, "exact")]
    assert result.notes == ("steps 4-8 of attempt 1 are void: a later attempt went on from step 3",)


@pytest.mark.parametrize(("save_every", "saved"), [(4, [4, 8]), (3, [3, 6, 8]), (None, [8])])
def test_the_last_step_is_saved_once_also_where_two_reasons_meet(
    world: World, save_every: int | None, saved: list[int]
) -> None:
    world(run_over(Numbers(), epochs=2), 2, PLAN, max_steps=8, save_every=save_every)
    events = map(decode, (world.worker_dir(0) / "events.jsonl").read_text().splitlines())
    assert [event.event.step for event in events if isinstance(event.event, CheckpointSaved)] == saved


@pytest.mark.parametrize("plan", ["replicas=2", "shard=2", "replicas=2+localsgd(every=4)"])
def test_an_error_after_the_loop_loses_no_step(
    world: World, monkeypatch: pytest.MonkeyPatch, plan: str, workers: int = 2
) -> None:
    """The end of a loop is saved before the code behind it runs."""

    def train(worker: Any) -> int:
        step, _ = trained(worker)
        count = [step(batch) for batch in worker.batches(Numbers(), epochs=2)]
        if not is_mended:
            raise ValueError("an evaluation that fails")
        return len(count)

    monkeypatch.setattr(save_timer, "LEAST_S", 0.0)  # the workers are forks
    parsed, is_mended = Plan.parse(f"{plan}+batch(size=8,micro=2)"), False
    with pytest.raises(WorkersFailed, match="an evaluation that fails"):
        world(train, workers, parsed)
    assert [path.name for path in checkpoint(world, 12).parent.iterdir()] == [checkpoint(world, 12).name]
    is_mended = True
    assert world(train, workers, parsed) == [0, 0], "no step is taken again"
    assert verdicts(audit(world.run_dir)) == [(0, "exact"), (1, "exact")]


def test_the_end_of_a_short_loop_is_saved_once(world: World) -> None:
    """What was trained in a moment is not worth a save of its own before that of the end."""
    world(run_over(Numbers()), 2, PLAN)
    events = map(decode, (world.worker_dir(0) / "events.jsonl").read_text().splitlines())
    assert [event.event.step for event in events if isinstance(event.event, CheckpointSaved)] == [6]


def test_a_fresh_start_may_restore_its_own_past(world: World) -> None:
    world(run_over(Numbers()), 1, PLAN, max_steps=4)
    world(run_over(Numbers(), before=restored(checkpoint(world, 4))), 2, PLAN, fresh=True)
    assert verdicts(audit(world.run_dir)) == [(0, "exact")]


def test_an_attempt_that_left_no_checkpoint_is_void_when_the_next_goes_on_from_another(world: World) -> None:
    world(run_over(Numbers()), 1, PLAN, max_steps=4)
    world(run_over(Numbers()), 1, PLAN, max_steps=2, fresh=True, save_at_end=False)
    assert world(run_over(Numbers()), 1, PLAN)[0] == [(0, 32, 40), (0, 40, 48)]  # of the first
    result = audit(world.run_dir)
    assert verdicts(result) == [(0, "exact")]
    assert result.notes == ("steps 1-2 of attempt 2 are void: no later attempt went on from this one",)


def test_a_checkpoint_of_another_run_begins_the_audit_where_it_stands(world: World, tmp_path: Path) -> None:
    world(run_over(Numbers(), epochs=3), 1, PLAN, max_steps=8)
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    other(run_over(Numbers(), epochs=3), 1, PLAN, max_steps=2)  # what it did before is void
    other(run_over(Numbers(), epochs=3, before=restored(checkpoint(world, 8))), 2, PLAN, max_steps=10)
    result = audit(other.run_dir)
    assert verdicts(result) == [(1, "unfinished")]
    other(run_over(Numbers(), epochs=3), 3, PLAN)
    result = audit(other.run_dir)
    assert verdicts(result) == [(1, "continued"), (2, "exact")]
    assert [(epoch.begins_at, epoch.num_used) for epoch in result.epochs] == [(16, 32), (0, 48)]
    assert "steps 1-2 of attempt 1 are void: no later attempt went on from this one" in result.notes
    assert any(f"went on from step 8 of {checkpoint(world, 8)}" in note for note in result.notes)


def test_what_another_run_left_and_this_one_skipped_is_missing(world: World, tmp_path: Path) -> None:
    world(run_over(Numbers()), 1, PLAN, max_steps=2)
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    other(run_over(Numbers(), before=restored(checkpoint(world, 2))), 1, PLAN)
    ledger = other.worker_dir(0) / "ledger.jsonl"
    lines = [line for line in ledger.read_text().splitlines(keepends=True) if json.loads(line).get("step") != 3]
    ledger.write_text("".join(lines))
    (epoch,) = audit(other.run_dir).epochs
    assert epoch.state == "broken"
    assert [(gap.start, gap.stop) for gap in epoch.missing] == [(16, 24)]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_iterable_is_audited_over_a_resume(world: World, workers: int) -> None:
    world(run_over(Lines(29), epochs=2), workers, PLAN, max_steps=5)
    world(run_over(Lines(29), epochs=2), 2, PLAN)
    result = audit(world.run_dir)
    assert verdicts(result) == [(0, "unfinished"), (1, "unfinished")]
    assert [(epoch.num_used, epoch.num_repeated) for epoch in result.epochs] == [(29, 0), (29, 0)]
    assert any("where its epochs end is not known" in note for note in result.notes)
