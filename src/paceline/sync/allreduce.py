"""Synchronous averaging: every replica's gradients are summed in buckets while backward runs.

One walk over a step's micro-batches goes `begin`, backward ..., `arm`, the last backward, `flush`, `collect`, `land`.
Only after `arm` do buckets leave, each as soon as all its gradients are there and all buckets before it have left:
collectives are then issued in the same order on every worker, also on one that has no micro-batch in this step and
sends zeros. One object therefore holds all parameters that a walk is about. Weights are the business of the caller, who
has scaled each loss.

Where a replica is split over several workers, each sums what it holds with those who hold the same; of rows, when the
walk is over. The tally goes to all workers by itself. Of parameters that several workers of a replica have, and whose
gradients each of them has a part of (norms between layers that are cut, embeddings that two stages share), the sums are
summed once more, over those who have the other parts. Parameters of other stages are absent (on the meta device): they
are in no bucket here, and in everybody's tally.

Buckets that nobody used in the walk of the same number of the step before (the other model of a GAN, an average of the
weights) are *cold*: they wait until all workers know whether anybody used them, and normally need not be sent.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.codec.build import build_codec
from paceline.comm.group import Alone, WorkerGroup, total
from paceline.comm.split import local_part
from paceline.plan import AllReduce, Cast, Raw
from paceline.sync.buckets import Bucket, Named, StayingBucket, assign

__all__ = ["CutGradients", "GradientSum", "Spread"]

SPARE_RIDERS = 256  # places for a walk's own numbers beside one for each parameter


class Spread(Protocol):
    """How gradients are spread over workers that run the same micro-batches."""

    @property
    def group(self) -> WorkerGroup:
        """These workers."""
        ...

    def counts(self, parameter: Parameter) -> bool:
        """Whether this worker's gradient of a parameter counts where all of theirs are added up, in a norm say."""
        ...

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Complete what is a part of a sum, of all parameters here that anybody used, in place; all must call it."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CutGradients:
    """How gradients are spread over the workers that cut layers together."""

    group: WorkerGroup
    has_part: Callable[[Parameter], bool]  # of a parameter that is cut; the others are whole on all of them
    is_partial: Callable[[Parameter], bool]  # the parameter is whole, and each worker has a part of its gradient's sum

    def counts(self, parameter: Parameter) -> bool:
        """Whether the gradient is here alone, or this is the first of those who have it."""
        return self.group.index == 0 or self.has_part(parameter)

    def complete(self, parameters: Sequence[Parameter]) -> None:
        """Sum what is a partial sum on each of them."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            if parameter.grad is not None and self.is_partial(parameter):
                by_type.setdefault(parameter.grad.dtype, []).append(local_part(parameter.grad))
        for some in by_type.values():
            flat = torch.cat([one.reshape(-1) for one in some])
            self.group.all_reduce(flat, what="gradients of what is between layers that are cut").wait()
            for gradient, values in zip(some, flat.split([one.numel() for one in some]), strict=True):
                gradient.copy_(values.view_as(gradient))


class GradientSum:
    """Sums the gradients of a set of named parameters over a group; a parameter with several names counts once."""

    def __init__(
        self,
        parameters: Iterable[Named],
        *,
        group: WorkerGroup,
        sync: AllReduce,
        wire: Raw | Cast,
        everybody: WorkerGroup | None = None,
        inside: WorkerGroup | None = None,
        is_used: Callable[[Parameter], bool | None] | None = None,
        cut: Spread | None = None,
    ) -> None:
        """`group`: those who hold the same numbers. `everybody` in the run, by default the same; the workers `inside` a
        replica, who hold the other rows of the same gradients. `is_used(parameter)`: whether this worker's runs gave it
        a gradient; None: whether it has one tells. `cut`: how gradients are spread over those who run the same
        micro-batches, where layers are cut, or the model into stages.
        """
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(list(parameters))}
        self._all = list(reversed(unique.values()))
        self._ids = frozenset(unique)
        self._group, self._sync, self._wire = group, sync, wire
        self._everybody, self._inside = group if everybody is None else everybody, inside or Alone()
        self._is_used, self._cut = is_used, cut
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._trained: set[int] = set()  # places in `_all` of parameters that require gradients, or once did
        self._followed: list[int] = []  # the same, in order: that of the tally
        self._buckets: list[Bucket] | list[StayingBucket] = []
        self._is_stale = False
        self._cold: dict[int, set[int]] = {}  # number of the walk in its step -> buckets that nobody used then
        self._bytes_before = 0
        self._num_riders = 0
        self._carrier: Bucket | StayingBucket | None = None  # of the tally
        self._used: dict[int, bool] = {}  # by place in `_all`: by any worker, in the last walk
        self._device = next((p.device for _, p in self._all if not p.is_meta), torch.device("cpu"))
        self._armed = False
        self.parameters: list[Parameter] = []  # that are summed, in the order in which they leave
        self.names: list[str] = []
        self.waited_s = 0.0  # for transfers, in the last `land`
        self._sealed: list[tuple[str, Parameter, Tensor, int]] = []  # gradients, and their versions

    def begin(self, walk: int) -> None:
        """Forget old gradients: a walk's gradients start from nothing. `walk` is its number in the step, from 0."""
        trained = self._trained | {place for place, (_, p) in enumerate(self._all) if p.requires_grad}
        if trained != self._trained or self._is_stale:
            self._build(trained)  # the user thawed parameters, on all workers alike
        self.drop()
        self._armed = False
        self._walk = walk
        cold = self._cold.get(walk, set())
        self._queue = [number for number in range(len(self._buckets)) if number not in cold]
        self._num_departed = 0
        self._arrived: set[int] = set()  # places of gradients that came in this walk
        self._ready: set[int] = set()  # and in its last backward
        self._pending = [len(bucket.parameters) for bucket in self._buckets]

    def members_changed(self) -> None:
        """The group's members are others: from the next walk on, nothing of what the old ones knew or sent is used."""
        self._is_stale = True
        self._trained.clear()

    def check(self) -> None:
        """Raise where gradients that had arrived are gone, or some were made that nobody sums."""
        wiped = [self.names[place] for place in self._arrived if self.parameters[place].grad is None]
        if wiped:
            raise RuntimeError(
                f"the gradient of {wiped[0]} was removed within a walk over a batch (optim.zero_grad()?): "
                "gradients belong to the whole walk. Call zero_grad() after optim.step(), outside of the inner loop"
            )
        for place, (name, parameter) in enumerate(self._all):
            if parameter.requires_grad and place not in self._trained:
                raise RuntimeError(
                    f"{name} was thawed (requires_grad=True) within a step, so its gradient is summed by nobody: "
                    "set requires_grad between steps"
                )

    def arm(self) -> None:
        """The coming backward is the walk's last: let buckets leave as they fill."""
        # A unit that a model runs several times in a forward has its gradients summed inside the replica as often, and
        # nobody knows which time is the last: rows are complete when backward is.
        self._armed = self._inside.size == 1

    def flush(self, numbers: Sequence[float]) -> None:
        """Send what has not left, and the tally: `numbers` to be summed, and which parameters got a gradient here.

        The tally rides on the last bucket where it can; its numbers should then bear single precision.
        """
        self.check()
        used = [self._got_one(self._all[place][1]) for place in self._followed]
        tally = [*map(float, numbers), *map(float, used)]
        self._armed = False
        self._num_numbers = len(numbers)
        last = self._buckets[self._queue[-1]] if self._queue else None
        may_ride = self._everybody is self._group and len(tally) <= self._num_riders
        self._carrier = last if last is not None and last.can_carry and may_ride else None
        while self._num_departed < len(self._queue):
            is_last = self._num_departed == len(self._queue) - 1
            self._depart_next(tally if is_last and self._carrier is not None else ())
        if self._carrier is None:
            self._tally = torch.tensor(tally, dtype=torch.float64, device=self._device)
            self._tally_transfer = self._everybody.all_reduce(self._tally, what="the tally of a step")

    def collect(self) -> list[float]:
        """Wait for the sums of `numbers` over all workers, and learn which parameters anybody used."""
        began = time.perf_counter()
        for number in self._queue:
            self._buckets[number].land()
        if self._carrier is not None:
            tally = self._carrier.riders()
        else:
            self._tally_transfer.wait()
            tally = self._tally.tolist()
        self.waited_s = time.perf_counter() - began
        counts = tally[self._num_numbers :]
        self._used = {place: count > 0 for place, count in zip(self._followed, counts, strict=True)}
        return tally[: self._num_numbers]

    def land(self, *, scale: float) -> None:
        """Install the sums, multiplied by `scale`; buckets that were cold and used all the same are exchanged first.

        Parameters that no worker used keep no gradient, so that optimizers leave them alone, as in one process.
        """
        cold: set[int] = set()
        is_used_of = {id(self._all[place][1]): is_used for place, is_used in self._used.items()}
        for number, bucket in enumerate(self._buckets):
            uses = [is_used_of[id(parameter)] for parameter in bucket.parameters]
            if not any(uses):
                cold.add(number)
            elif number not in self._queue:
                bucket.depart()
                began = time.perf_counter()
                bucket.land()
                self.waited_s += time.perf_counter() - began
            if scale != 1.0 and any(uses):
                bucket.scale(scale)
            for parameter, is_used in zip(bucket.parameters, uses, strict=True):
                if not is_used:
                    parameter.grad = None
        self._cold[self._walk] = cold
        if self._cut is not None:
            began = time.perf_counter()
            self._cut.complete([parameter for parameter in self.parameters if is_used_of[id(parameter)]])
            self.waited_s += time.perf_counter() - began
        self._seal()

    def unused(self) -> tuple[str, ...]:
        """The parameters that no worker used in the last walk."""
        return tuple(self._all[place][0] for place, is_used in self._used.items() if not is_used)

    @property
    def num_followed(self) -> int:
        """How many parameters are summed, on all workers together."""
        return len(self._followed)

    def norm(self, dtype: torch.dtype | None = None) -> Tensor:
        """The global norm of all gradients, 0-d; equal on every worker, since together they hold the same sums."""
        gradients = self._gradients_here(once=True)
        norm = torch.nn.utils.get_total_norm(gradients if dtype is None else [g.to(dtype) for g in gradients])
        if not self._is_spread:
            return norm
        squared = norm.to(device=self._device, dtype=torch.float64).square().reshape(1)
        for group in self._other_parts():
            group.all_reduce(squared, what="the norm of the gradients").wait()
        return squared.sqrt().reshape(()).to(norm.dtype if gradients else dtype or torch.float32)

    def is_finite(self) -> bool:
        """Whether all gradients are finite. A norm that overflows is looked into."""
        if bool(torch.isfinite(self.norm())):
            return True
        broken = sum(not bool(torch.isfinite(gradient).all()) for gradient in self._gradients_here())
        for group in self._other_parts():
            broken = total(group, [broken], what="gradients that are not finite", device=self._device)[0]
        return broken == 0

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients down so that their norm, which is `norm`, is at most `max_norm`."""
        if not self._is_spread:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
            return
        factor = torch.clamp(
            max_norm / (norm + 1e-6), max=1.0
        )  # as torch has it, which takes no rows with a plain norm
        for gradient in self._gradients_here():
            gradient.mul_(factor)
        self._seal()

    def check_unchanged(self) -> None:
        """Raise RuntimeError where somebody else has written to gradients of layers that are cut, since they landed.

        A norm of what is here is not the model's, and workers that clip by their own one take different steps.
        """
        for name, parameter, gradient, version in self._sealed:
            if parameter.grad is not None and (parameter.grad is not gradient or gradient._version != version):
                raise RuntimeError(
                    f"the gradient of {name} was changed between the walk over the batch and optim.step() "
                    "(clip_grad_norm_?), but each worker has only a part of it, and of its norm: call "
                    "worker.clip_gradients(max_norm) in its place, or give the loss the factor"
                )

    def _seal(self) -> None:
        """Remember the gradients as they are, where a look at this worker's part alone misleads."""
        if self._cut is None:
            return
        pairs = zip(self.names, self.parameters, strict=True)
        self._sealed = [(name, p, p.grad, p.grad._version) for name, p in pairs if p.grad is not None]

    def drop(self) -> None:
        """Remove all gradients: an optimizer's step then changes nothing."""
        self._sealed = []
        for _, parameter in self._all:
            parameter.grad = None

    def has_any(self) -> bool:
        """Whether any gradient has arrived here."""
        return bool(self._arrived)

    def has(self, parameter: Tensor) -> bool:
        """Whether `parameter` is one of those that were registered."""
        return id(parameter) in self._ids

    def _got_one(self, parameter: Parameter) -> bool:
        """Whether this worker's runs gave a parameter a gradient."""
        told = None if self._is_used is None else self._is_used(parameter)
        return parameter.grad is not None if told is None else told

    def _gradients_here(self, *, once: bool = False) -> list[Tensor]:
        """This worker's parts of all gradients; with `once`, those that several workers have only on one of them."""
        cut = self._cut if once else None
        return [
            local_part(parameter.grad)
            for parameter in self.parameters
            if parameter.grad is not None and (cut is None or cut.counts(parameter))
        ]

    @property
    def _is_spread(self) -> bool:
        """Whether other workers hold other parts of the same gradients."""
        return self._inside.size > 1 or self._cut is not None

    def _other_parts(self) -> list[WorkerGroup]:
        """The groups over which the gradients' parts are spread, one after the other."""
        return [self._inside, *([] if self._cut is None else [self._cut.group])]

    @property
    def num_bytes_sent(self) -> int:
        """Bytes handed to the wire since the beginning."""
        return self._bytes_before + sum(bucket.num_bytes_sent for bucket in self._buckets)

    def _build(self, trained: set[int]) -> None:
        self._bytes_before, self._is_stale = self.num_bytes_sent, False
        for hook in self._hooks:
            hook.remove()
        self._trained, self._cold = trained, {}
        self._followed = sorted(trained)
        here = [self._all[place] for place in self._followed if not self._all[place][1].is_meta]
        runs = assign(here, bucket_bytes=self._sync.bucket_bytes)
        if self._group.size == 1:
            self._buckets = [StayingBucket(run) for run in runs]
        else:
            self._num_riders = len(trained) + SPARE_RIDERS
            codecs = [build_codec(self._wire) for _ in runs]
            self._buckets = [
                Bucket(run, group=self._group, codec=codec, num_riders=self._num_riders)
                for run, codec in zip(runs, codecs, strict=True)
            ]
        self.parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self.names = [name for bucket in self._buckets for name in bucket.names]
        self._hooks = []
        place = 0
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                arrived = functools.partial(self._gradient_arrived, number, place)
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
                place += 1

    def _gradient_arrived(self, bucket: int, place: int, parameter: Tensor) -> None:
        self._arrived.add(place)
        if not self._armed:
            return
        if place in self._ready:
            raise RuntimeError(
                f"a second gradient arrived for {self.names[place]} in the step's last micro-batch: "
                "add the losses and call backward once, or walk over the batch again for another optimizer"
            )
        # Buckets leave one gradient late: hooks that the user put on this parameter run after this one and may change
        # its gradient. The last one waits for the tally.
        while self._num_departed < len(self._queue) - 1 and self._pending[self._queue[self._num_departed]] == 0:
            self._depart_next()
        self._ready.add(place)
        self._pending[bucket] -= 1

    def _depart_next(self, riders: Sequence[float] = ()) -> None:
        self._buckets[self._queue[self._num_departed]].depart(riders)
        self._num_departed += 1
