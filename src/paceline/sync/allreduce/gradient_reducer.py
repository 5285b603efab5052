"""Synchronous data parallelism: the replicas' gradients are summed in buckets while backward runs, like DDP's Reducer.

One gradient pass over a step's micro-batches calls `begin`, backward ..., `arm`, the last backward, `flush`, `collect`,
`land`. After `arm`, a bucket's all-reduce starts as soon as all its gradients are there and all buckets before it have
started. So collectives are issued in the same order on every worker, even on one that has no micro-batch in this step
and sends zeros. One object therefore holds all parameters of a gradient pass. The caller has weighted each loss.

The step metadata (losses, counts, which parameters were used) is summed over all workers. It travels with the last
bucket where possible. Fully sharded rows are sent after the last backward. Some parameters are whole on several workers
of a replica, each with a part of their gradients: norms between tensor parallel layers, embeddings that two pipeline
stages share. Their sums are summed once more, over the workers with the other parts.

With `op="adasum"`, replicas combine their own gradients. Gradients that are distributed over a replica are completed
there first, and the inner products travel in the step metadata (`sync.allreduce.adasum`).

Where losses were scaled (fp16), each worker takes the scale out of its own gradients when they are complete, before
they leave: what codecs keep, norms, and everything after it are of the losses as they are.

Buckets that no worker used in the same gradient pass of the previous step are *cold* (the other model of a GAN, an
average of the weights). They wait until all workers know whether they were used, and normally need not be sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.comm.group import Disrupted
from paceline.comm.sharded_tensors import local_part
from paceline.sync.allreduce.adasum import AdasumWeights
from paceline.sync.allreduce.bucket_pipeline import AnyBucket
from paceline.sync.allreduce.buckets import LocalBucket
from paceline.sync.allreduce.gradient_buckets import GradientBuckets
from paceline.sync.allreduce.gradient_norm import NonFiniteCheck, gradients_here, is_finite, require_real
from paceline.sync.allreduce.replica_norms import ReplicaNorm, ReplicaNorms

__all__ = ["GradientReducer"]


class GradientReducer(GradientBuckets):
    """Sums the gradients of a set of named parameters over a group; a parameter with several names counts once."""

    carries_buffers = False  # whether this worker's changes to buffers travel with its gradients
    buffer_rules: Callable[[], Mapping[int, str]] = dict  # those that are known, by the ids of buffers
    chosen: tuple[int, ...] | None = None  # the replicas whose gradients count in the last step; None: all
    is_late = False  # whether this worker's gradients are left out
    parts: Sequence[ReplicaNorm] = ()  # of the last gradient pass, if they were requested
    measured_square: float | None = None  # of the mean's norm, over the parameters in which the parts were measured
    loss_scale = 1.0  # by which losses of the gradient pass are multiplied, equally on all workers
    waited_s = 0.0  # for transfers, in the last `land`
    waited_in_all_s = 0.0
    _measures = False  # in this gradient pass
    _metadata_bucket: AnyBucket | None = None  # with which the step metadata travels
    _used: Mapping[int, bool] = MappingProxyType({})  # by place in `_all`: by any worker, in the last gradient pass
    _square: float | None = None  # of the norm of the last gradient pass's sums, until they are changed
    is_departing = False  # a bucket is being sent in backward; still True where that has failed
    _armed = False
    _finite_check: NonFiniteCheck | None = None
    _known_norm: Tensor | None = None

    def begin(self, gradient_pass: int, *, step: int = 0, measures: bool = False) -> None:
        """Begin gradient pass number `gradient_pass` of the step (from 0): old gradients are removed.

        With `measures`, the gradient pass ends with `parts`, the replicas' norms, and `measured_square`.
        """
        trained = self._trained | {place for place, (_, p) in enumerate(self._all) if p.requires_grad}
        if trained != self._trained or self._is_stale:
            self._build(trained)  # the user thawed parameters, equally on all workers
        self.drop()
        if self._finite_check is not None:
            self._finite_check.begin()
        self._armed = self.is_departing = False
        self._gradient_pass, self._step = gradient_pass, step
        self.parts, self.measured_square, self._square = [], None, None
        self._known_norm = None
        self._measures = measures
        self._parts.begin()
        for bucket in self._buckets:
            bucket.begin(is_measured=self._parts.is_measured if measures and self._combination is None else None)
        self._pipeline.begin()
        cold = self._cold.get(gradient_pass, set()) if self._combination is None else set()
        self._queue = [number for number in range(len(self._buckets)) if number not in cold]
        if carrying := [number for number in self._queue if number in self._metadata_buckets]:
            self._queue.remove(carrying[-1])  # the last one waits for the step metadata
            self._queue.append(carrying[-1])
        self._num_departed = 0
        self._arrived.clear()
        self._ready: set[int] = set()  # and in its last backward
        self._pending = [len(bucket.parameters) for bucket in self._buckets]

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
            self._parts.note_first(self.parameters, weight=weight, factor=1 / self.loss_scale)

    def flush(self, numbers: Sequence[float], *, weight: float = 1.0) -> None:
        """Send what has not left, and the step metadata: `numbers` to be summed, and which parameters got a gradient
        here.

        `weight`: how much this worker's losses count in the mean. The metadata travels with the last bucket where
        possible; its numbers should then tolerate single precision. Raises Disrupted, also for losses noticed earlier.
        """
        self.check()
        if self._finite_check is not None:  # gradients that were not checked during backward
            for name, parameter in zip(self.names, self.parameters, strict=True):
                self._check_finite(name, parameter)
        departed = set(self._queue[: self._num_departed])
        self._unscale([bucket for number, bucket in enumerate(self._buckets) if number not in departed])
        used = [self._was_used(self._all[place][1]) for place in self._trained_places]
        metadata = [*map(float, numbers), *map(float, used), *self._report(weight)]
        self._armed = False
        if self._combination is not None:
            self._complete_first()
        self._num_numbers, self._num_metadata = len(numbers), len(metadata)
        last = self._buckets[self._queue[-1]] if self._queue else None
        fits = (
            bool(self._queue) and self._queue[-1] in self._metadata_buckets and len(metadata) <= self._metadata_capacity
        )
        self._metadata_bucket = last if last is not None and last.can_carry_metadata and fits else None
        while self._num_departed < len(self._queue):
            self._pipeline.check()
            is_last = self._num_departed == len(self._queue) - 1
            self._depart_next(metadata if is_last and self._metadata_bucket is not None else ())
        self._pipeline.check()
        if self._metadata_bucket is None:
            self._step_metadata = torch.tensor(metadata + self._squares(), dtype=torch.float64, device=self._device)
            if self._combination is not None:
                self._pipeline.finish()
                self._step_metadata = torch.cat([self._step_metadata, self._combination.products().to(self._device)])
            self._metadata_transfer = self._all_workers.all_reduce(self._step_metadata, what="the step metadata")

    def collect(self) -> list[float]:
        """Wait for the sums of `numbers` over all workers, and learn which parameters any of them used."""
        began = time.perf_counter()
        early_s = self._pipeline.waited_s  # while backward ran
        self._pipeline.finish()
        if self._metadata_bucket is None:
            self._metadata_transfer.wait()
        self._settle_sums()
        if self._metadata_bucket is not None:
            metadata = self._metadata_bucket.metadata()
        else:
            metadata = self._step_metadata[: self._num_metadata].tolist()
            if self._sends_square:
                square, num_changing = self._step_metadata[self._num_metadata :].tolist()
                self._square = square if num_changing == 0 else None
        self.waited_s = early_s + time.perf_counter() - began
        end = self._num_numbers + len(self._trained_places)
        counts, report = metadata[self._num_numbers : end], metadata[end:]
        self._used = {place: count > 0 for place, count in zip(self._trained_places, counts, strict=True)}
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
                self._group_of(bucket.parameters[0]).settle()  # its norm may be read next
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

    def _settle_sums(self) -> None:
        """Return when all sums have ended well; raises Disrupted. A wait for a device's sum is the stream's alone, and
        what is read of one that was aborted meanwhile are any numbers."""
        for group in self._sums_over:
            if group is not self._all_workers:
                group.settle()
        self._all_workers.settle()  # last: where replicas have several workers, these compare here

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

    def changed(self) -> None:
        """Called after hooks of the user may have changed the sums: what was computed from them is out of date."""
        self._square, self.parts = None, []
        self._seal()

    def unused(self) -> tuple[str, ...]:
        """Return the parameters that no worker used in the last gradient pass."""
        return tuple(self._all[place][0] for place, is_used in self._used.items() if not is_used)

    def norm(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the global norm of all gradients, 0-d; equal on every worker, which together hold the same sums."""
        square, self._square = self._square, None  # gradients may change before the next call
        if square is not None and dtype is None:
            self._known_norm = self._norms.of_square(square, self.parameters)
            return self._known_norm
        is_wanted = self._measures and self._combination is None  # Adasum knows it already
        is_measured = self._parts.is_measured if is_wanted else None
        norm, measured = self._norms.norm(self.parameters, dtype, is_measured=is_measured)
        if measured is not None:
            self.measured_square = float(measured)
        self._known_norm = norm
        return norm

    @property
    def known_norm(self) -> float | None:
        """The global norm of the last gradient pass as it was computed last; None: it was not asked for. Computes
        nothing."""
        return None if self._known_norm is None else float(self._known_norm)

    def is_finite(self) -> bool:
        """Return whether all gradients are finite; if only the norm overflows, the gradients are checked."""
        return bool(torch.isfinite(self.norm())) or self._norms.num_broken(self.parameters) == 0

    def look(self) -> None:
        """From the next gradient pass on, check this worker's own gradients before they are summed."""
        self._finite_check = self._finite_check or NonFiniteCheck()

    def broken(self) -> tuple[tuple[str, ...] | None, str | None]:
        """Return the parameters whose local gradients were not finite before the sum, and the first one after it.

        None in the first place: nothing was checked. In the second, only this worker's parts of the sum are seen. Both
        follow the order in which backward reached the parameters.
        """
        own = None if self._finite_check is None else self._finite_check.broken()
        pairs = zip(self.names, self.parameters, strict=True)
        sums = (n for n, p in pairs if p.grad is not None and not is_finite(local_part(p.grad)))
        return own, next(sums, None)

    def _check_finite(self, name: str, parameter: Tensor) -> None:
        if self._finite_check is not None and parameter.grad is not None:
            self._finite_check.at(name, local_part(parameter.grad).detach())

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

    def add(self, gradients: Sequence[tuple[Parameter, Tensor]]) -> None:
        """Add gradients that are the same on all workers that hold a parameter, and need no sum: of a penalty."""
        for parameter, gradient in gradients:
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                local_part(parameter.grad).add_(local_part(gradient))
        self._square, self.parts = None, []  # they were computed without it
        self._seal()

    def clip_values(self, max_value: float) -> None:
        """Bring each number of all gradients into [-max_value, max_value]."""
        require_real(zip(self.names, self.parameters, strict=True))
        for gradient in gradients_here(self.parameters):
            gradient.clamp_(-max_value, max_value)
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
        """Raise RuntimeError if user code has written to gradients of split layers since they landed."""
        if self._shardings:
            self._sealed.check_unchanged()

    def _seal(self) -> None:
        """Remember the current gradients, where this worker's part alone would mislead."""
        if self._shardings:
            self._sealed.seal(zip(self.names, self.parameters, strict=True))

    def settle(self) -> None:
        """Commit the last gradient pass: its step is taken, and codecs keep what they learned."""
        is_used_of = {id(self._all[place][1]): is_used for place, is_used in self._used.items()}
        for bucket in self._buckets:
            bucket.settle(lambda parameter: is_used_of.get(id(parameter), False))

    def drop(self) -> None:
        """Remove all gradients: an optimizer's step then changes nothing, and codecs discard what they learned."""
        for bucket in self._buckets:
            bucket.drop()
        self._sealed.clear()
        for _, parameter in self._all:
            parameter.grad = None

    def poison(self) -> None:
        """Give every trained parameter an infinite gradient, on all workers alike."""
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, float("inf"), requires_grad=False)
        self._seal()

    def has_any(self) -> bool:
        """Return whether any gradient has arrived here."""
        return bool(self._arrived)

    def are_left(self, parameters: Iterable[Tensor]) -> bool:
        """Return whether any of these that is summed here has a gradient that is not zero. It waits for a device."""
        own = (p for p in parameters if id(p) in self._parameter_ids)
        found = (p.grad for p in own if p.grad is not None and not p.grad.is_meta)
        return any(bool(local_part(one).count_nonzero()) for one in found)

    def _was_used(self, parameter: Parameter) -> bool:
        """Return whether this worker's runs gave a parameter a gradient."""
        report = None if self._is_used is None else self._is_used(parameter)
        return parameter.grad is not None if report is None else report

    @property
    def _sends_square(self) -> bool:
        """Whether the norm of the only replica can be computed from the step metadata; equal on all workers."""
        is_alone = self._group.size == 1 and self._all_workers.size > 1
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
                self.is_departing = True
                self._unscale([self._buckets[self._queue[self._num_departed]]])
                self._depart_next()
                self.is_departing = False
            except Disrupted as disruption:  # not raised in backward, which is the user's code
                self._pipeline.notice(disruption)
        self._ready.add(place)
        self._pending[bucket] -= 1
        self._check_finite(self.names[place], parameter)

    def _unscale(self, buckets: Iterable[AnyBucket]) -> None:
        """Take the scale of losses out of this worker's gradients, which are complete."""
        if self.loss_scale == 1.0:
            return
        for bucket in buckets:
            if gradients := gradients_here(bucket.parameters):
                torch._foreach_mul_(gradients, 1 / self.loss_scale)  # pyright: ignore[reportPrivateUsage]  # GradScaler has no public way either

    def _depart_next(self, metadata: Sequence[float] = ()) -> None:
        number = self._queue[self._num_departed]
        self._buckets[number].depart(metadata, seed=self._seed_of(number))
        self._num_departed += 1
        self._pipeline.departed(self._buckets[number])
