"""Every way to start on one host trains the same, and every way to end leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paceline
import programs
import quick
from paceline.errors import PlanError, WorkerError
from programs import (
    GONE_S,
    PACELINE,
    STEPS,
    Announcements,
    checkpoints,
    child_environment,
    losses,
    record,
    reference_losses,
    started_workers,
    the_run,
    write_program,
)

# As users start them; and forks that find their imports done, where the claim is on what is asked of a start.
command, run = partial(programs.command, cold=True), partial(programs.run, cold=True)
command_fork, run_fork = programs.command, programs.run

# At step 14 the checkpoint of step 4 is complete: the next one, of step 8, has waited for it.
ENDLESS = ("--epochs", "100000", "--tell-at", "14")
PROBE = """\
import atexit, os, sys
atexit.register(lambda: print(os.getpid(), "torch" in sys.modules, file=open(os.environ["PROBE"], "a")))
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    return write_program(tmp_path)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Announcements]:
    with closing(Announcements(tmp_path / "pipe")) as announcements:
        yield announcements


def assert_trained(run_dir: Path, *, workers: int = 2) -> None:
    """The run finished with the losses of one process, and left what a finished run leaves."""
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert [one["rank"] for one in started_workers(run_dir)] == list(range(workers))
    assert checkpoints(run_dir)[-1] == STEPS
    assert (record(run_dir)["state"], json.loads((run_dir / "summary.json").read_text())["state"]) == ("finished",) * 2


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_trains_and_imports_no_torch(train: Path, tmp_path: Path, pipe: Announcements) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "sitecustomize.py").write_text(PROBE)
    path = os.pathsep.join([str(tmp_path / "probe"), child_environment()["PYTHONPATH"]])
    words = [*PACELINE, "run", train, "--workers", "2", "--tell", pipe.path, "--run-dir", "run", "--", "--epochs", "2"]
    with command(*words, environment={"PYTHONPATH": path, "PROBE": str(tmp_path / "ended")}) as program:
        told = program.told(pipe, 2)
        code, output = program.end()
        assert program.left() == []
    assert code == 0, output
    assert_trained(tmp_path / "run")
    assert 'value {"step": 8, "workers": 2}' in output
    assert [one["argv"] for one in told] == [["--tell", str(pipe.path), "--epochs", "2"]] * 2
    assert len({one["pid"] for one in told} | {program.process.pid}) == 3
    imported = dict(line.split() for line in (tmp_path / "ended").read_text().splitlines())
    assert imported[str(program.process.pid)] == "False"
    assert all(imported[str(one["pid"])] == "True" for one in told)  # the probe sees it where it is


def test_a_job_file_is_a_job(train: Path, tmp_path: Path) -> None:
    Path("job.toml").write_text(
        'program = "train.py"\nworkers = 3\nrun_dir = "of_file"\nsave_every = 3\nkeep = 9\n'
        "[plan.batch]\nsize = 24\nmicro = 3\n"
    )
    code, output = run_fork(*PACELINE, "run", "job.toml", "--set", "plan.batch.size=12", "--set", "save_at_end=false")
    assert code == 0, output
    run_dir = tmp_path / "of_file"
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    plans = [one["plan"] for one in started_workers(run_dir)]
    assert plans == ["replicas=3+batch(size=12,micro=3)"] * 3
    assert checkpoints(run_dir) == [3, 6]  # the script says save_every=4: the file wins


def test_options_of_the_command_win_over_the_script(train: Path, tmp_path: Path) -> None:
    code, output = run_fork(*PACELINE, "run", train, "--save-every", "5", "--run-dir", "run", "--workers", "1")
    assert code == 0, output
    assert checkpoints(tmp_path / "run") == [5, 8]
    assert "the script says workers=2" in output and "says otherwise" in output  # nothing is silent


def test_a_plain_program_takes_its_workers_from_the_script(train: Path, tmp_path: Path) -> None:
    code, output = run(sys.executable, train)
    assert code == 0, output
    run_dir = the_run(tmp_path)
    assert run_dir.name.startswith("train-")
    assert_trained(run_dir)
    assert output.count("value ") == 1 and 'value {"step": 8, "workers": 2}' in output


