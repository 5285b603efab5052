"""Real workers that keep the others waiting: the console names them in one sentence, and the job ends with it.

Such a run is waiting most of the time. So those of RUNS are begun one after the other, each when the one before stands
still, and then stand still together.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import lasting
import quick
import warm
from network_hosts import NamespaceHost, free_port, two_hosts
from programs import PACELINE, Program, command, record, run, the_run
from slurm_cluster import Cluster, needs_slurm, slurm_cluster

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", "2", "python"]
LAUNCHED = [*PACELINE, "run", "--workers", "3"]
RUNS = {  # the last words are the program's: how it hangs, its timeout_s, and more
    "elastic": [*LAUNCHED, "train.py", "data", "24", "calm", "elastic"],
    "torchrun data": [*TORCHRUN, "train.py", "data", "24", "calm"],
    "mpirun data": [*MPIRUN, "train.py", "data", "24", "calm"],
    "torchrun stop": [*TORCHRUN, "train.py", "stop", "24"],
    "mpirun stop": [*MPIRUN, "train.py", "stop", "24"],
    "mpirun data first": [*MPIRUN, "train.py", "data", "24", "calm", "first"],
    "evaluate": [*LAUNCHED, "train.py", "evaluate", "20"],
    "gather": [*LAUNCHED, "train.py", "gather", "14"],
    "shapes": [*LAUNCHED, "train.py", "shapes", "14"],
    "stop": [*LAUNCHED, "train.py", "stop", "14"],
    "data": [*LAUNCHED, "train.py", "data", "12"],
    "import": [*LAUNCHED, "train.py", "import", "8"],
    "mpirun late": [*MPIRUN, "train.py", "late", "8"],
}
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PACELINE_TEST_LOOPS": "paceline-w2",
}
BEFORE = 5  # steps of the program that are told before it hangs
SILENCE_S = 30.0  # of the program

ENDED_S = 100.0  # an engine takes up to 30 s to end the processes that it has asked to end
STILL_S = 60.0  # until a run stands still
LOOK_S = 0.02  # nothing tells when a file grows

pytestmark = pytest.mark.timeout(600)  # the first test waits until all runs stand still

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
        time.sleep(0.01)  # for ever


class Pictures:
    def __len__(self):
        return 3600 if "elastic" in sys.argv else 2400 if HOW == "fast" else 960

    def __getitem__(self, number):
        if HOW == "data" and here["rank"] == CULPRIT and here["step"] == BEFORE and not os.path.exists("looped"):
            open("looped", "w").close()
            load_image(number)
        return torch.randn(6, generator=torch.Generator().manual_seed(number)), number % 3


def load_image(number):
    while True:
        number += 1
        if "calm" in sys.argv:  # others stand still at the same time
            time.sleep(0.01)


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
    if HOW == "fast":  # steps of 20 ms: ten and more between two looks
        time.sleep(0.02 if here["rank"] == 2 else 0.006)  # little work, or three workers wait for two cores
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


def imported():
    # All workers of an engine begin together: what takes time before is not what the limit is for.
    rank = os.environ.get("RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank is not None and "SLURM_JOB_ID" not in os.environ:
        open(f"imported_{rank}", "w").close()
        while not all(os.path.exists(f"imported_{number}") for number in range(2)):
            time.sleep(0.01)
    while HOW == "late" and rank == "1":
        time.sleep(0.01)


if __name__ == "__main__":
    imported()
    replicas = (2, 3) if HOW == "data" and "elastic" in sys.argv else 3
    workers = int(os.environ.get("WORLD_SIZE") or os.environ.get("OMPI_COMM_WORLD_SIZE") or 3)
    replicas = workers if workers != 3 else replicas
    plan = Plan(layout=Layout(replicas=replicas), batch=Batch(size=24, micro=4))
    paceline.run(train, workers=workers, plan=plan, timeout_s=LIMIT_S, silence_s=30.0)
"""
STACK = re.compile(r"^worker (\d), most recent call last:$", re.MULTILINE)


