"""Real workers that keep the others waiting: the console names them in one sentence, and the job ends with it."""

from __future__ import annotations

import contextlib
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from network import Host, two_hosts
from programs import PACELINE, Program, command, record, run, the_run
from slurm import Cluster, needs_slurm, slurm_cluster

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", "3", sys.executable]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
ENGINES = pytest.mark.parametrize("engine", [TORCHRUN, MPIRUN], ids=["torchrun", "mpirun"])

ENDED_S = 100.0  # an engine takes up to 30 s to end whom it has asked to

TRAIN = """\
import os
import signal
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import all_gather

import paceline
from paceline import Batch, Layout, Plan

HOW, LIMIT_S = sys.argv[1], float(sys.argv[2])
CULPRIT = 2 if "last" in sys.argv else 0 if "first" in sys.argv else 1
BEFORE = 6  # steps
here = {"rank": -1, "step": 0}

if HOW == "import" and os.environ.get("PACELINE_TEST_LOOPS") in open("/proc/self/comm").read():
    while True:
        pass  # for ever


class Pictures:
    def __len__(self):
        return 9600 if "elastic" in sys.argv else 960

    def __getitem__(self, number):
        if HOW == "data" and here["rank"] == CULPRIT and here["step"] == BEFORE and not os.path.exists("looped"):
            open("looped", "w").close()
            load_image(number)
        return torch.randn(6, generator=torch.Generator().manual_seed(number)), number % 3


def load_image(number):
    while True:
        number += 1


def all_calls(worker, model):
    first = worker.rank == 0
    if HOW == "evaluate" and first:
        worker.evaluate(model, HELD_OUT, F.cross_entropy)
    if HOW == "gather" and worker.rank == 1:
        all_gather([torch.zeros(2) for _ in range(worker.workers)], torch.ones(2))
    if HOW == "shapes":
        torch.distributed.all_reduce(torch.ones(2 if first else 3))
    if HOW == "stop" and worker.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


HELD_OUT = torch.utils.data.TensorDataset(torch.randn(20, 6), torch.zeros(20, dtype=torch.long))


def forward(model, micro):
    if HOW == "slow":
        time.sleep(0.06 if here["rank"] == 2 else 0.02)
    return F.cross_entropy(model(micro[0]), micro[1])


def train(worker):
    here["rank"] = worker.rank
    model = worker.prepare(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, forward=forward)
    for batch in worker.batches(Pictures()):
        here["step"] = worker.step
        step(batch)
        if worker.step == BEFORE:
            all_calls(worker, model)


if __name__ == "__main__":
    replicas = (2, 3) if HOW == "data" and "elastic" in sys.argv else 3
    workers = int(os.environ.get("WORLD_SIZE", 3))
    replicas = workers if workers != 3 else replicas
    plan = Plan(layout=Layout(replicas=replicas), batch=Batch(size=24, micro=4))
    paceline.run(train, workers=workers, plan=plan, timeout_s=LIMIT_S, silence_s=30.0)
"""
STACK = re.compile(r"^worker (\d), most recent call last:$", re.MULTILINE)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def line_of(program: Path, text: str) -> int:
    (number,) = (n for n, line in enumerate(program.read_text().splitlines(), 1) if text in line)
    return number


def launched(program: Path, *arguments: str, **more: Any) -> tuple[int, str]:
    return run(*PACELINE, "run", "--workers", "3", program, *arguments, **more)


def verdict(output: str) -> str:
    """What is said when the job has ended."""
    return output[output.rindex("\nworker 1 (") :]


def sentence(output: str, pattern: str) -> re.Match[str]:
    found = re.search(pattern, " ".join(output.split()))
    assert found is not None, output
    return found


def test_an_endless_loop_in_a_dataset_is_told_live_and_ends_the_job_with_all_stacks(program: Path) -> None:
    code, output = launched(program, "data", "12")
    assert code == 1
    loop = line_of(program, "number += 1")
    named = (
        r"worker 1 \(\S+, pid \d+\) has not entered all_reduce \d+ \(model\.0\.weight .. model\.2\.bias \(4 "
        rf"gradients\), called at train\.py:{line_of(program, 'step(batch)')} in train, step 7\); it is at "
        rf"train\.py:({loop - 1}|{loop}) in load_image; workers 0, 2 have waited (\S+) s"
    )
    end = verdict(output)
    first, last = sentence(output, "warning: " + named), sentence(end, named)
    assert 5 <= float(first.group(2)) <= 10, "not within 10 s past the time that steps of milliseconds explain"
    assert 12 <= float(last.group(2)) <= 15
    assert STACK.findall(end) == ["1", "0", "2"], "not every worker's stack, the culprit's first"
    assert "in __getitem__\n    load_image(number)\n" in end
    assert "workers 0, 2 stopped because of it" in end
    assert "Traceback" not in end and "gloo" not in end.lower(), "a wall of text"
    directory = the_run(program.parent) / "attempt_1"
    assert "in load_image" in (directory / "worker_1" / "stacks").read_text()


