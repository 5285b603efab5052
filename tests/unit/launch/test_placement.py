"""Who gets which rank, and what they are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.job.placement import assign, assignment_template, ranks_by_host, slots_per_host
from paceline.plan import CommandPlan, Job, Layout, Plan


@given(st.integers(1, 40), st.integers(1, 40))
def test_ranks_are_contiguous_even_and_complete(hosts: int, more: int) -> None:
    workers = hosts + more - 1
    placed = ranks_by_host(workers, [None] * hosts)
    assert [rank for ranks in placed for rank in ranks] == list(range(workers))
    sizes = [len(ranks) for ranks in placed]
    assert len(sizes) == hosts
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("workers", "hosts"), [(1, 2), (0, 1), (3, 0)])
def test_no_host_stays_without_a_worker(workers: int, hosts: int) -> None:
    with pytest.raises(ValueError, match=f"{workers} workers cannot be placed on {hosts} hosts"):
        ranks_by_host(workers, [None] * hosts)


@pytest.mark.parametrize(
    ("workers", "slots", "sizes"),
    [(6, [2, 4], [2, 4]), (7, [None, 4, None], [2, 4, 1]), (3, [None, 1], [2, 1]), (1, [1], [1])],
)
def test_hosts_that_are_not_alike_get_as_many_workers_as_they_say(
    workers: int, slots: list[int | None], sizes: list[int]
) -> None:
    placed = ranks_by_host(workers, slots)
    assert [len(ranks) for ranks in placed] == sizes
    assert [rank for ranks in placed for rank in ranks] == list(range(workers))


@pytest.mark.parametrize(
    ("workers", "slots", "says"),
    [
        (5, [2, 4], "the 2 hosts have 6 slots for 5 workers"),
        (7, [2, 4], "the 2 hosts have 6 slots for 7 workers"),
        (4, [None, 4], "each host needs at least one"),
    ],
)
def test_slots_that_do_not_make_up_the_workers_are_refused(workers: int, slots: list[int | None], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ranks_by_host(workers, slots)


def test_each_worker_of_a_host_is_told_its_place() -> None:
    job = Job(workers=5, hosts=2, head="node1:29500")
    plan = CommandPlan(whole=Plan(layout=Layout(replicas=5)))
    alike = assignment_template(
        job,
        host="b",
        host_index=1,
        slots=2,
        address="10.0.0.2",
        run_dir=Path("/runs/r"),
        attempt=3,
        command_started=1.5,
        plan=plan,
    )
    told = assign(alike, ranks_by_host(5, [None, None])[1])
    assert [(one.rank, one.local_rank, one.local_workers, one.workers) for one in told] == [(3, 0, 2, 5), (4, 1, 2, 5)]
    assert {(one.host, one.host_index, one.hosts, one.address) for one in told} == {("b", 1, 2, "10.0.0.2")}
    assert told[1].worker_dir == "/runs/r/attempt_3/worker_4"
    assert {(one.attempt, one.command_started, one.plan, one.channel_fd) for one in told} == {(3, 1.5, plan, -1)}


def test_the_number_of_workers_has_to_be_known() -> None:
    with pytest.raises(ValueError, match=r"job\.workers is None"):
        assignment_template(
            Job(), host="a", host_index=0, slots=1, address="", run_dir=Path(), attempt=1, command_started=0.0
        )


@pytest.mark.parametrize(("workers", "hosts", "share"), [(4, 2, 2), (5, 2, 2), (2, 1, 2), (1, 1, 1)])
def test_a_host_that_comes_later_has_room_for_its_share(workers: int, hosts: int, share: int) -> None:
    assert slots_per_host(Job(workers=workers, hosts=hosts, head="a:29500")) == share