class Begun:
    """A run under way, or over."""

    def __init__(self, folder: Path, program: Program) -> None:
        self.folder, self.source, self._program = folder, folder / "train.py", program

    def stand_still(self) -> None:
        """Return when it has done all steps that it does, or is over."""
        deadline = time.monotonic() + STILL_S
        while sum(path.read_bytes().count(b"\n") for path in self.folder.rglob("metrics.jsonl")) < BEFORE:
            if self._program.process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(LOOK_S)

    def end(self) -> tuple[int, str]:
        """Wait for its end, which is that of all its processes: exit code and output."""
        ended = self._program.end(limit_s=ENDED_S)
        assert self._program.left(limit_s=5.0) == [], "the command's end was not the end of all"
        return ended


@pytest.fixture(scope="module")
def begun(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked_python: Path
) -> Iterator[Mapping[str, Begun]]:
    """Of RUNS, those whose tests are to run."""
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    wanted = {item.callspec.params.get("hang") for item in tests if hasattr(item, "callspec")}
    found: dict[str, Begun] = {}
    environment = ENVIRONMENT | {"PYTHON_EXEC": str(forked_python)}  # torchrun's own variable
    with contextlib.ExitStack() as stack:
        for name, words in RUNS.items():
            if name in wanted:
                folder = tmp_path_factory.mktemp("hang")
                (folder / "train.py").write_text(TRAIN)
                told = [forked_python if word == "python" else word for word in words]
                program = stack.enter_context(command(*told, environment=environment, cwd=folder))
                found[name] = Begun(folder, program)
                found[name].stand_still()
        yield found


@pytest.fixture(scope="module")
def forked_python() -> Path:
    """What launchers start: how they start interpreters is not what a hang is about."""
    return warm.interpreter(lasting.folder("python"))


@pytest.fixture
def hang(request: pytest.FixtureRequest, begun: Mapping[str, Begun]) -> Begun:
    return begun[request.param]


def runs(*names: Any) -> pytest.MarkDecorator:
    """A test for each of these RUNS, as `hang`."""
    return pytest.mark.parametrize("hang", names, indirect=True)


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


@runs("elastic")
def test_an_elastic_run_goes_on_without_a_worker_that_hangs(hang: Begun) -> None:
    """The first of the file: no test but its own may find the worker that comes in place of the one that hangs."""
    code, output = hang.end()
    assert code == 0, output
    who, loop = r"worker 1 \(\S+, pid (\d+)\)", line_of(hang.source, "number += 1")
    place = rf"train\.py:({loop - 1}|{loop}|{loop + 1}|{loop + 2}) in load_image"
    told = sentence(
        output,
        rf"{who} has not entered all_reduce .* \S+ s\. The run gives it up in (\d+) s \(timeout_s\) and goes on; "
        r"`kill -9 (\d+)` does it now",
    )
    assert told.group(1) == told.group(3)
    assert 1 <= int(told.group(2)) <= 24 - 5
    ended = sentence(
        output,
        rf"{who} was hanging at {place} and was ended: the others had stood still for (\S+) s \(timeout_s is 24\) "
        r"after step 6: detected in (\S+) s, regrouped in \S+ s; 2 workers go on, steps lost 0",
    )
    assert 24.0 <= float(ended.group(3)) < 24.0 + SILENCE_S
    told_to_s = 0.05  # three digits of what stood still, two decimals of what was detected
    assert float(ended.group(3)) - told_to_s <= float(ended.group(4)), "they stood still before it was detected"
    assert float(ended.group(4)) < 24.0 + SILENCE_S, "after timeout_s nobody waits for silence_s, too"
    assert STACK.findall(output) == ["1", "0", "2"]
    assert "finished at step 150" in output


