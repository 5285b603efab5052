"""The workers of one host, with a fake warm parent: which are forked, as what, and what is reported of them."""

from __future__ import annotations

import errno
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launch.fork.local_workers import KILL_TIMEOUT_S, MAX_PARENT_RESTARTS, LocalWorkers
from paceline.launch.io.event_loop import EventLoop, MessageStream
from paceline.launch.job.outcome import STUCK, WorkerExit
from paceline.launch.job.placement import assign, assignment_template
from paceline.plan.job import Assignment, Job


class FakeParent:
    """Records which workers it is to fork; `says` passes on its messages."""

    def __init__(self) -> None:
        self.has_files, self.can_restart, self.num_restarts = True, True, 0
        self.was_killed, self.is_silent, self.words = True, False, ""
        self.forked: list[Assignment] = []
        self.signalled: list[tuple[int, int]] = []
        self.says: Callable[[dict[str, Any]], None]
        self.ends: Callable[[str], None]

    def attach(self, loop: EventLoop, *, on_message: Callable[..., None], on_lost: Callable[[str], None]) -> None:
        self.says, self.ends = on_message, on_lost

    def fork(self, assignment: Assignment, channel: socket.socket, *, memory_checkpoint: Sequence[int] = ()) -> None:
        channel.close()
        if not self.has_files:
            raise OSError(errno.EMFILE, "Too many open files")
        self.forked.append(assignment)

    def signal(self, worker: int, signum: int, *, alone: bool = False) -> None:
        self.signalled.append((worker, signum))

    def restart(self) -> None:
        if not self.can_restart:
            raise LaunchError("no process")
        self.num_restarts += 1

    def tick(self, now: float, *, owes: bool, say: Callable[[str], None]) -> None:
        self.owes = owes

    def output(self) -> str:
        return self.words

    def close(self) -> None: ...


class Notes:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def request(self, worker: int, request: Mapping[str, Any]) -> None: ...

    def started(self, worker: int, pid: int) -> None: ...

    def exited(self, ended: WorkerExit) -> None:
        self.heard.append((ended.worker, (ended.error or {}).get("kind")))
        self.on_exit(ended)

    def on_exit(self, ended: WorkerExit) -> None:
        """What a head does about it."""

    def cannot_fork(self) -> None:
        self.heard.append("barren")


class Scene:
    """Local workers that begin with the ranks `ranks` of a job of 4 on 2 hosts."""

    def __init__(self, run_dir: Path, *ranks: int, begins_at: int | None = None) -> None:
        self.loop, self.parent, self.notes = EventLoop(), FakeParent(), Notes()
        about: dict[str, Any] = {"host": "b", "address": "10.0.0.2", "attempt": 1, "command_started": 0.0}
        job = Job(workers=4, hosts=2, head="a:29500")
        alike = assignment_template(job, host_index=1, slots=2, run_dir=run_dir, begins_at=begins_at, **about)
        fields: dict[str, Any] = {"parent": self.parent, "listener": self.notes, "say": self.notes.heard.append}
        self.local_workers = LocalWorkers(assign(alike, ranks), template=alike, loop=self.loop, **fields)
        self.local_workers.start()

    def ready(self) -> None:
        self.parent.says({"op": "ready", "threads": [], "devices_touched": False})

    @property
    def forked(self) -> list[tuple[int, int, int, bool]]:
        return [(one.rank, one.local_rank, one.local_workers, one.joins) for one in self.parent.forked]

    def close(self) -> None:
        self.local_workers.close()
        self.loop.close()


@pytest.fixture
def began(tmp_path: Path) -> Iterator[Scene]:
    with closing(Scene(tmp_path, 2, 3)) as scene:
        scene.ready()
        yield scene


@pytest.fixture
def late(tmp_path: Path) -> Iterator[Scene]:
    """On a host that came later: nobody has to be started yet."""
    with closing(Scene(tmp_path)) as scene:
        yield scene


