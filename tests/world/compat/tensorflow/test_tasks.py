"""Programs that are started as TensorFlow's are, by one without TensorFlow: places, ends, losses, signals, hosts."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from network_hosts import free_port
from programs import PACELINE, Program, command, record, run

PROGRAM = Path(__file__).resolve().parents[3] / "support" / "cluster_program.py"
LIMIT_S = 60.0


def words(*more: str) -> list[str]:
    return [*PACELINE, "run", "--for", "tensorflow", str(PROGRAM), "--run-dir", "run", *more]


def events(run_dir: Path, rank: int, *, attempt: int = 1) -> list[dict[str, Any]]:
    path = run_dir / f"attempt_{attempt}" / f"worker_{rank}" / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def kinds(run_dir: Path, rank: int, *, attempt: int = 1) -> list[str]:
    return [event["event"] for event in events(run_dir, rank, attempt=attempt)]


def stdout(run_dir: Path, rank: int, *, attempt: int = 1) -> str:
    return (run_dir / f"attempt_{attempt}" / f"worker_{rank}" / "stdout.log").read_text()


def until(is_so: Callable[[], bool], program: Program) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if program.process.poll() is not None or time.monotonic() > deadline:
            program.process.kill()
            raise AssertionError(program.end()[1])
        time.sleep(0.02)


def since_start(run_dir: Path, rank: int) -> list[str]:
    """What kinds of events a task has told since its program was started last."""
    told = kinds(run_dir, rank)
    return told[len(told) - told[::-1].index("TaskStarted") :]


def pid_of(run_dir: Path, rank: int, *, attempt: int = 1) -> int:
    return [event for event in events(run_dir, rank, attempt=attempt) if event["event"] == "TaskStarted"][-1]["pid"]


def test_each_task_of_a_mirrored_job_finds_its_place_and_meets_the_others(tmp_path: Path) -> None:
    code, output = run(*words("--workers", "2", "--lr", "0.1", "--", "--show"), cwd=tmp_path)
    assert code == 0, output
    told = [stdout(tmp_path / "run", rank) for rank in range(2)]
    configs = [json.loads(re.search(r"has (.*); torch", text)[1]) for text in told]  # type: ignore[index]
    assert configs[0]["cluster"] == configs[1]["cluster"]
    assert list(configs[0]["cluster"]) == ["worker"] and len(set(configs[0]["cluster"]["worker"])) == 2
    assert [config["task"] for config in configs] == [{"type": "worker", "index": rank} for rank in range(2)]
    for rank, text in enumerate(told):
        assert f"worker{rank} met worker0 worker1" in text
        assert "torch False; argv ['--lr', '0.1', '--show']" in text
    assert "2 workers on cpu, started in" in output and "\nfinished, after" in output
    assert record(tmp_path / "run")["state"] == "finished"


def test_servers_and_workers_that_never_return_are_ended_after_the_chief(tmp_path: Path) -> None:
    code, output = run(*words("--workers", "2", "--servers", "1"), cwd=tmp_path)
    assert code == 0, output
    assert "chief, 2 workers, 1 server on cpu, started in" in output
    assert "chief0 met chief0 ps0 worker0 worker1" in output  # its standard output is shown
    for rank in range(4):
        assert kinds(tmp_path / "run", rank)[-1] == "WorkerFinished"
    code, output = run(*PACELINE, "status", "run", cwd=tmp_path)
    assert "tensorflow: chief, 2 workers, 1 server" in output and "step" not in output
    assert re.findall(r"^  (\w+(?: \d)?) +\S+ +\d+ +cpu +finished", output, re.MULTILINE) == [
        "chief", "worker 0", "worker 1", "server 0",
    ]  # fmt: skip
    code, output = run(*PACELINE, "audit", "run", cwd=tmp_path)
    assert code == 2 and "is a program of tensorflow, which reads its data by itself" in output


def test_the_first_error_is_shown_once_and_tasks_that_lost_a_peer_are_folded(tmp_path: Path) -> None:
    files: list[Path] = []
    for number in range(3):  # on a busy machine a task may be ended before it has told: it has a second for it
        folder = tmp_path / str(number)
        folder.mkdir()
        code, output = run(*words("--workers", "3", "worker0:raise=no more", "*:echo"), cwd=folder)
        assert code == 1, output
        assert output.count("Traceback (most recent call last):") == 1, output
        assert "worker 0 (host" in output and ") failed: ValueError: no more" in output
        assert 'raise ValueError(detail or f"{name} has had enough")' in output
        assert "runpy" not in output and "child.py" not in output  # only the program's own frames
        assert "workers 1, 2 stopped because of it" in output
        files = [folder / f"run/attempt_1/worker_{rank}/error.json" for rank in range(3)]
        if all(file.exists() for file in files):
            break
    errors = [json.loads(file.read_text()) for file in files]
    assert [error["echo"] for error in errors if error["kind"] == "UnavailableError"] == [True, True]


def test_a_killed_worker_of_a_mirrored_job_has_all_start_again(tmp_path: Path) -> None:
    code, output = run(*words("--workers", "2", "worker1:kill-once=mark", "worker0:until=mark"), cwd=tmp_path)
    assert code == 0, output
    assert re.search(r"worker 1 \(pid \d+\) killed by signal 9: all start again, and the program goes on", output)
    assert [attempt["state"] for attempt in record(tmp_path / "run")["attempts"]] == ["failed", "finished"]
    assert "worker0 met worker0 worker1" in stdout(tmp_path / "run", 0, attempt=2)
    restarted = [json.loads(line) for line in (tmp_path / "run/attempt_2/events.jsonl").read_text().splitlines()]
    (cause,) = [event for event in restarted if event["event"] == "Restarted"]
    assert (cause["source"], cause["lost"], cause["workers"]) == ("program", [1], 2)


def test_a_killed_worker_beside_servers_is_started_again_alone_at_its_address(tmp_path: Path) -> None:
    more = ["--workers", "2", "--servers", "1", "chief0:until=gate"]
    run_dir = tmp_path / "run"
    with command(*words(*more), cwd=tmp_path) as program:
        until(lambda: kinds(run_dir, 2).count("TaskReady") == 1, program)
        os.kill(first := pid_of(run_dir, 2), signal.SIGKILL)
        until(lambda: kinds(run_dir, 2).count("TaskReady") == 2, program)
        until(lambda: "TaskUsage" in since_start(run_dir, 2), program)
        (tmp_path / "gate").touch()
        code, output = program.end()
    assert code == 0, output
    assert f"worker 1 (pid {first}) killed by signal 9: it is started again, and the others go on" in output
    assert [kinds(run_dir, rank).count("TaskStarted") for rank in range(4)] == [1, 1, 2, 1]
    since = since_start(run_dir, 2)
    usage = [event for event in events(run_dir, 2) if event["event"] == "TaskUsage"][-1]
    assert (usage["pid"], usage["restarts"]) == (pid_of(run_dir, 2), 1)
    assert usage["ready"] == ("TaskReady" in since[: len(since) - since[::-1].index("TaskUsage")])
    places = re.findall(r"has (\{.*\}); torch", stdout(run_dir, 2))
    assert len(places) == 2 and places[0] == places[1]
    assert len(record(run_dir)["attempts"]) == 1
    code, output = run(*PACELINE, "report", "run", "--no-html", cwd=tmp_path)
    assert "goodput" in output and "in which the program ran" in output
    assert re.search(r"killed by signal 9; back after .*, the others\s+went on meanwhile", output), output


def test_at_sigterm_all_programs_may_save_and_the_run_can_be_started_again(tmp_path: Path) -> None:
    more = ["--workers", "2", "worker0:save=saved_0", "worker1:save=saved_1"]
    with command(*words(*more), cwd=tmp_path) as program:
        until(lambda: all((tmp_path / f"saved_{rank}.ready").exists() for rank in range(2)), program)
        os.kill(program.process.pid, signal.SIGTERM)
        code, output = program.end()
    assert code == 75, output
    assert all((tmp_path / f"saved_{rank}").exists() for rank in range(2))
    assert "SIGTERM came: the programs are asked to save and end" in output
    assert "the programs have ended, and go on from what they saved" in output
    assert "go on with: " in output and "Traceback" not in output
    assert program.left() == []


@pytest.mark.further
def test_a_program_that_sigterm_reaches_first_leaves_with_all_others(tmp_path: Path) -> None:
    """As where a batch system signals every process of a job."""
    run_dir = tmp_path / "run"
    with command(*words("--workers", "2", "worker0:until=never", "worker1:until=never"), cwd=tmp_path) as program:
        until(lambda: all("met" in stdout(run_dir, rank) for rank in range(2) if kinds(run_dir, rank)), program)
        until(lambda: kinds(run_dir, 1).count("TaskReady") == 1, program)
        os.kill(pid_of(run_dir, 1), signal.SIGTERM)
        code, output = program.end()
    assert code == 75, output
    assert "worker 1 was asked to leave by SIGTERM" in output


@pytest.mark.further
def test_a_program_that_is_deaf_to_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    more = ["--workers", "2", "--grace-s", "1", "worker0:deaf=deaf_0", "worker1:deaf=deaf_1"]
    with command(*words(*more), cwd=tmp_path) as program:
        until(lambda: all((tmp_path / f"deaf_{rank}").exists() for rank in range(2)), program)
        os.kill(program.process.pid, signal.SIGTERM)
        code, output = program.end()
    assert code == 75, output
    assert program.left() == []


@pytest.mark.further
def test_a_task_that_is_lost_each_time_ends_the_run_after_some_starts(tmp_path: Path) -> None:
    code, output = run(*words("--workers", "2", "worker1:kill", "worker0:until=never"), cwd=tmp_path)
    assert code == 1, output
    assert "the workers have begun again 3 times in a row, and none lasted 10 minutes: the run ends" in output
    assert len(record(tmp_path / "run")["attempts"]) == 4
    assert re.search(r"worker 1 \(host \S+, pid \d+\) was killed by signal 9 \(SIGKILL\)", output), output


@pytest.mark.further
def test_a_lost_server_has_all_start_again(tmp_path: Path) -> None:
    more = ["--workers", "1", "--servers", "1", "ps0:kill-once=mark", "chief0:until=gate"]
    with command(*words(*more), cwd=tmp_path) as program:
        until(lambda: "TaskReady" in kinds(tmp_path / "run", 1, attempt=2), program)
        (tmp_path / "gate").touch()
        code, output = program.end()
    assert code == 0, output
    assert re.search(r"server 0 \(pid \d+\) killed by signal 9: all start again", output)


@pytest.mark.further
def test_a_program_that_fails_and_does_not_come_to_its_end_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    code, output = run(*words("--workers", "1", "alone0:linger"), cwd=tmp_path)
    assert code == 1 and "worker 0 (host" in output and "ValueError: it lingers" in output
    assert time.monotonic() - began < LIMIT_S  # the thread that it waits for would go on as long


@pytest.mark.further
def test_a_program_that_ends_with_an_exit_code_fails_with_it(tmp_path: Path) -> None:
    code, output = run(*words("--workers", "1", "alone0:exit=3"), cwd=tmp_path)
    assert code == 1 and "failed: SystemExit: 3" in output
    told = json.loads((tmp_path / "run/attempt_1/worker_0/error.json").read_text())
    assert told["kind"] == "SystemExit" and not told["echo"]


def test_tasks_of_two_hosts_meet_and_a_lost_one_starts_all_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    meeting = ["--hosts", "2", "--head", f"127.0.0.1:{free_port()}", "--token-file", str(token)]
    more = [*meeting, "--workers", "2", "worker1:kill-once=mark", "worker0:until=mark"]
    mark = str(tmp_path / "mark")
    more = [word.replace("=mark", f"={mark}") for word in more]
    folders = [tmp_path / "east", tmp_path / "west"]
    for folder in folders:
        folder.mkdir()
    with command(*words(*more), cwd=folders[0]) as head, command(*words(*more), cwd=folders[1]) as other:
        ends = [program.end() for program in (head, other)]
    assert [code for code, _ in ends] == [0, 0], "\n".join(text for _, text in ends)
    assert any("TensorFlow's connections between hosts are not encrypted" in text for _, text in ends)
    told = [text.count("killed by signal 9: all start again") for _, text in ends]
    assert sorted(told) == [0, 1], "\n".join(text for _, text in ends)  # by the head, which is the host that came first
    found = [folder / "run" for folder in folders if (folder / "run/attempt_2/worker_1").exists()]
    assert found and "worker1 met worker0 worker1" in stdout(found[0], 1, attempt=2)


@pytest.mark.further
def test_a_lost_host_is_replaced_by_another_and_all_start_again(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    meeting = ["--hosts", "2", "--head", f"127.0.0.1:{free_port()}", "--token-file", str(token), "--silence-s", "3"]
    more = words(*meeting, "--workers", "2", f"*:until={tmp_path / 'gate'}")
    folders = [tmp_path / "east", tmp_path / "west"]
    for folder in folders:
        folder.mkdir()
    east = folders[0] / "run"
    with command(*more, cwd=folders[0]) as head, command(*more, cwd=folders[1]) as lost:
        until(lambda: any("TaskReady" in kinds(folder / "run", 1) for folder in folders), head)
        lost.process.kill()
        with command(*more, cwd=folders[1]) as other:
            until(lambda: "TaskReady" in kinds(east, 0, attempt=2), head)
            (tmp_path / "gate").touch()
            code, output = head.end()
            assert other.end()[0] == 0
    assert code == 0, output
    assert "all start again, and the program goes on from what it has saved" in output


@pytest.mark.further
def test_tasks_whose_supervisor_is_killed_end_and_the_next_start_takes_its_place(tmp_path: Path) -> None:
    more = ["--workers", "2", "worker0:save=saved_0", "worker1:save=saved_1"]
    with command(*words(*more), cwd=tmp_path) as program:
        until(lambda: all((tmp_path / f"saved_{rank}.ready").exists() for rank in range(2)), program)
        program.process.kill()
        program.process.wait()
        deadline = time.monotonic() + LIMIT_S
        while program.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert program.left() == []
    assert all((tmp_path / f"saved_{rank}").exists() for rank in range(2))  # at the SIGTERM of their own tasks
    code, output = run(*words("--workers", "2"), cwd=tmp_path)
    assert code == 0, output
    assert [attempt["attempt"] for attempt in record(tmp_path / "run")["attempts"]] == [1, 2]


def test_what_the_first_task_writes_for_tensorboard_are_the_runs_steps_and_losses(tmp_path: Path) -> None:
    metrics = tmp_path / "run/metrics.jsonl"
    with command(*words("--workers", "2", "worker0:scalars=logs", "worker1:until=logs.read"), cwd=tmp_path) as program:
        until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) == 3, program)
        _, shown = run(*PACELINE, "status", "run", cwd=tmp_path)
        (tmp_path / "logs.read").touch()
        code, output = program.end()
    assert code == 0, output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {row["step"]: row["loss"] for row in rows} == pytest.approx({10: 0.1, 20: 0.05, 30: 1 / 30})
    assert "  step 30  loss 0.03333 (by the program's event files)\n" in shown
    assert os.readlink(tmp_path / "run/tensorboard/program/worker_0/logs") == str(tmp_path / "logs")


def test_tasks_that_do_nothing_are_said_to_stand_still_and_where(tmp_path: Path) -> None:
    more = ["--workers", "2", "--timeout-s", "8", "worker0:serve", "worker1:serve"]
    with command(*words(*more), cwd=tmp_path) as program:
        until(lambda: all(stands_at(tmp_path / "run", rank) for rank in range(2)), program)
        _, shown = run(*PACELINE, "status", "run", cwd=tmp_path)
        os.kill(program.process.pid, signal.SIGTERM)
        code, output = program.end()
    assert code == 75, output
    assert "STANDS STILL for" in shown, shown
    places = r"worker 0 at cluster_program.py:\d+ in wait_for_ever, worker 1 at cluster_program.py:\d+ in wait_for_ever"
    assert re.search(places, shown), shown
    assert re.search(r"the last line, .* ago, of worker \d: worker\d has {", shown), shown


def stands_at(run_dir: Path, rank: int) -> str:
    """Where a task has said last that it stands still."""
    told = [event for event in events(run_dir, rank) if event["event"] == "TaskUsage"]
    return str(told[-1].get("place", "")) if told else ""
