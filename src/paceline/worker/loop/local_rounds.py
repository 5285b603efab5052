"""Local rounds: a replica takes steps by itself, and all replicas agree at the end of a round.

This is the mode of local SGD, DiLoCo, streaming DiLoCo and gossip. `CommunicationRounds` and its subclasses decide when
a round ends and what replicas exchange then. This module calls them at the right places of the loop.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from paceline.comm.sharded_tensors import local_part
from paceline.plan import Gossip, LocalSGD, Plan
from paceline.schedule.micro_batches import deal_to_replicas
from paceline.worker.data.batch_stream import BatchStream
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.communication_rounds import CommunicationRounds, LoopPoint, RoundShare
from paceline.worker.loop.gossip_rounds import GossipRounds
from paceline.worker.loop.step_mode import ReplicaVote, StepMode, StepScope, StepTaker
from paceline.worker.loop.streaming_rounds import StreamingRounds
from paceline.worker.membership.join_run import WorkerContext

__all__ = ["LocalRounds"]


class LocalRounds(StepMode):
    """Steps of one replica, which count when the round is over."""

    skipped_by = "by this replica"

    def __init__(self, plan: Plan, scope: StepScope, **options: Any) -> None:
        super().__init__(plan, scope, **options)
        if not isinstance(scope.vote, ReplicaVote):
            raise TypeError(f"local rounds need a ReplicaVote, not a {type(scope.vote).__name__}")
        self._axes = scope.place.axes
        self._rounds = _rounds_of(plan)(
            plan,
            group=scope.place.group,
            axes=self._axes,
            agreement=self._agreement,
            by_itself=scope.vote,
            models=self._models,
            weights_changed=self._executor.shards.close,
        )
        self._is_deal_due = False  # when the round is over
        self._takers: dict[int, list[StepTaker]] = {}  # what took which of the round's steps

    @staticmethod
    def scope(plan: Plan, place: WorkerContext) -> StepScope:
        """The workers of one replica take part in each step."""
        return StepScope(
            place=place, group=place.axes.whole, axes=place.axes.by_itself(), vote=ReplicaVote(place.agreement)
        )

    # A stream of batches.

    def replicas(self) -> Callable[[], list[int]]:
        """All replicas' shares are known: the others run what a lost one should have run."""
        return self._rounds.replicas

    def opened(self) -> None:
        """Have replicas agree on everything that prepared optimizers train."""
        trained = self._between.prepared.trained()
        agreeing = self._rounds.prepare(trained)
        if agreeing:
            self._between.prepared.register_averaging(agreeing)

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

    def check_plain_loop(self) -> None:
        """In an elastic run only a stepper can take the steps of a lost replica."""
        if self._agreement.elastic is not None:
            raise RuntimeError(
                f"a plain loop over a batch under {self._plan.sync!r}, with replicas that come and go: "
                "what a lost replica should have run, the others run at the next agreement, and only a stepper can be "
                "asked to. Write: step = worker.stepper(model, optim, loss), and in the loop over batches: "
                "loss = step(batch)"
            )

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
            new = self._rounds.lacks(self._between.prepared.trained())
            if not new:
                return
            here = [local_part(parameter) for parameter in new if not parameter.is_meta]
            before = [part.clone() for part in here]
            self.end()
            for part, values in zip(here, before, strict=True):  # it was moved by what lost members should have run
                part.copy_(values)
        self.opened()
        self._rounds.begin()

    def stepped(self, batch: StepBatch) -> None:
        """Count a step into the round."""
        self._rounds.stepped(batch)

    def stepped_again(self, batch: StepBatch) -> None:
        """Count it once more, where the round was ended in between."""
        self._rounds.stepped_again(batch)

    @property
    def waits(self) -> bool:
        """Whether a round is open."""
        return self._rounds.is_open

    def after_commit(self, batch: StepBatch, by: StepTaker | None) -> None:
        """Remember what took the step, for the share of a lost replica."""
        if by is not None and self._rounds.is_open:
            self._takers.setdefault(batch.step, []).append(by)

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
        if self._is_deal_due and not self._rounds.is_left_behind:  # else with those who are in the next round, after it
            self._deal_anew()

    def _run_more(self, portion: RoundShare) -> None:
        """Take a step of this replica on micro-batches that a lost member should have run."""
        batch, each = portion.batch, self._axes.micro_batch_peers.size
        own = self._axes.share_of(self._scope.place.group)[0] % each  # among those with different micro-batches
        share = deal_to_replicas(len(portion.micros), replicas=1, each=each)[own]
        read = portion.micros[share.reads.start : share.reads.stop]
        items = self._between.streams[batch.stream].read(batch, read)
        more = batch.part(
            portion.micros[share.own.start : share.own.stop],
            num_runs=share.num_runs,
            spare=None if share.spare is None else portion.micros[share.spare],
            num_here=portion.num_samples,
            fetch=lambda: next(items),
        )
        self._recorder.begin("forward and backward", portion.step)
        for one in self._takers.get(portion.step, ()):
            one.run_more(more)
        self._files.ledger.ran_more(portion.step, more.micros if self._axes.counts else ())

    def members_changed(self) -> None:
        """Until a round is over, all replicas run what they were dealt, and then what others lost. A replica that is
        behind, in what the loop does before its first step, keeps its batch: the others took that step as dealt."""
        self._rounds.members_changed()
        self._is_deal_due = self._rounds.is_open or self._agreement.is_behind
        if not self._is_deal_due:
            self._deal_anew()

    def _deal_anew(self) -> None:
        self._is_deal_due = False
        self._between.deal_anew()


def _rounds_of(plan: Plan) -> type[CommunicationRounds]:
    """The rounds that exchange what this plan says."""
    if isinstance(plan.sync, Gossip):
        return GossipRounds
    return StreamingRounds if isinstance(plan.sync, LocalSGD) and plan.sync.streams else CommunicationRounds
