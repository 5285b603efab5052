"""Pipeline parallel models: this worker's stages of a model, and a step's way through the stages.

All workers of a replica's stages are given the same micro-batches, and run the model's own forward and the loss on
each, in which other stages' units are skipped (see `parallel.pipeline`). The worker of the last stage has the losses.
Parameters that two stages share have a *home*, the first of the two: it sums their gradients (`tied_gradients.py`), and
its state is saved.

A `PipelinePass` runs a step's micro-batches for one loss or one evaluation. Around each part of a forward on this
worker its buffers are rewound before, and captured afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.group import WorkerGroup
from paceline.errors import PlanError
from paceline.parallel.class_name import class_name
from paceline.parallel.fully_sharded.sharded_model import ShardedModels
from paceline.parallel.model_copies import refuse_copies
from paceline.parallel.model_units import ModelUnit
from paceline.parallel.partial_state import reading_parts
from paceline.parallel.pipeline.forward_hooks import refuse_backward_hooks
from paceline.parallel.pipeline.stage_partition import StagePartition, keep_stages
from paceline.parallel.pipeline.stage_transfer import StageTransport
from paceline.parallel.pipeline.stage_worker import MOST_KINDS, PipelineStepResult, StageWorker, bubble_share
from paceline.parallel.precision import computing
from paceline.plan import Layout
from paceline.schedule.micro_batches import MicroBatch
from paceline.schedule.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Pipeline, build
from paceline.schedule.pipeline_timeline import ideal_bubble_share
from paceline.units import bytes_text
from paceline.worker.data import random_state
from paceline.worker.step.losses import single, split_loss
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.step.recorded_state import left_as_it_was

__all__ = ["MicroBatchLoss", "PipelineModel", "PipelinePass"]


class PipelineModel:
    """One worker's stages of a model; its constructor moves all other stages to the meta device."""

    def __init__(
        self,
        model: nn.Module,
        *,
        units: Sequence[ModelUnit],
        partition: StagePartition,
        layout: Layout,
        group: WorkerGroup,
        link: StageTransport,
        device: torch.device,
        precision: str,
        note: Callable[[str], None],
        still: Callable[[], AbstractContextManager[None]],
        shards: ShardedModels,
    ) -> None:
        """`group`: the workers of this replica's stages. `note` shows the user a sentence. Under `still()` tensor
        parallel layers and sharded rows do not communicate. `shards`: the fully sharded models."""
        self.model, self.units, self.partition, self.group, self.link = model, units, partition, group, link
        self.device, self.precision, self.note, self.still = device, precision, note, still
        self.shards = shards
        self._layout = layout
        self._pipelines: dict[int, Pipeline] = {}
        self._evaluations: dict[Any, PipelinePass] = {}
        shape = self.pipeline(1)
        self.own_stages = shape.stages_of(group.index)
        self._worker_of = shape.worker_of
        stage_of = {unit.name: partition.stage_of(unit.name) for unit in units}
        self._stage_of_module = {inner: stage_of[unit.name] for unit in units for inner in unit.module.modules()}
        names = {id(buffer): name for name, buffer in model.named_buffers()}
        for module in set(model.modules()) - self._stage_of_module.keys():  # of no unit: where its buffers are updated
            homes = {partition.buffers[names[id(buffer)]][0] for buffer in module.buffers(recurse=False)}
            if (home := max(homes, default=0)) in self.own_stages:
                self._stage_of_module[module] = home
        self.headline = self._headline()
        keep_stages(model, partition, self.own_stages)
        refuse_copies(model, f"Layout(stages={partition.num_stages})", "stages of the others")
        self._is_running = False
        model.register_forward_pre_hook(self._before_forward)

    def pipeline(self, num_micro: int) -> Pipeline:
        """The layout's schedule for this number of micro-batches."""
        if num_micro not in self._pipelines:
            self._pipelines[num_micro] = build(
                self._layout.schedule,
                num_workers=self._layout.stages,
                num_micro=num_micro,
                stages_per_worker=self._layout.stages_per_worker,
            )
        return self._pipelines[num_micro]

    def homes(self) -> dict[str, int]:
        """For each entry of the model's state dict, extra state included: the stages' worker that saves it."""
        model, found = self.model, dict[str, int]()
        for named, stages in (
            (model.named_parameters, self.partition.parameters),
            (model.named_buffers, self.partition.buffers),
        ):
            first = {id(tensor): name for name, tensor in named()}
            for name, tensor in named(remove_duplicate=False):
                found[name] = self._worker_of(stages[first[id(tensor)]][0])
        with reading_parts():
            names = list(model.state_dict())
        for name in names:
            if name not in found:
                above = name.rpartition(".")[0]
                weight = above
                while weight and weight not in found:  # what a module keeps beside a weight: "fc.weight.absmax"
                    weight = weight.rpartition(".")[0]
                found[name] = found[weight] if weight else self._worker_of(self._stage_of(model, above))
        return found

    def _stage_of(self, model: nn.Module, name: str) -> int:
        return self._stage_of_module.get(model.get_submodule(name), 0)

    def own_units(self) -> list[tuple[str, nn.Module]]:
        """The units of this worker's stages that share no parameters with each other, with their names."""
        own = [unit for unit in self.units if self.partition.stage_of(unit.name) in self.own_stages]
        held = [{id(parameter) for parameter in unit.module.parameters()} for unit in own]
        return [
            (unit.name, unit.module)
            for index, unit in enumerate(own)
            if not any(held[index] & other for number, other in enumerate(held) if number != index)
        ]

    def shared(self) -> list[tuple[str, Parameter, tuple[int, ...]]]:
        """Parameters here that stages of other workers share: name, parameter, and the workers' indices, the home
        first.
        """
        parameters, found = dict(self.model.named_parameters()), []
        for name, stages in sorted(self.partition.shared.items()):
            holders = tuple(dict.fromkeys(self._worker_of(stage) for stage in stages))
            if len(holders) > 1 and self.group.index in holders:
                found.append((name, parameters[name], holders))
        return found

    def is_of_stage(self, module: nn.Module, stage: int) -> bool:
        """Whether a module's own forward belongs to this stage; the root module's belongs to this worker's first
        stage.
        """
        return self._stage_of_module.get(module, self.own_stages[0]) == stage

    def evaluation(self, forward: Callable[[Any], Any], *, key: Any) -> PipelinePass:
        """The pass for evaluations with the same `key`; what it has recorded of their forward is kept between
        evaluations.
        """
        if key not in self._evaluations:
            self._evaluations[key] = PipelinePass(self, forward)
        self._evaluations[key].loss_of = forward
        return self._evaluations[key]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While entered, the model may be called."""
        former, self._is_running = self._is_running, True
        try:
            yield
        finally:
            self._is_running = former

    def _before_forward(self, *_: Any) -> None:
        if not self._is_running:
            raise RuntimeError(
                f"{class_name(self.model)} was called outside of step(batch) and worker.evaluate(...), but under "
                f"Layout(stages={self._layout.stages}) this worker has only a part of it. Train by step = "
                "worker.stepper(model, optim, loss), measure by worker.evaluate(model, dataset, measures). For "
                "model.generate(...) give whole weights to a model of your own: weights = worker.state_dict(model). A "
                "model that is only asked within another one's step (a teacher) need not be prepared: it runs whole on "
                "every stage"
            )

    def _headline(self) -> str:
        sizes = {id(tensor): tensor.nbytes for tensor in [*self.model.parameters(), *self.model.buffers()]}
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        stages_of = {**self.partition.parameters, **self.partition.buffers}
        texts: list[str] = []
        for stage, names in enumerate(self.partition.stages):
            num_bytes = sum(sizes[id(tensor)] for name, tensor in named if stage in stages_of[name])
            what = ", ".join(names) if len(names) < 4 else f"{names[0]} to {names[-1]} ({len(names)} units)"
            texts.append(f"{what}: {bytes_text(num_bytes)}")
        return f"{class_name(self.model)} is partitioned into {len(texts)} stages: " + "; ".join(texts)


REPORT_AT_STEP = 5  # steps; the first one, which records forwards, is not measured
LARGE_BUBBLE_GAP = 0.1  # of a step, above which more micro-batches are recommended


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchLoss:
    """A micro-batch's loss on the last stage: a mean, or a sum with its count."""

    value: Tensor
    count: Any = None


