"""A step's micro-batches on their way through a model's stages, for one loss or one evaluation.

All workers of the stages walk together (`StageWorker`). Around each of a worker's parts of a forward its buffers are
put in place and looked at; what is returned is known on the worker of the last stage alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline.errors import PlanError
from paceline.parallel.precision import computing
from paceline.parallel.stages.run import MOST_KINDS, Outcome, StageWorker, bubble_share
from paceline.schedule.pipeline import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Pipeline
from paceline.schedule.timeline import ideal_bubble_share
from paceline.worker import randomness
from paceline.worker.buffers import BufferCombiner
from paceline.worker.losses import single, split_loss

if TYPE_CHECKING:
    from paceline.worker.stages import StagedModel

__all__ = ["Pipelined", "StepLoss"]

TOLD_AT = 5  # steps; the first one, which learns, is not measured
LARGE_GAP = 0.1  # of a step, beyond which more micro-batches are worth a word


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepLoss:
    """A micro-batch's loss as the last stage knows it: a mean, or a sum with the count that it is over."""

    value: Tensor
    count: Any = None


class Pipelined:
    """How micro-batches go through a model's stages for one loss (or evaluation), and what is learnt of its forward."""

    def __init__(self, staged: StagedModel, loss_of: Callable[[Any], Any]) -> None:
        self.staged, self.loss_of = staged, loss_of
        self.waited_s = 0.0  # for other stages, in all
        self._worker = StageWorker(
            staged.model,
            units=staged.units,
            cut=staged.cut,
            pipeline=staged.pipeline(1),
            worker_index=staged.group.index,
            link=staged.link,
            device=staged.device,
        )
        self._parameters = tuple(staged.model.parameters())
        self._trained: list[bool] = []
        self._is_mean: bool | None = None
        self._count: Any = None  # of the newest loss; None: it is a mean
        self._counts: dict[int, Any] = {}  # of each micro-batch's
        self._checked: set[int] = set()  # ids of tapes, which the worker keeps
        self._is_told = False  # that shapes keep changing
        self._usual_micros, self._walks = 0, list[tuple[float, float]]()  # of a step; how long it was busy, and in all

    def step(
        self,
        micros: Sequence[Any],
        *,
        sizes: Sequence[int],
        void: Sequence[bool],
        num_step: int,
        seeds: Sequence[tuple[int, ...]],
        buffers: BufferCombiner,
    ) -> list[StepLoss]:
        """Run forward and backward of micro-batches of these sizes; returns their losses, on the last stage's worker.

        Each counts by its share of the step's `num_step` samples, and for nothing where it is `void`, which the last
        ones may be. All workers of the stages must call it.
        """
        if not micros:
            return []
        staged = self.staged
        self._worker.pipeline = pipeline = staged.pipeline(len(micros))

        @contextlib.contextmanager
        def around(action: Action) -> Iterator[None]:
            randomness.seed_all(*seeds[action.micro])  # numpy's generator as well, which no unit's own seeds reach
            buffers.rewind(afresh=True)
            yield
            if void[action.micro]:
                buffers.undo(afresh=True)
                self._counted(action)
                return
            is_first = action.stage == staged.own_stages[0]
            buffers.capture(
                sizes[action.micro], among=lambda module: staged.is_of_stage(module, action.stage), is_new=is_first
            )
            self._counted(action)

        self._learn(self._loss, micros)
        factors = [
            0.0 if is_void else size / num_step if self._is_mean else 1.0 / num_step
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

        self._worker.around, self._worker.before, self._worker.after, self._counts = around, before, after, {}
        outcome = self._worker.step(self._loss, micros, weights=factors, seeds=seeds)
        self._note(outcome, pipeline)
        return [StepLoss(value=outcome.results[m], count=self._counts[m]) for m in sorted(outcome.results)]

    def evaluate(
        self, micros: Sequence[Any], *, around: Callable[[int], contextlib.AbstractContextManager[None]]
    ) -> list[Any]:
        """Run forwards alone, and return what they return, on the last stage's worker.

        `around(place)` surrounds each of this worker's parts of a micro-batch's forward.
        """
        self._worker.pipeline = self.staged.pipeline(len(micros))
        self._learn(self._output, micros)
        self._worker.around = lambda action: around(action.micro)
        self._worker.before = self._worker.after = lambda _: None
        outcome = self._worker.evaluate(self._output, micros)
        return [outcome.results[m] for m in sorted(outcome.results)]

    def _learn(self, forward: Callable[[Any], Any], micros: Sequence[Any]) -> None:
        """Record forwards of kinds that are met for the first time; refuses those that need what is not here."""
        trained = [parameter.requires_grad for parameter in self._parameters]
        if trained != self._trained:  # frozen or thawed, on all workers alike: other values have gradients
            self._worker.forget()
            self._trained = trained
            self._checked.clear()
        if forgotten := self._worker.trim():
            self._checked.difference_update(map(id, forgotten))
            if not self._is_told:
                self._is_told = True
                self.staged.note(
                    f"the shapes of micro-batches keep changing: of more than {MOST_KINDS} kinds the oldest are "
                    "forgotten and recorded anew, which takes time; pad to a few lengths"
                )
        for micro in micros:
            with self.staged.still():
                tape, way = self._worker.learn(forward, micro)
            if id(tape) in self._checked:
                continue
            self._checked.add(id(tape))
            for name, users in tape.parameters.items():
                lacking = {way.stage_of[unit] for unit in users} - set(self.staged.cut.parameters[name])
                if lacking:
                    raise PlanError(
                        f"{name} is used on stage {min(lacking)}, which does not have it: the sample that the "
                        "model was cut by did not use it there. Give worker.prepare(model, sample=...) a batch like "
                        "those of the training, with all arguments."
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
        """Note the count of the loss that has just been formed, where that is this worker's."""
        if action.stage != self.staged.cut.num_stages - 1:
            return
        if isinstance(self._count, Tensor) and self._count.is_meta:
            raise PlanError(
                "the count that the loss returns beside its sum hangs on what units of other stages made; with stages "
                "compute it from the inputs, as in (target != -100).sum()"
            )
        self._counts[action.micro] = self._count

    def _note(self, outcome: Outcome, pipeline: Pipeline) -> None:
        """Book the wait, and say once how it compares with the schedule's ideal."""
        self.waited_s += outcome.whole_s - outcome.busy_s
        self._usual_micros = self._usual_micros or pipeline.num_micro
        if len(self._walks) >= TOLD_AT or pipeline.num_micro != self._usual_micros:
            return  # the last step of an epoch may be short
        self._walks.append((outcome.busy_s, outcome.whole_s))
        if len(self._walks) < TOLD_AT:
            return
        steps = list(zip(*self.staged.group.gather_objects(self._walks[1:]), strict=True))
        share, ideal = sum(map(bubble_share, steps)) / len(steps), ideal_bubble_share(pipeline)
        text = (
            f"pipeline {pipeline.name} of {pipeline.num_stages} stages, {pipeline.num_micro} micro-batches: workers "
            f"wait {share:.0%} of a step, the schedule's ideal is {ideal:.0%}"
        )
        if ideal > LARGE_GAP and pipeline.num_micro < 4 * pipeline.num_workers:
            text += "; with more micro-batches (a smaller Batch.micro) it is less"
        self.staged.note(text)