def test_who_comes_later_is_told_the_lowest_free_number_of_its_host(began: Scene) -> None:
    began.parent.says(
        {
            "op": "exited",
            "worker": 2,
            "pid": 7,
            "exit_code": 0,
            "signal": None,
            "peak_memory_bytes": 1,
            "is_early": False,
        }
    )
    began.local_workers.add(9, workers=5, incarnation=1)
    began.local_workers.add(5, workers=6, incarnation=1)
    assert began.forked == [(2, 0, 2, False), (3, 1, 2, False), (9, 0, 2, True), (5, 2, 3, True)]
    assert began.parent.forked[2].workers == 5
    assert began.parent.forked[2].worker_dir.endswith("attempt_1/worker_9")


def test_who_comes_later_begins_with_what_the_others_send_not_with_what_they_began_with(tmp_path: Path) -> None:
    with closing(Scene(tmp_path, begins_at=7)) as scene:
        scene.ready()
        scene.local_workers.add(2, workers=3, incarnation=1)
        assert scene.parent.forked[-1].begins_at is None


def test_all_have_ended_once_those_killed_one_by_one_have_ended_too(began: Scene) -> None:
    def says(op: str, worker: int) -> None:
        about = {"exit_code": None, "signal": 9, "peak_memory_bytes": 1, "is_early": False} if op == "exited" else {}
        began.parent.says({"op": op, "worker": worker, "pid": 10 + worker, **about})

    says("started", 2)
    began.local_workers.kill_worker(2)
    began.local_workers.kill_worker(3)  # before it was heard of
    assert not began.local_workers.alive and not began.local_workers.have_all_ended
    says("exited", 2)
    says("started", 3)
    assert not began.local_workers.have_all_ended
    says("exited", 3)
    assert began.local_workers.have_all_ended


def test_who_is_started_before_the_warm_parent_is_ready_is_forked_when_it_is(late: Scene) -> None:
    late.local_workers.add(4, workers=6, incarnation=1)
    late.local_workers.add(5, workers=6, incarnation=1)
    assert late.forked == []
    late.ready()
    assert late.forked == [(4, 0, 2, True), (5, 1, 2, True)]


def test_who_is_killed_before_it_was_forked_never_is(late: Scene) -> None:
    late.local_workers.add(4, workers=6, incarnation=1)
    late.local_workers.add(5, workers=6, incarnation=1)
    late.local_workers.kill_worker(4)
    late.ready()
    assert [rank for rank, *_ in late.forked] == [5]
    late.local_workers.kill_worker(5)
    assert late.parent.signalled == [(5, signal.SIGKILL)]


def test_a_successor_may_be_killed_before_its_start_is_heard_of(began: Scene) -> None:
    def ended(pid: int) -> dict[str, Any]:
        return {
            "op": "exited",
            "worker": 2,
            "pid": pid,
            "exit_code": None,
            "signal": 9,
            "peak_memory_bytes": 0,
            "is_early": False,
        }

    began.parent.says({"op": "started", "worker": 2, "pid": 70})
    began.parent.says(ended(70))
    began.local_workers.add(2, workers=4, incarnation=1)
    began.local_workers.kill_worker(2)
    began.parent.says({"op": "started", "worker": 2, "pid": 71})
    began.parent.says(ended(71))
    assert began.notes.heard == [(2, None)], "only of the first one nobody knew"


def test_a_host_whose_warm_parent_is_lost_says_that_it_can_start_nobody_before_it_tells_who_was_lost(
    began: Scene,
) -> None:
    began.parent.can_restart = False
    began.parent.ends("was killed by signal 9")
    assert began.notes.heard == ["barren", (2, "WarmParentLost"), (3, "WarmParentLost")]
    began.local_workers.add(2, workers=4, incarnation=1)
    assert len(began.notes.heard) == 3, "no loss is reported in the middle of a decision"
    began.local_workers.tick(0.0)
    assert began.notes.heard[3:] == [(2, "WarmParentLost")]
    assert len(began.forked) == 2


def test_a_warm_parent_that_is_lost_is_started_again_and_forks_the_successors(began: Scene) -> None:
    began.notes.on_exit = lambda ended: began.local_workers.add(ended.worker, workers=4, incarnation=1)  # type: ignore[method-assign]
    began.parent.ends("was killed by signal 9")
    losses = [one for one in began.notes.heard if isinstance(one, tuple)]
    assert losses == [(2, "WarmParentLost"), (3, "WarmParentLost")] and "barren" not in began.notes.heard
    assert began.parent.num_restarts == 1 and len(began.forked) == 2
    began.local_workers.tick(time.monotonic())
    began.ready()
    assert [(rank, joins) for rank, _, _, joins in began.forked[2:]] == [(2, True), (3, True)]
    assert began.local_workers.alive.keys() == {2, 3}


