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

What several workers of a replica have the same of (a norm beside layers that are cut) each sums by itself, and all must
get the same bits, though wires round by what lies beside a number, and by chance. So such gradients travel in buckets
that are the same on all of them, and with the same chances.

Some parameters may be held by fewer workers than the others (experts, by those who have the same ones): their
gradients leave in buckets of their own, to these workers.

With `op="adasum"` replicas combine what each has made of its share of the batch: gradients that are spread over a
replica are completed there first, and what all need to know for it rides in the tally (`sync.allreduce.adasum`).

Buckets that nobody used in the walk of the same number of the step before (the other model of a GAN, an average of the
weights) are *cold*: they wait until all workers know whether anybody used them, and normally need not be sent.
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

SPARE_RIDERS = 256  # places for a walk's own numbers beside one for each parameter


class GradientReducer:
    """Sums the gradients of a set of named parameters over a group; a parameter with several names counts once."""

    carries_buffers = False  # what this worker has made of the buffers travels with its gradients
    chosen: tuple[int, ...] | None = None  # the shares of the last walk's step that count; None: all
    is_late = False  # this worker's is none of them

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        *,
        group: WorkerGroup,
        sync: AllReduce,
        wire: Wire,
        seed: int = 0,
        everybody: WorkerGroup | None = None,
        inside: WorkerGroup | None = None,
        is_used: Callable[[Parameter], bool | None] | None = None,
        spreads: Sequence[GradientSharding] = (),
        apart: Callable[[Parameter], WorkerGroup | None] | None = None,
        holders: Callable[[Parameter], Hashable] | None = None,
    ) -> None:
        """`group`: those who hold the same numbers. `everybody` in the run, by default the same; the workers `inside` a
        replica, who hold the other rows of the same gradients. `is_used(parameter)`: whether this worker's runs gave it
        a gradient; None: whether it has one tells. `spreads`: how gradients are spread over others of the replica,
        along each axis: where layers are cut, the model into stages, and experts over workers. `apart(parameter)`:
        those who hold the same numbers of a parameter where that is not `group`; each worker then has as many such
        parameters, of the same sizes and in the same order. `holders(parameter)`: who of the replica have the very same
        gradient of a parameter before it is summed, alike on all of them; `spreads` tell where it is not given.
        """
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(list(parameters))}
        self._all = list(reversed(unique.values()))
        self._ids = frozenset(unique)
        self._device = next((p.device for _, p in self._all if not p.is_meta), torch.device("cpu"))
        self._group, self._sync, self._wire, self._seed = group, sync, wire, seed
        self._everybody, self._inside = group if everybody is None else everybody, inside or SingleWorkerGroup()
        self._is_used, self._spreads, self._apart = is_used, tuple(spreads), apart
        self._holders = holders or self._holders_by_spread
        self._norms = GradientNorm(inside=self._inside, spreads=self._spreads, device=self._device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._trained: set[int] = set()  # places in `_all` of parameters that require gradients, or once did
        self._followed: list[int] = []  # the same, in order: that of the tally
        self._buckets: list[AnyBucket] = []
        self._relay = BucketPipeline()
        self._riding: set[int] = set()  # buckets that go to everybody, so that the tally may ride on them
        self._is_stale = False
        self._memory: CodecMemory | None = None  # for the buckets that come next; None: that of those before
        self._cold: dict[int, set[int]] = {}  # number of the walk in its step -> buckets that nobody used then
        self._bytes_before = SentBytes()
        self._num_riders = 0
        self._combination: AdasumWeights | None = None
        self._parts = ReplicaNorms(group, is_measured=lambda _: False)
        self._measures = False  # in this walk
        self._carrier: AnyBucket | None = None  # of the tally
        self._used: dict[int, bool] = {}  # by place in `_all`: by any worker, in the last walk
        self._square: float | None = None  # of the norm of what the last walk has brought, until somebody changes that
        self._armed = False
        self.parameters: list[Parameter] = []  # that are summed, in the order in which they leave
        self.names: list[str] = []
        self.parts: list[ReplicaNorm] = []  # of the last walk, where somebody has asked
        self.measured_square: float | None = None  # of the mean's norm, in those parameters that parts were measured in
        self.waited_s = 0.0  # for transfers, in the last `land`
        self.waited_in_all_s = 0.0
        self._encoded_before_s = 0.0
        self._sealed: list[tuple[str, Parameter, Tensor, int]] = []  # gradients, and their versions
        self._look: NonFiniteCheck | None = None

    def begin(self, walk: int, *, step: int = 0, measures: bool = False) -> None:
        """Forget old gradients: a walk's gradients start from nothing. `walk` is its number in the step, from 0.

        With `measures` the walk ends with what is known of the replicas' `parts`, and `measured_square`.
        """
        trained = self._trained | {place for place, (_, p) in enumerate(self._all) if p.requires_grad}
        if trained != self._trained or self._is_stale:
            self._build(trained)  # the user thawed parameters, on all workers alike
        self.drop()
        if self._look is not None:
            self._look.begin()
        self._armed = False
        self._walk, self._step = walk, step
        self.parts, self.measured_square, self._square = [], None, None
        self._measures = measures
        self._parts.begin()
        for bucket in self._buckets:
            bucket.begin(is_measured=self._parts.is_measured if measures and self._combination is None else None)
        self._relay.begin()
        cold = self._cold.get(walk, set()) if self._combination is None else set()
        self._queue = [number for number in range(len(self._buckets)) if number not in cold]
        if riding := [number for number in self._queue if number in self._riding]:
            self._queue.remove(riding[-1])  # the last one waits for the tally
            self._queue.append(riding[-1])
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
        is_complete = self._combination is None or not self._spreads
        self._armed = self._inside.size == 1 and is_complete

    def note_first(self, *, weight: float) -> None:
        """The walk's first backward is over, and its gradients are complete: they count for `weight` in the mean."""
        if self._measures:
            self._parts.note_first(self.parameters, weight=weight)

    def flush(self, numbers: Sequence[float], *, weight: float = 1.0) -> None:
        """Send what has not left, and the tally: `numbers` to be summed, and which parameters got a gradient here.

        `weight`: what this worker's losses count for in the mean. The tally rides on the last bucket where it can; its
        numbers should then bear single precision. Raises Disrupted, also for what was noticed before.
        """
        self.check()
        if self._look is not None:  # what backward has not shown already is here still
            for name, parameter in zip(self.names, self.parameters, strict=True):
                self._look_at(name, parameter)
        used = [self._got_one(self._all[place][1]) for place in self._followed]
        tally = [*map(float, numbers), *map(float, used), *self._told(weight)]
        self._armed = False
        if self._combination is not None:
            self._complete_first()
        self._num_numbers, self._num_told = len(numbers), len(tally)
        last = self._buckets[self._queue[-1]] if self._queue else None
        may_ride = bool(self._queue) and self._queue[-1] in self._riding and len(tally) <= self._num_riders
        self._carrier = last if last is not None and last.can_carry and may_ride else None
        while self._num_departed < len(self._queue):
            self._relay.check()
            is_last = self._num_departed == len(self._queue) - 1
            self._depart_next(tally if is_last and self._carrier is not None else ())
        self._relay.check()
        if self._carrier is None:
            self._tally = torch.tensor(tally + self._squares(), dtype=torch.float64, device=self._device)
            if self._combination is not None:
                self._relay.finish()
                self._tally = torch.cat([self._tally, self._combination.products().to(self._device)])
            self._tally_transfer = self._everybody.all_reduce(self._tally, what="the tally of a step")

    def collect(self) -> list[float]:
        """Wait for the sums of `numbers` over all workers, and learn which parameters anybody used."""
        began = time.perf_counter()
        early_s = self._relay.waited_s  # while backward ran
        self._relay.finish()
        if self._carrier is not None:
            tally = self._carrier.riders()
        else:
            self._tally_transfer.wait()
            tally = self._tally[: self._num_told].tolist()
            if self._tells_square:
                square, num_changing = self._tally[self._num_told :].tolist()
                self._square = square if num_changing == 0 else None
        self.waited_s = early_s + time.perf_counter() - began
        end = self._num_numbers + len(self._followed)
        counts, told = tally[self._num_numbers : end], tally[end:]
        self._used = {place: count > 0 for place, count in zip(self._followed, counts, strict=True)}
        self.parts = ReplicaNorms.read(told)
        return tally[: self._num_numbers]

    def land(self, *, scale: float) -> None:
        """Install the sums, multiplied by `scale`; buckets that were cold and used all the same are exchanged first.

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
                self.parts = []  # they were told without it
                began = time.perf_counter()
                bucket.land()
                self.waited_s += time.perf_counter() - began
            if scale != 1.0 and any(uses) and self._combination is None:
                bucket.scale(scale)
            for parameter, is_used in zip(bucket.parameters, uses, strict=True):
                if not is_used:
                    parameter.grad = None
                elif parameter.grad is None:  # of its parts only others were used
                    parameter.grad = torch.zeros_like(parameter)
        if self._square is not None:  # where the gradients grow they may overflow: these are looked at themselves
            self._square = self._square * scale**2 if abs(scale) <= 1 else None
        self._cold[self._walk] = cold
        if self._spreads and self._combination is None:
            began = time.perf_counter()
            used = [parameter for parameter in self.parameters if is_used_of[id(parameter)]]
            for spread in self._spreads:
                spread.complete(used)
            self.waited_s += time.perf_counter() - began
        self.waited_in_all_s += self.waited_s
        self._seal()

    def _complete_first(self) -> None:
        """Complete gradients inside the replica: what is combined has to be the replica's own."""
        if not self._spreads:
            return
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for spread in self._spreads:
            spread.complete(self.parameters)

    def _combine(self, combination: AdasumWeights, scale: float) -> None:
        """Have all replicas' gradients combined, each the mean over its own share: so each loss has counted for more
        than it did, by what all of them weigh over what its replica's do."""
        began = time.perf_counter()
        weight = sum(part.weight for part in self.parts)
        factors = [scale * weight / part.weight if part.weight else 0.0 for part in self.parts]
        combination.combine(self._tally[self._num_told :], factors)
        squares, self.measured_square = combination.squares(scale)
        self.parts = [ReplicaNorm(part.weight, square) for part, square in zip(self.parts, squares, strict=True)]
        self.waited_s += time.perf_counter() - began

    def unused(self) -> tuple[str, ...]:
        """The parameters that no worker used in the last walk."""
        return tuple(self._all[place][0] for place, is_used in self._used.items() if not is_used)

    @property
    def num_followed(self) -> int:
        """How many parameters are summed, on all workers together."""
        return len(self._followed)

    def norm(self, dtype: torch.dtype | None = None) -> Tensor:
        """The global norm of all gradients, 0-d; equal on every worker, since together they hold the same sums."""
        square, self._square = self._square, None  # what is asked for later may be another one
        if square is not None and dtype is None:
            return self._norms.of_square(square, self.parameters)
        is_wanted = self._measures and self._combination is None  # which knows it already
        is_measured = self._parts.is_measured if is_wanted else None
        norm, measured = self._norms.norm(self.parameters, dtype, is_measured=is_measured)
        if measured is not None:
            self.measured_square = float(measured)
        return norm

    def is_finite(self) -> bool:
        """Whether all gradients are finite. A norm that overflows is looked into."""
        return bool(torch.isfinite(self.norm())) or self._norms.num_broken(self.parameters) == 0

    def look(self) -> None:
        """From the next walk on, look at this worker's own gradients before they are summed."""
        self._look = self._look or NonFiniteCheck()

    def broken(self) -> tuple[tuple[str, ...] | None, str | None]:
        """The parameters whose gradients were not finite here, before they were summed (None: nobody has looked), and
        the first of those of the sum, in what this worker holds of it. The first is the first that backward reached."""
        own = None if self._look is None else self._look.broken()
        pairs = zip(self.names, self.parameters, strict=True)
        sums = (n for n, p in pairs if p.grad is not None and not is_finite(local_part(p.grad)))
        return own, next(sums, None)

    def _look_at(self, name: str, parameter: Tensor) -> None:
        if self._look is not None and parameter.grad is not None:
            self._look.at(name, local_part(parameter.grad).detach())

    def agree_on(self, verdict: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return what all who took part think of the last walk's losses: the same, where they all know the same."""
        return verdict

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients down so that their norm, which is `norm`, is at most `max_norm`."""
        if not self._norms.is_spread:
            torch.nn.utils.clip_grads_with_norm_(self.parameters, max_norm, norm)
            return
        factor = torch.clamp(
            max_norm / (norm + 1e-6), max=1.0
        )  # as torch has it, which takes no rows with a plain norm
        for gradient in gradients_here(self.parameters):
            gradient.mul_(factor)
        self._seal()

    def serve(self, optimizers: Sequence[Optimizer]) -> None:
        """These optimizers take the steps of this sum's gradients."""

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Take the step that the gradients are for."""
        for optimizer in optimizers:
            optimizer.step()

    def fetch_state(self) -> None:
        """Have the optimizers' state here, where it lies elsewhere."""

    def drop_state(self) -> None:
        """Let go of what `fetch_state` brought."""

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
        if not self._spreads:
            return
        pairs = zip(self.names, self.parameters, strict=True)
        self._sealed = [(name, p, p.grad, p.grad._version) for name, p in pairs if p.grad is not None]

    def settle(self) -> None:
        """The last walk counts: its step is taken, and what codecs have learnt in it is remembered."""
        is_used_of = {id(self._all[place][1]): is_used for place, is_used in self._used.items()}
        for bucket in self._buckets:
            bucket.settle(lambda parameter: is_used_of.get(id(parameter), False))

    def memory(self) -> CodecMemory:
        """What codecs remember of the steps that count, by the parameters' names; not copied."""
        if self._memory is not None:
            return self._memory
        own: dict[str, Tensor] = {}
        common: dict[str, dict[str, Tensor]] = {}
        for bucket in self._buckets:
            own.update(bucket.own())
            common.update(bucket.common())
        return CodecMemory(own, common)

    def gathered_own(self, *, keeps: bool) -> dict[str, list[Tensor]]:
        """What each replica has still to send, by the parameters' names; of what its workers have parts of, the sum.

        All workers must call it, and it blocks. Who does not `keep` it takes part for the others, bucket by bucket, and
        gets nothing.
        """
        if self._is_stale or not self._buckets:
            self._build({place for place, (_, p) in enumerate(self._all) if p.requires_grad} | self._trained)
        partial = {name for name, one in self._all if any(spread.adds_up(one) for spread in self._spreads)}
        found: dict[str, list[Tensor]] = {}
        for bucket in self._buckets:
            parts = bucket.gathered_own()
            found.update(parts if keeps else {name: parts[name] for name in parts.keys() & partial})
        for spread in self._spreads:
            sum_residuals(found, self._all, spread=spread, count=self._group.size, device=self._device)
        return found if keeps else {}

    def remember(self, memory: CodecMemory) -> None:
        """Go on with what codecs remembered elsewhere, of those parameters that it knows; None of all else."""
        self._memory = memory
        self._is_stale = True  # until the next walk

    def drop(self) -> None:
        """Remove all gradients: an optimizer's step then changes nothing, and codecs have learnt nothing."""
        for bucket in self._buckets:
            bucket.drop()
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

    def sent_beside(self, num_bytes: int) -> None:
        """Count what went to other replicas in another way."""
        self._bytes_before += SentBytes(num_sent=num_bytes)

    @property
    def bytes(self) -> SentBytes:
        """What went to other replicas since the beginning."""
        return sum((bucket.bytes for bucket in self._buckets), self._bytes_before)

    @property
    def encoding_s(self) -> float:
        """What codecs have taken since the beginning."""
        return self._encoded_before_s + sum(bucket.encoding_s for bucket in self._buckets)

    def largest_bucket(self) -> list[tuple[int, int]]:
        """The matrices of the largest bucket that goes to other replicas; none where there is none."""
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
    def _tells_square(self) -> bool:
        """Whether the norm of what is spread over the only replica may be told with the tally, as all know alike."""
        is_alone = self._group.size == 1 and self._everybody.size > 1
        return is_alone and self._combination is None and not self._measures

    def _squares(self) -> list[float]:
        """This worker's part of the square of that norm, and 1 where what is here is still going to be summed."""
        if not self._tells_square:
            return []
        # What was left out so far may bring more: cold buckets, and what was still to be sent when there were others.
        is_all = self._num_departed == len(self._buckets)
        is_staying = is_all and all(isinstance(one, LocalBucket) and not one.own() for one in self._buckets)
        adds_up = (spread.adds_up(parameter) for spread in self._spreads for parameter in self.parameters)
        if not is_staying or any(adds_up):
            return [0.0, 1.0]
        return [self._norms.own_square(self.parameters), 0.0]

    def _told(self, weight: float) -> list[float]:
        """What this worker tells of its part of the batch."""
        if not self._measures and self._combination is None:
            return []
        is_measured = self._measures and self._combination is None and self._group.size > 1
        return self._parts.told(weight, [self._buckets[number].square() for number in self._queue if is_measured])

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
        """The bucket of parameters that nobody else holds: `group` is of one."""
        return LocalBucket(run)

    def _is_measured(self, parameter: Parameter) -> bool:
        """Whether a replica has a gradient of its own, before any sum, and this worker has the word on what is here."""
        is_part = any(spread.adds_up(parameter) for spread in self._spreads)
        return not is_part and self._norms.counts(parameter) and self._group_of(parameter) is self._group

    def _group_of(self, parameter: Parameter) -> WorkerGroup:
        """Those who hold the same numbers."""
        return (None if self._apart is None else self._apart(parameter)) or self._group

    def _holders_by_spread(self, parameter: Parameter) -> Hashable:
        """Who of the replica have the same gradient, along each axis, and not each a part of its sum."""
        return tuple(() if spread.adds_up(parameter) else spread.holders(parameter) for spread in self._spreads)

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
        while (
            self._relay.disruption is None
            and self._num_departed < len(self._queue) - 1
            and self._pending[self._queue[self._num_departed]] == 0
        ):
            try:
                self._depart_next()
            except Disrupted as disruption:  # not for backward, which is the user's code
                self._relay.notice(disruption)
        self._ready.add(place)
        self._pending[bucket] -= 1
        self._look_at(self.names[place], parameter)

    def _depart_next(self, riders: Sequence[float] = ()) -> None:
        number = self._queue[self._num_departed]
        self._buckets[number].depart(riders, seed=self._seed_of(number))
        self._num_departed += 1
        self._relay.departed(self._buckets[number])

    def _seed_of(self, number: int) -> int:
        """Of the chances that a codec takes: other ones in each step and for each replica, the same when it is run
        again, and for all in the replica who have the same bucket, though it may have another number there."""
        bucket = self._buckets[number]
        first = bucket.parameters[0]
        # Parts of one sum are rounded each by its own chances: errors that go together would not even out.
        parts = [spread.group.index for spread in self._spreads if not spread.holders(first) or spread.adds_up(first)]
        place = self._group_of(first).index
        return mix(self._seed, self._step, self._walk, zlib.crc32(bucket.names[0].encode()), place, *parts) >> 1
