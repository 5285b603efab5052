"""What hosts have in memory after a loss, and who begins where with it."""

from __future__ import annotations

import json

import pytest

from paceline.launch.coordinator.restart_decision import RestartRequirement
from paceline.launch.job.outcome import JobOutcome, RecoverableLoss
from paceline.launch.job.restart_plan import (
    RemainingHost,
    RestartPlan,
    SnapshotTransfer,
    StoredSnapshot,
    newest_step,
    reassign_ranks,
    workers_that_fit,
)
from paceline.runs.restart_loop import restart_decision


def kept(worker: int, *steps: int, **more: bool) -> list[StoredSnapshot]:
    return [StoredSnapshot(worker=worker, step=step, **more) for step in steps]


def copied(worker: int, *steps: int) -> list[StoredSnapshot]:
    return kept(worker, *steps, is_copy=True)


def host(
    index: int, workers: range | tuple[int, ...], *snapshots: list[StoredSnapshot], slots: int | None = None
) -> RemainingHost:
    room = len(workers) if slots is None else slots
    return RemainingHost(
        index=index, slots=room, workers=tuple(workers), snapshots=tuple(one for some in snapshots for one in some)
    )


def again(
    *hosts: RemainingHost, workers: int, workers_each: int | None = None, on_disk: int | None = None
) -> RestartPlan:
    recoverable_loss = RecoverableLoss(
        causes=("it broke",), lost=(1,), workers=workers, workers_each=workers_each, hosts=hosts
    )
    return restart_decision(recoverable_loss, most=workers, on_disk=on_disk, at_step=29)


def test_a_worker_lost_while_all_hosts_stay_begins_with_what_its_own_host_has() -> None:
    found = again(
        host(0, range(0, 2), kept(0, 10, 20), kept(1, 10, 20), copied(2, 10), copied(3, 10)),
        host(1, range(2, 4), kept(2, 10, 20), kept(3, 10, 20), copied(0, 10), copied(1, 10)),
        workers=4,
    )
    assert (found.begins_at, found.ranks, found.transfers) == (20, {0: (0, 1), 1: (2, 3)}, ())
    assert (found.restarted.source, found.restarted.lent, found.restarted.hosts) == ("memory", (), 2)


def test_a_lost_hosts_part_comes_from_its_neighbour_and_only_a_step_that_all_have_counts() -> None:
    """Host 1 of three was lost before its copy of step 20 was whole; host 3 has come, with nothing."""
    found = again(
        host(0, range(0, 2), kept(0, 10, 20), kept(1, 10, 20), copied(4, 10, 20), copied(5, 10, 20)),
        host(2, range(4, 6), kept(4, 10, 20), kept(5, 10, 20), copied(2, 10, 20), copied(3, 10)),
        host(3, (), slots=2),
        workers=6,
    )
    assert found.begins_at == 10
    assert found.ranks == {0: (0, 1), 2: (4, 5), 3: (2, 3)}
    assert found.transfers == (SnapshotTransfer(worker=2, source=2, to=3), SnapshotTransfer(worker=3, source=2, to=3))
    assert found.restarted.lent == (2, 3)


def test_without_a_common_step_the_disk_counts_or_all_begin_anew() -> None:
    hosts = (host(0, range(0, 1), kept(0, 20)), host(1, range(1, 2), kept(1, 10)))
    assert again(*hosts, workers=2, on_disk=8).restarted.source == "disk"
    assert again(*hosts, workers=2, on_disk=8).begins_at is None
    nothing = again(*hosts, workers=2).restarted
    assert (nothing.source, nothing.step, nothing.lent) == ("nothing", 0, ())