def test_a_stopped_worker_is_called_stopped(program: Path) -> None:
    code, output = launched(program, "stop", "4")
    assert code == 1
    sentence(
        output, r"worker 1 \(\S+, pid \d+\) is stopped \(SIGSTOP, or a debugger\) and has not entered all_reduce \d+"
    )
    assert STACK.findall(output) == ["1", "0", "2"]


def test_an_evaluation_on_one_worker_only_is_told_with_both_calls_and_their_lines(program: Path) -> None:
    code, output = launched(program, "evaluate", "20")
    assert code == 1
    evaluate = line_of(program, "worker.evaluate(")
    sentence(
        output,
        r"workers are in different collectives: number \d+ is all_reduce of 2 float64 \(evaluation, called at "
        rf"train\.py:{evaluate} in all_calls, step 6\) for worker 0, and all_reduce of \d+ float32 \(model\.0\.weight "
        r".*, step 7\) for workers 1, 2\. All workers must make the same calls",
    )
    assert "Traceback" not in output


def test_a_gather_of_the_users_own_that_one_worker_makes_is_told_at_once(program: Path) -> None:
    """Also where the name was imported from torch.distributed before the run began."""
    code, output = launched(program, "gather", "6")
    assert code == 1
    end = verdict(output)
    gather = line_of(program, "all_gather([")
    named = (
        rf"worker 1 \(\S+, pid \d+\) waits in torch\.distributed\.all_gather 1 \(called at train\.py:{gather} in "
        r"all_calls, step 6\), which workers 0, 2 have not entered; workers 0, 2 wait in all_reduce \d+ "
    )
    sentence(output, "warning: " + named)
    sentence(end, named)
    assert STACK.findall(end) == ["1", "0", "2"]


def test_sums_of_different_shapes_of_the_users_own_are_told(program: Path) -> None:
    code, output = launched(program, "shapes", "6")
    assert code == 1
    sentence(
        output,
        r"number 1 is torch\.distributed\.all_reduce of 2 float32 \(called at train\.py:\d+ in all_calls, step 6\) for "
        r"worker 0, and torch\.distributed\.all_reduce of 3 float32 \(.*\) for workers 1, 2",
    )


def test_a_worker_that_does_not_come_to_the_run_is_found_in_its_script(program: Path) -> None:
    code, output = launched(program, "import", "5", environment={"PACELINE_TEST_LOOPS": "paceline-w2"})
    assert code == 1
    loop = line_of(program, "pass  # for ever")
    sentence(
        output,
        r"worker 2 has not entered meeting 1 \(the workers find each other, called at train\.py:\d+\); it is at "
        rf"train\.py:({loop - 1}|{loop}); workers 0, 1 have waited",
    )


def test_an_elastic_run_goes_on_without_a_worker_that_hangs(program: Path) -> None:
    code, output = launched(program, "data", "9", "elastic")
    assert code == 0, output
    who, loop = r"worker 1 \(\S+, pid (\d+)\)", line_of(program, "number += 1")
    place = rf"train\.py:({loop - 1}|{loop}) in load_image"
    told = sentence(
        output,
        rf"{who} has not entered all_reduce .* \S+ s\. The run gives it up in [1-4] s \(timeout_s\) and goes on; "
        r"`kill -9 (\d+)` does it now",
    )
    assert told.group(1) == told.group(2)
    ended = sentence(
        output,
        rf"{who} was hanging at {place} and was ended: the others had stood still for (\S+) s \(timeout_s is 9\) after "
        r"step 6: detected in (\S+) s, regrouped in \S+ s; 2 workers go on, steps lost 0",
    )
    assert 9.0 <= float(ended.group(3)) < 14.0
    told_to_s = 0.05  # three digits of what stood still, two decimals of what was detected
    assert float(ended.group(3)) - told_to_s <= float(ended.group(4)), "they stood still before it was detected"
    assert float(ended.group(4)) < 15.0, "after timeout_s nobody waits for silence_s, too"
    assert STACK.findall(output) == ["1", "0", "2"]
    assert "finished at step 400" in output


def test_an_elastic_run_over_two_hosts_goes_on_without_a_worker_that_hangs(program: Path, tmp_path: Path) -> None:
    """Without shared memory: gloo between the hosts."""
    ends = over_two_hosts(tmp_path, program, "data", "6", "elastic", "last")
    assert [code for code, _ in ends] == [0, 0], ends
    sentence(ends[0][1] + ends[1][1], r"worker 2 \(\S+, pid \d+\) has not entered all_reduce .* in load_image")
    sentence(ends[0][1] + ends[1][1], r"worker 2 \(\S+, pid \d+\) was hanging at \S+ in load_image and was ended")
    assert "finished at step 400" in ends[0][1] + ends[1][1]


def test_a_slow_worker_is_named(program: Path) -> None:
    code, output = launched(program, "slow", "60")
    assert code == 0
    sentence(
        output,
        r"warning: worker 2 \(\S+, pid \d+\) is \d\.\dx slower than the others: its compute takes \d+ ms a step, "
        r"theirs \S+ ms",
    )