def test_a_dry_run_starts_nothing(train: Path, tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "sitecustomize.py").write_text(PROBE)
    path = os.pathsep.join([str(tmp_path / "probe"), child_environment()["PYTHONPATH"]])
    environment = {"PYTHONPATH": path, "PROBE": str(tmp_path / "ended")}
    words = [*PACELINE, "run", train, "--workers", "2", "--plan", "batch(size=12)", "--dry-run", "--run-dir", "run"]
    code, output = run(*words, environment=environment)
    assert code == 0, output
    assert "replicas=2+batch(size=12" in output
    assert len((tmp_path / "ended").read_text().splitlines()) == 1  # the command itself, and no other interpreter
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--workers", "2", "--plan", "replicas=3"], "3"),
        (["--workers", "0"], "Job.workers is 0"),
        (["--workers", "2", "--plan", "batch(size=12)", "--set", "plan.bacth.size=3"], "bacth"),
    ],
)
def test_what_cannot_work_is_refused_once_in_words(train: Path, tmp_path: Path, options: list[str], says: str) -> None:
    code, output = run_fork(*PACELINE, "run", train, "--run-dir", "run", *options)
    assert code == 2
    assert says in output and "Traceback" not in output
    assert output.count("paceline:") == 1
    assert not (tmp_path / "run").exists()