@runs("data")
def test_an_endless_loop_in_a_dataset_is_told_live_and_ends_the_job_with_all_stacks(hang: Begun) -> None:
    code, output = hang.end()
    assert code == 1
    loop = line_of(hang.source, "number += 1")
    named = (
        r"worker 1 \(\S+, pid \d+\) has not entered all_reduce \d+ \(model\.0\.weight .. model\.2\.bias \(4 "
        rf"gradients\), called at train\.py:{line_of(hang.source, 'step(batch)')} in train, step 7\); it is at "
        rf"train\.py:({loop - 1}|{loop}|{loop + 1}) in load_image; workers 0, 2 have waited (\S+) s"
    )
    end = verdict(output)
    first, last = sentence(output, "warning: " + named), sentence(end, named)
    assert 5 <= float(first.group(2)) <= 10, "not within 10 s past the time that steps of milliseconds explain"
    assert 12 <= float(last.group(2)) <= 15
    assert STACK.findall(end) == ["1", "0", "2"], "not every worker's stack, the culprit's first"
    assert "in __getitem__\n    load_image(number)\n" in end
    assert "workers 0, 2 stopped because of it" in end
    assert "Traceback" not in end and "gloo" not in end.lower(), "a wall of text"
    directory = the_run(hang.folder) / "attempt_1"
    assert "in load_image" in (directory / "worker_1" / "stacks").read_text()


@runs("stop")
def test_a_stopped_worker_is_called_stopped(hang: Begun) -> None:
    code, output = hang.end()
    assert code == 1
    sentence(
        output, r"worker 1 \(\S+, pid \d+\) is stopped \(SIGSTOP, or a debugger\) and has not entered all_reduce \d+"
    )
    assert STACK.findall(output) == ["1", "0", "2"]


@runs("evaluate")
def test_an_evaluation_on_one_worker_only_is_told_with_both_calls_and_their_lines(hang: Begun) -> None:
    code, output = hang.end()
    assert code == 1
    evaluate = line_of(hang.source, "worker.evaluate(")
    sentence(
        output,
        r"workers are in different collectives: number \d+ is all_reduce of 2 float64 \(evaluation, called at "
        rf"train\.py:{evaluate} in all_calls, step 6\) for worker 0, and all_reduce of \d+ float32 \(model\.0\.weight "
        r".*, step 7\) for workers 1, 2\. All workers must make the same calls",
    )
    assert "Traceback" not in output


@runs("gather")
def test_a_gather_of_the_users_own_that_one_worker_makes_is_told_at_once(hang: Begun) -> None:
    """Also where the name was imported from torch.distributed before the run began."""
    code, output = hang.end()
    assert code == 1
    end = verdict(output)
    gather = line_of(hang.source, "all_gather([")
    named = (
        rf"worker 1 \(\S+, pid \d+\) waits in torch\.distributed\.all_gather 1 \(called at train\.py:{gather} in "
        r"all_calls, step 6\), which workers 0, 2 have not entered; workers 0, 2 wait in all_reduce \d+ "
    )
    sentence(output, "warning: " + named)
    sentence(end, named)
    assert STACK.findall(end) == ["1", "0", "2"]


@runs("shapes")
def test_sums_of_different_shapes_of_the_users_own_are_told(hang: Begun) -> None:
    code, output = hang.end()
    assert code == 1
    sentence(
        output,
        r"number 1 is torch\.distributed\.all_reduce of 2 float32 \(called at train\.py:\d+ in all_calls, step 6\) for "
        r"worker 0, and torch\.distributed\.all_reduce of 3 float32 \(.*\) for workers 1, 2",
    )


@runs("import")
def test_a_worker_that_does_not_come_to_the_run_is_found_in_its_script(hang: Begun) -> None:
    code, output = hang.end()
    assert code == 1
    loop = line_of(hang.source, "time.sleep(0.01)  # for ever")
    sentence(
        output,
        r"worker 2 has not entered meeting 1 \(the workers find each other, called at train\.py:\d+\); it is at "
        rf"train\.py:({loop - 1}|{loop}); workers 0, 1 have waited",
    )


