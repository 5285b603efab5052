"""Synchronous averaging: every replica's gradients are summed in buckets while backward runs.

One gradient pass over a step's micro-batches is `begin`, backward ..., `arm`, the last backward, `flush`, `collect`,
`land`. Buckets leave only after `arm`, each as soon as all its gradients are there and all buckets before it have left.
So collectives are issued in the same order on every worker, even on one that has no micro-batch in this step and sends
zeros. One object therefore holds all parameters of a gradient pass. The caller has weighted each loss.

A replica may be split over several workers. Each then sums what it holds with the workers of other replicas that hold
the same; sharded rows leave when the gradient pass is over. The step metadata goes to all workers by itself. Some
parameters are whole on several workers of a replica, each with a part of their gradients: norms between split layers,
embeddings that two stages share. Their sums are summed once more, over the workers with the other parts. Parameters of
other stages are absent (on the meta device): they are in no local bucket, but in every worker's step metadata.

Where several workers of a replica hold the same gradient (a norm beside split layers), each sums it by itself, and all
must get the same bits. But wires round by neighboring numbers and by random draws. So such gradients travel in buckets
that are equal on all of these workers, with equal seeds.

Some parameters may have fewer replicas than the others (distributed experts): their gradients leave in buckets of their
own, to these workers.

With `op="adasum"` replicas combine their own gradients. Gradients that are distributed over a replica are completed
there first, and the inner products travel in the step metadata (`sync.allreduce.adasum`).

Buckets that no worker used in the same gradient pass of the previous step are *cold* (the other model of a GAN, an
average of the weights). They wait until all workers know whether they were used, and normally need not be sent.
"""

from __future__ import annotations

import functools
import time
import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.group import Disrupted, SingleWorkerGroup, WorkerGroup
from paceline.comm.sharded_tensors import local_part
from paceline.plan import AllReduce, Wire
from paceline.schedule.sample_order import mix
from paceline.sync.allreduce.adasum import AdasumBucket, AdasumWeights
from paceline.sync.allreduce.bucket_pipeline import AnyBucket, BucketPipeline
from paceline.sync.allreduce.buckets import Bucket, LocalBucket, NamedParameter, SentBytes, assign
from paceline.sync.allreduce.codec_memory import CodecMemory, sum_residuals
from paceline.sync.allreduce.gradient_norm import GradientNorm, NonFiniteCheck, gradients_here, is_finite
from paceline.sync.allreduce.gradient_sharding import GradientSharding
from paceline.sync.allreduce.replica_norms import ReplicaNorm, ReplicaNorms

__all__ = ["GradientReducer"]

SPARE_RIDERS = 256  # room for a gradient pass's own numbers beside one for each parameter


