"""Rare models and rare mistakes: odd buffers, copies of a model, complex numbers, optimizers that hold strangers."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import MinMaxObserver, MovingAverageMinMaxObserver
from torch.utils.data import IterableDataset, TensorDataset

import quick
from forked import WorkersFailed, World
from paceline.comm.group import Group, SingleWorkerGroup
from paceline.comm.messages.json_channel import ChannelClosed
from paceline.errors import SyncError
from paceline.events import Evaluated, StepDone, decode
from paceline.parallel.apply import place
from paceline.plan import Batch, Cast, Compute, Plan
from paceline.worker.data.data_loading import StepItems
from paceline.worker.record.error_report import is_peer_failure
from paceline.worker.state.checkpoint_loading import load_optimizer
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.step.model_buffers import BufferAverager

SMALL = Plan(batch=Batch(size=16, micro=4))
UNEVEN = Plan(batch=Batch(size=16, micro=6))  # three micro-batches, and two in the rest
ONE_MICRO = Plan(batch=Batch(size=16, micro=16))


def dataset(count: int = 16) -> TensorDataset:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


def train(worker: Any, model: nn.Module, *, count: int = 16, **options: Any) -> nn.Module:
    worker.prepare(model)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy, **options)
    for batch in worker.batches(dataset(count)):
        step(batch)
    return model


class WithBuffer(nn.Module):
    """A linear layer, and a buffer "kept" that `change(module, x)` deals with in each forward."""

    def __init__(
        self, change: Callable[[Any, Tensor], None], value: Tensor | None = None, *, persistent: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("kept", value, persistent=persistent)
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        self._change(self, x)
        return self.linear(x)


def kept_after(worker: Any, *, change: Callable[[Any, Tensor], None], count: int = 16, **options: Any) -> Any:
    model = train(worker, WithBuffer(change, **options), count=count)
    return model.kept


# Buffers


def test_buffers_that_begin_as_infinity_become_what_the_observer_saw(world: World) -> None:
    def extremes(worker: Any) -> Any:
        observer = MinMaxObserver()
        train(worker, nn.Sequential(nn.Linear(6, 4), observer))
        return observer.min_val, observer.max_val

    low, high = world(extremes, 1, ONE_MICRO)[0]
    assert low.isfinite() and high.isfinite() and low < 0 < high


def test_a_micro_batch_that_leaves_a_buffer_alone_counts_with_the_old_value() -> None:
    module: Any = nn.Module()
    module.register_buffer("kept", torch.tensor([[2.0]]))
    buffers = BufferAverager()
    buffers.add(module)
    buffers.begin()
    buffers.rewind()
    module.kept.fill_(10.0)
    buffers.capture(1)
    buffers.rewind()
    assert module.kept.item() == 2.0
    buffers.capture(3)
    buffers.combine(buffers.changed(), num_samples=4, groups=[SingleWorkerGroup()])()
    assert module.kept.item() == 4.0  # (10 + 3 * 2) / 4


def add_one(module: Any, x: Tensor) -> None:
    module.kept += 1 + 1j if module.kept.is_complex() else 1


def test_complex_buffers_keep_their_imaginary_part(world: World) -> None:
    run = functools.partial(kept_after, change=add_one, value=torch.zeros(2, dtype=torch.complex64))
    for workers in (1, 2):
        kept = world(run, workers, fresh=True)
        assert all(value.tolist() == [4 + 4j, 4 + 4j] for value in kept), "each of four micro-batches has added to it"


def test_integers_beyond_the_precision_of_float64_stay_exact(world: World) -> None:
    def write(module: Any, x: Tensor) -> None:
        module.kept.copy_(torch.tensor([2**62 + 1, -(2**61) - 3, 3]))

    run = functools.partial(kept_after, change=write, value=torch.zeros(3, dtype=torch.int64), count=10)
    for kept in world(run, 2, SMALL):
        assert kept.tolist() == [2**62 + 1, -(2**61) - 3, 3]


def mean_of_inputs(module: Any, x: Tensor) -> None:
    module.kept = x.mean(0) if module.kept is None else 0.9 * module.kept + 0.1 * x.mean(0)


@pytest.mark.parametrize("count", [42, 10])  # of ten samples the third worker gets none
def test_a_buffer_that_begins_as_none_is_combined_over_workers(world: World, count: int) -> None:
    run = functools.partial(kept_after, change=mean_of_inputs, count=count)
    expected = world.one_process(run, UNEVEN)
    for kept in world(run, 3, UNEVEN):
        torch.testing.assert_close(kept, expected)


def grow(module: Any, x: Tensor) -> None:
    if module.kept is None or len(module.kept) < 100 + len(x):
        module.register_buffer("kept", torch.zeros(100 + len(x)), persistent=False)


def drop(module: Any, x: Tensor) -> None:
    module.kept = None


def fill(module: Any, x: Tensor) -> None:
    module.kept = torch.ones(len(x))


@pytest.mark.parametrize(
    ("workers", "count", "change"),
    [
        *[(3, 42, grow), (3, 10, grow), (3, 10, drop), (1, 42, fill)],
        *[quick.further(*case) for case in ((1, 42, grow), (1, 42, drop), (3, 42, drop), (3, 42, fill), (3, 10, fill))],
    ],
)
def test_caches_are_each_workers_own(world: World, workers: int, count: int, change: Any) -> None:
    run = functools.partial(kept_after, change=change, value=torch.zeros(2), persistent=False, count=count)
    kept = world(run, workers, UNEVEN)[0]
    assert (kept is None) == (change is drop)
    if change is grow:
        assert len(kept) == (106 if count == 42 else 105)


def test_a_persistent_buffer_that_changes_its_shape_is_refused_with_a_remedy(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"buffer kept went from \[2\] to \[4\] within a step.*persistent=False"):
        world(functools.partial(kept_after, change=fill, value=torch.zeros(2)), 1, SMALL)


def test_a_buffer_that_is_registered_in_forward_is_refused_with_a_remedy(world: World) -> None:
    def register(module: Any, x: Tensor) -> None:
        module.register_buffer("late", torch.zeros(1))

    with pytest.raises(WorkersFailed, match=r"buffer late was registered within a step.*\('late', None\)"):
        world(functools.partial(kept_after, change=register), 1, SMALL)


def test_statistics_that_a_kernel_writes_uncounted_are_rewound_and_combined(world: World) -> None:
    class OwnNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)
            self.mean: Tensor
            self.var: Tensor
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("var", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(F.batch_norm(x, self.mean, self.var, training=self.training))

    def own(worker: Any) -> Any:
        return train(worker, OwnNorm(), count=48).state_dict()

    def built_in(worker: Any) -> Any:
        return train(worker, nn.Sequential(nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4)), count=48).state_dict()

    expected = world.one_process(built_in, SMALL)
    for state in world(own, 2, SMALL):
        torch.testing.assert_close(state["mean"], expected["0.running_mean"])
        torch.testing.assert_close(state["var"], expected["0.running_var"])


def test_thousands_of_buffers_are_added_in_linear_time() -> None:
    module = nn.Module()
    for number in range(8000):
        module.register_buffer(f"b{number}", torch.zeros(1))
    began = time.process_time()
    BufferAverager().add(module)
    assert time.process_time() - began < 3  # 0.1 s is usual; to compare each with each takes 15 s


# Evaluation


def test_evaluation_leaves_buffers_as_they_were(world: World) -> None:
    def observe(worker: Any) -> Any:
        model = worker.prepare(nn.Sequential(nn.Linear(6, 4), MovingAverageMinMaxObserver()))
        before = model[1].min_val.clone()
        worker.evaluate(model, dataset(10), F.cross_entropy)
        return before, model[1].min_val

    for before, after in world(observe, 2, SMALL):
        assert torch.equal(before, after)


def test_evaluation_over_nothing_is_refused_by_name(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"ValueError: worker\.evaluate.* got an empty TensorDataset"):
        world(lambda worker: worker.evaluate(worker.prepare(nn.Linear(6, 4)), dataset(0), F.cross_entropy), 1)


# Reading


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor(float(number)) for number in range(16)])


def noisy(items: list[Tensor]) -> Tensor:
    return torch.stack(items) + torch.rand(())


def collated(worker: Any) -> dict[tuple[int, int], list[float]]:
    worker.prepare(nn.Linear(6, 4))
    return {
        (batch.step, micro.index): data.tolist()
        for batch in worker.batches(Numbers(), collate=noisy)
        for micro, data in zip(batch.micros, batch, strict=True)
    }


def test_a_random_collate_of_an_iterable_is_the_same_on_any_number_of_workers(world: World) -> None:
    plan = Plan(batch=Batch(size=8, micro=2))
    first, second = world(collated, 2, plan)
    assert {**first, **second} == world.one_process(collated, plan)


def test_what_an_iterable_gives_can_be_pinned() -> None:
    class Data:
        is_pinned = False

        def pin_memory(self) -> Data:
            self.is_pinned = True
            return self

    pinned = StepItems(1, (Data(),)).pin_memory()
    assert pinned.num_samples == 1 and pinned.data[0].is_pinned


# Models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("training", [True, False])
def test_a_deep_copy_of_a_recomputing_model_computes_with_its_own_weights(training: bool) -> None:
    first, last = Block(), Block()
    model = nn.Sequential(first, last).train(training)
    place(model, Plan(compute=Compute(recompute="blocks")), device=torch.device("cpu"))
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    output = copied(torch.ones(1, 4))
    assert output.tolist() == [[0.0] * 4]
    output.sum().backward()
    assert last.linear.weight.grad is None
    assert all(parameter.grad is not None for parameter in copied[1].parameters())


def test_a_lazy_module_is_refused_by_its_name(world: World) -> None:
    def work(worker: Any) -> None:
        worker.prepare(nn.Sequential(nn.LazyLinear(4)))

    with pytest.raises(
        WorkersFailed, match=r"0\.weight of Sequential has no shape yet.*run one forward before prepare"
    ):
        world(work, 1)


def test_complex_gradients_survive_the_cast(world: World) -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            y = x.to(torch.complex64) @ self.weight
            return y.imag + y.real

    def weights(worker: Any) -> Tensor:
        return train(worker, Rotation()).state_dict()["weight"]

    raw = world(weights, 2, SMALL)[0]
    for cast in world(weights, 2, Plan(batch=SMALL.batch, wire=Cast(dtype="bf16")), fresh=True):
        torch.testing.assert_close(cast, raw, rtol=0, atol=2e-3)


# Optimizers


def test_an_optimizer_is_prepared_once(world: World) -> None:
    def twice(worker: Any) -> None:
        model = worker.prepare(nn.Linear(6, 4))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        worker.prepare(optim)

    with pytest.raises(WorkersFailed, match="this SGD is prepared already, as 'optimizer'"):
        world(twice, 1)


def test_a_parameter_group_of_no_prepared_model_is_named() -> None:
    registry = StateRegistry()
    registry.models["model"] = model = nn.Linear(6, 4)
    registry.optimizers["optimizer"] = optim = torch.optim.SGD(model.parameters(), lr=0.1)
    assert registry.plain()["optimizers"]["optimizer"]["groups"][0]["params"] == ["model.weight", "model.bias"]
    optim.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"optimizer holds a parameter of shape \[3\] that is of no prepared model"):
        registry.plain()


def test_state_of_many_parameters_comes_back_in_linear_time() -> None:
    registry = StateRegistry()
    registry.models["model"] = model = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(20_000)])
    registry.optimizers["optimizer"] = optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, parameter in enumerate(model.parameters()):
        optim.state[parameter]["age"] = number
    plain = registry.plain()
    optim.state.clear()
    began = time.process_time()
    load_optimizer("optimizer", optim, registry, plain, None, SingleWorkerGroup())
    assert time.process_time() - began < 2.5  # 0.2 s is usual; to look each name up in a list takes 5 s
    assert [optim.state[parameter]["age"] for parameter in model.parameters()] == list(range(20_000))


# Groups and errors


def test_objects_and_barriers_need_no_gpu(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        group = Group(dist.group.WORLD, device=torch.device("cuda", 0))  # which this machine may lack
        group.barrier()
        assert group.gather_objects({"a": torch.ones(2, dtype=torch.int64).tolist()}) == [{"a": [1, 1]}]
        assert group.broadcast_object("word") == "word"
        assert torch.equal(group.gather_objects(torch.arange(3))[0], torch.arange(3))
    finally:
        dist.destroy_process_group()


def test_a_lost_peer_is_told_without_jokes(world: World, tmp_path: Path) -> None:
    message = tmp_path / "message"

    def leave(worker: Any) -> None:
        if worker.rank == 1:
            os._exit(0)
        try:
            worker.wait()
        except SyncError as error:
            message.write_text(str(error))
            raise

    with pytest.raises(WorkersFailed):
        world(leave, 2)
    text = message.read_text()
    assert text.startswith("lost contact with a peer during barrier: ") and "GLHF" not in text


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionRefusedError(111, "Connection refused"), False),
        (BrokenPipeError(32, "Broken pipe"), False),
        (RuntimeError("the data base said: Connection refused"), False),
        (RuntimeError("[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:1"), True),
        (dist.DistBackendError("Connection reset by peer"), True),
        (ChannelClosed("the other end has gone (Broken pipe)"), True),
        (SyncError("lost contact with a peer during barrier: x"), True),
    ],
)
def test_an_echo_is_an_error_of_the_group_not_of_the_users_own_connections(error: Exception, expected: bool) -> None:
    assert is_peer_failure(error) == expected


def test_metrics_with_odd_names_are_shown_and_written(world: World) -> None:
    def train(worker: Any) -> None:
        model = worker.prepare(nn.Linear(6, 4))
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset(10)):
            worker.report(**{"\ud800": step(batch), "a\nfailed after step 3": 1.0})
        worker.evaluate(model, dataset(10), {"\udcff": F.cross_entropy})

    world(train, 1)
    log = (world.worker_dir(0) / "events.jsonl").read_text()
    events = [decode(line).event for line in log.splitlines()]
    (done, *_) = [event for event in events if isinstance(event, StepDone)]
    (evaluated,) = [event for event in events if isinstance(event, Evaluated)]
    assert {"\\ud800", "a\\nfailed after step 3"} <= set(done.metrics)
    assert set(evaluated.metrics) == {"\\udcff"}


def test_a_number_that_no_float_holds_is_named(world: World) -> None:
    with pytest.raises(WorkersFailed, match=r"worker\.report\(big=10{100,}\.\.\.\): report numbers"):
        world(lambda worker: worker.report(big=10**400), 1)