def test_a_warm_parent_that_is_lost_again_and_again_is_given_up(began: Scene) -> None:
    for _ in range(MAX_PARENT_RESTARTS):
        began.parent.ends("was killed by signal 9")
    began.ready()
    with pytest.raises(LaunchError) as info:
        began.local_workers._has_forked = False
        began.parent.ends("was killed by signal 9")
    assert info.value.is_accident and began.parent.num_restarts == MAX_PARENT_RESTARTS


@pytest.mark.parametrize("was_killed", [True, False])
def test_a_warm_parent_that_is_lost_before_it_is_ready_is_an_accident_where_it_was_killed(
    late: Scene, was_killed: bool
) -> None:
    late.parent.was_killed, late.parent.can_restart = was_killed, False
    with pytest.raises(LaunchError, match="The process that imports the workers' modules was killed") as info:
        late.parent.ends("was killed by signal 9")
    assert info.value.is_accident == was_killed


@pytest.mark.parametrize(
    ("output", "is_accident"),
    [
        ("terminate called after throwing an instance of 'std::bad_alloc'", True),
        ("OpenBLAS error: Memory allocation still failed after 10 retries, giving up.", True),
        ("Fatal Python error: Segmentation fault", False),
    ],
)
def test_a_warm_parent_that_gets_no_memory_is_an_accident(late: Scene, output: str, is_accident: bool) -> None:
    late.parent.words, late.parent.was_killed = output, False
    with pytest.raises(LaunchError, match=re.escape(output)) as info:
        late.parent.ends("was killed by signal 6")
    assert info.value.is_accident == is_accident == ("There was not enough memory: free some" in str(info.value))


@pytest.mark.parametrize(
    ("kind", "message", "is_accident"),
    [
        ("MemoryError", "", True),
        ("ImportError", "libtorch_cpu.so: failed to map segment from shared object", True),
        ("ImportError", "No module named 'mine'", False),
    ],
)
def test_an_import_that_gets_no_memory_is_an_accident(late: Scene, kind: str, message: str, is_accident: bool) -> None:
    with pytest.raises(LaunchError, match=f"An import of the workers' modules failed: {kind}") as info:
        late.parent.says({"op": "failed", "kind": kind, "message": message, "traceback": "Traceback ..."})
    assert info.value.is_accident == is_accident == ("There was not enough memory: free some" in str(info.value))


def not_started(scene: Scene, worker: int) -> None:
    scene.parent.says({"op": "not_started", "worker": worker, "reason": "Resource temporarily unavailable"})


def no_files(scene: Scene, worker: int) -> None:
    scene.parent.has_files = False
    scene.local_workers.add(worker, workers=6, incarnation=1)
    scene.parent.has_files = True


def no_directory(scene: Scene, worker: int) -> None:
    directory = Path(scene.local_workers.alive[2].worker_dir).with_name(f"worker_{worker}")
    directory.write_text("in the way")
    scene.local_workers.add(worker, workers=6, incarnation=1)
    directory.unlink()


def no_process(scene: Scene, worker: int) -> None:
    scene.local_workers.add(worker, workers=6, incarnation=1)
    not_started(scene, worker)


@pytest.mark.parametrize(
    ("fails", "says"),
    [
        (no_process, "worker 5 could not be forked: Resource temporarily unavailable. Free memory or processes"),
        (no_files, "No channel for worker 5: Too many open files. Raise the limit on open files"),
        (no_directory, "worker_5: File exists. Make room there"),
    ],
    ids=["process", "files", "directory"],
)
def test_who_comes_later_and_cannot_be_started_is_lost_and_the_others_go_on(
    began: Scene, fails: Callable[[Scene, int], None], says: str
) -> None:
    fails(began, 5)
    (said,) = began.notes.heard
    assert says in said
    began.local_workers.tick(0.0)
    assert began.notes.heard[1:] == [(5, "NotStarted")]
    assert sorted(began.local_workers.alive) == [2, 3] and not began.parent.signalled
    began.local_workers.add(5, workers=6, incarnation=2)
    began.local_workers.tick(0.0)
    assert began.forked[-1] == (5, 2, 3, True) and len(began.notes.heard) == 2, "it is tried again as ever"


