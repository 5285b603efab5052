"""However a job ends, none of its processes is left, and the outcome says what happened."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import resource
import signal
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import quick
from paceline.errors import LaunchError
from paceline.launch.coordinator.job_end import STOP_S
from paceline.launch.fork.warm_parent_client import WarmParent
from paceline.launch.local import launch
from paceline.plan.job import Job
from supervised_launch import Announcements, Said, marked, run_job, supervised

GONE_S = 10.0  # the promise: after a failure or a signal everything is gone by then


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Announcements]:
    announcements = Announcements(tmp_path / "pipe")
    yield announcements
    announcements.close()


def job(*args: str, workers: int = 2, **fields: Any) -> Job:
    return Job(workers=workers, args=args, **fields)


def error_of(run_dir: Path, worker: int) -> dict[str, Any]:
    return json.loads((run_dir / "attempt_1" / f"worker_{worker}" / "error.json").read_text())


# ------------------------------------------------------------------------------------------------------------- how
# workers end


def test_workers_that_end_well_are_a_finished_job(tmp_path: Path) -> None:
    outcome = run_job(job(workers=3), tmp_path)
    assert (outcome.state, outcome.exit_code, outcome.failures) == ("finished", 0, ())
    assert [(ended.worker, ended.exit_code) for ended in outcome.exits] == [(0, 0), (1, 0), (2, 0)]
    assert all(ended.pid > 1 and ended.peak_memory_bytes > 1 << 20 for ended in outcome.exits)


def test_a_worker_begins_with_its_own_session_files_and_signals(tmp_path: Path, pipe: Announcements) -> None:
    run_job(job(f"*:tell={pipe.path}", workers=3), tmp_path / "run")
    told = {one["rank"]: one for one in pipe.take(3)}
    assert sorted(told) == [0, 1, 2]
    for worker, one in told.items():
        own = {0, 1, 2, one["channel_fd"]}  # and the lock on its log
        assert own < set(one["files"]) and len(one["files"]) == 5, "files of the warm parent or of others are open"
        assert (one["session"], one["group"], one["terminate"], one["interrupt"]) == (True, True, True, True)
        assert (one["mask"], one["threads"], one["torch"], one["stdin"]) == ([], 1, False, "/dev/null")
        assert one["folder"] == os.getcwd()
        worker_dir = tmp_path / "run" / "attempt_1" / f"worker_{worker}"
        assert (worker_dir / "stdout.log").read_text() == "said on stdout\n"
        assert (worker_dir / "stderr.log").read_text() == "said on stderr\n"
        assert not (worker_dir / "error.json").exists()


def test_what_escapes_from_a_worker_is_explained_and_ends_the_others(tmp_path: Path) -> None:
    outcome = run_job(job("1:raise", "*:wait", workers=3), tmp_path)
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    failed, *others = sorted(outcome.failures, key=lambda failure: failure.sent_by_us)
    assert (failed.worker, failed.exit_code, failed.signal, failed.sent_by_us) == (1, 1, None, False)
    assert failed.error is not None
    assert (failed.error["kind"], failed.error["message"]) == ("RuntimeError", "worker 1 has had enough")
    assert "fake_worker.py" in failed.error["traceback"]
    assert dict(failed.error) == error_of(tmp_path, 1)
    assert [(other.worker, other.exit_code, other.signal, other.sent_by_us) for other in others] == [
        (0, None, signal.SIGTERM, True),
        (2, None, signal.SIGTERM, True),
    ]


def test_all_workers_may_say_what_they_know_when_one_fails(tmp_path: Path) -> None:
    outcome = run_job(job("*:raise", workers=4), tmp_path)
    assert [(failure.worker, failure.sent_by_us) for failure in outcome.failures] == [
        (worker, False) for worker in range(4)
    ]
    assert {failure.error["message"] for failure in outcome.failures if failure.error} == {
        f"worker {worker} has had enough" for worker in range(4)
    }


def test_a_killed_worker_is_told_by_its_signal(tmp_path: Path) -> None:
    outcome = run_job(job("0:kill", "*:wait"), tmp_path)
    by_worker = {failure.worker: failure for failure in outcome.failures}
    assert (by_worker[0].exit_code, by_worker[0].signal, by_worker[0].sent_by_us) == (None, signal.SIGKILL, False)
    assert by_worker[1].sent_by_us
    assert outcome.exit_code == 76


def test_usage_errors_of_workers_are_exit_code_2(tmp_path: Path) -> None:
    outcome = run_job(job("0:usage", "*:wait"), tmp_path)
    assert (outcome.state, outcome.exit_code) == ("failed", 2)


def test_an_exit_code_of_the_programs_own_is_a_failure(tmp_path: Path) -> None:
    outcome = run_job(job("0:exit=3"), tmp_path)
    assert [(failure.worker, failure.exit_code, failure.error) for failure in outcome.failures] == [(0, 3, None)]
    assert run_job(job("0:exit=0"), tmp_path / "other").state == "finished"


@pytest.mark.parametrize("code", [0, 75, 76])
def test_an_exit_code_does_not_make_a_good_end_of_a_function_that_has_not_returned(tmp_path: Path, code: int) -> None:
    outcome = run_job(job(f"1:quit={code}", "*:wait"), tmp_path)
    assert (outcome.state, outcome.exit_code) == ("failed", 1)
    (failed,) = [failure for failure in outcome.failures if not failure.sent_by_us]
    assert (failed.worker, failed.exit_code, failed.is_early) == (1, code, True)


def test_what_ends_a_process_behind_its_function_counts_by_its_exit_code(tmp_path: Path) -> None:
    outcome = run_job(job("*:late=0"), tmp_path)
    assert (outcome.state, outcome.failures) == ("finished", ())


def test_a_worker_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    began = time.monotonic()
    outcome = run_job(job("0:raise", "1:stubborn"), tmp_path)
    assert time.monotonic() - began < GONE_S
    assert [(failure.worker, failure.signal) for failure in outcome.failures] == [(0, None), (1, signal.SIGKILL)]


def test_peak_memory_is_each_workers_own(tmp_path: Path) -> None:
    outcome = run_job(job(f"1:memory={200 << 20}"), tmp_path)
    small, large = (ended.peak_memory_bytes for ended in outcome.exits)
    assert large >= 200 << 20
    assert small < 150 << 20


def test_what_workers_started_ends_with_a_failed_job(tmp_path: Path, pipe: Announcements) -> None:
    options = {"job": {"workers": 2, "args": [f"0:family={pipe.path}", "1:raise"]}, "run_dir": str(tmp_path / "run")}
    with supervised(options) as supervisor:
        code, outcome, _ = supervisor.result()
        assert supervisor.left(limit_s=0) == []  # when the supervisor ends, everything has ended
    assert code == 1
    assert outcome is not None and outcome.state == "failed"
    assert not any(psutil.pid_exists(pid) for pid in pipe.take(1)[0])


def test_what_workers_leave_behind_ends_with_a_finished_job(tmp_path: Path, pipe: Announcements) -> None:
    outcome = run_job(job(f"*:leave={pipe.path}"), tmp_path / "run")
    assert outcome.state == "finished"
    assert not any(psutil.pid_exists(pid) for pids in pipe.take(2) for pid in pids)


# ------------------------------------------------------------------------------------------------------------------
# the channel


def test_large_values_pass_the_kv_store(tmp_path: Path) -> None:
    assert run_job(job(f"*:large={6 << 20}"), tmp_path).state == "finished"


def test_a_worker_that_talks_nonsense_loses_its_channel_and_nobody_elses(tmp_path: Path) -> None:
    said = Said()
    assert run_job(job("0:garbage"), tmp_path, observer=said).state == "finished"
    assert said.texts == ["worker 0's channel was closed: a message is not JSON: b'this is not JSON'"]


# ------------------------------------------------------------------------------------------------------------- the
# warm parent


def test_a_missing_module_is_a_launch_error_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"ModuleNotFoundError.*no_such_module_at_all"):
        run_job(job(), tmp_path, modules=["no_such_module_at_all"])


def test_a_crash_while_importing_is_a_launch_error_with_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crashing_module.py").write_text("import os\nos.write(2, b'about to crash')\nos.abort()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LaunchError, match=r"killed by signal 6 \(SIGABRT\).\nabout to crash"):
        run_job(job(), tmp_path, modules=["crashing_module"])


def test_warnings_of_imports_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "warning_module.py").write_text("import warnings\nwarnings.warn('mind the gap')\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = Said()
    assert run_job(job(), tmp_path, modules=["warning_module"], observer=said).state == "finished"
    assert len(said.texts) == 1
    assert "mind the gap" in said.texts[0]


def test_threads_before_the_fork_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded_module.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = Said()
    assert run_job(job(), tmp_path, modules=["threaded_module"], observer=said).state == "finished"
    assert "threads are running before the workers are forked" in said.texts[0]


def test_an_entry_that_does_not_exist_is_explained(tmp_path: Path) -> None:
    outcome = run_job(job(), tmp_path, entry="fake_worker:no_such_function")
    assert {failure.error["kind"] for failure in outcome.failures if failure.error} == {"AttributeError"}
    assert len(outcome.failures) == 2


def test_a_log_directory_that_cannot_be_made_is_a_launch_error(tmp_path: Path) -> None:
    (tmp_path / "attempt_1").write_text("in the way")
    with pytest.raises(LaunchError, match=r"Cannot make the log directory .*worker_0: Not a directory"):
        run_job(job(), tmp_path)


def test_too_few_open_files_are_a_launch_error_with_the_remedy(tmp_path: Path) -> None:
    few, most = len(os.listdir("/proc/self/fd")) + 12, resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, most[1]))
    try:
        with pytest.raises(LaunchError, match=r"No channel for worker \d+: Too many open files. Raise .*ulimit -n"):
            run_job(job("*:early", workers=40), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)


def test_launching_leaves_no_file_and_no_thread_open(tmp_path: Path) -> None:
    run_job(job(), tmp_path / "first")
    before = os.listdir("/proc/self/fd"), threading.active_count()
    for number in range(25):
        run_job(job(workers=1), tmp_path / str(number))
    assert (os.listdir("/proc/self/fd"), threading.active_count()) == before


def test_a_killed_warm_parent_is_a_failure_that_says_so(tmp_path: Path, pipe: Announcements) -> None:
    options = {"job": {"workers": 2, "args": [f"*:family={pipe.path}"]}, "run_dir": str(tmp_path / "run")}
    with supervised(options) as supervisor:
        pipe.take(2)
        warm = psutil.Process(supervisor.process.pid).children()
        assert len(warm) == 1
        warm[0].kill()
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        assert supervisor.left(limit_s=0) == []
    assert code == 76
    assert outcome is not None
    assert [failure.error["kind"] for failure in outcome.failures if failure.error] == ["WarmParentLost"] * 2
    assert "was killed by signal 9 (SIGKILL)" in str(outcome.failures[0].error)


# -------------------------------------------------------------------------------------------------- signals to the
# supervisor


def options_for(moment: str, pipe: Announcements, tmp_path: Path) -> dict[str, Any]:
    match moment:
        case "importing":
            return {"job": {"workers": 2}, "modules": ["slow_module"], "run_dir": str(tmp_path / "run")}
        case "forking":  # the first of many announces at once, while the others are being forked
            args = [f"0:early={pipe.path}", "*:early"]
            return {"job": {"workers": 24, "args": args}, "run_dir": str(tmp_path / "run")}
        case _:
            return {
                "job": {"workers": 2, "args": [f"0:family={pipe.path}", "*:wait"]},
                "run_dir": str(tmp_path / "run"),
            }


@pytest.mark.parametrize(
    ("moment", "signum"),
    [
        ("importing", signal.SIGINT),
        ("forking", signal.SIGTERM),
        ("running", signal.SIGHUP),
        ("running", signal.SIGINT),
        quick.further("importing", signal.SIGTERM),
        quick.further("importing", signal.SIGHUP),
        quick.further("forking", signal.SIGINT),
        quick.further("forking", signal.SIGHUP),
        quick.further("running", signal.SIGTERM),
    ],
)
def test_a_signal_at_any_moment_leaves_nothing(
    moment: str, signum: signal.Signals, tmp_path: Path, pipe: Announcements
) -> None:
    environment = {"SLOW_MODULE_TELLS": str(pipe.path)}
    with supervised(options_for(moment, pipe, tmp_path), environment=environment) as supervisor:
        pipe.take(1)
        began = time.monotonic()
        supervisor.process.send_signal(signum)
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        assert supervisor.left(limit_s=0) == []
        assert time.monotonic() - began < GONE_S
    assert code == 128 + signum
    assert outcome is not None
    assert (outcome.state, outcome.failures, outcome.reason) == ("stopped", (), f"stopped by {signum.name}")
    assert all(ended.sent_by_us and ended.signal == signal.SIGTERM for ended in outcome.exits), "SIGKILL was needed"


def test_ctrl_c_before_anything_was_imported_leaves_nothing(tmp_path: Path) -> None:
    """The moment when the warm parent is still an interpreter that starts."""
    with supervised({"job": {"workers": 2, "args": ["*:wait"]}, "run_dir": str(tmp_path)}) as supervisor:
        while not psutil.Process(supervisor.process.pid).children():
            assert supervisor.process.poll() is None
        supervisor.process.send_signal(signal.SIGINT)
        code = supervisor.process.wait(GONE_S)
        assert code in (130, -signal.SIGINT)  # it may come before launch() has begun to note signals
        assert supervisor.left() == []


def test_a_signal_to_all_processes_at_once_is_a_stop(tmp_path: Path, pipe: Announcements) -> None:
    """As from a cluster's scheduler, or a service that is stopped: workers and warm parent get it too, in any order."""
    options = {"job": {"workers": 2, "args": [f"*:wait={pipe.path}"]}, "run_dir": str(tmp_path / "run")}
    with supervised(options) as supervisor:
        pipe.take(2)
        supervisor.process.send_signal(signal.SIGSTOP)  # it hears of its workers' end and of its own signal together
        for line in marked(supervisor.mark):
            os.kill(int(line.partition(":")[0]), signal.SIGTERM)
        supervisor.process.send_signal(signal.SIGCONT)
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        assert supervisor.left(limit_s=0) == []
    assert outcome is not None
    assert (code, outcome.state, outcome.failures) == (143, "stopped", ())


