"""What replicas that are left run of lost ones' shares, and what each weighs; what one alone has still to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.group import SingleWorkerGroup
from paceline.plan import Int8, Layout, LocalSGD, Nesterov, Plan, Raw
from paceline.schedule.micro_batches import micro_batches, split_evenly
from paceline.sync.allreduce.gradient_buckets import CodecMemory
from paceline.sync.local.local_sgd import OuterStep
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.communication_rounds import CommunicationRounds, LoopPoint
from paceline.worker.loop.round_shares import RoundShare
from paceline.worker.step.step_scope import ReplicaVote

MICROS = micro_batches(0, 40, 2)


class Replica:
    """One of four, in the middle of a round of one step; `others` tell what they have run more."""

    def __init__(self, number: int) -> None:
        self.ran: list[int] = []
        self.consensus = SimpleNamespace(rank=number, ranks=(0, 1, 2, 3), holds=False, generation=0, is_behind=False)
        self.others: tuple[Replica, ...] = ()
        self.told: Any = None
        self.rounds = CommunicationRounds(
            Plan(layout=Layout(replicas=(1, 4)), sync=LocalSGD(every=8)),
            group=cast("Any", self),
            axes=cast("Any", None),
            consensus=cast("Any", self.consensus),
            replica_vote=ReplicaVote(cast("Any", self.consensus)),
            models=cast("Any", SimpleNamespace(reducers=SimpleNamespace(stepped=lambda: None))),
            weights_changed=lambda: None,
        )
        shares = {owner: MICROS[part.start : part.stop] for owner, part in enumerate(split_evenly(len(MICROS), 4))}
        self.ran += [micro.index for micro in shares[number]]
        self.rounds.stepped(
            StepBatch(
                stream="a",
                step=1,
                epoch=0,
                start=0,
                stop=40,
                micros=shares[number],
                ends_epoch=False,
                fetch=lambda: None,
                run_pass=lambda _: iter(()),
                num_here=10,
                shares=shares,
            )
        )

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *(one.told for one in self.others)]

    def share_out(self, ranks: tuple[int, ...], *others: Replica) -> None:
        self.consensus.ranks, self.others = ranks, others
        self.rounds.shares.redistribute_lost(self._run)

    def tell(self) -> None:
        """What this one is about to tell in the next generation."""
        self.told = self.rounds.shares.run_for_others()

    def _run(self, portion: RoundShare) -> None:
        self.ran += [micro.index for micro in portion.micros]


def test_a_second_loss_before_all_have_begun_leaves_no_micro_batch_and_runs_none_twice() -> None:
    first, second = Replica(0), Replica(1)
    for one in (first, second):
        one.tell()
    nothing = cast("Replica", SimpleNamespace(told=[]))
    first.share_out((0, 1, 3), nothing, nothing)  # the third is lost; the second has not heard of it when the last is
    for one in (first, second):
        one.tell()
    first.share_out((0, 1), second)
    second.share_out((0, 1), first)
    assert sorted(first.ran + second.ran) == list(range(len(MICROS)))
    assert first.rounds.shares.num_own + second.rounds.shares.num_own == 40


def test_in_a_round_those_who_are_present_weigh_one_together() -> None:
    shares: list[float] = []
    for number in (0, 1, 3):
        replica = Replica(number)
        replica.consensus.ranks = (0, 1, 3)
        shares.append(replica.rounds._share())
    assert shares == pytest.approx([1 / 3] * 3)


def test_one_replica_alone_takes_what_the_wire_had_still_to_send() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    outer = OuterStep(
        [("w", parameter)],
        group=SingleWorkerGroup(),
        all_workers=SingleWorkerGroup(),
        sync=LocalSGD(every=2),
        wire=Int8(),
    )
    owed = torch.tensor([0.5, 0.0, -0.25])
    outer.sums.remember(CodecMemory({"w": owed}, {}))

    def round_to(weights: Tensor) -> Tensor:
        outer.begin()
        with torch.no_grad():
            parameter.copy_(weights)
        outer.exchange(1.0, [], step=2)
        outer.take()
        return parameter.detach().clone()

    after = torch.tensor([0.0, 1.0, 2.0])
    assert torch.equal(round_to(after), after - owed)
    assert torch.equal(round_to(after * 2), after * 2), "once"


@pytest.mark.parametrize(
    "sync", [LocalSGD(every=4, overlap=2, keep_moves=True), LocalSGD(every=4, overlap=2, mixing=0.3)], ids=str
)
def test_what_one_replica_alone_moves_by_while_it_sends_counts_once(sync: LocalSGD) -> None:
    parameter = nn.Parameter(torch.randn(50, generator=torch.Generator().manual_seed(1)))
    outer = OuterStep(
        [("w", parameter)], group=SingleWorkerGroup(), all_workers=SingleWorkerGroup(), sync=sync, wire=Raw()
    )
    outer.begin()
    for step in (4, 8):
        for is_under_way in (False, True):
            if is_under_way:
                outer.send(1.0, [], step=step)
            with torch.no_grad():
                parameter.mul_(0.7).add_(0.1)
        own = parameter.detach().clone()
        outer.receive()
        outer.take(mixing=sync.mixing)
        assert torch.equal(parameter, own), "to the last bit"


def test_what_is_thawed_in_a_round_is_agreed_on_at_its_end() -> None:
    sync = LocalSGD(every=4, outer=Nesterov(lr=0.5, momentum=0.0))
    frozen, other = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    named = [("frozen", frozen), ("other", other)]
    outer = OuterStep(named, group=SingleWorkerGroup(), all_workers=SingleWorkerGroup(), sync=sync, wire=Raw())
    outer.begin()
    frozen.requires_grad_(True)
    with torch.no_grad():
        frozen.fill_(3.0)
    outer.exchange(1.0, [], step=4)
    outer.take()
    assert frozen.tolist() == [2.0] * 3, "half of the way"


def test_a_round_ends_where_too_few_are_left() -> None:
    replica = Replica(0)
    consensus, agreed = replica.consensus, list[int]()

    def regroup(operation: Any) -> Any:
        consensus.holds = True  # a member was lost in it, and it is done again
        return operation()

    consensus.do, consensus.wants_change, consensus.ranks = regroup, False, (0,)
    replica.rounds._group = cast("Any", SingleWorkerGroup())
    replica.rounds._axes = cast("Any", SimpleNamespace(is_split=False, expert_replica_group=SingleWorkerGroup()))
    replica.rounds._agreeing = [
        cast(
            "Any",
            SimpleNamespace(
                exchange=lambda share, numbers, step: agreed.append(step) or [],
                take=lambda: None,
                sums=SimpleNamespace(is_finite=lambda: True),
            ),
        )
    ]
    assert not replica.rounds.is_over(lambda _: False)
    replica.rounds.loop_point = LoopPoint.FOLLOWING
    assert replica.rounds.end(1, run_more=lambda _: None, is_wanted=False)
    assert agreed == [1]
    other = Replica(0)
    other.consensus.holds = True
    assert other.rounds.is_over(lambda _: False), "one that was lost in the course of an operation"


def test_a_round_in_which_a_member_was_lost_ends_before_its_time() -> None:
    replica = Replica(0)
    assert not replica.rounds.is_over(lambda _: False)
    replica.rounds.members_changed()
    assert replica.rounds.is_over(lambda _: False)
