"""What a user sees when something goes wrong: their own error, once, on top; whose, where and when.

Every test runs the real command on a script that goes wrong in its own way. That no process is left is checked after
each test by conftest.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quick
import warm

GONE_S = 10.0  # the promise: this long after an error everything is gone

SCRIPT = """\
import ctypes, os, resource, signal, sys, threading, time, warnings
import torch, torch.nn as nn, torch.nn.functional as F
import paceline

MODE, AT = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 4


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        if MODE == "loader" and index == 40:
            raise OSError(f"sample {index} cannot be read")
        return torch.full((4,), index / 96), torch.full((1,), index / 96)


class Odd(Exception):
    def __init__(self, text, lock):
        super().__init__(text)
        self.lock = lock

    def __str__(self):
        raise RuntimeError("no words")


def dig(depth):
    return dig(depth + 1) + 1


def parse(text):
    try:
        return int(text)
    except ValueError as error:
        raise RuntimeError("the setting cannot be read") from error


def go_wrong(worker):
    if MODE == "all":
        raise ValueError("all of them fail")
    if MODE == "warn":
        warnings.warn("this is odd")
        if worker.rank == 2:
            warnings.warn("only worker two says this")
    if MODE == "hang" and worker.rank != 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        threading.Event().wait()
    if MODE == "collective" and worker.rank != 1:
        worker.average(1.0)
    if MODE == "save":
        worker.save()
        worker.wait()
    if worker.rank != 1:
        return
    match MODE:
        case "one" | "hang" | "collective":
            raise ValueError("worker one has had enough")
        case "exit":
            sys.exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "deep":
            dig(0)
        case "huge":
            raise ValueError("x" * 3_000_000)
        case "tall":
            raise ValueError("\\n".join(f"line {number}" for number in range(5000)))
        case "odd":
            raise Odd("a lock cannot be pickled", threading.Lock())
        case "group":
            raise ExceptionGroup("several", [ValueError("first of it"), TypeError("second of it")])
        case "cause":
            parse("many")
        case "plan":
            paceline.Plan(batch=paceline.Batch(size=0))
        case "shapes":
            nn.Sequential(nn.Linear(4, 1), nn.Linear(4, 1))(torch.zeros(1, 4))
        case "full":  # no file of this worker's may grow beyond what its events have now
            size = os.stat("run/attempt_1/worker_1/events.jsonl").st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def train(worker):
    model = worker.prepare(nn.Linear(4, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    for batch in worker.batches(Data(), epochs=2, loaders=1 if MODE == "loader" else 0):
        if batch.step == AT:
            go_wrong(worker)
            if MODE == "leave" and worker.rank == 1:
                return
        step(batch)
        if batch.step == AT and MODE == "after" and worker.rank == 1:
            raise ValueError("after the step")
    if MODE == "quit":
        sys.exit()


if __name__ == "__main__":
    paceline.run(train, plan="batch(size=12,micro=2)")
"""
IN_TRAIN = 'train.py", line '


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """A command that has ended."""

    status: int
    screen: str
    ended: float

    @property
    def report(self) -> str:
        """The failure report: from the headline on, without the table at the end."""
        return re.split(r"\n\n(?=failed )", self.screen)[-2].rpartition("\n\n")[2]


@pytest.fixture
def paceline(tmp_path: Path) -> Callable[..., Done]:
    (tmp_path / "train.py").write_text(SCRIPT)

    def run(*words: str | Path) -> Done:
        command = [sys.executable, "-m", "paceline", *map(str, words)]
        done = warm.run(command, env=os.environ, timeout=110)
        return Done(status=done.returncode, screen=done.stdout, ended=time.time())

    return run


@pytest.fixture
def train(paceline: Callable[..., Done]) -> Callable[..., Done]:
    """Runs the script in one of its ways."""

    def run(*mode: str, workers: int = 3, options: tuple[str, ...] = ()) -> Done:
        fixed = ("--workers", str(workers), "--threads", "1", "--run-dir", "run", "--timeout-s", "30")
        return paceline("run", "train.py", *mode, *fixed, *options)

    return run


def error_of(worker: int, attempt: int = 1) -> dict[str, Any]:
    return json.loads(Path(f"run/attempt_{attempt}/worker_{worker}/error.json").read_text())


# ------------------------------------------------------------------------------------------------------- one traceback


def test_the_users_own_traceback_is_on_the_screen_once_with_worker_host_and_step(train: Callable[..., Done]) -> None:
    done = train("one")
    assert done.status == 1
    headline, *trace, named, echo = done.report.splitlines()
    assert re.fullmatch(
        r"worker 1 \(host \S+, pid \d+\) failed after step 3: ValueError: worker one has had enough", headline
    )
    assert trace[0] == "Traceback (most recent call last):"
    assert [line for line in trace if IN_TRAIN in line and "train" in line]
    assert trace[-1] == "ValueError: worker one has had enough"
    assert "paceline" not in "".join(trace), "frames of ours say nothing about the user's error"
    assert named == "(all frames: run/attempt_1/worker_1/stderr.log)"
    assert "paceline" in Path("run/attempt_1/worker_1/stderr.log").read_text()
    assert echo == "workers 0, 2 stopped because of it"
    assert done.screen.count("Traceback") == 1
    assert "Exception ignored" not in done.screen


def test_a_failed_run_leaves_its_logs_and_ends_in_time(train: Callable[..., Done]) -> None:
    done = train("after")
    error = error_of(1)
    assert (error["kind"], error["message"], error["worker"]) == ("ValueError", "after the step", 1)
    assert (error["step"], error["usage"], error["echo"]) == (4, False, False)
    assert done.ended - error["time"] < GONE_S
    assert "failed after step 4" in done.screen
    assert "Exception ignored" not in done.screen
    for worker in range(3):
        directory = Path(f"run/attempt_1/worker_{worker}")
        assert {"stdout.log", "stderr.log", "events.jsonl", "ledger.jsonl"} <= {
            path.name for path in directory.iterdir()
        }
    assert "ValueError: after the step" in Path("run/attempt_1/worker_1/stderr.log").read_text()
    assert json.loads(Path("run/run.json").read_text())["state"] == "failed"


def test_the_same_error_of_all_workers_is_one(train: Callable[..., Done]) -> None:
    done = train("all")
    assert done.status == 1
    assert done.report.startswith("workers 0-2 (host ")
    assert "all failed with the same error after step 3: ValueError: all of them fail" in done.report
    assert done.screen.count("Traceback") == 1
    assert "because of it" not in done.screen


def test_workers_in_a_collective_follow_the_one_that_failed(train: Callable[..., Done]) -> None:
    done = train("collective", workers=4)
    assert done.status == 1
    assert done.report.startswith("worker 1 (host ")
    assert done.report.endswith("workers 0, 2, 3 stopped because of it")
    assert done.screen.count("Traceback") == 1
    assert done.ended - error_of(1)["time"] < GONE_S


def test_a_worker_that_hangs_on_is_ended_too(train: Callable[..., Done]) -> None:
    done = train("hang")
    assert done.status == 1
    assert done.report.endswith("workers 0, 2 stopped because of it")
    assert done.ended - error_of(1)["time"] < GONE_S


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", id="import"),
        quick.further("def train(worker:\n    pass\n", "SyntaxError: ", id="syntax"),
    ],
)
def test_a_script_that_is_wrong_before_it_trains(text: str, says: str, paceline: Callable[..., Done]) -> None:
    Path("wrong.py").write_text(text)
    done = paceline("run", "wrong.py", "--workers", "2", "--run-dir", "run")
    assert done.status == 1
    assert "all failed with the same error before the end of the first step" in done.screen
    assert says in done.screen
    assert done.screen.count("Traceback") <= 1
    assert "failed before the first step; logs are in run/attempt_1" in done.screen


def test_a_frame_of_torch_below_the_users_is_folded(train: Callable[..., Done]) -> None:
    done = train("shapes")
    assert done.status == 1
    assert re.search(
        r"train.py\", line \d+, in go_wrong\n    nn.Sequential.*\n( +\^+\n)?  \.\.\. \d+ frames in torch\nRun",
        done.report,
    )
    assert "site-packages/torch" not in done.report
    assert "site-packages/torch" in error_of(1)["traceback"], "the whole is in the files"


# --------------------------------------------------------------------------------------------------------- usage errors

MANY = "x" * 300  # a message is not cut


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pass\n", "wrong.py ended without becoming a worker: there was nothing to train."),
        (
            f"import paceline\nraise paceline.PlanError('{MANY}')\n",
            f"{MANY} (wrong.py, line 2)",
        ),
        (
            "import paceline\npaceline.run(print, plan=paceline.Plan(batch=paceline.Batch(size=2, micro=1)))\n",
            "makes 2 micro-batches a step, but the job has 3 workers",
        ),
    ],
    ids=["no_run", "plan", "rule"],
)
def test_a_usage_error_that_only_workers_find_is_its_sentence_once(
    text: str, says: str, paceline: Callable[..., Done]
) -> None:
    Path("wrong.py").write_text(text)
    done = paceline("run", "wrong.py", "--workers", "3", "--run-dir", "run")
    assert done.status == 2
    sentence, end = done.screen.strip().split("\n\n")
    assert sentence.startswith("paceline: ") and "\n" not in sentence
    assert says in sentence
    assert end == "failed before the first step; logs are in run/attempt_1"
    assert all(word not in done.screen for word in ("Traceback", "because of it", "worker 0"))


def test_a_plan_error_of_one_worker_is_a_usage_error_with_the_users_line(train: Callable[..., Done]) -> None:
    done = train("plan")
    assert done.status == 2
    assert re.fullmatch(r"paceline: Batch.size is 0; it must be at least 1 sample. \(train.py, line \d+\)", done.report)


def test_an_override_that_no_plan_takes_is_refused_before_anything_is_written(train: Callable[..., Done]) -> None:
    done = train("none", options=("--set", "plan.bacth.size=4"))
    assert done.status == 2
    assert done.screen.startswith("paceline: plan.bacth: Plan has no field 'bacth'. Did you mean 'batch'?")
    assert not Path("run").exists()


def test_an_error_in_a_loader_process_is_the_users_own(train: Callable[..., Done]) -> None:
    done = train("loader")
    assert done.status == 1
    assert re.match(
        r"worker \d .* failed after step \d: OSError: sample 40 cannot be read \(in loader process 0\)\n", done.report
    )
    assert "DataLoader" not in done.report
    assert re.search(r'train.py", line \d+, in __getitem__', done.report)
    assert len(re.findall(r"^workers? [\d, -]+ stopped because of it$", done.report, re.MULTILINE)) == 1


# ------------------------------------------------------------------------------------------ ends that are no exceptions


def test_an_exit_status_of_a_worker_is_a_failure_that_names_it(train: Callable[..., Done]) -> None:
    done = train("exit")
    assert done.status == 1
    assert "worker 1 (host " in done.report
    assert "failed after step 3: SystemExit: 3" in done.report


def test_a_worker_that_is_killed_is_said_to_be_killed_with_step_and_peak_memory(train: Callable[..., Done]) -> None:
    done = train("kill")
    assert done.status == 76, "who was killed may come again"
    assert "failed after step 3 (too few workers were left: it can go on)" in done.screen
    headline, echo = done.report.splitlines()
    assert re.fullmatch(
        r"worker 1 \(host \S+, pid \d+\) was killed by signal 9 \(SIGKILL\) after step 3; "
        r"peak memory [\d.]+ MiB( of [\d.]+ [GT]iB)?",
        headline,
    )
    assert echo == "workers 0, 2 stopped because of it"
    assert "Traceback" not in done.screen


def test_a_segmentation_fault_is_told_with_the_line_that_made_it(train: Callable[..., Done]) -> None:
    done = train("segfault")
    assert done.status == 1
    assert "was killed by signal 11 (SIGSEGV) after step 3" in done.report
    assert re.search(r'train.py", line \d+ in go_wrong', done.screen)


def test_a_worker_that_leaves_the_function_before_the_others_is_named(train: Callable[..., Done]) -> None:
    done = train("leave")
    assert done.status == 1
    assert "worker 1 left the training function after step 3, others are in it" in done.report
    assert "return, break, continue or sys.exit() that only some reach" in done.report
    assert IN_TRAIN in done.report, "where the others were"


def test_sys_exit_at_the_end_of_training_is_a_good_end(train: Callable[..., Done]) -> None:
    done = train("quit")
    assert (done.status, "finished at step 16" in done.screen) == (0, True), done.screen
    assert not list(Path("run").glob("*/*/error.json"))
    assert (Path("run") / "checkpoints" / "step_00000016" / "checkpoint.json").exists()


# ------------------------------------------------------------------------------------------------------- unusual errors


@pytest.mark.parametrize(
    ("mode", "says"),
    [
        ("odd", "failed after step 3: Odd: (its __str__ failed: RuntimeError)"),
        quick.further(
            "group", "ValueError: first of it\n    +---------------- 2 ----------------\n    | TypeError: second of it"
        ),
        quick.further(
            "cause", "invalid literal for int() with base 10: 'many'\n\nThe above exception was the direct cause"
        ),
        ("deep", "RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_weird_errors_are_told_whole(mode: str, says: str, train: Callable[..., Done]) -> None:
    done = train(mode)
    assert done.status == 1
    report = re.split(r"\n\n(?=worker 1)", done.screen)[1]
    assert report.startswith("worker 1 (host ")
    assert says in report
    assert "workers 0, 2 stopped because of it" in report
    assert re.search(r'train.py", line \d+, in go_wrong', report)
    assert len(done.screen) < 6000


@pytest.mark.parametrize(
    ("mode", "head", "tail"),
    [("huge", "x" * 1000, "characters left out"), ("tall", "line 0\nline 1\n", "line 4998\nline 4999\n")],
)
def test_a_huge_message_does_not_flood_the_screen_and_is_whole_in_the_log(
    mode: str, head: str, tail: str, train: Callable[..., Done]
) -> None:
    done = train(mode)
    assert done.status == 1
    assert head in done.screen
    assert tail in done.screen
    assert IN_TRAIN in done.screen
    assert len(done.screen) < 12_000
    assert done.screen.count("\n") < 120
    log = Path("run/attempt_1/worker_1/stderr.log").read_text()
    assert "x" * 3_000_000 in log or "line 2500\n" in log


# ---------------------------------------------------------------------------------------------------------- not the end


def test_each_distinct_warning_is_shown_once_with_its_workers(train: Callable[..., Done]) -> None:
    done = train("warn", options=("--max-steps", "6"))
    assert done.status == 0
    assert done.screen.count("UserWarning: this is odd") == 1
    assert re.search(r"^\[workers 0-2\] \S*train.py:\d+: UserWarning: this is odd$", done.screen, re.MULTILINE)
    assert done.screen.count("UserWarning: only worker two says this") == 1
    assert re.search(r"^\[worker 2\] \S*train.py:\d+: UserWarning: only worker two", done.screen, re.MULTILINE)


def test_a_checkpoint_that_cannot_be_written_fails_the_run_and_names_the_place(train: Callable[..., Done]) -> None:
    Path("run").mkdir()
    Path("run/checkpoints").write_text("a file where a directory has to be")
    done = train("save")
    assert done.status == 1
    assert "CheckpointError" in done.screen
    assert "run/checkpoints" in done.screen
    assert done.screen.count("Traceback") <= 1


def test_a_ledger_that_cannot_be_written_ends_the_run_with_one_sentence(train: Callable[..., Done]) -> None:
    done = train("full", options=("--save-every", "2"))
    assert done.status == 1
    headline, *echo = done.report.splitlines()
    assert re.fullmatch(
        r"worker 1 \(host \S+, pid \d+\) failed after step \d: RunFileError: "
        r"\S+/worker_1/\w+.jsonl could not be written: "
        r"File too large. Raise the limit of a file's size \(ulimit -f\) and start again with the same run_dir: "
        r"it goes on from the newest \w+.",
        headline,
    )
    assert echo == ["workers 0, 2 stopped because of it"]
    assert "Traceback" not in done.screen
    assert json.loads(Path("run/run.json").read_text())["state"] == "failed"
    assert list(Path("run/checkpoints").glob("step_*/checkpoint.json"))
    assert not list(Path("run").glob("attempt_1/worker_*/.error.spare"))
    again = train("none", options=("--save-every", "2"))
    assert (again.status, "finished at step 16" in again.screen) == (0, True), again.screen


# ------------------------------------------------------------------------------------------------ looking at a real run


def test_status_logs_and_audit_tell_the_truth_about_a_run_that_was_killed_twice_and_resumed_on_other_counts(
    train: Callable[..., Done], paceline: Callable[..., Done]
) -> None:
    every = ("--save-every", "2")
    assert train("kill", "6", workers=3, options=every).status == 76
    assert not list(Path("run").rglob(".error.spare")), "of the one that was killed"
    state = json.loads(paceline("status", "run", "--json").screen)
    assert (state["state"], state["step"], state["attempt"], state["exit_code"]) == ("failed", 5, 1, 76)
    assert [(worker["rank"], worker["host"] != "", worker["pid"] > 1) for worker in state["workers"]] == [
        (0, True, True),
        (1, True, True),
        (2, True, True),
    ]
    assert "unfinished; 60 of 96 samples were used, each once" in paceline("audit", "run").screen

    assert train("kill", "11", workers=2, options=every).status == 76
    done = train("none", workers=1, options=every)
    assert done.status == 0
    assert done.screen.count("resumed from step 10") == 1
    assert json.loads(paceline("status", "run", "--json").screen)["step"] == 16

    audit = paceline("audit", "run")
    assert audit.status == 0, audit.screen
    assert "unfinished" not in audit.screen
    rows = [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert sorted(set(rows)) == list(range(1, 17))

    ledger = Path("run/attempt_3/worker_0/ledger.jsonl")
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"step": 14' not in line))
    tampered = paceline("audit", "run")
    assert tampered.status == 1
    assert "epoch" in tampered.screen


def test_logs_show_what_every_worker_printed_by_worker_and_stream(paceline: Callable[..., Done]) -> None:
    Path("talks.py").write_text(
        "import sys, torch, paceline\n"
        "def train(worker):\n"
        "    print('hello from', worker.rank)\n"
        "    print('careful', worker.rank, file=sys.stderr)\n"
        "paceline.run(train)\n"
    )
    done = paceline("run", "talks.py", "--workers", "2", "--run-dir", "run")
    assert done.status == 0, done.screen
    assert "hello from 0" in done.screen
    assert "hello from 1" not in done.screen, "worker 0's output alone, unless --show all"
    logs = paceline("logs", "run")
    assert logs.status == 0
    assert all(text in logs.screen for text in ("hello from 0", "hello from 1", "careful 0", "careful 1"))
    one = paceline("logs", "run", "--worker", "1", "--stream", "stderr").screen
    assert "careful 1" in one
    assert "hello" not in one
    assert "careful 0" not in one


def test_a_finished_run_that_is_started_again_says_that_nothing_was_left(train: Callable[..., Done]) -> None:
    assert train("none", workers=2).status == 0
    done = train("none", workers=2)
    assert done.status == 0
    assert "finished already at step 16, nothing was left to do, after " in done.screen
    assert re.search(r"^  to train on +more epochs in the script; or --fresh", done.screen, re.M)
    fresh = train("none", workers=2, options=("--fresh",))
    assert "finished at step 16, after" in fresh.screen