def test_who_begins_the_run_and_cannot_be_started_ends_it(began: Scene) -> None:
    with pytest.raises(LaunchError, match="worker 2 could not be forked: Resource temporarily unavailable"):
        not_started(began, 2)


def test_a_replica_that_cannot_be_started_is_lost_once_and_nobody_of_it_is_waited_for(began: Scene) -> None:
    """The head ends all of a replica when it hears of the first, and may ask for it again at once."""

    def on_exit(ended: WorkerExit) -> None:
        for other in {4, 5} - {ended.worker}:
            began.local_workers.kill_worker(other)
        for worker in (4, 5):
            began.local_workers.add(worker, workers=6, incarnation=2)

    no_files(began, 4)
    no_files(began, 5)
    began.notes.heard.clear()
    began.notes.on_exit = on_exit  # type: ignore[method-assign]  # another listener for this test
    began.local_workers.tick(0.0)
    assert began.notes.heard == [(4, "NotStarted")]
    assert [one.rank for one in began.parent.forked[2:]] == [4, 5] and not began.parent.signalled
    assert sorted(began.local_workers.alive) == [2, 3, 4, 5]
    began.local_workers.kill_worker(4)
    assert not began.local_workers.have_all_ended
    not_started(began, 4)  # killed before this was heard: nobody is lost by it
    began.local_workers.tick(0.0)
    assert began.notes.heard == [(4, "NotStarted")]


def test_when_the_warm_parent_is_lost_no_worker_is_reported_twice(
    began: Scene,
) -> None:
    began.notes.on_exit = lambda ended: began.local_workers.kill_worker(5 - ended.worker)  # type: ignore[method-assign]  # as above
    began.parent.can_restart = False
    began.parent.ends("was killed by signal 9")
    assert began.notes.heard == ["barren", (2, "WarmParentLost")]
    assert not began.local_workers.alive


def test_a_worker_that_ends_after_it_was_given_up_as_stuck_is_no_news(began: Scene) -> None:
    for worker in (2, 3):
        began.parent.says({"op": "started", "worker": worker, "pid": 10 + worker})
    began.local_workers.kill()
    began.local_workers.tick(time.monotonic() + KILL_TIMEOUT_S + 1.0)
    assert began.notes.heard == [(2, STUCK), (3, STUCK)]
    about = {"exit_code": None, "signal": 9, "peak_memory_bytes": 1, "is_early": False}
    began.parent.says({"op": "exited", "worker": 2, "pid": 12, **about})
    assert len(began.notes.heard) == 2 and began.local_workers.have_all_ended


def test_the_warm_parent_owes_forks_and_ends_that_show_here_and_nothing_while_workers_run(
    began: Scene,
) -> None:
    def owes() -> bool:
        began.local_workers.tick(time.monotonic())
        return began.parent.owes

    assert owes(), "two forks"
    for worker in (2, 3):
        began.parent.says({"op": "started", "worker": worker, "pid": 10 + worker})
    for worker in (2, 3):
        began.local_workers._channels[worker] = MessageStream(
            socket.socketpair()[0], began.loop, on_message=lambda _: None, on_close=lambda _: None
        )
    assert not owes()
    began.local_workers.kill_worker(2)
    assert owes(), "the end of one that was killed"
    began.parent.says({"op": "exited", "worker": 2, "pid": 12, "is_early": False})
    assert not owes()
    began.local_workers.terminate(30.0)
    assert owes(), "the ends of all"


def test_workers_are_not_stuck_while_the_warm_parent_says_nothing(began: Scene) -> None:
    began.local_workers.kill()
    began.parent.is_silent = True
    began.local_workers.tick(time.monotonic() + KILL_TIMEOUT_S + 1.0)
    assert not began.notes.heard
    began.parent.is_silent = False
    began.local_workers.tick(time.monotonic() + KILL_TIMEOUT_S + 1.0)
    assert began.notes.heard == [(2, STUCK), (3, STUCK)]