class PipelinePass:
    """Runs micro-batches through a model's stages for one loss or evaluation, by tapes that it records of forwards."""

    def __init__(self, staged: PipelineModel, loss_of: Callable[[Any], Any]) -> None:
        self.staged, self.loss_of = staged, loss_of
        self.waited_s = 0.0  # for other stages, in all
        self._worker = StageWorker(
            staged.model,
            units=staged.units,
            partition=staged.partition,
            pipeline=staged.pipeline(1),
            worker_index=staged.group.index,
            link=staged.link,
            device=staged.device,
        )
        self._worker.recording = lambda: left_as_it_was(self.loss_of, staged.model)
        self._parameters = tuple(staged.model.parameters())
        self._trained: list[bool] = []
        self._is_mean: bool | None = None
        self._count: Any = None  # of the newest loss; None: it is a mean
        self._counts: dict[int, Any] = {}  # of each micro-batch's
        self._checked: set[int] = set()  # ids of tapes, which the worker keeps
        self._has_warned = False  # that shapes keep changing
        self._usual_micros = 0  # of a step
        self._timings: list[tuple[float, float]] = []  # of each step: busy seconds, and seconds in all

    def step(
        self,
        micros: Sequence[Any],
        *,
        parts: Sequence[MicroBatch],
        void: Sequence[bool],
        num_step: int,
        seeds: Sequence[tuple[int, ...]],
        buffers: BufferAverager,
        around: Callable[[int], AbstractContextManager[None]],
        loss_scale: float = 1.0,
    ) -> list[MicroBatchLoss]:
        """Run forward and backward of the micro-batches' data; returns their losses, on the last stage's worker.

        `around(number)` surrounds each of this worker's parts of that micro-batch's forward.
        Each counts by its share of the step's `num_step` samples, times `loss_scale` in backward; a `void` one, which
        only the last ones may be, does not count. All workers of the stages must call it.
        """
        if not micros:
            return []
        staged, sizes = self.staged, [part.num_samples for part in parts]
        refuse_backward_hooks(
            staged.model, [one.module for one in staged.units], f"Layout(stages={staged.partition.num_stages})"
        )
        self._worker.pipeline = pipeline = staged.pipeline(len(micros))

        @contextlib.contextmanager
        def around_action(action: Action) -> Iterator[None]:
            random_state.seed_all(*seeds[action.micro])  # also numpy's generator, which the units' own seeds do not set
            buffers.rewind(afresh=True)
            with around(action.micro):
                yield
            if void[action.micro]:
                buffers.undo(afresh=True)
                self._counted(action)
                return
            is_first = action.stage == staged.own_stages[0]
            buffers.capture(
                sizes[action.micro],
                parts[action.micro],
                among=lambda module: staged.is_of_stage(module, action.stage),
                is_new=is_first,
            )
            self._counted(action)

        self._learn(self._loss, micros)
        factors = [
            0.0 if is_void else (size / num_step if self._is_mean else 1.0 / num_step) * loss_scale
            for size, is_void in zip(sizes, void, strict=True)
        ]
        last = {action.stage: action for action in pipeline.orders[staged.group.index] if action.kind != FORWARD}

        def before(action: Action) -> None:
            staged.shards.before_run(is_last=last.get(action.stage) is action, is_void=void[action.micro])
            if action.kind == BACKWARD_WEIGHT:
                staged.shards.before_weights(staged.model)

        def after(action: Action) -> None:
            if action.kind == BACKWARD_INPUT:
                staged.shards.after_inputs(staged.model)
            elif action.kind == BACKWARD_WEIGHT:
                staged.shards.after_weights(staged.model, is_last=last.get(action.stage) is action)

        self._worker.around, self._worker.before, self._worker.after = around_action, before, after
        self._counts = {}
        outcome = self._worker.step(self._loss, micros, weights=factors, seeds=seeds)
        self._note(outcome, pipeline)
        return [MicroBatchLoss(value=outcome.results[m], count=self._counts[m]) for m in sorted(outcome.results)]

    def evaluate(
        self, micros: Sequence[Any], *, around: Callable[[int], contextlib.AbstractContextManager[None]]
    ) -> list[Any]:
        """Run forwards only; returns their results on the last stage's worker.

        `around(number)` surrounds each of this worker's parts of that micro-batch's forward.
        """
        self._worker.pipeline = self.staged.pipeline(len(micros))
        self._learn(self._output, micros)
        self._worker.around = lambda action: around(action.micro)
        self._worker.before = self._worker.after = lambda _: None
        outcome = self._worker.evaluate(self._output, micros)
        return [outcome.results[m] for m in sorted(outcome.results)]

    def try_forward(self, micro: Any) -> list[Any]:
        """Run the forward of a micro-batch once more, without gradients; all workers of the stages must call it.

        Returns its loss on the worker of the last stage, and nothing on others."""
        self.staged.shards.close()  # recorded are registered parameters, not those that another forward has gathered
        self._worker.pipeline = self.staged.pipeline(1)
        self._learn(self._loss, [micro])
        self._worker.around = lambda _: contextlib.nullcontext()
        self._worker.before = self._worker.after = lambda _: None
        return list(self._worker.evaluate(self._loss, [micro]).results.values())

    def _learn(self, forward: Callable[[Any], Any], micros: Sequence[Any]) -> None:
        """Record forwards of shapes that are new. Raises PlanError for those that use parameters of another stage."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:  # frozen or unfrozen, on all workers alike: other values have gradients
            self._worker.forget()
            self._trained = trained
            self._checked.clear()
        if forgotten := self._worker.trim():
            self._checked.difference_update(map(id, forgotten))
            if not self._has_warned:
                self._has_warned = True
                self.staged.note(
                    f"the shapes of micro-batches keep changing: of more than {MOST_KINDS} kinds the oldest are "
                    "forgotten and recorded anew, which takes time; pad to a few lengths"
                )
        for micro in micros:
            with self.staged.still():
                tape, partition = self._worker.learn(forward, micro)
            if id(tape) in self._checked:
                continue
            self._checked.add(id(tape))
            for name, users in tape.parameters.items():
                lacking = {partition.stage_of[unit] for unit in users} - set(self.staged.partition.parameters[name])
                if lacking:
                    raise PlanError(
                        f"{name} is used on stage {min(lacking)}, which does not have it: the sample that the "
                        "model was partitioned by did not use it there. Where the loss computes a penalty on weights, "
                        "give it to worker.stepper(..., penalty=fn): fn(name, parameter) gets each parameter whole. "
                        "Else give worker.prepare(model, sample=...) a batch like those of the training, with all "
                        "arguments."
                    )

    def _output(self, micro: Any) -> Any:
        with computing(self.staged.precision, self.staged.device), self.staged.running():
            return self.loss_of(micro)

    def _loss(self, micro: Any) -> Tensor:
        with computing(self.staged.precision, self.staged.device), self.staged.running():
            value, count = split_loss(self.loss_of(micro))
            value = single(value)
        if self._is_mean is None:
            self._is_mean = count is None
        elif self._is_mean != (count is None):
            raise PlanError(
                "the loss is a mean for some micro-batches and (sum, count) for others; with stages it must be one of "
                "them, since a micro-batch's weight is needed before its loss. Return (sum, count) for all"
            )
        self._count = count
        return value

    def _counted(self, action: Action) -> None:
        """Note the count of the loss that has just been computed, on the last stage."""
        if action.stage != self.staged.partition.num_stages - 1:
            return
        if isinstance(self._count, Tensor) and self._count.is_meta:
            raise PlanError(
                "the count that the loss returns beside its sum depends on outputs of other stages; with stages "
                "compute it from the inputs, as in (target != -100).sum()"
            )
        self._counts[action.micro] = self._count

    def _note(self, outcome: PipelineStepResult, pipeline: Pipeline) -> None:
        """Count the wait, and report once how it compares with the schedule's ideal."""
        self.waited_s += outcome.whole_s - outcome.busy_s
        self._usual_micros = self._usual_micros or pipeline.num_micro
        if len(self._timings) >= REPORT_AT_STEP or pipeline.num_micro != self._usual_micros:
            return  # the last step of an epoch may be short
        self._timings.append((outcome.busy_s, outcome.whole_s))
        if len(self._timings) < REPORT_AT_STEP:
            return
        steps = list(zip(*self.staged.group.gather_objects(self._timings[1:]), strict=True))
        share, ideal = sum(map(bubble_share, steps)) / len(steps), ideal_bubble_share(pipeline)
        text = (
            f"pipeline {pipeline.name} of {pipeline.num_stages} stages, {pipeline.num_micro} micro-batches: workers "
            f"wait {share:.0%} of a step, the schedule's ideal is {ideal:.0%}"
        )
        if ideal > LARGE_BUBBLE_GAP and pipeline.num_micro < 4 * pipeline.num_workers:
            text += "; with more micro-batches (a smaller Batch.micro) it is less"
        self.staged.note(text)
