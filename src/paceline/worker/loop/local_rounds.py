"""Local rounds: a replica takes steps by itself, and all replicas agree at the end of a round.

This is the mode of local SGD, DiLoCo, streaming DiLoCo and gossip. `CommunicationRounds` and its subclasses decide when
a round ends and what replicas exchange then. This module calls them at the right places of the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

from paceline.comm.sharded_tensors import local_part
from paceline.plan import Gossip, LocalSGD, Plan
from paceline.schedule.micro_batches import split_among_replicas
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.between_steps import BetweenSteps
from paceline.worker.loop.communication_rounds import CommunicationRounds, LoopPoint
from paceline.worker.loop.gossip_rounds import GossipRounds
from paceline.worker.loop.round_shares import RoundShare
from paceline.worker.loop.step_mode import StepMode, StepTaker, StreamTerms
from paceline.worker.loop.streaming_rounds import StreamingRounds
from paceline.worker.membership.join_run import WorkerContext
from paceline.worker.parts import WorkerParts
from paceline.worker.step.step_scope import ReplicaVote, StepScope

__all__ = ["LocalRounds"]


class LocalRounds(StepMode):
    """Steps of one replica, which count when the round is over."""

    def __init__(self, parts: WorkerParts, between: BetweenSteps) -> None:
        super().__init__(parts, between)
        self._group, self._axes = parts.place.group, parts.place.axes
        self._rounds = _rounds_of(parts.plan)(
            parts.plan,
            group=self._group,
            axes=self._axes,
            consensus=self._consensus,
            replica_vote=cast("ReplicaVote", parts.scope.vote),  # by `scope`
            models=parts.models,
            weights_changed=parts.executor.shards.close,
            rules=parts.executor.buffers.rules,
        )
        self._has_new_members = False  # shares change when the round is over
        self._takers: dict[int, list[StepTaker]] = {}  # what took which of the round's steps

    @staticmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """The workers of one replica take part in each step."""
        return StepScope(
            place=place,
            group=place.axes.whole,
            axes=place.axes.by_itself(),
            vote=ReplicaVote(place.consensus),
            counts_later=True,
        )

    def check_plain_loop(self) -> None:
        """In an elastic run only a stepper can take the steps of a lost replica."""
        if self._consensus.elastic is not None:
            raise RuntimeError(
                f"a plain loop over a batch under {self._plan.sync!r}, with replicas that come and go: "
                "what a lost replica should have run, the others run at the next agreement, and only a stepper can be "
                "asked to. Write: step = worker.stepper(model, optim, loss), and in the loop over batches: "
                "loss = step(batch)"
            )

    # A stream of batches.

    def begin_stream(self) -> StreamTerms:
        """All replicas' shares are to be known: the others run what a lost one should have run."""
        self._agree_on_trained()
        return StreamTerms(replicas=self._rounds.shares.replicas)

    def open(self, stream: BatchStream) -> Iterator[StepBatch]:
        """Yield the stream's batches; what needs equal weights is done where no round is open."""
        log, between, rounds = self._log, self._between, self._rounds
        steps = stream.steps(lambda: log.step + 1)
        while True:
            self._recorder.begin("between two steps", log.step)
            rounds.loop_point = LoopPoint.WAITING
            if not rounds.is_open:
                between.before_step()
            self._recorder.begin("waiting for data", log.step + 1)
            batch = next(steps, None)
            if batch is None:
                self._end_last_round(stream)
                between.end_of_data()
                return
            if self._files.is_last_step(log.step):
                self._end_last_round()
                between.stop()
                return
            rounds.loop_point = LoopPoint.IN_HAND
            yield from between.hand_out(stream, batch, follow=self._follow_steps)
            self._recorder.begin("between two steps", log.step)
            if not rounds.is_open:
                between.after_step()

    def _follow_steps(self) -> None:
        """Do what is due after the steps that were taken. The user's code is done with them: before that, another
        optimizer may step."""
        rounds = self._rounds
        rounds.loop_point = LoopPoint.FOLLOWING
        rounds.advance()
        if rounds.is_over(self._files.is_save_due):
            self._try_to_end_round()
        elif rounds.is_mixing_due(self._log.step):
            self._try_to_end_round(is_wanted=False)
        rounds.followed()

    def _end_last_round(self, ended: BatchStream | None = None) -> None:
        """No more steps come: end the round, and do what has waited for its end. `ended`: the stream that has no more
        data."""
        was_open = self._rounds.is_open
        self._try_to_end_round()
        if ended is not None and not ended.num_samples:
            self._rounds.end_of_data(self._log.step)
        self._rounds.require_nobody_ahead(self._log.step)
        if was_open:
            self._recorder.begin("between two steps", self._log.step)
            self._between.after_step()

    # One step.

    def before_step(self, batch: StepBatch) -> None:
        """Begin a round, where none is open."""
        self._begin_round()
        super().before_step(batch)

    def before_optimizer(self, *, is_stepping: bool) -> None:
        """Begin a round, where that of this batch was ended in between. A stepper has looked before its pass."""
        if not (is_stepping and self._rounds.is_open):
            self._begin_round()

    def _begin_round(self) -> None:
        """Have replicas agree, from now on, on all that is trained. Where optimizers were given more within a round, it
        ends before that has moved, here, on all replicas alike."""
        if self._rounds.is_open:
            new = self._rounds.lacks(self._prepared.trained())
            if not new:
                return
            here = [local_part(parameter) for parameter in new if not parameter.is_meta]
            before = [part.clone() for part in here]
            self.end()
            for part, values in zip(here, before, strict=True):  # it was moved by what lost members should have run
                part.copy_(values)
        self._agree_on_trained()
        self._rounds.begin()

    def _agree_on_trained(self) -> None:
        """Have replicas agree on everything that prepared optimizers train."""
        agreeing = self._rounds.prepare(self._prepared.trained())
        if agreeing:
            self._prepared.register_averaging(agreeing)

    def commit(self, batch: StepBatch, by: StepTaker | None) -> None:
        """Remember what took the step, for the share of a lost replica."""
        super().commit(batch, by)
        if by is not None and self._rounds.is_open:
            self._takers.setdefault(batch.step, []).append(by)

    def stepped(self, batch: StepBatch, *, is_again: bool) -> None:
        """Count a step into the round; once more, where the round was ended in between."""
        if is_again:
            self._rounds.stepped_again(batch)
        else:
            self._rounds.stepped(batch)

    # Operations that all workers do together.

    def before_operation(self) -> None:
        """End the round first, where its end is due."""
        self._end_round(is_wanted=self._rounds.is_over(self._files.is_save_due))

    def averaged(self) -> contextlib.AbstractContextManager[None]:
        """Have the mean of all replicas' weights in the models meanwhile."""
        return self._rounds.averaged()

    def before_save(self) -> None:
        """End the round: a checkpoint holds equal weights."""
        self.end()

    def end(self) -> None:
        """End the round, where one is open. Raises SyncError where another replica has gone past this place: what is
        done next, a save for example, would be this replica's alone."""
        self._end_round(is_wanted=True)

    def _end_round(self, *, is_wanted: bool) -> None:
        self._try_to_end_round(is_wanted=is_wanted)
        self._rounds.require_nobody_ahead(self._log.step)

    def _try_to_end_round(self, *, is_wanted: bool = True) -> None:
        """The same, where others may be further: then this replica has to go on."""
        if not self._rounds.is_open:
            return
        if is_wanted:
            self._recorder.begin("the replicas agree", self._log.step)
        if not self._rounds.end(self._log.step, run_more=self._run_more, is_wanted=is_wanted):
            return
        self._files.ledger.settle()
        self._takers.clear()
        # A replica that is left behind waits for the end of the round that the others are in.
        if self._has_new_members and not self._rounds.is_left_behind:
            self._share_anew()

    # When a replica is lost.

    def _run_more(self, lost: RoundShare) -> None:
        """Take a step of this replica on micro-batches that a lost member should have run."""
        batch, each = lost.batch, self._axes.micro_batch_peers.size
        own = self._axes.share_of(self._group)[0] % each  # among those with different micro-batches
        share = split_among_replicas(len(lost.micros), replicas=1, each=each)[own]
        read = lost.micros[share.reads.start : share.reads.stop]
        items = self._between.streams[batch.stream].read(batch, read)
        more = batch.part(
            lost.micros[share.own.start : share.own.stop],
            num_runs=share.num_runs,
            spare=None if share.spare is None else lost.micros[share.spare],
            num_here=lost.num_samples,
            fetch=lambda: next(items),
        )
        self._recorder.begin("forward and backward", lost.step)
        for one in self._takers.get(lost.step, ()):
            one.run_more(more)
        self._files.ledger.ran_more(lost.step, more.micros if self._axes.counts else ())

    def members_changed(self) -> None:
        """Until a round is over, all replicas run the shares that they have, and then what others lost. A replica that
        is behind, in what the loop does before its first step, keeps its batch: the others took that step with the same
        shares."""
        self._rounds.members_changed()
        self._has_new_members = self._rounds.is_open or self._consensus.is_behind
        if not self._has_new_members:
            self._share_anew()

    def _share_anew(self) -> None:
        self._has_new_members = False
        self._between.share_anew()


def _rounds_of(plan: Plan) -> type[CommunicationRounds]:
    """The rounds that exchange what this plan says."""
    if isinstance(plan.sync, Gossip):
        return GossipRounds
    return StreamingRounds if isinstance(plan.sync, LocalSGD) and plan.sync.streams else CommunicationRounds
