"""What replicas that are left run of lost ones' shares, and what each weighs; what one alone has still to take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.group import Alone
from paceline.plan import Int8, Layout, LocalSGD, Plan
from paceline.schedule.share import deal, micro_batches
from paceline.sync.local_sgd import OuterStep
from paceline.sync.memory import Memory
from paceline.worker.batch import StepBatch
from paceline.worker.rounds import ByItself, Portion, Rounds

MICROS = micro_batches(0, 40, 2)


class Replica:
    """One of four, in the middle of a round of one step; `others` tell what they have run more."""

    def __init__(self, number: int) -> None:
        self.ran: list[int] = []
        self.agreement = SimpleNamespace(rank=number, ranks=(0, 1, 2, 3))
        self.others: tuple[Replica, ...] = ()
        self.told: Any = None
        self.rounds = Rounds(
            Plan(layout=Layout(replicas=(1, 4)), sync=LocalSGD(every=8)),
            group=cast("Any", self),
            axes=cast("Any", None),
            agreement=cast("Any", self.agreement),
            by_itself=ByItself(cast("Any", self.agreement)),
            models=cast("Any", SimpleNamespace(stepped=lambda: None)),
            weights_changed=lambda: None,
        )
        dealt = {owner: MICROS[part.start : part.stop] for owner, part in enumerate(deal(len(MICROS), 4))}
        self.ran += [micro.index for micro in dealt[number]]
        self.rounds.stepped(
            StepBatch(
                stream="a",
                step=1,
                epoch=0,
                start=0,
                stop=40,
                micros=dealt[number],
                ends_epoch=False,
                fetch=lambda: None,
                walk=lambda _: iter(()),
                num_here=10,
                dealt=dealt,
            )
        )

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *(one.told for one in self.others)]

    def share_out(self, ranks: tuple[int, ...], *others: Replica) -> None:
        self.agreement.ranks, self.others = ranks, others
        self.rounds._share_out_lost(self._run)

    def tell(self) -> None:
        """What this one is about to tell in the next generation."""
        more = self.rounds._more.items()
        self.told = [(number, micro.index) for number, micros in more for micro in micros]

    def _run(self, portion: Portion) -> None:
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
    assert first.rounds._num_own() + second.rounds._num_own() == 40


def test_in_a_round_those_who_are_present_weigh_one_together() -> None:
    shares: list[float] = []
    for number in (0, 1, 3):
        replica = Replica(number)
        replica.agreement.ranks = (0, 1, 3)
        shares.append(replica.rounds._share())
    assert shares == pytest.approx([1 / 3] * 3)


def test_one_replica_alone_takes_what_the_wire_had_still_to_send() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    outer = OuterStep([("w", parameter)], group=Alone(), everybody=Alone(), sync=LocalSGD(every=2), wire=Int8())
    owed = torch.tensor([0.5, 0.0, -0.25])
    outer.sums.remember(Memory({"w": owed}, {}))

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
