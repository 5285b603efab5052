"""A poisoned batch, and a flipped bit: what the plan's guard does about them is the same on any number of workers."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import quick
from forked import WorkersFailed, World
from paceline.checkpoint.reader import open_checkpoint
from paceline.events import SpikeSeen, StepDone, Warned, WeightsDiffer, decode
from paceline.monitor.audit.audit import audit, main_audit
from paceline.plan import Batch, Compute, Guard, Plan

SIZE, SAMPLES = 6, 180  # of a batch, of the one epoch: 30 steps
POISON = 99  # a sample of step 17
BAD_STEP = POISON // SIZE + 1
EXACT = Compute(precision="fp64")
BATCH = Batch(size=SIZE, micro=2, shuffle=False)


class Sums(Dataset[tuple[Tensor, Tensor]]):
    """Numbers and their sum; what is poisoned has a target from another world."""

    def __init__(self, *poisoned: int) -> None:
        self._poisoned = poisoned

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        numbers = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return numbers, numbers.sum(0, keepdim=True) + (1e4 if index in self._poisoned else 0.0)


class Net(nn.Module):
    """With statistics, which a rollback must put back as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.layers(numbers)


def plan(guard: Guard) -> Plan:
    return Plan(batch=BATCH, compute=EXACT, guard=guard)


def made(worker: Any | None = None) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(1)
    prepare: Callable[[Any], Any] = (lambda thing: thing) if worker is None else worker.prepare
    model = prepare(Net() if worker is not None else Net().double())
    optim = prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
    return model, optim, prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=4, gamma=0.9))


def state_of(model: nn.Module, schedule: Any) -> dict[str, Any]:
    return {**{name: value.clone() for name, value in model.state_dict().items()}, "lr": schedule.get_last_lr()[0]}


def train(worker: Any, *, poisoned: tuple[int, ...] = (POISON,), plain: bool = False) -> dict[str, Any]:
    model, optim, schedule = made(worker)
    step = worker.stepper(model, optim, F.mse_loss)
    for batch in worker.batches(Sums(*poisoned)):
        if plain:
            for x, y in batch:
                worker.backward(F.mse_loss(model(x), y))
            optim.step()
        else:
            step(batch)
        schedule.step()
    return state_of(model, schedule)


