"""Rounds: steps that a replica takes by itself, and the agreement at their end that makes all of them count.

In a run of local rounds a gradient pass involves only its own replica. The *round* is what is committed on all
replicas, or on none. It ends at the steps that the plan names (those that `every` divides). It ends earlier where
something needs equal weights or cannot wait: a save, the end of the data, a lost member, a request to leave. Then all
*meet*: each replica states its step, and those that are behind go on until they have come to the newest one.

A step is over when the loop asks for the next batch. Until then other optimizers may step on the same one, and weights
that were agreed on before would no longer be equal. An operation in the loop's body may end the round earlier. A step
that is taken afterwards on the same batch begins the next round.

A replica meets the others at a *place*: in the loop's body after its step, behind that, or in the body again with a
batch in hand. A replica at another place, though after the same step, does other things next. So places are compared,
and a round ends at one of them. All replicas come through the same places in the same order. A replica that comes to an
operation which another has gone past will never meet it there, so that is an error.

What a lost member should have run in the round, the others run before they agree, in as many steps more. So each sample
of the round is used once, whichever member is lost, and whenever. A replica's weight in the average is its share of the
round's samples that it has run. Buffers become the mean by the same weights.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.group import WorkerGroup, total
from paceline.comm.sharded_tensors import local_part
from paceline.errors import BadNumbersError, SyncError
from paceline.plan import Gossip, LocalSGD, Plan
from paceline.schedule.sample_order import mix
from paceline.sync.allreduce.buckets import NamedParameter
from paceline.sync.local.local_sgd import OuterStep, fragments_of
from paceline.sync.local.weight_averaging import WeightAveraging
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.round_shares import RoundShare, RoundShares
from paceline.worker.membership.consensus import Consensus
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.step.model_buffers import UNKNOWN, BufferAverager
from paceline.worker.step.step_scope import ReplicaVote
from paceline.worker.step.tracked_buffer import FoundRules
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["CommunicationRounds", "LoopPoint"]


class LoopPoint(enum.IntEnum):
    """Where in the loop a replica is after a step, in the order in which it comes there."""

    STEPPED = 0  # in the loop's body, which has stepped on its batch, and may step on it once more
    FOLLOWING = 1  # the loop has asked for the next batch: what is due after the step is done
    WAITING = 2  # for the next batch, which may not come
    IN_HAND = 3  # in the loop's body, with a batch that it has not stepped on


class CommunicationRounds:
    """One worker's rounds. All workers of a replica come to each method at the same place."""

    def __init__(
        self,
        plan: Plan,
        *,
        group: WorkerGroup,
        axes: ParallelGroups,
        consensus: Consensus,
        replica_vote: ReplicaVote,
        models: PreparedModels,
        weights_changed: Callable[[], None],
        rules: FoundRules | None = None,
    ) -> None:
        """`weights_changed()`: what was made of a model's weights before is not of these. `rules`: of buffers."""
        self.is_open = False  # this replica has taken steps that do not count yet
        self.loop_point = LoopPoint.WAITING  # set by the loop; a newcomer comes to a batch as the others do
        self._buffers = BufferAverager(rules)
        self._plan, self._group, self._axes, self._consensus, self._models = plan, group, axes, consensus, models
        self._replica_vote, self._weights_changed = replica_vote, weights_changed
        self._agreeing: Sequence[WeightAveraging] = ()
        self._trained: frozenset[int] = frozenset()  # ids of the parameters that are agreed on
        self._has_begun = False
        self._fresh: list[int] = []  # steps after which nothing has been done yet of what may be due
        self.shares = RoundShares(consensus, group, workers_each=plan.layout.workers_each)
        self.is_left_behind = False  # a member was lost in the last agreement, when others had begun the next round
        self._has_lost = False  # a member, in this round
        self._ahead: int | None = None  # the place that another replica had come to when all met, and this one had not
        self._end_at: int | None = None  # that place, or where all that met are to end the round

    def lacks(self, trained: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those of these parameters that are not agreed on yet."""
        return [parameter for parameter in trained if id(parameter) not in self._trained]

    def prepare(self, trained: Iterable[nn.Parameter]) -> Sequence[WeightAveraging]:
        """Between two rounds: agree on these parameters from now on. Returns what averages them, where that is new."""
        ids = frozenset(map(id, trained))
        if ids == self._trained:
            return ()
        self._trained = ids
        self._agreeing = self._models.reducers.average_by(self._made, ids)
        for model in self._models:
            if any(id(parameter) in ids for parameter in model.parameters()):
                self._buffers.add(model)
        return self._agreeing

    def _made(
        self, parameters: Sequence[NamedParameter], group: WorkerGroup, everybody: WorkerGroup
    ) -> Sequence[WeightAveraging]:
        """What averages these parameters."""
        sync = self._plan.sync
        if not isinstance(sync, LocalSGD):
            raise ValueError(f"replicas under {sync!r} agree in each step")
        return [
            OuterStep(
                some,
                group=group,
                all_workers=everybody,
                sync=sync,
                wire=self._plan.wire,
                seed=mix(self._plan.batch.seed, number) >> 1,
                holders=self._models.reducers.holders(),
            )
            for number, some in enumerate(fragments_of(parameters, sync.fragments))
        ]

    def begin(self) -> None:
        """A gradient pass comes. Before the first of a round, all replicas have equal weights and buffers."""
        if self._agreeing and not self._has_begun and not self.is_open:
            for one in self._agreeing:
                one.begin()
            self._buffers.begin()
            self._has_begun = True

    def stepped(self, batch: StepBatch) -> None:
        """This replica has taken a step of its own, which waits for the round's end."""
        self.loop_point = LoopPoint.STEPPED
        self._models.reducers.stepped()
        self._note(batch)

    def stepped_again(self, batch: StepBatch) -> None:
        """It has stepped on the same batch once more: where the round was ended in between, another one has begun."""
        if not self.is_open:
            self._note(batch)

    def _note(self, batch: StepBatch) -> None:
        self.is_open = True
        if batch.step not in self._fresh:
            self._fresh.append(batch.step)
        self._count(batch)

    def _count(self, batch: StepBatch) -> None:
        """Add all replicas' shares of a step to the round."""
        self.shares.add(batch)

    def advance(self) -> None:
        """Where parts of what is agreed on travel meanwhile: send and take those whose turn comes with the fresh
        steps."""

    def is_over(self, is_save_due: Callable[[int], bool]) -> bool:
        """Whether the round ends after the fresh steps, as far as this replica knows, equally on all of its workers.
        Saves wait for its end."""
        if not self.is_open or not isinstance(self._plan.sync, LocalSGD | Gossip):
            return False
        every, cannot_wait = self._plan.sync.num_round_steps, self._cannot_wait
        return any(cannot_wait or step % every == 0 or self._place(step) == self._end_at for step in self._fresh)

    @property
    def _cannot_wait(self) -> bool:
        """Whether the round is to end before its time: this replica is called, a member was lost in it, or too few are
        left to take steps."""
        return self._replica_vote.is_called or self._has_lost or self._consensus.holds

    def members_changed(self) -> None:
        """The members are others."""
        self._has_lost = self.is_open

    def followed(self) -> None:
        """What was due after the fresh steps has been done."""
        self._fresh.clear()

    def end(self, step: int, *, run_more: Callable[[RoundShare], None], is_wanted: bool = True) -> bool:
        """Agree with the other replicas, where all have come to the same place, and one of them at least wants to;
        returns whether. Elsewhere another may be further, and this one has to go on. `run_more(share)` takes a step
        on what a lost member should have run. Blocks."""
        ends = self._meet(step, is_wanted=is_wanted) if self._agreeing else None
        if ends is False and self.is_mixing_due(step):
            self._mix(step)
        if not ends:
            return False

        def agree() -> Callable[[], None]:
            shares = self.shares
            shares.redistribute_lost(run_more)
            self._buffers.capture_anew(shares.num_own, is_first=self._axes.expert_replica_group.index == 0)
            own = marks = self._buffers.marks_of_replica()
            weight = shares.num_own / shares.num_samples if shares.num_samples else 0.0
            for one in self._agreeing:
                marks = one.exchange(weight, own, step=step)
            self._require_finite(self._agreeing, step)
            return self._combined(marks, shares.num_samples)

        generation = self._consensus.generation
        settle = self._consensus.do(agree)
        self.is_left_behind = self._consensus.generation != generation and self._consensus.is_behind
        for one in self._agreeing:
            one.take()
        settle()
        self._close()
        return True

    def _combined(self, marks: Sequence[float], num_samples: int) -> Callable[[], None]:
        """Combine the buffers that changed in any replica, and return what sets them; `marks` are those of all
        replicas. Raises ValueError where replicas have found different rules."""
        self._buffers.compare_rules(marks, self._group)
        is_changed = [mark % UNKNOWN > 0 for mark in marks]
        return self._buffers.combine(is_changed, num_samples=num_samples, groups=[self._axes.expert_replica_group])

    def _close(self) -> None:
        """All have the same weights: the round is over."""
        self._weights_changed()
        self.shares.clear()
        self.is_open = self._has_begun = self._has_lost = self._replica_vote.is_called = False
        self._end_at = self._ahead = None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Have the mean of all replicas' weights and buffers in the models, in a round: with the weights that they have
        in an agreement. All must call it; what was there comes back afterwards. Raises Disrupted."""
        if not self.is_open:
            yield
            return
        own = self._buffers.marks_of_replica()
        self._buffers.compare_rules(total(self._group, own, what="rules of buffers") if own else [], self._group)
        live = [local_part(anchored) for anchored in self._models.reducers.averaged()]
        live += [buffer for buffer in self._buffers.floating() if not buffer.is_meta]
        kept = [tensor.clone() for tensor in live]
        try:
            _average(live, share=self._share(), group=self._axes.expert_replica_group)
            self._weights_changed()
            yield
        finally:
            with torch.no_grad():
                for tensor, before in zip(live, kept, strict=True):
                    tensor.copy_(before)
            self._weights_changed()

    def _share(self) -> float:
        """The weight of this replica in a mean over those that are present."""
        return self.shares.weight()

    def is_mixing_due(self, step: int) -> bool:
        """Whether this replica, in the middle of a round, is to come together with others after this step."""
        return False

    def _mix(self, step: int) -> None:
        """All have come to the same step, and no replica wants the round to end."""

    def end_of_data(self, step: int) -> None:
        """The data has ended here: raise SyncError where it goes on elsewhere, as only an iterable's can. Blocks."""
        if not self._agreeing:
            return
        if not self.is_open:  # otherwise all have met just now
            self._meet(step, is_wanted=False)
        if self._ahead is not None:
            raise SyncError(
                f"the data has ended here after step {step}, and another replica has come to {_named(self._ahead)}: an "
                "iterable dataset must give the same items in the same order on every worker. Seed it, sort its "
                "files, and do not split it by worker yourself"
            )

    def require_nobody_ahead(self, step: int) -> None:
        """This replica has come to an operation of all, and met: raise SyncError where another has gone past it."""
        if self._ahead is not None:
            raise SyncError(
                "this replica has come to something that all do together (a save, an evaluation, the function's end, "
                f"...) after step {step}, and another one has gone past that place, to {_named(self._ahead)}: all must "
                "leave the loop after the same step, and do the same things in it. The loss that step(batch) returns "
                f"under {self._plan.sync!r} is that of this replica's samples: decide by worker.average(loss)"
            )

    def _place(self, step: int) -> int:
        """The place after this step where this replica is."""
        return step * len(LoopPoint) + self.loop_point

    def _meet(self, step: int, *, is_wanted: bool) -> bool | None:
        """Come together with the replicas that want the round to end, and those that do an operation in it. Returns
        whether the round ends; None: others are further.

        Where it does not end, this replica is not called any more: the next pass's metadata says it again. Where one
        replica wants it to end, and all are in the loop's body, it ends when the loop asks for the next batch."""
        place = self._place(step)

        def look() -> tuple[list[int], bool, bool, bool]:
            places = [0.0] * self._group.size
            places[self._group.index] = float(place)
            # All that decides is summed here: a replica past this, when a member is lost, may not know of the loss.
            is_urgent = self._cannot_wait or place == self._end_at
            asks = [float(is_wanted), float(is_urgent), float(self._consensus.wants_change)]
            *found, wanted, urgent, wishes = total(self._group, [*places, *asks], what="a round's end")
            return list(map(int, found)), wanted > 0, urgent > 0, wishes > 0

        while True:
            places, ends, is_urgent, is_change_due = self._consensus.do(look)
            newest = max(places)
            if place < newest:
                self._end_at = self._ahead = newest
                self._replica_vote.is_called = False
                return None
            if min(places) == newest:
                break
        self._ahead = None
        ends = ends or (is_urgent and self.loop_point == LoopPoint.FOLLOWING)
        if is_urgent and not ends:
            self._end_at = (step + (self.loop_point == LoopPoint.IN_HAND)) * len(LoopPoint) + LoopPoint.FOLLOWING
        if ends and is_change_due:
            self._consensus.change_is_due()
        if not ends:
            self._replica_vote.is_called = False
        return ends

    def _require_finite(self, agreeing: Iterable[WeightAveraging], step: int) -> None:
        """Raise BadNumbersError, on all workers, where what was summed is not finite on any. All must call it."""
        is_broken = not all(one.sums.is_finite() for one in agreeing)
        if self._axes.is_split:  # each has looked at its own parts
            is_broken = total(self._group, [float(is_broken)], what="whether weights are finite")[0] > 0
        if is_broken:
            raise BadNumbersError(
                f"step {step}: how far the replicas have moved is not finite, so the weights of one of them are "
                "broken. Start again with the same run_dir, which goes on from the newest checkpoint, with a lower "
                "learning rate or with clip_norm"
            )


def _named(place: int) -> str:
    step, point = divmod(place, len(LoopPoint))
    return f"the batch after step {step}" if point == LoopPoint.IN_HAND else f"step {step}"


@torch.no_grad()
def _average(tensors: Sequence[Tensor], *, share: float, group: WorkerGroup) -> None:
    """Replace tensors by their sum over a group, each member's times its `share`; all must have the same; blocks."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for some in by_kind.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in some]).mul_(share)
        group.all_reduce(flat, what="the mean of all replicas' weights").wait()
        for tensor, mean in zip(some, flat.split([one.numel() for one in some]), strict=True):
            tensor.copy_(mean.view_as(tensor))