def test_fewer_replicas_begin_on_the_hosts_that_are_left_and_places_are_found_by_what_they_hold() -> None:
    """Replicas of two workers, each over two hosts; host 1 is lost, which had the second place of the first."""
    hosts = (
        host(0, (0,), kept(0, 10), copied(3, 10)),
        host(2, (2,), kept(2, 10), copied(1, 10)),
        host(3, (3,), kept(3, 10)),
    )
    needs = RestartRequirement(most=4, workers_each=2, least=1)
    assert needs.fit(hosts) == 2
    found = again(*hosts, workers=2, workers_each=2)
    assert found.ranks == {0: (0,), 2: (1,), 3: ()} and (found.workers, found.num_hosts) == (2, 2)
    assert found.transfers == () and found.restarted.lent == (1,)  # host 2 begins with the copy of the lost worker 1


def test_a_place_whose_host_has_nothing_gets_its_own_snapshot_where_there_is_a_copy_of_it() -> None:
    found = again(host(0, range(0, 1), kept(0, 10), copied(1, 10)), host(3, (), slots=2), workers=3, workers_each=1)
    assert found.ranks == {0: (0,), 3: (1, 2)}
    assert found.transfers == (SnapshotTransfer(worker=1, source=0, to=3), SnapshotTransfer(worker=0, source=0, to=3))


def test_where_one_has_written_for_all_it_goes_to_every_host_that_lacks_it() -> None:
    snapshots = kept(0, 10, is_for_all=True)
    found = again(host(0, range(0, 2), snapshots), host(1, range(2, 4)), workers=4, workers_each=1)
    assert found.begins_at == 10
    assert found.transfers == (SnapshotTransfer(worker=0, source=0, to=1),)


def test_a_fixed_number_of_workers_needs_room_for_all_and_an_elastic_one_for_the_least() -> None:
    hosts = (host(0, range(0, 2)), host(1, range(2, 4)))
    assert RestartRequirement(most=6, workers_each=None, least=1).fit(hosts) == 0
    assert RestartRequirement(most=4, workers_each=None, least=1).fit(hosts) == 4
    assert RestartRequirement(most=6, workers_each=2, least=3).fit(hosts) == 0
    assert RestartRequirement(most=6, workers_each=2, least=2).fit(hosts) == 4
    assert workers_that_fit(hosts, most=9, workers_each=3) == 3


def test_who_is_left_stays_and_newcomers_get_neighbouring_ranks() -> None:
    left = (host(0, range(0, 2)), host(3, range(6, 8)), host(4, (), slots=2), host(5, (), slots=2))
    assert reassign_ranks(left, 8, workers_each=None) == {0: (0, 1), 3: (6, 7), 4: (2, 3), 5: (4, 5)}
    assert reassign_ranks(left[:2], 4, workers_each=2) == {0: (0, 1), 3: (2, 3)}


@pytest.mark.parametrize("workers_each", [None, 2])
def test_what_every_host_is_told_survives_the_way(workers_each: int | None) -> None:
    hosts = (host(0, range(0, 2), kept(0, 10), kept(1, 10)), host(1, (), slots=2))
    found = again(*hosts, workers=2, workers_each=workers_each)
    sent = JobOutcome(
        state="failed",
        exit_code=1,
        recoverable_loss=RecoverableLoss(causes=(), lost=(), hosts=hosts),
        restart_plan=found,
    )
    back = JobOutcome.from_json(json.loads(json.dumps(sent.to_json())))
    assert back.may_restart and back.restart_plan is not None
    assert json.dumps(back.restart_plan.to_json()) == json.dumps(found.to_json())
    assert newest_step(hosts[0].snapshots, 2, workers_each=workers_each) == 10


def test_smaller_micro_batches_stay_through_later_restarts() -> None:
    hosts = (host(0, range(0, 2)),)
    short = RecoverableLoss(causes=("too little",), lost=(), workers=2, hosts=hosts, micro=4)
    first = restart_decision(short, most=2, on_disk=None, at_step=3)
    assert (first.micro, first.restarted.micro) == (4, 4)
    lost = RecoverableLoss(causes=("it broke",), lost=(1,), workers=2, hosts=hosts)
    later = restart_decision(lost, most=2, on_disk=None, at_step=5, micro=first.micro)
    assert (later.micro, later.restarted.micro) == (4, None), "it is not why they begin again"
    assert RestartPlan.from_json(json.loads(json.dumps(later.to_json()))).micro == 4