def test_a_second_ctrl_c_does_not_wait(tmp_path: Path, pipe: Announcements) -> None:
    options = {"job": {"workers": 2, "args": [f"*:stubborn={pipe.path}"]}, "run_dir": str(tmp_path / "run")}
    with supervised(options) as supervisor:
        pipe.take(2)
        supervisor.process.send_signal(signal.SIGINT)
        pipe.take(2)  # they have got SIGTERM: the first one was understood
        began = time.monotonic()
        supervisor.process.send_signal(signal.SIGINT)
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        passed = time.monotonic() - began
        assert supervisor.left(limit_s=0) == []
    assert code == 130
    assert outcome is not None
    assert [ended.signal for ended in outcome.exits] == [signal.SIGKILL] * 2
    assert passed < STOP_S - 1


def test_an_ignored_signal_stays_ignored(tmp_path: Path, pipe: Announcements) -> None:
    options = {"job": {"workers": 1, "args": [f"0:wait={pipe.path}"]}, "run_dir": str(tmp_path / "run")}
    with supervised(options, prefix=["nohup"], stderr=subprocess.DEVNULL) as supervisor:
        pipe.take(1)
        supervisor.process.send_signal(signal.SIGHUP)
        supervisor.process.send_signal(signal.SIGTERM)
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
    assert outcome is not None and outcome.reason == "stopped by SIGTERM"
    assert code == 143


