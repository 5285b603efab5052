"""When no replica of an elastic run can go on: the coordinator restarts all workers, or ends the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fake_hosts import FakeLocalWorkers, ended
from paceline.elastic.membership_messages import TOO_FEW
from paceline.events import Event
from paceline.launch.coordinator.coordinator import Coordinator
from paceline.launch.coordinator.restart_decision import GONE_S
from paceline.launch.job.outcome import RecoverableLoss
from paceline.launch.job.restart_plan import RemainingHost
from paceline.plan.job import Job

AGAIN = "nothing was saved, so it begins at step 1 again"


class OneHost:
    """A head with `replicas` of two workers each, at work."""

    def __init__(self, run_dir: Path, *, replicas: int = 2) -> None:
        workers = range(2 * replicas)
        self.local_workers, self.said, self.events = FakeLocalWorkers(*workers), list[str](), list[Event]()
        self.head = Coordinator(
            host="a",
            address="127.0.0.1",
            job=Job(workers=len(workers)),
            remote_hosts=[],
            admission=None,
            attempt=1,
            run_dir=str(run_dir),
            say=self.said.append,
        )
        self.head.lead(self.local_workers, self.events.append)  # type: ignore[arg-type]  # fake local workers
        for worker in workers:
            self.head.request(worker, {"op": "elastic", "least": 1, "most": 2, "workers_each": 2})
        for worker in workers:
            self.head.request(worker, {"op": "begun"})
            self.head.request(worker, {"op": "formed", "step": 0, "generation": 0, "noticed": time.time()})

    def keep(self) -> None:
        self.head.request(0, {"op": "keeps"})

    def lose_all(self) -> None:
        for worker in (1, 2):
            self.head.exited(ended(worker, None, signal=9, pid=10 + worker))

    def close(self) -> None:
        self.head.close()


@pytest.fixture
def one(tmp_path: Path) -> Iterator[OneHost]:
    with closing(OneHost(tmp_path)) as made:
        yield made


def test_all_begin_again_when_every_process_is_gone(one: OneHost) -> None:
    one.keep()
    one.lose_all()
    told = one.local_workers.told
    assert told[-1] == "kill" and ("kill_worker", 0) in told and ("kill_worker", 3) in told
    one.head.tick(time.monotonic())
    assert one.head.outcome is None  # a worker that was killed may still write into the memory
    one.local_workers.have_all_ended = True
    for worker in (0, 1):  # successors that were on their way
        one.head.exited(ended(worker, None, signal=9, sent_by_us=True))
    one.head.tick(time.monotonic())
    assert one.head.outcome is not None
    causes = (
        "worker 1 (pid 11) killed by signal 9, and with it replica 0 (workers 0, 1)",
        "worker 2 (pid 12) killed by signal 9, and with it replica 1 (workers 2, 3)",
    )
    left = (RemainingHost(index=0, slots=4, workers=(0, 1, 2, 3)),)
    assert one.head.outcome.recoverable_loss == RecoverableLoss(
        causes=causes, lost=(1, 2), workers_each=2, workers=4, hosts=left
    )
    assert one.said == []


def test_without_anything_in_memory_the_run_ends_at_once_and_says_how_to_go_on(one: OneHost) -> None:
    one.lose_all()
    assert one.head.outcome is not None
    assert (one.head.outcome.exit_code, one.head.outcome.may_restart) == (76, False)
    assert one.said[0].startswith("no replica is left that has the run's state") and one.said[0].endswith(AGAIN)


def test_who_is_to_leave_does_not_begin_again(one: OneHost) -> None:
    one.keep()
    one.head.interrupted(signal.SIGTERM)
    one.lose_all()
    assert one.head.outcome is not None
    assert (one.head.outcome.exit_code, one.head.outcome.may_restart) == (76, False)


def test_a_signal_while_all_are_being_ended_ends_the_run(one: OneHost) -> None:
    one.keep()
    one.lose_all()
    one.head.interrupted(signal.SIGINT)
    one.local_workers.have_all_ended = True
    for worker in (0, 1):
        one.head.exited(ended(worker, None, signal=9, sent_by_us=True))
    one.head.tick(time.monotonic())
    assert one.head.outcome is not None
    assert (one.head.outcome.exit_code, one.head.outcome.may_restart) == (130, False)


def test_nobody_begins_again_beside_a_process_that_does_not_end(one: OneHost) -> None:
    one.keep()
    one.lose_all()
    one.head.tick(time.monotonic() + GONE_S + 0.1)
    assert one.head.outcome is not None
    assert (one.head.outcome.exit_code, one.head.outcome.may_restart) == (76, False)
    assert one.said[0].endswith(AGAIN)


SERVER = "parameter server 1 (pid 5 on a) killed by signal 9"


def test_a_lost_server_has_all_begin_again_though_nothing_is_in_memory(one: OneHost) -> None:
    one.head.request(2, {"op": "unserved", "cause": SERVER})
    one.head.request(1, {"op": "unserved", "cause": "the same, told later"})
    assert one.local_workers.told == ["kill"]
    one.local_workers.have_all_ended = True
    for worker in range(4):
        one.head.exited(ended(worker, None, signal=9, sent_by_us=True))
    one.head.tick(time.monotonic())
    assert one.head.outcome is not None
    left = (RemainingHost(index=0, slots=4, workers=(0, 1, 2, 3)),)
    lost = RecoverableLoss(causes=(SERVER,), lost=(), keeps=False, workers_each=2, workers=4, hosts=left)
    assert one.head.outcome.recoverable_loss == lost


def test_a_lost_server_ends_a_run_that_nobody_can_begin_again(one: OneHost) -> None:
    one.head.decide_restarts(lambda _: None)
    one.head.request(2, {"op": "unserved", "cause": SERVER})
    one.local_workers.have_all_ended = True
    for worker in range(4):
        one.head.exited(ended(worker, None, signal=9, sent_by_us=True))
    one.head.tick(time.monotonic())
    assert one.head.outcome is not None
    (failure,) = one.head.outcome.failures
    assert (one.head.outcome.exit_code, one.head.outcome.may_restart) == (TOO_FEW, False)
    assert failure.error is not None and failure.error["message"] == f"{SERVER}: {AGAIN}"


@pytest.mark.parametrize("before", ["error", "barren", "leaving"])
def test_a_lost_server_changes_nothing_where_the_run_ends_anyway(one: OneHost, before: str) -> None:
    if before == "error":
        one.head.exited(ended(0, 1, error={"message": "the user's"}))
    elif before == "barren":
        one.head.cannot_fork()
    else:
        one.head.interrupted(signal.SIGTERM)
    one.head.request(2, {"op": "unserved", "cause": SERVER})
    assert "kill" not in one.local_workers.told


def test_an_error_of_the_program_counts_though_the_others_are_lost_after_it(one: OneHost) -> None:
    one.keep()
    one.head.exited(ended(0, 1, error={"message": "the user's"}))
    one.lose_all()
    one.local_workers.have_all_ended = True
    assert one.local_workers.told == ["kill"]  # and nobody is started in their place
    one.head.exited(ended(3, None, signal=15, sent_by_us=True))
    one.head.tick(time.monotonic())
    assert one.head.outcome is not None
    assert (one.head.outcome.state, one.head.outcome.may_restart) == ("failed", False)


def test_who_hangs_in_the_only_replica_is_no_end_either(tmp_path: Path) -> None:
    with closing(OneHost(tmp_path, replicas=1)) as one:
        one.keep()
        hang = {"worker": 1, "host": "a", "pid": 11, "kind": "Hang", "message": "it hangs", "cause": "worker 1 hangs"}
        one.head.end_hung([1], {**hang, "waited_s": 5.0}, goes_on=one.head.can_do_without([0, 1]))
        one.local_workers.have_all_ended = True
        for worker in range(2):
            one.head.exited(ended(worker, None, signal=9, sent_by_us=True))
        one.head.tick(time.monotonic())
        assert one.head.outcome is not None
        left = (RemainingHost(index=0, slots=2, workers=(0, 1)),)
        recoverable_loss = RecoverableLoss(causes=("worker 1 hangs",), lost=(1,), workers_each=2, workers=2, hosts=left)
        assert one.head.outcome.recoverable_loss == recoverable_loss


def test_what_has_left_for_good_keeps_no_memory(one: OneHost) -> None:
    head = one.head
    assert head.answer_command({"op": "resize", "replicas": 1}) == {"says": "it will have 1 replicas"}
    for worker in range(4):
        head.request(worker, {"op": "formed", "step": 1, "generation": 1, "noticed": time.time()})
    for worker in (2, 3):
        head.exited(ended(worker, 0))
    assert ("drop_state", 2) in one.local_workers.told and ("drop_state", 3) in one.local_workers.told