@pytest.mark.further
def test_an_elastic_run_over_two_hosts_goes_on_without_a_worker_that_hangs(program: Path, tmp_path: Path) -> None:
    """Without shared memory: gloo between the hosts."""
    ends = over_two_hosts(tmp_path, program, "data", "6", "elastic", "last")
    assert [code for code, _ in ends] == [0, 0], ends
    sentence(ends[0][1] + ends[1][1], r"worker 2 \(\S+, pid \d+\) has not entered all_reduce .* in load_image")
    sentence(ends[0][1] + ends[1][1], r"worker 2 \(\S+, pid \d+\) was hanging at \S+ in load_image and was ended")
    assert "finished at step 150" in ends[0][1] + ends[1][1]


@pytest.mark.parametrize("how", ["slow", quick.further("fast")])
def test_a_slow_worker_is_named(program: Path, how: str) -> None:
    """Before the tests beside it: none is named where the workers wait for cores, and then the run is made again."""
    output, small = "", ("--set", "plan.batch.size=12") if how == "fast" else ()
    for _ in range(3):
        code, output = run("nice", "-n", "-10", *PACELINE, "run", "--workers", "3", *small, program, how, "60")
        assert code == 0
        if "slower than" in output:
            break
    sentence(
        output,
        r"warning: worker 2 \(\S+, pid \d+\) is \d\.\dx slower than the others: its compute takes \S+ ms a step, "
        r"theirs \S+ ms \(data \d+% compute \d+% comm \d+% optim \d+%",
    )


@runs("torchrun data", quick.further("mpirun data"))
def test_under_an_engine_a_hang_is_told_live_and_ends_the_job_with_all_stacks(hang: Begun) -> None:
    code, output = hang.end()
    assert code != 0
    named = r"worker 1 \(\S+, pid \d+\) has not entered all_reduce \d+ .* in load_image; worker 0 has waited (\S+) s"
    sentence(output, "warning: " + named)
    assert STACK.findall(output) == ["1", "0"], "not every worker's stack, the culprit's first"
    assert "in __getitem__\n" in output


@runs(quick.further("torchrun stop"), "mpirun stop")
def test_under_an_engine_a_stopped_worker_is_told_and_the_job_ends(hang: Begun) -> None:
    code, output = hang.end()
    assert code != 0
    sentence(
        output, r"worker 1 \(\S+, pid \d+\) is stopped \(SIGSTOP, or a debugger\) and has not entered all_reduce \d+"
    )
    assert STACK.findall(output) == ["1", "0"]


@runs("mpirun data first")
def test_under_an_engine_a_worker_0_that_hangs_ends_the_job_as_well(hang: Begun) -> None:
    code, output = hang.end()
    assert code != 0
    sentence(output, r"worker 0 \(\S+, pid \d+\) has not entered all_reduce \d+ .* in load_image; worker 1 has")
    assert STACK.findall(output) == ["0", "1"]
    assert record(the_run(hang.folder))["state"] == "failed"


@runs("mpirun late")
def test_under_an_engine_a_worker_that_does_not_come_to_the_run_is_named(hang: Begun) -> None:
    code, output = hang.end()
    assert code != 0
    sentence(output, r"worker 1 has not come to paceline\.run\(\) within 8 s \(timeout_s\)")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), subnet="10.80.0") as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: list[NamespaceHost], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), hosts) as made:
        yield made


@pytest.mark.further
@needs_slurm
def test_under_srun_a_hang_on_another_node_is_told_with_its_place_and_ends_the_job(
    cluster: Cluster, forked_python: Path, program: Path
) -> None:
    """The workers of that node tell worker 0 what they do; without --kill-on-bad-exit srun itself would wait on."""
    words = cluster.srun("-N2", "-n3", "--distribution=block", str(forked_python), str(program), "data", "24", "last")
    token = {"PACELINE_TOKEN": "0123456789abcdef0123456789abcdef"}
    code, output = run(*words, environment=cluster.environment | token, limit_s=ENDED_S)
    assert code != 0
    named = r"worker 2 \((\S+), pid \d+\) has not entered all_reduce \d+ .* in load_image; workers 0, 1 have waited"
    found = sentence(output, named)
    assert found.group(1) in ("n1", "n2")
    assert STACK.findall(output) == ["2", "0", "1"]


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
