"""Run one worker's actions of a pipeline schedule: forwards and backwards of its stages, and the transfers between
them.

Every worker of the pipeline gets the same micro-batches, because each stage computes masks and positions from the
inputs. Gradients add up in `parameter.grad`. What a stage keeps of a micro-batch is freed by its backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError
from paceline.parallel.meta.tensor_tree import TensorSpec, shape_key
from paceline.parallel.model_units import ModelUnit
from paceline.parallel.pipeline.split_backward import SplitBackward
from paceline.parallel.pipeline.stage_partition import StagePartition, ValueRoute, route
from paceline.parallel.pipeline.stage_replay import StageReplayer
from paceline.parallel.pipeline.stage_transfer import StageExchange, StageTransport
from paceline.parallel.pipeline.tape import Tape
from paceline.parallel.pipeline.tape_recorder import record
from paceline.schedule.pipeline import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    Action,
    Pipeline,
    StageMessage,
    made,
    needed,
)

__all__ = ["MOST_KINDS", "PipelineStepResult", "StageWorker", "bubble_share"]

MOST_KINDS = 64  # kinds of inputs whose tapes are kept between steps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStepResult:
    """The outcome of a gradient pass. `results`: on the worker of the last stage, one per micro-batch; elsewhere empty.

    `spans` are (action, begin, end) in seconds of the worker's own clock, without the wait for what an action needs;
    `begin` and `end` are those of the whole pass. `peak_in_flight`: most (stage, micro-batch) pairs kept at once.
    """

    results: dict[int, Any]
    spans: tuple[tuple[Action, float, float], ...]
    begin: float
    end: float
    peak_in_flight: int

    @property
    def busy_s(self) -> float:
        return sum(end - begin for _, begin, end in self.spans)

    @property
    def whole_s(self) -> float:
        return self.end - self.begin


def bubble_share(passes: Sequence[tuple[float, float]]) -> float:
    """Return the part of all workers' time in which they had nothing to do, between 0 and 1.

    `passes`: `busy_s` and `whole_s` of each worker in one step. Workers begin together, and one that ends early (the
    last stage does) waits for the others, so the longest pass counts for all.
    """
    longest = max(whole_s for _, whole_s in passes)
    return 1 - sum(busy_s for busy_s, _ in passes) / (longest * len(passes))


@dataclasses.dataclass(slots=True)
class _MicroBatchState:
    """What a stage keeps of a micro-batch until its backward."""

    received: dict[int, Tensor]
    values: dict[int, Tensor]
    loss: Tensor | None
    halves: SplitBackward | None = None


class StageWorker:
    """One worker of a pipeline: the stages `pipeline.stages_of(worker_index)` of a model.

    Between steps `pipeline` may be replaced by one with another number of micro-batches. `around(action)` surrounds
    each of this worker's parts of a forward, so that buffers can be exchanged and inspected there. `before(action)` and
    `after(action)` are called around every action, and `recording()` surrounds each recording of a forward.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        units: Sequence[ModelUnit],
        partition: StagePartition,
        pipeline: Pipeline,
        worker_index: int,
        link: StageTransport,
        device: torch.device,
    ) -> None:
        if partition.num_stages != pipeline.num_stages:
            raise PlanError(
                f"the model is partitioned into {partition.num_stages} stages, but the schedule has "
                f"{pipeline.num_stages} ({pipeline.num_workers} workers with {pipeline.stages_per_worker} each). "
                "Partition it into as many."
            )
        self.worker_index, self.link, self.device = worker_index, link, device
        self.replayer = StageReplayer(model, units, device=device)
        self._model, self._cut, self.pipeline = model, partition, pipeline
        self._known: dict[Any, tuple[Tape, ValueRoute]] = {}  # in the order of their last use
        self.around: Callable[[Action], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext()
        self.before: Callable[[Action], None] = lambda _: None
        self.after: Callable[[Action], None] = lambda _: None
        self.recording: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    def step(
        self,
        forward: Callable[[Any], Tensor],
        micros: Sequence[Any],
        *,
        weights: Sequence[float],
        seeds: Sequence[tuple[int, ...]] = (),
    ) -> PipelineStepResult:
        """Run forward and backward of all micro-batches; all workers of the pipeline must call it with the same
        arguments.

        `forward(micro)` runs the model and returns the loss, a tensor without dims. Each loss counts `weights[m]` times
        in the gradients. `seeds[m]` seed the units' random draws; without seeds they use the generators as they are.
        Results are the losses, without weights. Blocks until everything sent has arrived. Raises SyncError after the
        link's time limit, and PlanError if a forward differs from the first one of its kind.
        """
        step = _PipelineStep(self, self.pipeline, forward, micros, weights, seeds)
        return step.run()

    def evaluate(self, forward: Callable[[Any], Any], micros: Sequence[Any]) -> PipelineStepResult:
        """Run the forwards alone, without gradients; the results are what `forward` returns."""
        orders = tuple(tuple(a for a in order if a.kind == FORWARD) for order in self.pipeline.orders)
        with torch.no_grad():
            step = _PipelineStep(self, dataclasses.replace(self.pipeline, orders=orders), forward, micros, (), ())
            return step.run()

    def forget(self) -> None:
        """Discard the recorded tapes, because something has changed that is no part of the inputs."""
        self._known.clear()

    def learn(self, forward: Callable[[Any], Any], micro: Any, *, tape: Tape | None = None) -> tuple[Tape, ValueRoute]:
        """Return the tape and route for this forward on inputs of this kind; needs no other worker.

        The tape is recorded when the two are first met, unless it is passed in.
        """
        # The code, not the function: a lambda in a loop is a new function each time.
        code = getattr(forward, "__code__", forward)
        key = (code, shape_key(micro), torch.is_grad_enabled(), self._model.training)
        if key not in self._known:
            if tape is None:
                with self.recording():
                    tape = record(self._model, forward, micro, units=self.replayer.units, device=self.device)
            self._known[key] = tape, value_route = tape, route(tape, self._cut)
            self.link.make_room(
                max((tape.values[n].spec.num_bytes for each in value_route.crossing for n in each), default=0)
            )
        self._known[key] = found = self._known.pop(key)
        return found

    def trim(self) -> list[Tape]:
        """Forget the least recently used kinds of inputs beyond MOST_KINDS, between two steps; returns their tapes.

        All workers of a pipeline get the same inputs, so all forget the same.
        """
        surplus = list(self._known)[: max(0, len(self._known) - MOST_KINDS)]
        return [self._known.pop(key)[0] for key in surplus]


class _PipelineStep:
    """One step of one worker."""

    def __init__(
        self,
        worker: StageWorker,
        pipeline: Pipeline,
        forward: Callable[[Any], Any],
        micros: Sequence[Any],
        weights: Sequence[float],
        seeds: Sequence[tuple[int, ...]],
    ) -> None:
        self._worker, self._device = worker, worker.device
        self._pipeline, self._forward, self._micros = pipeline, forward, micros
        self._weights, self._seeds = weights, seeds
        num = pipeline.num_micro
        if len(micros) != num or len(weights) not in (0, num) or len(seeds) not in (0, num):
            raise ValueError(
                f"{len(micros)} micro-batches, {len(weights)} weights and {len(seeds)} seeds were passed to a schedule "
                f"for {num}. Pass one of each for every micro-batch (seeds may be left out)."
            )
        self._known = [worker.learn(forward, micro) for micro in micros]
        if weights:
            self._check_losses()
        self._check_draws()
        self._exchange = StageExchange(
            pipeline, worker.worker_index, worker.link, contents=self._contents, device=worker.device
        )
        self._kept: dict[tuple[int, int], _MicroBatchState] = {}
        self._results: dict[int, Any] = {}
        self._clock = _DeviceTimer(self._device)
        self._peak = 0

    def run(self) -> PipelineStepResult:
        begin = self._clock.now()
        spans = []
        do = {
            FORWARD: self._do_forward,
            BACKWARD: self._do_backward,
            BACKWARD_INPUT: self._do_backward_input,
            BACKWARD_WEIGHT: self._do_backward_weight,
        }
        for action in self._pipeline.orders[self._worker.worker_index]:
            message = needed(action, self._pipeline.num_stages)
            arrived = self._exchange.take(message) if message else {}
            start = self._clock.now()
            self._worker.before(action)
            values = do[action.kind](action, arrived)
            self._worker.after(action)
            spans.append((action, start, self._clock.now()))
            if sent := made(action, self._pipeline.num_stages):
                self._exchange.send(sent, values)
        self._exchange.finish()
        end = self._clock.now()
        return PipelineStepResult(
            results=self._results,
            spans=tuple((a, self._clock.seconds(start), self._clock.seconds(stop)) for a, start, stop in spans),
            begin=self._clock.seconds(begin),
            end=self._clock.seconds(end),
            peak_in_flight=self._peak,
        )

    # --------------------------------------------------------------------------------------------------------- actions

    def _do_forward(self, action: Action, arrived: dict[int, Tensor]) -> dict[int, Tensor]:
        tape, value_route = self._known[action.micro]
        for number, tensor in arrived.items():
            tensor.requires_grad_(tape.values[number].has_gradient)
        with self._worker.around(action):
            part = self._worker.replayer.replay(
                self._forward,
                self._micros[action.micro],
                tape=tape,
                route=value_route,
                stage=action.stage,
                received=arrived,
                seed=self._seeds[action.micro] if self._seeds else None,
            )
        loss = None
        if action.stage == self._pipeline.num_stages - 1:
            self._results[action.micro] = part.result.detach() if self._weights else part.result
            loss = part.result if self._weights else None
        if self._weights:
            kept = {n: part.values[n] for n in self._returning(action) if part.values[n].requires_grad}
            self._kept[action.stage, action.micro] = _MicroBatchState(arrived, kept, loss)
            self._peak = max(self._peak, len(self._kept))
        return {number: tensor.detach() for number, tensor in part.values.items()}

    def _do_backward(self, action: Action, arrived: dict[int, Tensor]) -> dict[int, Tensor]:
        kept = self._kept.pop((action.stage, action.micro))
        torch.autograd.backward(*self._starts(kept, action, arrived))
        return {
            number: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for number, leaf in kept.received.items()
            if leaf.requires_grad
        }

    def _do_backward_input(self, action: Action, arrived: dict[int, Tensor]) -> dict[int, Tensor]:
        kept = self._kept[action.stage, action.micro]
        leaves = {number: leaf for number, leaf in kept.received.items() if leaf.requires_grad}
        kept.halves = SplitBackward(*self._starts(kept, action, arrived), leaves)
        found = kept.halves.do_inputs()
        kept.received, kept.values, kept.loss = {}, {}, None
        return {number: found[number] if number in found else torch.zeros_like(leaf) for number, leaf in leaves.items()}

    def _do_backward_weight(self, action: Action, _: dict[int, Tensor]) -> dict[int, Tensor]:
        halves = self._kept.pop((action.stage, action.micro)).halves
        if halves is not None:
            halves.do_weights()
        return {}

    def _starts(
        self, kept: _MicroBatchState, action: Action, arrived: Mapping[int, Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors at which backward begins, and the gradients there."""
        tensors, gradients = list(kept.values.values()), [arrived[number] for number in kept.values]
        if kept.loss is not None and kept.loss.requires_grad:
            tensors.append(kept.loss)
            gradients.append(torch.full_like(kept.loss, self._weights[action.micro]))
        return tensors, gradients

    # -------------------------------------------------------------------------------------------------------- messages

    def _returning(self, action: Action) -> tuple[int, ...]:
        """Return values of this stage's forward whose gradients will come back."""
        value_route = self._known[action.micro][1]
        return value_route.with_gradient[action.stage] if action.stage < len(value_route.with_gradient) else ()

    def _contents(self, message: StageMessage) -> dict[int, tuple[TensorSpec, str]]:
        tape, value_route = self._known[message.micro]
        numbers = value_route.crossing[message.by] if message.kind == FORWARD else value_route.with_gradient[message.to]
        return {number: (tape.values[number].spec, tape.values[number].says) for number in numbers}

    def _check_losses(self) -> None:
        for tape, _ in self._known:
            specs = [tape.values[number].spec for number in tape.results]
            if len(specs) != 1 or specs[0].shape != () or not specs[0].requires_grad:
                kinds = ", ".join(map(str, specs)) or "nothing that a unit made"
                raise PlanError(
                    f"with stages the forward must return the loss: one number that requires a gradient. This one "
                    f"returns {kinds}. Return the mean (or the sum, and divide by the weights) of the micro-batch."
                )

    def _check_draws(self) -> None:
        """Refuse random numbers that would differ between stages, or from those of one process."""
        for tape, value_route in self._known:
            places: dict[int, set[int]] = {}
            for draw in tape.draws:
                stage = value_route.stage_of[draw.unit] if draw.unit >= 0 else -1
                places.setdefault(draw.after, set()).add(stage)
                if stage < 0 and not self._seeds:
                    raise PlanError(
                        f"random numbers are drawn at {draw.where}, between units, by each stage on its own, so they "
                        "would differ. Pass seeds, or draw them inside a unit."
                    )
                if self._seeds and len(places[draw.after]) > 1:
                    raise PlanError(
                        f"random numbers are drawn at {draw.where}, between units, where another stage draws some. "
                        "Draw them inside a unit, or partition the model so that both are on one stage."
                    )


class _DeviceTimer:
    """Reads the time: of the host on the CPU, of the stream on a GPU, where the host only launches the work."""

    def __init__(self, device: torch.device) -> None:
        self._on_stream = device.type == "cuda"
        self._first: Any = self.now()

    def now(self) -> Any:
        if not self._on_stream:
            return time.perf_counter()
        moment = torch.cuda.Event(enable_timing=True)
        moment.record()
        return moment

    def seconds(self, moment: Any) -> float:
        """Return seconds since the timer was made; on a GPU it waits until the moment has come."""
        if not self._on_stream:
            return moment - self._first
        moment.synchronize()
        return self._first.elapsed_time(moment) / 1000