@ENGINES
def test_under_an_engine_a_hang_is_told_live_and_ends_the_job_with_all_stacks(engine: list[str], program: Path) -> None:
    with command(*engine, program, "data", "24", environment=AS_ROOT) as started:
        code, output = started.end(limit_s=ENDED_S)
        assert_nobody_is_left(started)
    assert code != 0
    named = (
        r"worker 1 \(\S+, pid \d+\) has not entered all_reduce \d+ .* in load_image; workers 0, 2 have waited (\S+) s"
    )
    sentence(output, "warning: " + named)
    assert STACK.findall(output) == ["1", "0", "2"], "not every worker's stack, the culprit's first"
    assert "in __getitem__\n" in output


@ENGINES
def test_under_an_engine_a_stopped_worker_is_told_and_the_job_ends(engine: list[str], program: Path) -> None:
    with command(*engine, program, "stop", "24", environment=AS_ROOT) as started:
        code, output = started.end(limit_s=ENDED_S)
        assert_nobody_is_left(started)
    assert code != 0
    sentence(
        output, r"worker 1 \(\S+, pid \d+\) is stopped \(SIGSTOP, or a debugger\) and has not entered all_reduce \d+"
    )
    assert STACK.findall(output) == ["1", "0", "2"]


def test_under_an_engine_a_worker_0_that_hangs_ends_the_job_as_well(program: Path) -> None:
    with command(*MPIRUN, program, "data", "24", "first", environment=AS_ROOT) as started:
        code, output = started.end(limit_s=ENDED_S)
        assert_nobody_is_left(started)
    assert code != 0
    sentence(output, r"worker 0 \(\S+, pid \d+\) has not entered all_reduce \d+ .* in load_image; workers 1, 2 have")
    assert STACK.findall(output) == ["0", "1", "2"]
    assert record(the_run(program.parent))["state"] == "failed"


def test_under_an_engine_a_worker_that_does_not_come_to_the_run_is_named(program: Path) -> None:
    late = program.with_name("late.py")
    late.write_text(program.read_text().replace("HOW, LIMIT_S =", "while os.environ['OMPI_COMM_WORLD_RANK'] == '2':\n"
                    "    pass\nHOW, LIMIT_S ="))  # fmt: skip
    with command(*MPIRUN, late, "none", "4", environment=AS_ROOT) as started:
        code, output = started.end(limit_s=ENDED_S)
        assert_nobody_is_left(started)
    assert code != 0
    sentence(output, r"worker 2 has not come to paceline\.run\(\) within 4 s \(timeout_s\)")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with two_hosts(tmp_path_factory.mktemp("network"), subnet="10.80.0") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), hosts) as made:
        yield made


@needs_slurm
def test_under_srun_a_hang_on_another_node_is_told_with_its_place_and_ends_the_job(
    cluster: Cluster, program: Path
) -> None:
    """The workers of that node tell worker 0 what they do; without --kill-on-bad-exit srun itself would wait on."""
    words = cluster.srun("-N2", "-n3", "--distribution=block", sys.executable, str(program), "data", "24", "last")
    token = {"PACELINE_TOKEN": "0123456789abcdef0123456789abcdef"}
    code, output = run(*words, environment=cluster.environment | token, limit_s=ENDED_S)
    assert code != 0
    named = r"worker 2 \((\S+), pid \d+\) has not entered all_reduce \d+ .* in load_image; workers 0, 1 have waited"
    found = sentence(output, named)
    assert found.group(1) in ("n1", "n2")
    assert STACK.findall(output) == ["2", "0", "1"]


def assert_nobody_is_left(program: Program) -> None:
    assert program.left(limit_s=5.0) == [], "the engine's end was not the end of all"


def test_a_hang_on_another_host_is_told_by_the_head_with_the_stacks_of_both(program: Path, tmp_path: Path) -> None:
    ends = over_two_hosts(tmp_path, program, "data", "8", "last")
    assert [code for code, _ in ends] == [1, 1]
    for _, output in ends:
        sentence(
            output,
            r"worker 2 \(\S+, pid \d+\) has not entered all_reduce \d+ .* in load_image; workers 0, 1 have waited",
        )
        assert STACK.findall(output) == ["2", "0", "1"]
        assert "in load_image\n" in output


def over_two_hosts(folder: Path, program: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of each of two commands that make one job."""
    (folder / "token").write_text("a token of a test, long enough")
    (folder / "token").chmod(0o600)
    words = ["--workers", "3", "--hosts", "2", "--head", f"127.0.0.1:{free_port()}", "--token-file", folder / "token"]
    with contextlib.ExitStack() as stack:
        commands = [
            stack.enter_context(command(*PACELINE, "run", *words, "--run-dir", folder / name, program, *arguments))
            for name in ("one", "other")
        ]
        return [one.end(limit_s=ENDED_S) for one in commands]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