class GradientReducer:
    """Sums the gradients of a set of named parameters over a group; a parameter with several names counts once."""

    carries_buffers = False  # whether this worker's changes to buffers travel with its gradients
    chosen: tuple[int, ...] | None = None  # the replicas whose gradients count in the last step; None: all
    is_late = False  # whether this worker's gradients are left out

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        *,
        group: WorkerGroup,
        sync: AllReduce,
        wire: Wire,
        seed: int = 0,
        everybody: WorkerGroup | None = None,
        shard_group: WorkerGroup | None = None,
        is_used: Callable[[Parameter], bool | None] | None = None,
        shardings: Sequence[GradientSharding] = (),
        apart: Callable[[Parameter], WorkerGroup | None] | None = None,
        holders: Callable[[Parameter], Hashable] | None = None,
    ) -> None:
        """`group`: the workers that hold the same numbers. `everybody`: all workers of the run, by default the group.

        `shard_group`: the workers of this replica that hold the other rows of the same gradients. `is_used(parameter)`:
        whether this worker's runs gave it a gradient; without it, or where it returns None, the presence of a gradient
        decides. `shardings`: how gradients are distributed over the replica's other workers, along each axis (tensor,
        pipeline, expert). `apart(parameter)`: the workers that hold the same numbers of a parameter where that is not
        `group`; each of them must have as many such parameters, of the same sizes and in the same order.
        `holders(parameter)`: which workers of the replica hold the very same gradient before it is summed, equal on all
        of them; by default `shardings` tell.
        """
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(list(parameters))}
        self._all = list(reversed(unique.values()))
        self._ids = frozenset(unique)
        self._device = next((p.device for _, p in self._all if not p.is_meta), torch.device("cpu"))
        self._group, self._sync, self._wire, self._seed = group, sync, wire, seed
        self._everybody, self._shard_group = (
            group if everybody is None else everybody,
            shard_group or SingleWorkerGroup(),
        )
        self._is_used, self._shardings, self._apart = is_used, tuple(shardings), apart
        self._holders = holders or self._holders_by_sharding
        self._norms = GradientNorm(shard_group=self._shard_group, shardings=self._shardings, device=self._device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._trained: set[int] = set()  # places in `_all` of parameters that require gradients, or once did
        self._followed: list[int] = []  # the same, sorted: the order of the step metadata
        self._buckets: list[AnyBucket] = []
        self._pipeline = BucketPipeline()
        self._riding: set[int] = set()  # buckets that go to all workers, so the step metadata may travel with them
        self._is_stale = False
        self._memory: CodecMemory | None = None  # for the next buckets; None: that of the current ones
        # number of the gradient pass in its step -> buckets that no worker used then
        self._cold: dict[int, set[int]] = {}
        self._bytes_before = SentBytes()
        self._num_riders = 0
        self._combination: AdasumWeights | None = None
        self._parts = ReplicaNorms(group, is_measured=lambda _: False)
        self._measures = False  # in this gradient pass
        self._carrier: AnyBucket | None = None  # of the step metadata
        self._used: dict[int, bool] = {}  # by place in `_all`: by any worker, in the last gradient pass
        self._square: float | None = None  # of the norm of the last gradient pass's sums, until they are changed
        self._armed = False
        self.parameters: list[Parameter] = []  # that are summed, in the order in which they leave
        self.names: list[str] = []
        self.parts: list[ReplicaNorm] = []  # of the last gradient pass, if they were requested
        # of the mean's norm, over the parameters in which the parts were measured
        self.measured_square: float | None = None
        self.waited_s = 0.0  # for transfers, in the last `land`
        self.waited_in_all_s = 0.0
        self._encoded_before_s = 0.0
        self._sealed: list[tuple[str, Parameter, Tensor, int]] = []  # gradients, and their versions
        self._look: NonFiniteCheck | None = None

    def begin(self, gradient_pass: int, *, step: int = 0, measures: bool = False) -> None:
        """Begin gradient pass number `gradient_pass` of the step (from 0): old gradients are removed.

        With `measures`, the gradient pass ends with `parts`, the replicas' norms, and `measured_square`.
        """
        trained = self._trained | {place for place, (_, p) in enumerate(self._all) if p.requires_grad}
        if trained != self._trained or self._is_stale:
            self._build(trained)  # the user thawed parameters, equally on all workers
        self.drop()
        if self._look is not None:
            self._look.begin()
        self._armed = False
        self._gradient_pass, self._step = gradient_pass, step
        self.parts, self.measured_square, self._square = [], None, None
        self._measures = measures
        self._parts.begin()
        for bucket in self._buckets:
            bucket.begin(is_measured=self._parts.is_measured if measures and self._combination is None else None)
        self._pipeline.begin()
        cold = self._cold.get(gradient_pass, set()) if self._combination is None else set()
        self._queue = [number for number in range(len(self._buckets)) if number not in cold]
        if riding := [number for number in self._queue if number in self._riding]:
            self._queue.remove(riding[-1])  # the last one waits for the step metadata
            self._queue.append(riding[-1])
        self._num_departed = 0
        self._arrived: set[int] = set()  # places of gradients that came in this gradient pass
        self._ready: set[int] = set()  # and in its last backward
        self._pending = [len(bucket.parameters) for bucket in self._buckets]

    def members_changed(self) -> None:
        """Rebuild the buckets before the next gradient pass, because the group's members have changed."""
        self._is_stale = True
        self._trained.clear()

    def check(self) -> None:
        """Raise if gradients that had arrived are gone, or if some were made that are not summed."""
        wiped = [self.names[place] for place in self._arrived if self.parameters[place].grad is None]
        if wiped:
            raise RuntimeError(
                f"the gradient of {wiped[0]} was removed within a gradient pass over a batch (optim.zero_grad()?): "
                "gradients belong to the whole pass. Call zero_grad() after optim.step(), outside of the inner loop"
            )
        for place, (name, parameter) in enumerate(self._all):
            if parameter.requires_grad and place not in self._trained:
                raise RuntimeError(
                    f"{name} was thawed (requires_grad=True) within a step, so its gradient is not summed: "
                    "set requires_grad between steps"
                )

    def arm(self) -> None:
        """The coming backward is the gradient pass's last: let buckets leave as they fill."""
        # A unit that a model runs several times in a forward has its gradients reduced within the replica as often, and
        # it is unknown which time is the last. So sharded rows are complete only after backward.
        is_complete = self._combination is None or not self._shardings
        self._armed = self._shard_group.size == 1 and is_complete

    def note_first(self, *, weight: float) -> None:
        """The first backward is over, and its gradients are complete: they count for `weight` in the mean."""
        if self._measures:
            self._parts.note_first(self.parameters, weight=weight)

    def flush(self, numbers: Sequence[float], *, weight: float = 1.0) -> None:
        """Send what has not left, and the step metadata: `numbers` to be summed, and which parameters got a gradient
        here.

        `weight`: how much this worker's losses count in the mean. The metadata travels with the last bucket where
        possible; its numbers should then tolerate single precision. Raises Disrupted, also for losses noticed earlier.
        """
        self.check()
        if self._look is not None:  # gradients that were not checked during backward
            for name, parameter in zip(self.names, self.parameters, strict=True):
                self._look_at(name, parameter)
        used = [self._got_one(self._all[place][1]) for place in self._followed]
        metadata = [*map(float, numbers), *map(float, used), *self._report(weight)]
        self._armed = False
        if self._combination is not None:
            self._complete_first()
        self._num_numbers, self._num_metadata = len(numbers), len(metadata)
        last = self._buckets[self._queue[-1]] if self._queue else None
        may_ride = bool(self._queue) and self._queue[-1] in self._riding and len(metadata) <= self._num_riders
        self._carrier = last if last is not None and last.can_carry and may_ride else None
        while self._num_departed < len(self._queue):
            self._pipeline.check()
            is_last = self._num_departed == len(self._queue) - 1
            self._depart_next(metadata if is_last and self._carrier is not None else ())
        self._pipeline.check()
        if self._carrier is None:
            self._step_metadata = torch.tensor(metadata + self._squares(), dtype=torch.float64, device=self._device)
            if self._combination is not None:
                self._pipeline.finish()
                self._step_metadata = torch.cat([self._step_metadata, self._combination.products().to(self._device)])
            self._metadata_transfer = self._everybody.all_reduce(self._step_metadata, what="the step metadata")

    def collect(self) -> list[float]:
        """Wait for the sums of `numbers` over all workers, and learn which parameters any of them used."""
        began = time.perf_counter()
        early_s = self._pipeline.waited_s  # while backward ran
        self._pipeline.finish()
        if self._carrier is not None:
            metadata = self._carrier.riders()
        else:
            self._metadata_transfer.wait()
            metadata = self._step_metadata[: self._num_metadata].tolist()
            if self._sends_square:
                square, num_changing = self._step_metadata[self._num_metadata :].tolist()
                self._square = square if num_changing == 0 else None
        self.waited_s = early_s + time.perf_counter() - began
        end = self._num_numbers + len(self._followed)
        counts, report = metadata[self._num_numbers : end], metadata[end:]
        self._used = {place: count > 0 for place, count in zip(self._followed, counts, strict=True)}
        self.parts = ReplicaNorms.read(report)
        return metadata[: self._num_numbers]

    def land(self, *, scale: float) -> None:
        """Install the sums, multiplied by `scale`; cold buckets that were used after all are exchanged first.

        Parameters that no worker used keep no gradient, so that optimizers leave them alone, as in one process.
        """
        if self._combination is not None:
            self._combine(self._combination, scale)
        cold: set[int] = set()
        is_used_of = {id(self._all[place][1]): is_used for place, is_used in self._used.items()}
        for number, bucket in enumerate(self._buckets):
            uses = [is_used_of[id(parameter)] for parameter in bucket.parameters]
            if not any(uses):
                cold.add(number)
            elif number not in self._queue:
                bucket.depart(seed=self._seed_of(number))
                self.parts = []  # they were computed without it
                began = time.perf_counter()
                bucket.land()
                self.waited_s += time.perf_counter() - began
            if scale != 1.0 and any(uses) and self._combination is None:
                bucket.scale(scale)
            for parameter, is_used in zip(bucket.parameters, uses, strict=True):
                if not is_used:
                    parameter.grad = None
                elif parameter.grad is None:  # only other workers used their parts
                    parameter.grad = torch.zeros_like(parameter)
        if self._square is not None:  # Larger gradients may overflow, so their norm is computed again.
            self._square = self._square * scale**2 if abs(scale) <= 1 else None
        self._cold[self._gradient_pass] = cold
        if self._shardings and self._combination is None:
            began = time.perf_counter()
            used = [parameter for parameter in self.parameters if is_used_of[id(parameter)]]
            for sharding in self._shardings:
                sharding.complete(used)
            self.waited_s += time.perf_counter() - began
        self.waited_in_all_s += self.waited_s
        self._seal()

    def _complete_first(self) -> None:
        """Complete gradients within the replica, because whole replicas' gradients are combined."""
        if not self._shardings:
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for sharding in self._shardings:
            sharding.complete(self.parameters)

    def _combine(self, combination: AdasumWeights, scale: float) -> None:
        """Combine all replicas' gradients, each as the mean over its own samples.

        So each loss counts for more than it did: by the weight of all replicas over that of its own.
        """
        began = time.perf_counter()
        weight = sum(part.weight for part in self.parts)
        factors = [scale * weight / part.weight if part.weight else 0.0 for part in self.parts]
        combination.combine(self._step_metadata[self._num_metadata :], factors)
        squares, self.measured_square = combination.squares(scale)
        self.parts = [ReplicaNorm(part.weight, square) for part, square in zip(self.parts, squares, strict=True)]
        self.waited_s += time.perf_counter() - began

    def unused(self) -> tuple[str, ...]:
        """Return the parameters that no worker used in the last gradient pass."""
        return tuple(self._all[place][0] for place, is_used in self._used.items() if not is_used)

    @property
    def num_followed(self) -> int:
        """How many parameters are summed, on all workers together."""
        return len(self._followed)

    def norm(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the global norm of all gradients, 0-d; equal on every worker, which together hold the same sums."""
        square, self._square = self._square, None  # gradients may change before the next call
        if square is not None and dtype is None:
            return self._norms.of_square(square, self.parameters)
        is_wanted = self._measures and self._combination is None  # Adasum knows it already
        is_measured = self._parts.is_measured if is_wanted else None
        norm, measured = self._norms.norm(self.parameters, dtype, is_measured=is_measured)
        if measured is not None:
            self.measured_square = float(measured)
        return norm

    def is_finite(self) -> bool:
        """Return whether all gradients are finite; if only the norm overflows, the gradients are checked."""
        return bool(torch.isfinite(self.norm())) or self._norms.num_broken(self.parameters) == 0

    def look(self) -> None:
        """From the next gradient pass on, check this worker's own gradients before they are summed."""
        self._look = self._look or NonFiniteCheck()

    def broken(self) -> tuple[tuple[str, ...] | None, str | None]:
        """Return the parameters whose local gradients were not finite before the sum, and the first one after it.

        None in the first place: nothing was checked. In the second, only this worker's parts of the sum are seen. Both
        follow the order in which backward reached the parameters.
        """
        own = None if self._look is None else self._look.broken()
        pairs = zip(self.names, self.parameters, strict=True)
        sums = (n for n, p in pairs if p.grad is not None and not is_finite(local_part(p.grad)))
        return own, next(sums, None)

    def _look_at(self, name: str, parameter: Tensor) -> None:
        if self._look is not None and parameter.grad is not None:
            self._look.at(name, local_part(parameter.grad).detach())

    def agree_on(self, verdict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return the verdict of all workers that took part on the last losses; here all know the same already."""
        return verdict

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients down so that their norm, which is `norm`, is at most `max_norm`."""
        if not self._norms.is_distributed:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
            return
        factor = torch.clamp(
            max_norm / (norm + 1e-6), max=1.0
        )  # torch's formula; its function takes no sharded gradients with a plain norm
        for gradient in gradients_here(self.parameters):
            gradient.mul_(factor)
        self._seal()

    def serve(self, optimizers: Sequence[Optimizer]) -> None:
        """Declare that these optimizers take the steps of these gradients; of use to subclasses only."""

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the step for which the gradients were made."""
        for optimizer in optimizers:
            optimizer.step()

    def fetch_state(self) -> None:
        """Fetch the optimizers' state if it lies elsewhere."""

    def drop_state(self) -> None:
        """Free what `fetch_state` fetched."""

    def check_unchanged(self) -> None:
        """Raise RuntimeError if user code has written to gradients of split layers since they landed.

        A norm of the local parts is not the model's, and workers that clip by their own norm take different steps.
        """
        for name, parameter, gradient, version in self._sealed:
            if parameter.grad is not None and (parameter.grad is not gradient or gradient._version != version):
                raise RuntimeError(
                    f"the gradient of {name} was changed between the pass over the batch and optim.step() "
                    "(clip_grad_norm_?), but each worker has only a part of it, and of its norm: call "
                    "worker.clip_gradients(max_norm) in its place, or scale the loss"
                )

    def _seal(self) -> None:
        """Remember the current gradients, where this worker's part alone would mislead."""
        if not self._shardings:
            return
        pairs = zip(self.names, self.parameters, strict=True)
        self._sealed = [(name, p, p.grad, p.grad._version) for name, p in pairs if p.grad is not None]

    def settle(self) -> None:
        """Commit the last gradient pass: its step is taken, and codecs keep what they learned."""
        is_used_of = {id(self._all[place][1]): is_used for place, is_used in self._used.items()}
        for bucket in self._buckets:
            bucket.settle(lambda parameter: is_used_of.get(id(parameter), False))

    def memory(self) -> CodecMemory:
        """Return what codecs remember of committed steps, by parameter name; not copied."""
        if self._memory is not None:
            return self._memory
        own: dict[str, Tensor] = {}
        common: dict[str, dict[str, Tensor]] = {}
        for bucket in self._buckets:
            own.update(bucket.own())
            common.update(bucket.common())
        return CodecMemory(own, common)

    def gathered_own(self, *, keeps: bool) -> dict[str, list[Tensor]]:
        """Return each replica's error feedback by parameter name; of partial gradients, the sum over its workers.

        All workers must call it, and it blocks. A worker without `keeps` takes part for the others, bucket by bucket,
        and gets nothing.
        """
        if self._is_stale or not self._buckets:
            self._build({place for place, (_, p) in enumerate(self._all) if p.requires_grad} | self._trained)
        partial = {name for name, one in self._all if any(sharding.adds_up(one) for sharding in self._shardings)}
        found: dict[str, list[Tensor]] = {}
        for bucket in self._buckets:
            parts = bucket.gathered_own()
            found.update(parts if keeps else {name: parts[name] for name in parts.keys() & partial})
        for sharding in self._shardings:
            sum_residuals(found, self._all, sharding=sharding, count=self._group.size, device=self._device)
        return found if keeps else {}

    def remember(self, memory: CodecMemory) -> None:
        """Continue with what codecs remembered elsewhere; parameters that it does not know begin without memory."""
        self._memory = memory
        self._is_stale = True  # until the next gradient pass

    def drop(self) -> None:
        """Remove all gradients: an optimizer's step then changes nothing, and codecs discard what they learned."""
        for bucket in self._buckets:
            bucket.drop()
        self._sealed = []
        for _, parameter in self._all:
            parameter.grad = None

    def has_any(self) -> bool:
        """Return whether any gradient has arrived here."""
        return bool(self._arrived)

    def has(self, parameter: Tensor) -> bool:
        """Return whether `parameter` is one of those that were registered."""
        return id(parameter) in self._ids

    def _got_one(self, parameter: Parameter) -> bool:
        """Return whether this worker's runs gave a parameter a gradient."""
        report = None if self._is_used is None else self._is_used(parameter)
        return parameter.grad is not None if report is None else report

    def sent_beside(self, num_bytes: int) -> None:
        """Count bytes that went to other replicas in another way."""
        self._bytes_before += SentBytes(num_sent=num_bytes)

    @property
    def bytes(self) -> SentBytes:
        """What went to other replicas since the beginning."""
        return sum((bucket.bytes for bucket in self._buckets), self._bytes_before)

    @property
    def encoding_s(self) -> float:
        """Total time of codecs since the beginning."""
        return self._encoded_before_s + sum(bucket.encoding_s for bucket in self._buckets)

    def largest_bucket(self) -> list[tuple[int, int]]:
        """Return the matrices of the largest bucket that goes to other replicas; empty if there is none."""
        each = [bucket.shapes for bucket in self._buckets if isinstance(bucket, Bucket)]
        return max(each, key=lambda shapes: sum(rows * columns for rows, columns in shapes), default=[])

    def _build(self, trained: set[int]) -> None:
        memory = self.memory().copied() if self._memory is None else self._memory
        self._bytes_before, self._is_stale, self._memory = self.bytes, False, None
        self._encoded_before_s = self.encoding_s
        for hook in self._hooks:
            hook.remove()
        self._trained, self._cold = trained, {}
        self._followed = sorted(trained)
        here = [self._all[place] for place in self._followed if not self._all[place][1].is_meta]
        self._num_riders = len(trained) + 2 * self._group.size + SPARE_RIDERS
        self._buckets, self._riding = [], set()
        combines = self._sync.op == "adasum" and self._group.size > 1
        size = self._sync.bucket_bytes
        for group, run in assign(here, bucket_bytes=size, group_of=self._group_of, kind_of=self._holders):
            if group.size == 1:
                self._buckets.append(self._staying(run, group))
                continue
            if combines:
                self._buckets.append(AdasumBucket(run, group=group, wire=self._wire))
                continue
            num_riders = 0
            if group is self._everybody:
                self._riding.add(len(self._buckets))
                num_riders = self._num_riders
            self._buckets.append(Bucket(run, group=group, wire=self._wire, num_riders=num_riders))
        self._combination = self._combination_of(self._buckets) if combines else None
        measured = {id(parameter) for _, parameter in here if self._is_measured(parameter)}
        self._parts = ReplicaNorms(self._group, is_measured=lambda parameter: id(parameter) in measured)
        for bucket in self._buckets:
            bucket.fill(memory.own, memory.common)
        self.parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self.names = [name for bucket in self._buckets for name in bucket.names]
        self._hooks = []
        place = 0
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                arrived = functools.partial(self._gradient_arrived, number, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
                place += 1

    @property
    def _sends_square(self) -> bool:
        """Whether the norm of the only replica can be computed from the step metadata; equal on all workers."""
        is_alone = self._group.size == 1 and self._everybody.size > 1
        return is_alone and self._combination is None and not self._measures

    def _squares(self) -> list[float]:
        """Return this worker's part of the square of that norm, and 1 if local gradients will still be summed."""
        if not self._sends_square:
            return []
        # What is missing so far may add to it: cold buckets, and remaining error feedback.
        is_all = self._num_departed == len(self._buckets)
        is_staying = is_all and all(isinstance(one, LocalBucket) and not one.own() for one in self._buckets)
        adds_up = (sharding.adds_up(parameter) for sharding in self._shardings for parameter in self.parameters)
        if not is_staying or any(adds_up):
            return [0.0, 1.0]
        return [self._norms.own_square(self.parameters), 0.0]

    def _report(self, weight: float) -> list[float]:
        """Return what this worker reports about its part of the batch."""
        if not self._measures and self._combination is None:
            return []
        is_measured = self._measures and self._combination is None and self._group.size > 1
        return self._parts.report(weight, [self._buckets[number].square() for number in self._queue if is_measured])

    def _combination_of(self, buckets: Sequence[AnyBucket]) -> AdasumWeights:
        place_of = {id(self._all[place][1]): number for number, place in enumerate(self._followed)}
        return AdasumWeights(
            [bucket for bucket in buckets if isinstance(bucket, AdasumBucket)],
            group=self._group,
            place_of=lambda parameter: place_of[id(parameter)],
            counts=self._norms.counts,
            num_places=len(self._followed),
        )

    def _staying(self, run: Sequence[NamedParameter], group: WorkerGroup) -> LocalBucket:
        """Return the bucket of parameters that no other replica holds: `group` is of one."""
        return LocalBucket(run)

    def _is_measured(self, parameter: Parameter) -> bool:
        """Return whether a replica has its own gradient before any sum, and this worker's local part counts."""
        is_part = any(sharding.adds_up(parameter) for sharding in self._shardings)
        return not is_part and self._norms.counts(parameter) and self._group_of(parameter) is self._group

    def _group_of(self, parameter: Parameter) -> WorkerGroup:
        """Return the workers that hold the same numbers."""
        return (None if self._apart is None else self._apart(parameter)) or self._group

    def _holders_by_sharding(self, parameter: Parameter) -> Hashable:
        """Return which workers of the replica have the same gradient along each axis; () where each has a part."""
        return tuple(() if sharding.adds_up(parameter) else sharding.holders(parameter) for sharding in self._shardings)

    def _gradient_arrived(self, bucket: int, place: int, parameter: Tensor) -> None:
        self._arrived.add(place)
        if not self._armed:
            return
        if place in self._ready:
            raise RuntimeError(
                f"a second gradient arrived for {self.names[place]} in the step's last micro-batch: "
                "add the losses and call backward once, or iterate over the batch again for another optimizer"
            )
        # Buckets leave one gradient late: hooks of the user on this parameter run after this one and may change its
        # gradient. The last bucket waits for the step metadata.
        while (
            self._pipeline.disruption is None
            and self._num_departed < len(self._queue) - 1
            and self._pending[self._queue[self._num_departed]] == 0
        ):
            try:
                self._depart_next()
            except Disrupted as disruption:  # not raised in backward, which is the user's code
                self._pipeline.notice(disruption)
        self._ready.add(place)
        self._pending[bucket] -= 1
        self._look_at(self.names[place], parameter)

    def _depart_next(self, riders: Sequence[float] = ()) -> None:
        number = self._queue[self._num_departed]
        self._buckets[number].depart(riders, seed=self._seed_of(number))
        self._num_departed += 1
        self._pipeline.departed(self._buckets[number])

    def _seed_of(self, number: int) -> int:
        """Return the seed of a codec's random rounding.

        It differs between steps and replicas, is the same when a step is repeated, and equal on all workers of the
        replica that have the same bucket, though its number may differ there.
        """
        bucket = self._buckets[number]
        first = bucket.parameters[0]
        # Parts of one sum are rounded with different seeds, because correlated errors would not average out.
        parts = [
            sharding.group.index
            for sharding in self._shardings
            if not sharding.holders(first) or sharding.adds_up(first)
        ]
        place = self._group_of(first).index
        return (
            mix(self._seed, self._step, self._gradient_pass, zlib.crc32(bucket.names[0].encode()), place, *parts) >> 1
        )