def test_the_same_run_dir_continues_and_fresh_starts_over(train: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [*PACELINE, "run", train, "--workers", "2", "--run-dir", "run"]
    assert run_fork(*words, "--max-steps", "6")[0] == 0
    assert (len(losses(run_dir)), checkpoints(run_dir)) == (6, [4, 6])
    assert run_fork(*words)[0] == 0
    assert [one["resumed_from_step"] for one in started_workers(run_dir, 2)] == [6, 6]
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert run_fork(*words, "--fresh", "--max-steps", "3")[0] == 0
    assert [one["resumed_from_step"] for one in started_workers(run_dir, 3)] == [0, 0]
    assert losses(run_dir) == pytest.approx(list(reference_losses()[:3]), rel=1e-5)
    assert run_fork(*words, "--max-steps", "4")[0] == 0
    assert [one["resumed_from_step"] for one in started_workers(run_dir, 4)] == [3, 3]  # of the new start, not the old


def test_a_second_call_in_one_run_is_refused_and_python_makes_it_two_runs(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "import paceline\n"
        "if __name__ == '__main__':\n"
        "    for name in 'one', 'two':\n"
        "        print(name, paceline.run(lambda worker: worker.rank, workers=1, run_dir=name))\n"
    )
    code, output = run_fork(*PACELINE, "run", "twice.py", "--run-dir", "run")
    assert code == 2 and "calls paceline.run() a second time" in output
    code, output = run_fork(sys.executable, "twice.py")
    assert code == 0, output
    assert [record(tmp_path / name)["state"] for name in ("one", "two")] == ["finished"] * 2


# ------------------------------------------------------------------------------------------------------ a function call


def test_a_closure_of_an_imported_module_runs_and_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_module.py").write_text(
        "BASE = 40\n"
        "def make(more):\n"
        "    def train(worker):\n"
        "        return {'sum': BASE + more, 'of': worker.gather(worker.rank)}\n"
        "    return train\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    make = __import__("some_module").make
    value = paceline.run(make(2), workers=2, run_dir="run")
    assert value == {"sum": 42, "of": [0, 1]}


def test_a_workers_own_error_is_in_the_callers_exception(capfd: pytest.CaptureFixture[str]) -> None:
    def train(worker: Any) -> None:
        if worker.rank == 1:
            raise KeyError(f"of worker {worker.rank}")
        worker.wait()

    with pytest.raises(WorkerError, match=r"KeyError: 'of worker 1'") as caught:
        paceline.run(train, workers=2, run_dir="run")
    assert (caught.value.worker, caught.value.step) == (1, 0)
    assert "in train" in caught.value.traceback


def test_a_plain_program_that_fails_shows_the_workers_traceback_once(train: Path, tmp_path: Path) -> None:
    code, output = run_fork(sys.executable, train, "--fail", "1:5")
    assert code == 1
    assert output.count("ValueError: worker 1 has had enough\n") == 2  # in the headline, and below the traceback
    assert output.count('raise ValueError(f"worker {worker.rank} has had enough")') == 1
    assert "worker 0 stopped because of it" in output
    assert record(the_run(tmp_path))["state"] == "failed"


def test_a_plan_that_cannot_work_is_a_plan_error_of_the_caller() -> None:
    with pytest.raises(PlanError, match=r"3 replicas|replicas=3"):
        paceline.run(lambda worker: None, workers=2, plan="replicas=3", run_dir="run")
    assert not Path("run").exists()


# --------------------------------------------------------------------------------------------------------------- inline


def test_inline_the_debugger_works_and_the_others_wait(tmp_path: Path) -> None:
    text = write_program(tmp_path).read_text()
    stopped = "        if worker.rank == 0 and worker.step == 3:\n            breakpoint()\n"
    train = tmp_path / "debugged.py"
    train.write_text(text.replace("        worker.report(loss", stopped + "        worker.report(loss"))
    commands = "p ('pid', os.getpid(), worker.step)\nimport time; time.sleep(2.5)\ncontinue\n"
    # `time.sleep` stands for somebody who thinks for longer than the job's patience.
    words = [*PACELINE, "run", train, "--launcher", "inline", "--workers", "2", "--timeout-s", "2", "--run-dir", "run"]
    with command(*words, stdin=-1) as program:
        assert isinstance(program.process, subprocess.Popen)
        output, _ = program.process.communicate(commands, timeout=200)
        assert program.left() == []
    assert program.process.returncode == 0, output
    assert f"('pid', {program.process.pid}, 3)" in output
    assert_trained(tmp_path / "run")


def test_inline_a_program_may_run_again_and_again(tmp_path: Path) -> None:
    program = tmp_path / "twice.py"
    program.write_text(
        "import os, paceline\n"
        "def train(worker):\n    return [os.getpid() == int(pid) for pid in worker.gather(str(os.getpid()))]\n"
        "if __name__ == '__main__':\n"
        "    print('first', paceline.run(train, workers=2, launcher='inline'))\n"
        "    print('second', paceline.run(train, workers=2))\n"
        "    print('third', paceline.run(train, workers=1, launcher='inline'))\n"
    )
    code, output = run_fork(sys.executable, program)
    assert code == 0, output
    assert "first [True, False]" in output and "second [True, False]" in output and "third [True]" in output


# ---------------------------------------------------------------------------------------------------- ends from outside


def test_a_program_from_a_pipe_has_a_run_named_run_and_its_function_s_name(tmp_path: Path) -> None:
    text = (
        "import paceline\ndef learn(worker):\n    return worker.rank\nprint('value', paceline.run(learn, workers=2))\n"
    )
    (tmp_path / "text").write_text(text)
    with open(tmp_path / "text") as pipe:
        code, output = run(sys.executable, "-", stdin=pipe)
    assert (code, "value 0" in output) == (0, True), output
    run_dir = the_run(tmp_path)
    assert run_dir.name.startswith("run-")
    assert json.loads((run_dir / "summary.json").read_text())["program"] == "learn"


@pytest.mark.parametrize("signum", [signal.SIGINT, quick.further(signal.SIGTERM)])
def test_a_signal_stops_the_run_and_the_next_start_continues(
    signum: signal.Signals, train: Path, tmp_path: Path, pipe: Announcements
) -> None:
    run_dir = tmp_path / "run"
    words = [*PACELINE, "run", train, "--workers", "2", "--run-dir", "run", *ENDLESS]
    with command_fork(*words, "--tell", pipe.path) as program:
        program.told(pipe, 2)
        code, output = run_fork(*words)
        assert (code, output.count("is in use")) == (2, 1)
        program.signal(signum)
        code, output = program.end(limit_s=GONE_S)
        assert program.left() == []
    # The first signal is a notice: the step is finished, everything is saved, and the code says "run me again".
    assert code == 75, output
    assert "go on with: " in output.splitlines()[-1], output
    assert_stopped_and_continues(run_dir, words, code)


def test_a_closing_terminal_stops_the_run_and_the_next_start_continues(
    train: Path, tmp_path: Path, pipe: Announcements
) -> None:
    words = [*PACELINE, "run", train, "--workers", "2", "--run-dir", "run", *ENDLESS]
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    terminal = {**streams, "preexec_fn": take_terminal, "start_new_session": False}
    with command(*words, "--tell", pipe.path, **terminal) as program:
        os.close(theirs)
        program.told(pipe, 2)
        os.close(ours)
        code = program.process.wait(GONE_S)
        assert program.left() == []
    assert code == 75
    assert_stopped_and_continues(tmp_path / "run", words, code)


def assert_stopped_and_continues(run_dir: Path, words: list[Any], code: int) -> None:
    assert (record(run_dir)["state"], record(run_dir)["exit_code"]) == ("stopped", code)
    last = checkpoints(run_dir)[-1]
    assert last >= 4
    code, output = run_fork(*words, "--max-steps", str(last + 2))
    assert code == 0, output
    assert [one["resumed_from_step"] for one in started_workers(run_dir, 2)] == [last, last]
    assert len(losses(run_dir)) == last + 2
    alike = min(STEPS, last + 2)
    assert losses(run_dir)[:alike] == pytest.approx(list(reference_losses()[:alike]), rel=1e-5)


def test_sigterm_ends_a_plain_program_in_good_order(train: Path, tmp_path: Path, pipe: Announcements) -> None:
    with command_fork(sys.executable, train, *ENDLESS, "--tell", pipe.path) as program:
        program.told(pipe, 2)
        program.signal(signal.SIGTERM)
        code, output = program.end(limit_s=GONE_S)
        assert program.left() == []
    assert code == 75, output
    assert "Traceback" not in output
    assert record(the_run(tmp_path))["state"] == "stopped"