def bare(left_out: range, *, schedule_goes_on: bool = False) -> dict[str, Any]:
    """The oracle, without Paceline: the same steps, but some that were never taken."""
    model, optim, schedule = made()
    data = Sums()
    for number in range(1, SAMPLES // SIZE + 1):
        if number not in left_out:
            _bare_step(model, optim, [data[index] for index in range((number - 1) * SIZE, number * SIZE)])
        if number not in left_out or schedule_goes_on:
            schedule.step()
    return state_of(model, schedule)


def _bare_step(model: nn.Module, optim: torch.optim.Optimizer, samples: list[tuple[Tensor, Tensor]]) -> None:
    optim.zero_grad()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found: list[dict[str, Tensor]] = []
    for start in range(0, SIZE, 2):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        x, y = (torch.stack(part).double() for part in zip(*samples[start : start + 2], strict=True))
        (F.mse_loss(model(x), y) * 2 / SIZE).backward()
        found.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    for name, buffer in model.named_buffers():
        buffer.copy_(torch.stack([one[name].double() for one in found]).mean(0))
    optim.step()


def assert_like(results: list[dict[str, Any]], oracle: dict[str, Any], tolerance: float = 1e-9) -> None:
    for result in results:
        assert result["lr"] == pytest.approx(oracle["lr"], rel=1e-12)
        for name in oracle.keys() - {"lr"}:
            torch.testing.assert_close(result[name], oracle[name], rtol=tolerance, atol=tolerance)
            assert torch.equal(result[name], results[0][name]), f"{name} differs between workers"


def events(world: World, worker: int, *kinds: type) -> list[Any]:
    lines = (world.worker_dir(worker) / "events.jsonl").read_text().splitlines()
    return [event for line in lines if isinstance(event := decode(line).event, kinds)]


def ledger(world: World, worker: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.worker_dir(worker) / "ledger.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("on_spike", ["none", "skip"])
def test_whose_loss_is_not_finite_names_its_micro_batch_and_samples(world: World, on_spike: Any) -> None:
    def train_it(worker: Any) -> list[tuple[int, int, int]]:
        model, optim, _ = made(worker)
        own: list[tuple[int, int, int]] = []

        def loss(output: Tensor, target: Tensor) -> Tensor:
            value = F.mse_loss(output, target)
            if worker.step in (7, 9) and worker.rank == 0 and output.requires_grad:
                output.register_hook(lambda gradient: gradient * math.inf)
            return value * math.nan if worker.step in (1, 2, 4, 5) and worker.rank == 1 else value

        step = worker.stepper(model, optim, loss)
        for batch in worker.batches(Sums()):
            mine = [(micro.index, micro.start, micro.stop) for micro in batch.micros]
            if worker.step == 1:
                own = mine
            step(batch)
        return own

    _, own = world(train_it, 2, plan(Guard(on_spike=on_spike)))
    assert own
    named = ", ".join(
        f"micro-batch {index + 1} (samples {', '.join(map(str, range(start, stop)))})" for index, start, stop in own
    )
    told = [event.text for event in events(world, 1, Warned) if "which ran here" in event.text]
    assert told[0] == f"step 2: the loss is not finite in {named}, which ran here"
    assert [text.split(":")[0] for text in told] == ["step 2", "step 3", "step 5"]
    assert told[2].endswith("; further ones are not reported")
    assert not [event for event in events(world, 0, Warned) if "which ran here" in event.text], "its own were fine"

    told = [event.text for event in events(world, 0, Warned) if "the loss is finite" in event.text]
    said = re.compile(
        r"step (\d+): the loss is finite, but not the gradient of \S*layers\.3\.\w+ and of 4 more after it, "
        r"which was made here"
    )
    found = [match.group(1) for text in told if (match := said.fullmatch(text))]
    assert found == {"none": ["10"], "skip": ["8", "10"]}[on_spike], "without a guard nobody looks before the first one"
    assert not [event for event in events(world, 1, Warned) if "the loss is finite" in event.text]
    skipped = [event.text for event in events(world, 0, Warned) if event.text.startswith("step 8 was skipped")]
    assert len(skipped) == (on_spike == "none")
    assert all(re.search(r"that of \S*layers\.3\.\w+ first in backward", text) for text in skipped)


@pytest.mark.parametrize(("workers", "plain"), [(1, True), (3, False), quick.further(1, False), quick.further(3, True)])
def test_skip_leaves_the_spike_out_and_nothing_else(world: World, workers: int, plain: bool) -> None:
    guard = Guard(on_spike="skip", window=16)
    results = world(functools.partial(train, plain=plain), workers, plan(guard))
    assert_like(results, bare(range(BAD_STEP, BAD_STEP + 1), schedule_goes_on=True))
    for worker in range(workers):
        (spike,) = events(world, worker, SpikeSeen)
        assert (spike.step, spike.action, spike.to_step) == (BAD_STEP, "skip", None)
        assert spike.expected < 100 < spike.loss
        assert [step.step for step in events(world, worker, StepDone) if step.skipped] == [BAD_STEP]
    judged = audit(world.run_dir)
    assert judged.verdict == "clean"
    assert judged.epochs[0].skipped_steps == (BAD_STEP,)


@pytest.mark.parametrize(("workers", "plain"), [(1, True), (3, False), quick.further(1, False), quick.further(3, True)])
def test_rollback_goes_on_as_if_the_steps_since_the_snapshot_had_not_been(
    world: World, workers: int, plain: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(on_spike="rollback", window=16, snapshot_every=6)
    results = world(functools.partial(train, plain=plain), workers, plan(guard))
    assert_like(results, bare(range(13, BAD_STEP + 1)))
    for worker in range(workers):
        (spike,) = events(world, worker, SpikeSeen)
        assert (spike.step, spike.action, spike.to_step) == (BAD_STEP, "rollback", 12)
        (noted,) = [line["rollback"] for line in ledger(world, worker) if "rollback" in line]
        assert noted == {"to_step": 12, "from_step": BAD_STEP, "skips": {"train": [[0, 72], [0, BAD_STEP * SIZE]]}}
        assert [step.step for step in events(world, worker, StepDone)] == list(range(1, 31))
    assert main_audit(world.run_dir) == 0
    told = capsys.readouterr().out
    assert "undone    positions 72-101 (30 samples: 72, 73, 74, 75, 76, 77, 78, 79, ...), by a rollback of" in told
    assert "by a rollback of steps 13-17 to step 12: not used again" in told
    assert "clean: 1 finished epoch" in told


def test_what_is_expected_goes_back_as_well(world: World) -> None:
    guard = Guard(on_spike="rollback", window=24, snapshot_every=6)
    world(train, 2, plan(guard), max_steps=20)
    state = open_checkpoint(world.run_dir / "checkpoints" / "step_00000020").state
    assert len(state["losses"]["losses"]["train.0"]) == 12 + 3, "those of the steps up to 12, and from 18 on"


def test_a_second_spike_soon_after_goes_back_to_the_same_snapshot(world: World) -> None:
    guard = Guard(on_spike="rollback", window=16, snapshot_every=6)
    results = world(functools.partial(train, poisoned=(POISON, POISON + 2 * SIZE)), 2, plan(guard))
    assert_like(results, bare(range(13, BAD_STEP + 3)))
    (undone,) = audit(world.run_dir).epochs[0].undone
    assert (undone.first_step, undone.last_step, undone.to_step) == (13, BAD_STEP + 2, 12)


def test_a_rollback_after_which_nothing_gets_better_ends_the_run(world: World) -> None:
    guard = Guard(on_spike="rollback", window=16, snapshot_every=6)
    with pytest.raises(WorkersFailed) as caught:
        world(functools.partial(train, poisoned=tuple(range(POISON, SAMPLES))), 2, plan(guard))
    says = "after 5 rollbacks to step 12 with other samples each time"
    assert all(says in text for text in caught.value.errors.values())


def test_skipping_that_does_not_end_ends_the_run(world: World) -> None:
    guard = Guard(on_spike="skip", window=8)
    with pytest.raises(WorkersFailed, match="That is the 20th spike in a row"):
        world(functools.partial(train, poisoned=tuple(range(5 * SIZE, SAMPLES))), 1, plan(guard))


@pytest.mark.parametrize("workers", [quick.further(1), 3])
def test_stop_ends_the_run_before_the_step_and_keeps_the_last_checkpoint(world: World, workers: int) -> None:
    with pytest.raises(WorkersFailed) as caught:
        world(train, workers, plan(Guard(on_spike="stop", window=16)), save_every=4)
    assert len(caught.value.errors) == workers
    for text in caught.value.errors.values():
        assert "BadNumbersError: step 17: loss " in text and ", expected at most " in text
    assert open_checkpoint(world.run_dir / "checkpoints" / "step_00000016").step == 16
    assert max(line["step"] for line in ledger(world, 0) if "step" in line) == 16


def test_what_was_expected_is_in_the_checkpoint(world: World) -> None:
    guard = plan(Guard(on_spike="skip", window=32))  # half a window is known at step 16 only
    world(train, 2, guard, save_every=4, max_steps=16)
    results = world(train, 2, guard)
    assert_like(results, bare(range(BAD_STEP, BAD_STEP + 1), schedule_goes_on=True))


def test_a_resume_from_before_a_rollback_makes_it_void(world: World) -> None:
    guard = plan(Guard(on_spike="rollback", window=16, snapshot_every=6))
    world(train, 2, guard, save_every=14, keep=9, max_steps=20)  # saved at 14, undone, and at the end
    for path in world.run_dir.glob("checkpoints/step_00000020/*"):
        path.unlink()
    world(functools.partial(train, poisoned=()), 1, guard)
    judged = audit(world.run_dir)
    assert judged.verdict == "clean"
    assert judged.epochs[0].undone == (), "the steps after 14 were taken again, and the one before are in its weights"


def test_a_save_in_the_step_of_the_spike_holds_the_state_that_was_put_back(world: World) -> None:
    def saving(worker: Any) -> dict[str, Any]:
        model, optim, schedule = made(worker)
        step = worker.stepper(model, optim, F.mse_loss)
        for batch in worker.batches(Sums(POISON)):
            step(batch)
            schedule.step()
            if worker.step == BAD_STEP:
                worker.save()
                break
        return state_of(model, schedule)

    guard = Guard(on_spike="rollback", window=16, snapshot_every=6)
    results = world(saving, 2, plan(guard), save_at_end=False)
    finished = world(train, 2, plan(guard))
    assert_like(finished, bare(range(13, BAD_STEP + 1)))
    assert results[0]["lr"] == pytest.approx(0.02 * 0.9**3), "leaving the loop goes back as well"


def test_a_rollback_gives_modules_their_extra_state_back(world: World) -> None:
    class Scaled(Net):
        scale = torch.ones(1, dtype=torch.float64)

        def get_extra_state(self) -> Tensor:
            return self.scale

        def set_extra_state(self, state: Tensor) -> None:
            self.scale = state

    def scaled(worker: Any) -> float:
        model = worker.prepare(Scaled())
        optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))
        step = worker.stepper(model, optim, F.mse_loss)
        for batch in worker.batches(Sums(POISON)):
            step(batch)
            model.scale = model.scale / 2
        return float(model.scale)

    guard = Guard(on_spike="rollback", window=16, snapshot_every=6)
    steps = SAMPLES // SIZE - (BAD_STEP - 12)
    assert world(scaled, 2, plan(guard)) == [2.0**-steps] * 2


@pytest.mark.parametrize(("at", "to_step"), [(14, 14), (BAD_STEP, 12)])
def test_a_rollback_after_parameters_were_thawed(world: World, at: int, to_step: int) -> None:
    def thawing(worker: Any) -> tuple[list[float], bool]:
        model = worker.prepare(Net())
        first, *others = model.parameters()
        optim = worker.prepare(torch.optim.AdamW(others, lr=0.02))
        before = first.detach().clone()
        step = worker.stepper(model, optim, F.mse_loss)
        for batch in worker.batches(Sums(POISON)):
            step(batch)
            if worker.step == at:
                optim.add_param_group({"params": [first], "lr": 0.01})
        rates = [group["lr"] for group in optim.param_groups]
        return rates, not torch.equal(first, before)

    guard = Guard(on_spike="rollback", window=16, snapshot_every=6)
    assert world(thawing, 2, plan(guard)) == [([0.02, 0.01], True)] * 2
    (spike,) = events(world, 0, SpikeSeen)
    assert (spike.step, spike.to_step) == (BAD_STEP, to_step)


def flip(tensor: Tensor) -> None:
    """What a cosmic ray does: one bit of one number."""
    tensor.detach().view(torch.int64).view(-1)[1] ^= 1 << 40


def with_a_flip(worker: Any, *, on: int, at: int, where: str) -> dict[str, Any]:
    model, optim, schedule = made(worker)
    step = worker.stepper(model, optim, F.mse_loss)
    for batch in worker.batches(Sums()):
        step(batch)
        schedule.step()
        if worker.rank == on and worker.step == at:
            weight = model.get_parameter("layers.3.weight")
            flip(weight if where == "weights" else optim.state[weight]["exp_avg"])
    return state_of(model, schedule)


@pytest.mark.parametrize(
    ("on", "where"),
    [(0, "weights"), (2, "optimizer"), quick.further(2, "weights"), quick.further(0, "optimizer")],
)
def test_a_flipped_bit_is_found_named_and_healed(world: World, on: int, where: str) -> None:
    flipped = functools.partial(with_a_flip, on=on, at=9, where=where)
    healthy = world(train_undisturbed, 3, plan(Guard()))
    results = world(flipped, 3, plan(Guard(check_every=10)), fresh=True)
    told = [events(world, worker, WeightsDiffer) for worker in range(3)]
    ((first,), (second,), (third,)) = told
    assert first == second == third
    assert (first.workers, first.step, first.since_step, first.num_alike) == ([on], 10, 0, 2)
    assert first.who[0].startswith(f"worker {on} (testhost, pid ")
    assert first.source == (1 if on == 0 else 0)
    others = [result for rank, result in enumerate(results) if rank != on]
    if where == "weights":  # its gradients of step 10 went into the sum, before anybody could know
        assert_like(results, results[1])
        assert_like(others, healthy[0], 1e-2)
    else:
        assert_like(results, healthy[0], 0.0)
    assert audit(world.run_dir).is_clean


def train_undisturbed(worker: Any) -> dict[str, Any]:
    return train(worker, poisoned=())


def test_a_flip_right_before_the_comparison_costs_nothing(world: World) -> None:
    healthy = world(train_undisturbed, 3, plan(Guard()))
    flipped = functools.partial(with_a_flip, on=2, at=10, where="weights")
    results = world(flipped, 3, plan(Guard(check_every=10)), fresh=True)
    ((told,), _, _) = (events(world, worker, WeightsDiffer) for worker in range(3))
    assert told.first == "model.layers.3.weight"
    assert_like(results, healthy[0], 0.0)


def test_weights_are_compared_before_they_are_saved(world: World) -> None:
    flipped = functools.partial(with_a_flip, on=0, at=7, where="weights")
    healthy = world(train_undisturbed, 3, plan(Guard()), save_every=7, keep=9)
    right = open_checkpoint(world.run_dir / "checkpoints" / "step_00000007").load()
    world(flipped, 3, plan(Guard(check_every=1000)), save_every=7, keep=9, fresh=True)
    saved = open_checkpoint(world.run_dir / "checkpoints" / "step_00000007").load()
    assert events(world, 1, WeightsDiffer)[0].step == 7
    assert saved.keys() == right.keys()
    assert all(torch.equal(saved[name], right[name]) for name in right)
    assert healthy


def test_two_workers_that_differ_stop_because_nobody_can_say_who_is_right(world: World) -> None:
    with pytest.raises(WorkersFailed) as caught:
        world(functools.partial(with_a_flip, on=1, at=9, where="weights"), 2, plan(Guard(check_every=5)))
    assert len(caught.value.errors) == 2
    for text in caught.value.errors.values():
        assert "step 10: the weights of the workers are not equal any more" in text
        assert "worker 0 (testhost, pid " in text and "worker 1 (testhost, pid " in text
        assert "They were equal after step 5" in text


def test_healthy_workers_are_never_told_to_differ(world: World) -> None:
    results = world(train_undisturbed, 3, plan(Guard(check_every=1)))
    assert_like(results, bare(range(0)))
    assert not events(world, 0, WeightsDiffer)
