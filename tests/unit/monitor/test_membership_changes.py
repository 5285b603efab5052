"""Workers are lost, replaced and added while a run is watched: everything that shows workers follows them."""

from __future__ import annotations

import contextlib
import io
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fake_run_files import JOB, SECONDS, Workers, lose
from paceline.events import (
    EventLog,
    Regrouped,
    Reported,
    Restarted,
    StepDone,
    WorkerFinished,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
)
from paceline.monitor.console.event_lines import event_line
from paceline.monitor.console.progress import idle_texts, shares_text
from paceline.monitor.records.steps import shares
from paceline.monitor.status.status import status
from paceline.monitor.watch import Watch
from paceline.plan.job import Job


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    workers = Workers(tmp_path / "run")
    yield workers
    workers.close()


def test_a_host_tells_of_all_workers_of_the_job_and_which_of_them_are_its_own(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", count=4)
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 4, job=JOB, stream=stream, local=[2, 3])
    workers.start_one(0, host="b")  # another host's, seen on a disk that both share
    workers.start_one(2)
    watch.poll()
    assert stream.getvalue() == ""
    workers.start_one(3)
    watch.poll()
    workers.start_one(1, host="b")
    watch.poll()
    workers.close()
    assert stream.getvalue() == "4 workers (2 of them here on a: cpu), ready in 1.90 s  plan replicas=2\n"


