"""An operation counts when its sums have ended well on this worker's device: what was read of others is of no use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from paceline.comm.elastic.generation_group import ElasticGroup
from paceline.comm.elastic.lockstep_group import CrossReplicaGroup, Lockstep, LockstepGroup
from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import CompletedTransfer, Disrupted, SingleWorkerGroup
from paceline.worker.membership.consensus import Consensus
from paceline.worker.membership.generation_builder import ElasticMembership


class OnDevice(SingleWorkerGroup):
    """Two members. After an abort votes are refused, as everything is, and only `settle` tells of it before."""

    size = 2

    def __init__(self) -> None:
        self.is_aborted = False
        self.votes: list[str] = []

    def all_reduce(self, tensor: Tensor, *, what: str) -> CompletedTransfer:
        self.votes.append(what)
        return CompletedTransfer()

    def settle(self) -> None:
        if self.is_aborted:
            raise Disrupted("worker 1 was killed by signal 9")


class Redoing(Consensus):
    """The next generation has the same members, whose devices are well again."""

    groups: tuple[OnDevice, ...] = ()

    def drop(self, disruption: Disrupted, *, holds_result: bool = False) -> bool:
        self.dropped: list[tuple[str, bool]] = [*getattr(self, "dropped", []), (str(disruption), holds_result)]
        self._lockstep.abort(disruption)
        for group in self.groups:
            group.is_aborted = False
        return holds_result


def consensus_of(run: OnDevice, between: OnDevice | None = None) -> Redoing:
    """Of a worker whose replica is it alone, or, with a group `between` replicas, has others, too."""
    lockstep, recorder = Lockstep(), FlightRecorder.unread()
    members, cross_replica = ElasticGroup(None, generation=0), None
    if between is not None:
        members, cross_replica = (
            LockstepGroup(lockstep, recorder=recorder),
            CrossReplicaGroup(lockstep, recorder=recorder),
        )
        cross_replica.take(between, 0, ranks=(0, 2))
    members.take(run, 0, ranks=(0, 1))
    made = Redoing(
        members,
        rank=0,
        coordinator=cast("Any", SimpleNamespace(end_if_overdue=lambda: None)),
        timeout_s=10.0,
        elastic=ElasticMembership(
            build=lambda view, is_hurry: run,
            has_formed=lambda generation, has_formed: has_formed,
            lockstep=lockstep,
            workers_each=1 if between is None else 2,
            cross_replica=cross_replica,
        ),
    )
    made.groups = (run,) if between is None else (run, between)
    return made


@pytest.mark.parametrize("where", ["run", "between"])
def test_a_result_of_an_aborted_sum_is_dropped_before_the_vote_and_does_not_count_as_held(where: str) -> None:
    run, between = OnDevice(), OnDevice()
    consensus = consensus_of(run, between if where == "between" else None)
    aborted = run if where == "run" else between
    results = [torch.tensor(float("nan")), torch.tensor(5.0)]

    def operation() -> float:
        aborted.is_aborted = len(results) == 2
        return float(results.pop(0))

    assert consensus.do(operation) == 5.0
    assert consensus.dropped == [("worker 1 was killed by signal 9", False)]
    assert run.votes == ["the vote"], "there was nothing to vote for the first time"


def test_an_error_that_came_of_such_a_sum_is_none_of_the_programs() -> None:
    run, weights = OnDevice(), [0.0, 2.0]
    consensus = consensus_of(run)

    def operation() -> float:
        run.is_aborted = len(weights) == 2
        return 1 / weights.pop(0)

    assert consensus.do(operation) == 0.5
    assert consensus.dropped == [("worker 1 was killed by signal 9", False)]


def test_any_other_error_is_raised() -> None:
    consensus = consensus_of(OnDevice())
    with pytest.raises(ZeroDivisionError):
        consensus.do(lambda: 1 / 0)
