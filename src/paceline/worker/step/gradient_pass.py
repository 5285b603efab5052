"""Gradient accumulation over a step's micro-batches, then one all-reduce that commits the step on all workers.

A *gradient pass* is one forward and backward over all micro-batches of a step. Before each micro-batch, random state is
seeded and buffers are rewound. Each loss is scaled by its share of the step's real samples, so the sum over
micro-batches and workers is the gradient of the mean over the global batch. Where losses come as (sum, count), say over
tokens, the count is known only afterwards: gradients are formed per sample, and multiplied by samples / count once all
counts are in. In fp16 each loss is also multiplied by the loss scale (`loss_scale`), which is taken out of gradients
before they are summed.

With pipeline parallelism all micro-batches of a replica go through the stages in one run, by a schedule.

The workers of a split replica exchange tensors in each run, so all of them make as many runs. A worker with fewer
micro-batches runs one again at the end, *void*: its loss is multiplied by 0, and nothing of it is kept.

The *step metadata* travels with the last bucket: the batch's number, which must be the same everywhere, whether a
worker wants a change between two steps, the sums of losses and of weights, the parameters that a worker used, and the
buffers that changed. In an elastic run a vote comes last: until then nothing outside of the pass has changed. Where
a worker got no memory, all know it by the metadata, and the pass is void (`memory_shortage`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.comm.group import Disrupted, WorkerGroup
from paceline.errors import SyncError
from paceline.host_memory import is_out_of_memory
from paceline.parallel.fully_sharded.sharded_model import ShardedModels
from paceline.parallel.gradient_queries import backward_calls
from paceline.parallel.precision import computing, computing_body, input_dtype
from paceline.plan import ParameterServer, Plan
from paceline.schedule.micro_batches import MicroBatch
from paceline.sync.allreduce.gradient_reducer import GradientReducer
from paceline.worker.data import random_state
from paceline.worker.data.micro_batch_size import MicroBatchSize
from paceline.worker.data.step_batch import StepBatch, to_device
from paceline.worker.step.buffer_trial import BufferTrials
from paceline.worker.step.forward_writes import ForwardWrites
from paceline.worker.step.grad_scaler import scaled_losses
from paceline.worker.step.gradient_noise_scale import GradientNoiseScale
from paceline.worker.step.loss_scale import LossScale
from paceline.worker.step.losses import (
    WEIGHT_UNIT,
    LossLike,
    LossSpike,
    LossSpikeDetector,
    as_weight,
    halves_of,
    loss_and_weight,
    single,
    split_loss,
    weighed,
)
from paceline.worker.step.memory_shortage import MemoryShortage, PassOutOfMemory
from paceline.worker.step.micro_batch_observer import MicroBatchObserver, observed
from paceline.worker.step.model_buffers import UNKNOWN, BufferAverager
from paceline.worker.step.optimizer_agreement import OptimizerAgreement
from paceline.worker.step.parameter_hooks import ParameterHooks
from paceline.worker.step.state_trial import StateTrials
from paceline.worker.step.step_outcome import StepInvalidated, StepOutcome, StepVote, SummedMetadata
from paceline.worker.step.trial_runs import TrialRuns
from paceline.worker.step.unit_draws import UnitDraws
from paceline.worker.topology.parallel_groups import ParallelGroups

if TYPE_CHECKING:
    from paceline.worker.step.pipeline_stages import PipelinePass

__all__ = ["StepExecutor"]

SERIALS = 16  # batches are compared by their number modulo this: sums of squares stay exact in single precision
TRAILS = 1 << 24  # hashes of what was gathered: their sums over workers are exact

NOISE_EACH, NOISE_EVERY = 300, 10  # the noise scale is measured in so many first steps, then in every tenth


class StepExecutor:
    """Runs gradient passes, one at a time, for one worker."""

    def __init__(
        self,
        plan: Plan,
        *,
        group: WorkerGroup,
        consensus: StepVote,
        device: torch.device,
        axes: ParallelGroups,
        measures_noise: bool,
        num_shares: Callable[[], int] = lambda: 1,
        sizes: MicroBatchSize | None = None,
    ) -> None:
        """`group`: the workers that sum gradients at the end of a pass; `axes`: the groups of their replicas, or of one
        replica that takes steps by itself. `num_shares`: among how many workers the run's micro-batches, or parts of
        their forward, are spread now. `sizes`: of micro-batches, which the loop may halve."""
        self.buffers = BufferAverager()
        self.shards = ShardedModels()
        self.hooks = ParameterHooks(refusal=_why_no_hooks(plan))
        self.agreement = OptimizerAgreement()
        self.observer: MicroBatchObserver | None = None
        self.unit_draws: UnitDraws | None = None
        self.writes = ForwardWrites(is_alone=lambda: group.size == 1 or isinstance(plan.sync, ParameterServer))
        self.autocasts_body = True  # around all of a micro-batch; False: the caller's models do so in their forwards
        self.outcome: StepOutcome | None = None  # of the last pass; None during one, or when it was left early
        self._has_begun = False  # its first pass
        self._sizes = sizes or MicroBatchSize(plan.batch)
        self.shortage = MemoryShortage(plan, self._sizes, is_split=axes.is_split)
        self._plan, self._group, self._consensus, self._device = plan, group, consensus, device
        self._axes = axes
        self.loss_scale = LossScale(plan.compute)
        scaled_losses.install(is_refused=self.loss_scale.is_used)
        self.runs = TrialRuns(plan, self.buffers, self.shards, device)
        self.state = StateTrials(self.runs, is_alone=lambda: num_shares() == 1, is_split=plan.layout.workers_each > 1)
        self._buffer_trials = BufferTrials(plan, self.buffers, self.runs)
        self.losses = LossSpikeDetector(plan.guard)
        self.noise = GradientNoiseScale()
        # Context parallel workers that sum at once have gradients of tokens, and none of samples.
        self._measures_noise = measures_noise and not axes.spans_context
        self._precision = plan.compute.precision
        self._preserved_random_state = random_state.PreservedRandomState()
        self._batch: StepBatch | None = None  # set during a pass
        self._gradients: GradientReducer | None = None
        self._micro: MicroBatch | None = None
        self._losses: list[tuple[Tensor, Tensor | float, bool]] = []  # value, weight, whether the value is a mean
        self._ran: list[MicroBatch] = []  # the micro-batches of these losses
        self.broken: tuple[MicroBatch, ...] = ()  # of this worker, in the last pass: their losses were not finite
        self.nonfinite_gradients: tuple[str, ...] | None = None  # of this worker, where its losses are finite
        self._checks_gradients = plan.guard.on_spike != "none"  # before they are summed
        self.penalty = 0.0  # on the weights, of this pass: `is_finite` adds it, which the stepper gives
        self._is_backward_done = False
        self._waited_before_s = 0.0  # inside the replica, before this pass
        self._stages_waited_s = 0.0  # for other stages, in all

    @property
    def under_way(self) -> bool:
        return self._batch is not None

    def run(
        self,
        batch: StepBatch,
        gradients: GradientReducer,
        *,
        is_finite: Callable[[], bool] | None = None,
        forward: Callable[[Any], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield this worker's micro-batches on its device; after the last one the pass is committed on all workers.

        All workers must iterate over the batch to its end, also those whose share is empty. `is_finite()` judges the
        averaged gradients, equally on all workers; by default each of them is checked. `forward` runs a micro-batch, if
        it is not the caller's own code that does. A pass that is left early changes nothing.
        """
        with self._opened_pass(batch, gradients):
            self._begin_trials(forward, loss_of=forward)
            with self._preserved_random_state:
                for number, (read, micro, is_void) in enumerate(batch.runs()):
                    data: Any = None
                    with self.shortage.survived():
                        data = to_device(batch.read(read), self._device, input_dtype(self._precision))
                    if self.shortage.text:
                        break
                    batch.is_void = is_void
                    self._open_micro(batch, micro, gradients, is_last=number == batch.num_runs - 1)
                    around = computing_body if not self.autocasts_body else computing
                    with around(self._precision, self._device), self._draws(batch, micro):
                        yield data
                    if self.shortage.text:
                        break
                    if is_void:
                        self.buffers.undo()
                    elif not self._is_backward_done:
                        self.buffers.capture(micro.num_samples, micro)
                    if number == 0 and batch.num_runs > 1 and not self.shards.reduces_on_last_pass:
                        has_weight = bool(self._losses) and self._axes.counts
                        gradients.note_first(weight=float(self._losses[0][1]) if has_weight else 0.0)
            if len(batch) and gradients.has_any() and not self._losses and not self.shortage.text:
                raise RuntimeError(
                    "loss.backward() was called in a step: call worker.backward(loss) instead, which gives the "
                    "micro-batch its weight in the global batch"
                )
            self.outcome = self._commit(batch, gradients, is_finite)

    def run_pipeline(
        self,
        batch: StepBatch,
        gradients: GradientReducer,
        pipelined: PipelinePass,
        *,
        is_finite: Callable[[], bool] | None = None,
    ) -> Iterator[Any]:
        """Run a batch whose micro-batches all go through the pipeline stages of this replica; it yields nothing.

        All workers must call it, as `run`.
        """
        with self._opened_pass(batch, gradients):
            self._begin_trials(pipelined.try_forward, loss_of=pipelined.loss_of)
            with self._preserved_random_state:
                dtype = input_dtype(self._precision)
                runs = list(batch.runs())
                micros = [to_device(batch.read(read), self._device, dtype) for read, _, _ in runs]
                waited_s = pipelined.waited_s
                losses = pipelined.step(
                    micros,
                    parts=[micro for _, micro, _ in runs],
                    void=[is_void for _, _, is_void in runs],
                    num_step=batch.num_here,
                    seeds=[self._seed(batch, micro) for _, micro, _ in runs],
                    loss_scale=self.loss_scale.value,
                    buffers=self.buffers,
                    around=lambda number: observed(
                        self.observer, (batch.num_passes, runs[number][1].index), is_void=runs[number][2]
                    ),
                )
                self._stages_waited_s += pipelined.waited_s - waited_s
            self._is_backward_done = True  # of the last one, too
            for micro, loss in zip(batch.micros if losses else (), losses[: len(batch.micros)], strict=True):
                weight = micro.num_samples if loss.count is None else as_weight(loss.count)
                self._losses.append((loss.value, weight, loss.count is None))
                self._ran.append(micro)
            self.outcome = self._commit(batch, gradients, is_finite)
        return iter(())

    @contextlib.contextmanager
    def _opened_pass(self, batch: StepBatch, gradients: GradientReducer) -> Iterator[None]:
        """Begin and end a pass; one that is left without an outcome changes nothing."""
        if self._batch is not None:
            raise RuntimeError(
                "a loop over a step's micro-batches began inside another one: finish the first, or use a "
                "stepper for each optimizer"
            )
        self.buffers.begin()
        self._batch, self._gradients, self.outcome, self._losses = batch, gradients, None, []
        self._ran, self.broken, self.nonfinite_gradients, self.penalty = [], (), None, 0.0
        self.shortage.text, self._has_begun = "", True
        self.shortage.is_torn = lambda: gradients.is_departing
        self._waited_before_s = self._waited_s()
        is_due = batch.step <= NOISE_EACH or batch.step % NOISE_EVERY == 0
        measures = self._measures_noise and is_due and batch.num_passes == 0  # further passes have other losses
        try:
            if self._checks_gradients:
                gradients.look()
            gradients.loss_scale = self.loss_scale.value
            # This may wait for parameter servers, and be disrupted.
            gradients.begin(batch.num_passes, step=batch.step, measures=measures)
            gradients.buffer_rules = self.buffers.rules_of_tensors
            self.shards.begin()
            self.hooks.begin(gradients.named)
            scaled_losses.open()
            backward_calls.is_in_pass = self._axes.link is None  # stages call backward elsewhere
            self.writes.begin(gradients.named, self.buffers.modules, self.shards.gathered())
            yield
        except Disrupted:
            batch.num_passes -= 1  # the batch will be run again, as the same pass
            raise
        finally:
            self._batch = self._micro = self._gradients = None
            self.runs.end()
            self.state.end()
            scaled_losses.close()
            backward_calls.is_in_pass = False
            batch.num_passes += 1
            batch.is_void = False
            self.hooks.end()
            self.writes.end()
            if self.outcome is None:
                self.buffers.give_up()
                self.shards.give_up()
                gradients.drop()
            else:
                self.shards.close()

    def _begin_trials(self, forward: Callable[[Any], Any] | None, *, loss_of: Callable[[Any], Any] | None) -> None:
        self.state.begin(self.buffers.modules, loss_of)
        watches = self.state.is_watching
        if watches or not self.buffers.is_settled:
            self.runs.begin(forward, owners=self.buffers.unsettled_modules(), is_surely=watches)

    def smaller_micro(self, error: BaseException | None) -> int | None:
        """How many samples a micro-batch may have to get around this error that ended the training function; None where
        it is not about memory, or did not come in a pass, or micro-batches are not to be halved."""
        was_left_early = self._has_begun and self.outcome is None
        if error is None or not was_left_early or not is_out_of_memory(error):
            return None
        return self.shortage.half if self.shortage.can_halve else None

    def backward(self, loss: LossLike) -> None:
        """Add the micro-batch's gradient with its weight."""
        batch, micro = self._batch, self._micro
        if batch is None or micro is None:
            raise RuntimeError(
                "worker.backward() was called outside of a loop over a step's micro-batches. Write: for x, y in batch: "
                "worker.backward(loss(model(x), y))"
            )
        if self._is_backward_done:
            raise RuntimeError(
                "worker.backward() was called twice for one micro-batch: add the losses and call it once, "
                "or loop over the batch again for another optimizer"
            )
        self._is_backward_done = True
        if self.observer is not None:
            self.observer.close()
        if self.unit_draws is not None:
            self.unit_draws.begin_backward()
        if self._gradients is not None:
            self._gradients.check()
        with self.shortage.survived():
            self._differentiate(batch, micro, loss)

    def _differentiate(self, batch: StepBatch, micro: MicroBatch, loss: LossLike) -> None:
        if batch.is_void:
            with torch.autocast(self._device.type, enabled=False), backward_calls.own():
                (weighed(loss, micro.num_samples, batch.num_here)[0] * 0.0).backward()
            return
        self.buffers.capture(
            micro.num_samples, micro
        )  # before backward: recomputed blocks change their buffers once more
        value, weight, factor = weighed(loss, micro.num_samples, batch.num_here)
        is_mean = weight is None
        unscaled = single(scaled_losses.unscaled(split_loss(loss)[0]))
        self._losses.append((unscaled, micro.num_samples if weight is None else weight, is_mean))
        self._ran.append(micro)
        factor *= self.loss_scale.value
        with torch.autocast(self._device.type, enabled=False), backward_calls.own():
            (value if factor == 1.0 else value * factor).backward()

    def _seed(self, batch: StepBatch, micro: MicroBatch) -> tuple[int, ...]:
        """What a micro-batch's random numbers come from, wherever it runs."""
        return self._plan.batch.seed, 0, batch.step, batch.num_passes, micro.index

    def _draws(self, batch: StepBatch, micro: MicroBatch) -> contextlib.AbstractContextManager[None]:
        if self.unit_draws is None:
            return contextlib.nullcontext()
        return self.unit_draws.of_micro(*self._seed(batch, micro))

    def _waited_s(self) -> float:
        """Seconds of all passes that this worker waited for others of its replica."""
        return self.shards.traffic.waited_s + self._stages_waited_s + self._axes.waited_s

    def _open_micro(self, batch: StepBatch, micro: MicroBatch, gradients: GradientReducer, *, is_last: bool) -> None:
        self._micro, self._is_backward_done = micro, False
        self.buffers.rewind()
        self.runs.open_micro()
        scaled_losses.open()
        random_state.seed_all(*self._seed(batch, micro))
        self.shards.before_run(is_last=is_last, is_void=batch.is_void)
        if self.observer is not None:
            self.observer.open((batch.num_passes, micro.index), is_void=batch.is_void)
        if is_last:
            gradients.arm()

    def _commit(
        self, batch: StepBatch, gradients: GradientReducer, is_finite: Callable[[], bool] | None
    ) -> StepOutcome:
        """Sum gradients and metadata over the workers, judge the step, and vote; buffers change after the vote."""
        if self.shortage.text:
            self._losses = []
            if self._device.type == "cuda":  # the sums need some memory, too
                torch.cuda.empty_cache()
        elif self.shards.reduces_on_last_pass and self._losses and not self._is_backward_done:
            raise RuntimeError(
                "worker.backward() was not called for the step's last micro-batch, and with Layout(zero=1) gradients "
                "are summed in its backward: call worker.backward(loss) for every micro-batch, with loss * 0 where "
                "one is to count for nothing; or use zero=2 or 3"
            )
        if not self.shortage.text:
            self.writes.check(self.shards.gathered(), self.buffers.modules)
        summed = self._exchange_metadata(batch, gradients)
        mean_loss = summed.loss_sum / summed.weight_sum if summed.weight_sum else None
        scale = (batch.num_here / summed.weight_sum if summed.weight_sum > 0 else 1.0) / self._axes.context.size
        gradients.land(scale=scale)
        self.hooks.apply(gradients, self.shards.gathered())
        finite = is_finite() if is_finite is not None else gradients.is_finite()
        norm = scaled_losses.unscaled_norm(gradients.known_norm)
        mean_loss = None if mean_loss is None else mean_loss + self.penalty
        series = f"{batch.stream}.{batch.num_passes}"
        is_overflow = self.loss_scale.is_too_large(mean_loss, finite=finite)
        judged = self.losses.judge(series, mean_loss, finite=finite or is_overflow)
        verdict = gradients.agree_on(None if judged is None else dataclasses.asdict(judged))
        spike = None if verdict is None else LossSpike(**verdict)
        batch.chosen, is_late = gradients.chosen, gradients.is_late
        is_idle = batch.num_here == 0
        is_taken = finite and spike is None and not is_idle and not is_late
        if is_taken:
            self.state.settle(batch, summed.of_state, self._group)
        settle = self._combine_buffers(batch, gradients, summed) if is_taken else self.buffers.give_up
        if not self._consensus.vote():
            raise StepInvalidated("a member was lost before all had the sum: the pass is done again")
        if summed.wants_change:
            self._consensus.change_is_due()
        self.agreement.settled()
        broken = self._find_nonfinite(gradients, mean_loss, finite=finite or is_overflow)
        if spike is not None or not is_overflow:
            self.losses.settled(series, mean_loss, spike)
        settle()
        if is_taken:
            self.noise.add(
                gradients.parts,
                square=gradients.measured_square,
                scale=scale,
                weight=summed.weight_sum,
                num_samples=batch.num_here,
            )
        else:
            gradients.drop()
        unused = gradients.unused()
        loss_scale = self.loss_scale.value if self.loss_scale.is_used else None
        if summed.weight_sum and not is_idle:
            self.loss_scale.settled(mean_loss, finite=finite, is_first=batch.num_passes == 0)
        return StepOutcome(
            loss=float("nan") if mean_loss is None else mean_loss,
            finite=finite,
            unused=unused,
            is_empty=not summed.weight_sum and len(unused) == gradients.num_trained and not is_idle,
            communication_s=gradients.waited_s + self._waited_s() - self._waited_before_s,
            broken=broken,
            spike=spike,
            is_idle=is_idle,
            is_late=is_late,
            noise_scale=self.noise.samples,
            grad_norm=None if is_idle or is_late else norm,
            loss_scale=loss_scale,
            next_loss_scale=self.loss_scale.value if is_overflow else None,
            num_overflows=self.loss_scale.num_overflows,
        )

    def _exchange_metadata(self, batch: StepBatch, gradients: GradientReducer) -> SummedMetadata:
        """Send the last bucket with the step metadata, and return the sums. Raises SyncError, on all workers, where
        they ran different batches, or different blocks of the model."""
        serial = batch.serial % SERIALS
        own_loss, own_weight = loss_and_weight(self._losses if self._axes.counts else [])
        if gradients.carries_buffers:
            num_samples = sum(micro.num_samples for micro in batch.micros)
            self._buffer_trials.settle(batch, self.buffers.marks(), num_micros=len(batch.micros), group=self._group)
            self.buffers.combine(
                self.buffers.changed(), num_samples=num_samples, groups=[self._group], micros=batch.micros
            )()
        loss, loss_rest, weight, weight_rest = halves_of(own_loss, own_weight)
        wish = float(self._consensus.wants_change)
        trail = self.shards.traffic.trail % TRAILS * self._axes.sign
        mark = self.state.mark()
        of_optimizers = self.agreement.marks(salt=batch.serial)
        short = float(bool(self.shortage.text))
        # Of these, four are of the chosen replicas only where some may be left out (`backup_workers.SUMMED`).
        numbers = [serial, serial**2, trail, wish, loss, loss_rest, weight, weight_rest, short, *of_optimizers]
        numbers += [mark, *self.hooks.marks()]
        gradients.flush([*numbers, *self.buffers.marks()], weight=own_weight)
        serials, squares, trails, wishes, loss, loss_rest, weight, weight_rest, shorts, *rest = gradients.collect()
        if shorts:
            if not self._consensus.vote():
                raise StepInvalidated("a member was lost before all knew: the pass is done again")
            raise PassOutOfMemory("a worker got no memory: the pass is done again in smaller micro-batches")
        of_optimizers, rest = rest[: len(of_optimizers)], rest[len(of_optimizers) :]
        of_state, marks, mark_squares, *of_buffers = rest
        if self._group.size * squares != serials**2:
            raise SyncError(
                f"worker {self._group.index} runs batch {batch.serial} of the run, others run another one: a worker "
                "left out a step (continue, break) that others made. All workers must make the same steps: "
                "decide by values that are equal on all, such as the loss"
            )
        if trails:
            raise SyncError(
                f"the workers of a replica ran other blocks of the model than each other in batch {batch.serial}, but "
                "each block is gathered from all of them: under Layout(shard=...) every micro-batch must run the same "
                "blocks, in the same order. Run all and multiply by 0 what is not wanted, or use Layout(replicas=n)"
            )
        self.hooks.compare(marks, mark_squares, size=self._group.size)
        self.agreement.compare(of_optimizers, self._group, step=batch.step)
        return SummedMetadata(
            loss_sum=loss + loss_rest,
            weight_sum=weight * WEIGHT_UNIT + weight_rest,
            wants_change=bool(wishes),
            changed=[mark % UNKNOWN > 0 for mark in of_buffers],
            of_buffers=of_buffers,
            of_state=of_state,
        )

    def _combine_buffers(
        self, batch: StepBatch, gradients: GradientReducer, summed: SummedMetadata
    ) -> Callable[[], None]:
        """Average the buffers that changed on any worker; returns what sets them."""
        if gradients.carries_buffers:
            return lambda: None  # they went with the gradients
        has_stages = self._axes.stages.size > 1
        micros = self._sizes.cut(batch.start, batch.stop)
        self._buffer_trials.settle(batch, summed.of_buffers, num_micros=len(micros), group=self._group)
        return self.buffers.combine(
            summed.changed,
            num_samples=batch.num_here,
            # The workers of a stage have the same buffers, and each micro-batch was run by one of them.
            groups=[self._axes.micro_batch_peers, self._axes.replica_group] if has_stages else [self._group],
            counts=has_stages or self._axes.counts,
            micros=micros,
        )

    def _find_nonfinite(self, gradients: GradientReducer, mean_loss: float | None, *, finite: bool) -> str:
        """Note which losses or gradients of this worker were not finite; returns the first such parameter, or ""."""
        if mean_loss is not None and not math.isfinite(mean_loss):
            values = zip(self._ran, self._losses, strict=True)
            self.broken = tuple(micro for micro, (value, _, _) in values if not math.isfinite(float(value)))
            return ""
        if finite:
            return ""
        self.nonfinite_gradients, first = gradients.broken()
        self._checks_gradients = True  # so that the next time it is known which worker made them
        return first or ""


def _why_no_hooks(plan: Plan) -> str:
    if not isinstance(plan.sync, ParameterServer):
        return ""
    return f"under {plan.sync!r} gradients are summed on the servers: it would see a part. Use sync=AllReduce()"