def test_a_batch_systems_warning_is_the_sigterm_that_it_announces(tmp_path: Path, pipe: Announcements) -> None:
    options = {"job": {"workers": 2, "args": [f"*:wait={pipe.path}"]}, "run_dir": str(tmp_path / "run")}
    with supervised(options, environment={"SLURM_JOB_ID": "12"}) as supervisor:
        pipe.take(2)
        supervisor.process.send_signal(signal.SIGUSR1)
        code, outcome, _ = supervisor.result(limit_s=GONE_S)
        assert supervisor.left(limit_s=0) == []
    assert outcome is not None and outcome.reason == "stopped by SIGTERM"
    assert code == 143


def test_a_closing_terminal_leaves_nothing(tmp_path: Path, pipe: Announcements) -> None:
    options = {"job": {"workers": 2, "args": [f"*:family={pipe.path}"]}, "run_dir": str(tmp_path / "run")}
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    terminal = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "preexec_fn": take_terminal}
    with supervised(options, **terminal) as supervisor:
        os.close(theirs)
        pipe.take(2)
        os.close(ours)
        supervisor.process.wait(GONE_S)
        assert supervisor.left(limit_s=0) == []


@pytest.mark.parametrize("moment", ["importing", "forking", "running"])
def test_a_killed_supervisor_leaves_nothing(moment: str, tmp_path: Path, pipe: Announcements) -> None:
    environment = {"SLOW_MODULE_TELLS": str(pipe.path)}
    with supervised(options_for(moment, pipe, tmp_path), environment=environment) as supervisor:
        pipe.take(1)
        supervisor.process.kill()
        supervisor.process.wait()
        assert supervisor.left(limit_s=GONE_S) == []