def test_a_loss_is_one_line_and_so_is_its_end_and_ready_is_said_once(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    supervisor = EventLog(workers.run / "attempt_1" / "events.jsonl", worker=None)
    workers.start()
    workers.step(1)
    watch.poll()
    lose(supervisor, 1, 1, members=[0])
    workers.logs[0].emit(StepDone(step=2, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds=SECONDS))
    watch.poll()
    metrics = (workers.run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [1, 2]  # it is not waited for the lost one
    workers.start_one(1)
    workers.step(3)
    supervisor.emit(WorkerJoined(rank=1, step=3, after_s=0.2, pid=8))
    supervisor.emit(WorkerLost(rank=2, host="a", step=3, reason="worker 2 (pid 9) killed by signal 9"))
    watch.poll()
    facts = watch.finish("finished", 0)
    supervisor.close()
    shown = stream.getvalue()
    assert shown.count("2 workers on cpu, ready in") == 1
    line = "worker 1 (pid 7) killed by signal 9 after step 1: detected in 0.01 s, regrouped in 0.03 s; 1 worker goes on"
    assert shown.count("killed by signal 9 after") == 1
    assert f"\n{line}, steps lost 0, samples repeated 0\n" in shown
    assert "\nworker 1 (pid 8) joined at step 3, 0.20 s after the loss\n" in shown
    assert "\nworker 2 (pid 9) killed by signal 9 before it had joined\n" in shown  # nothing else would tell of it
    assert (facts["workers_lost"], facts["workers_joined"], facts["steps_lost"]) == (2, 1, 0)
    assert "\n  incidents      2 workers lost, 1 taken in again, 0 steps lost (more: paceline report" in shown


def test_an_attempt_that_began_again_says_so_in_its_closing_table(workers: Workers) -> None:
    def shown(**fields: Any) -> str:
        stream = io.StringIO()
        watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
        with contextlib.closing(EventLog(workers.run / "attempt_1" / "events.jsonl", worker=None)) as supervisor:
            supervisor.emit(Restarted(causes=["worker 1 (pid 7) killed"], workers=2, lost_at=0.0, **fields))
        watch.finish("finished", 0)
        return stream.getvalue()

    workers.start()
    workers.step(1)
    table = shown(lost=[1], at_step=21, step=12, source="memory")
    assert "\n  incidents      worker 1 lost: all began again from memory after step 12, 9 steps done again (" in table
    table = shown(lost=[0, 1], at_step=1, step=0, source="nothing")
    assert "\n  incidents      workers 0, 1 lost: all began anew, 1 step done again (more: paceline report" in table


def test_who_leaves_is_named_once_with_the_reason_and_waited_for_no_longer(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    supervisor = EventLog(workers.run / "attempt_1" / "events.jsonl", worker=None)
    workers.start()
    workers.step(1)
    workers.logs[1].emit(WorkerFinished(rank=1, step=1, peak_memory_bytes=1))
    supervisor.emit(WorkerLeft(rank=1, host="a", step=1, reason="SIGTERM", members=[0]))
    watch.poll()
    workers.logs[0].emit(StepDone(step=2, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds=SECONDS))
    watch.poll()
    assert len((workers.run / "metrics.jsonl").read_text().splitlines()) == 2
    now = status(workers.run)
    assert (now.members, now.workers_lost, now.workers_left) == ((0,), 0, 1)
    assert [worker.state for worker in now.workers] == ["running", "left"]
    assert now.last_leaving == "worker 1 has left (SIGTERM) after step 1: 1 worker goes on"
    facts = watch.finish("finished", 0)
    supervisor.close()
    assert stream.getvalue().count("worker 1 has left (SIGTERM) after step 1: 1 worker goes on\n") == 1
    assert "\n  left           worker 1 after step 1 (SIGTERM)\n" in stream.getvalue()
    assert facts["left"] == [{"worker": 1, "step": 1, "reason": "SIGTERM"}]


@pytest.mark.parametrize(
    ("members", "steps_lost", "holds", "text"),
    [
        ((0, 1, 3), 0, False, "3 workers go on, steps lost 0, samples repeated 0"),
        ((0, 1), 1, False, "2 workers go on, steps lost 1, samples repeated those of 1 step"),
        ((0,), 0, True, "1 worker waits for others, steps lost 0, samples repeated 0"),
        ((0, 1), 3, True, "2 workers wait for others, steps lost 3, samples repeated those of 3 steps"),
    ],
)
def test_what_a_loss_cost_is_said_in_numbers(members: tuple[int, ...], steps_lost: int, holds: bool, text: str) -> None:
    about: dict[str, Any] = {"causes": ["worker 2 (pid 1) failed", "worker 4 was not heard of"], "step": 812}
    event = Regrouped(**about, members=members, detected_s=0.0123, regrouped_s=0, steps_lost=steps_lost, holds=holds)
    assert event_line(event) == (
        "worker 2 (pid 1) failed, worker 4 was not heard of after step 812: "
        f"detected in 0.01 s, regrouped in 0.00 s; {text}"
    )


def test_a_worker_that_was_added_is_waited_for_from_its_first_step_on(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 1, job=JOB, console="none")  # the run began with worker 0 alone
    workers.start()
    workers.step(1)
    watch.poll()
    workers.step(2, num_bytes_sent=10)
    watch.poll()
    assert watch.finish("finished", 0)["num_bytes_sent"] == 20


def test_the_idle_share_of_each_worker_is_on_the_line_of_progress(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    for number in (1, 2, 3):
        for log, waited_s in zip(workers.logs, (0.04, 0.001), strict=True):
            seconds = {**SECONDS, "communication": waited_s}
            log.emit(StepDone(step=number, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds=seconds))
    watch.finish("finished", 0)
    assert "  idle 0:40% 1:1%\n" in stream.getvalue()


def test_the_time_that_changes_of_the_members_took_is_named_where_there_were_any() -> None:
    assert "recovery" not in shares_text(shares(SECONDS))
    stalled = {**SECONDS, "recovery": 9.9, "total": 10.0}
    assert shares_text(shares(stalled)) == "data 0% compute 1% comm 0% optim 0% recovery 99% other 0%"


def test_the_idle_shares_of_many_workers_are_the_least_and_the_most() -> None:
    assert idle_texts({0: 0.5}) == []
    assert idle_texts({0: 0.125, 3: 0.5}) == ["0:12%", "3:50%"]
    many = {worker: worker / 100 for worker in range(20)}
    assert " ".join(idle_texts(many)) == "0% (worker 0) to 19% (worker 19)"


def test_the_metrics_of_workers_follow_the_members(workers: Workers) -> None:
    watch = Watch(workers.run, 1, 2, job=Job(metrics_port=0, tensorboard=False), console="none")
    supervisor = EventLog(workers.run / "attempt_1" / "events.jsonl", worker=None)
    url = watch.metrics_url or ""

    def seen() -> tuple[set[str], str]:
        watch.poll()
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        found = set(re.findall(r'paceline_worker_idle_ratio{worker="(\d+)"}', text))
        return found, re.findall(r"^paceline_workers (\d+)\.0$", text, re.MULTILINE)[0]

    workers.start()
    workers.step(1)
    assert seen() == ({"0", "1"}, "2")
    lose(supervisor, 1, 1, members=[0])
    assert seen() == ({"0"}, "1")
    workers.start_one(1)
    assert seen() == ({"0"}, "1"), "it has not taken part yet"
    workers.step(2)
    supervisor.emit(WorkerJoined(rank=1, step=2, after_s=0.2))
    assert seen() == ({"0", "1"}, "2")
    workers.start_one(workers.add())
    workers.step(3)
    assert seen() == ({"0", "1", "2"}, "3"), "the run has grown"
    workers.logs[2].emit(WorkerFinished(rank=2, step=3, peak_memory_bytes=1))
    for log in workers.logs[:2]:
        log.emit(StepDone(step=4, epoch=0, num_samples=8, loss=1.0, metrics={}, seconds=SECONDS))
    assert seen() == ({"0", "1"}, "2"), "and shrunk"
    supervisor.close()
    watch.finish("finished", 0)


def test_what_an_added_worker_prints_is_shown_from_its_first_word_on(workers: Workers) -> None:
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.start()
    watch.poll()
    added = workers.add()
    workers.write(added, "stderr", "a word of the third\n")
    workers.start_one(added)
    watch.poll()
    watch.finish("finished", 0)
    assert "[worker 2] a word of the third\n" in stream.getvalue()


def test_on_one_of_several_hosts_an_added_worker_is_followed_where_it_is(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", count=4)
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 4, job=JOB, stream=stream, local=[2, 3], host="a")
    for worker, host in ((0, "b"), (1, "b"), (2, "a"), (3, "a")):
        workers.start_one(worker, host=host)
    for host in ("b", "a"):
        added = workers.add()
        workers.write(added, "stderr", f"worker {added} is on {host}\n")
        workers.start_one(added, host=host)
    watch.poll()
    watch.finish("finished", 0)
    workers.close()
    assert "[worker 5] worker 5 is on a" in stream.getvalue()
    assert "worker 4 is on b" not in stream.getvalue(), "its own supervisor shows it"


def test_a_host_that_has_no_worker_yet_tells_of_the_first_one(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", count=1)
    stream = io.StringIO()
    watch = Watch(workers.run, 1, 1, job=JOB, stream=stream, local=[], host="c", record=False)
    workers.start_one(0)  # another host's, seen on a disk that both share
    workers.emit(Reported(step=0, metrics={"lr": 0.5}))
    workers.step(1)
    watch.poll()
    added = workers.add()
    workers.start_one(added, host="c")
    workers.step(2)
    watch.poll()
    watch.finish("finished", 0)
    workers.close()
    assert "(1 of them here on c: cpu)" in stream.getvalue()


def test_a_host_that_is_given_two_workers_later_is_ready_when_both_are(tmp_path: Path) -> None:
    workers = Workers(tmp_path / "run", count=1)
    stream, here = io.StringIO(), set[int]()
    watch = Watch(workers.run, 1, 1, job=JOB, stream=stream, local=here, host="c", record=False)
    added = [workers.add(), workers.add()]
    here.update(added)  # as a member does when the head has it start them
    for worker in added:
        assert "ready" not in stream.getvalue()
        workers.start_one(worker, host="c")
        watch.poll()
    watch.finish("finished", 0)
    workers.close()
    assert "3 workers (2 of them here on c: cpu), ready" in stream.getvalue()