def test_a_supervisor_whose_starting_thread_has_ended_goes_on(tmp_path: Path) -> None:
    """The kernel tells a child of its parent's death also when only the thread ended that started it."""
    started: list[WarmParent] = []
    thread = threading.Thread(target=lambda: started.append(WarmParent.start(modules=(), entry="fake_worker:work")))
    thread.start()
    thread.join()
    outcome = launch(job(), run_dir=tmp_path, attempt=1, observer=Said(), command_started=time.time(), warm=started[0])
    assert outcome.state == "finished"


# ---------------------------------------------------------------------------------------------------------------------
# inline


def test_inline_runs_worker_0_in_this_process_and_the_others_beside(tmp_path: Path) -> None:
    outcome = run_job(job("0:large=100", launcher="inline", workers=3), tmp_path)
    assert outcome.state == "finished"
    assert outcome.exits[0].pid == os.getpid()
    assert len({ended.pid for ended in outcome.exits}) == 3


def test_inline_alone_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.local.ENTRY", "fake_worker:work")
    monkeypatch.setattr(WarmParent, "start", lambda: pytest.fail("a warm parent was started"))
    more: dict[str, Any] = {"attempt": 1, "observer": Said(), "command_started": time.time()}
    outcome = launch(job(launcher="inline", workers=1), run_dir=tmp_path, **more)
    assert (outcome.state, [ended.pid for ended in outcome.exits]) == ("finished", [os.getpid()])


def test_inline_a_failing_worker_0_ends_the_others_and_is_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="worker 0 has had enough"):
        run_job(job("0:raise", "1:wait", launcher="inline"), tmp_path)


def test_inline_ctrl_c_in_worker_0_stops_the_job(tmp_path: Path) -> None:
    outcome = run_job(job("0:ctrl-c", "1:wait", launcher="inline"), tmp_path)
    assert (outcome.state, outcome.exit_code) == ("stopped", 130)
    assert [ended.exit_code for ended in outcome.exits] == [130, None]
