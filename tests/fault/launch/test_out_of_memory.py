"""A step has too little memory where its workers cannot agree on that within it: all begin again in smaller parts."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import lasting
import quick
from paceline.checkpoint.checkpoint_dir import find
from paceline.checkpoint.reader import open_checkpoint
from paceline.monitor.audit.audit import audit
from programs import PACELINE, child_environment, losses, record, run

PROGRAM = f"""\
import os
import signal
import sys
import time

sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "support")!r})

import torch

import paceline
from layout_runs import Net, Text, next_word

WHERE, STEP, ROOM = sys.argv[1], int(sys.argv[2]), 2
files = [0]


def train(worker):
    if os.path.exists("struck"):
        open("came", "w").close()
    torch.manual_seed(3)
    model = worker.prepare(Net(drop=0.0))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02))

    def enough(samples):
        if worker.rank == 1 and worker.step + 1 >= STEP and samples > ROOM:
            torch.empty(1 << 58)

    def loss(output, target):
        if WHERE == "held":
            torch.ones(len(output), 40 << 18)  # 40 MiB each
        if WHERE in ("forward", "lost"):
            enough(len(output))
        return next_word(output, target)

    step = worker.stepper(model, optim, loss)
    for batch in worker.batches(Text(), epochs=4):
        if WHERE == "plain":
            for x, y in batch:
                enough(len(x))
                worker.backward(next_word(model(x), y))
            optim.step()
            optim.zero_grad()
        else:
            step(batch)
        if WHERE == "lost" and worker.rank == 0 and worker.step == STEP + 2 and worker._files.attempt == 1:
            if not os.path.exists("struck"):
                open("struck", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        if WHERE == "lost" and worker.step > STEP + 2:  # the one that comes for it is waited for
            until = time.monotonic() + 30.0
            while not os.path.exists("came") and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(0.2)


if __name__ == "__main__":
    paceline.run(train, workers=2)
"""
AGAIN = r"worker 1 ran out of memory in step 6: both workers start again with micro-batches of {} samples, "


def told(
    folder: Path, layout: str, *more: str, where: str, step: int = 6, micro: int = 8, keeps: int = 2
) -> tuple[int, str]:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(PROGRAM)
    plan = f"{layout}+batch(size=16,micro={micro})+compute(precision=fp64)+guard(snapshot_every={keeps})"
    words = [*PACELINE, "run", folder / "program.py", "--run-dir", folder / "r", "--plan", plan, "--no-save-at-end"]
    return run(*words, *more, "--", where, str(step), limit_s=150, cwd=folder)


@functools.cache
def undisturbed() -> list[float]:
    """The losses of one process that has memory enough."""
    folder = lasting.folder("enough")
    code, output = told(folder, "replicas=1", "--workers", "1", where="")
    assert code == 0, output
    return losses(folder / "r")


@pytest.mark.parametrize(
    "layout",
    ["shard=2", quick.further("tensor=2"), quick.further("stages=2"), quick.further("shard=2+localsgd(every=2)")],
)
def test_workers_of_a_split_replica_go_on_from_memory(tmp_path: Path, layout: str) -> None:
    code, output = told(tmp_path, layout, where="forward")
    assert code == 0, output
    for samples in (4, 2):
        assert re.search(AGAIN.format(samples) + "at step 4 from this host's memory, [01] step", output), output
    assert "out of memory, so micro-batches have 2 samples (more: paceline report" in output
    assert losses(tmp_path / "r") == pytest.approx(undisturbed(), rel=1e-9)
    assert audit(tmp_path / "r").is_clean


@pytest.mark.parametrize("saves", [quick.further(False), True])
def test_a_plain_loop_goes_on_from_what_is_on_disk_or_begins_again(tmp_path: Path, saves: bool) -> None:
    more = ["--save-every", "5"] if saves else []
    code, output = told(tmp_path, "replicas=2", *more, where="plain", micro=4, keeps=0)
    assert code == 0, output
    how = (
        "from the checkpoint of step 5 on disk: 0 steps are" if saves else "at the beginning, nothing was kept or saved"
    )
    assert re.search(AGAIN.format(2) + how, output), output
    assert losses(tmp_path / "r") == pytest.approx(undisturbed(), rel=1e-9)
    assert audit(tmp_path / "r").is_clean and len(record(tmp_path / "r")["attempts"]) == 2
    if saves:  # whatever goes on from there has the smaller size
        newest = find(tmp_path / "r" / "checkpoints").newest
        assert newest is not None
        assert open_checkpoint(newest).state["micro_batch"] == {"planned": 4, "samples": 2}


def test_a_newcomer_to_an_elastic_run_has_the_micro_batches_of_the_others(tmp_path: Path) -> None:
    code, output = told(tmp_path, "replicas=1-2", where="lost", step=3)
    assert code == 0, output
    assert output.count("the step runs again with micro-batches of") == 2, output
    assert re.search(r"worker 0 \(pid \d+\) joined at step", output), output
    assert losses(tmp_path / "r") == pytest.approx(undisturbed(), rel=1e-9)
    assert audit(tmp_path / "r").is_clean


@contextlib.contextmanager
def memory_of(tmp_path: Path, num_bytes: int) -> Iterator[list[str]]:
    """A control group with so much memory; yields the words that begin a command in it."""
    for kind, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup") / kind / f"paceline-{tmp_path.name}-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(num_bytes))
                yield ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
                return
        finally:
            group.rmdir()
    pytest.skip("needs the right to make a control group with a limit of memory")


def test_a_worker_that_the_kernel_kills_for_want_of_memory_has_the_micro_batches_halved(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    plan = "replicas=2+batch(size=32,micro=16)"
    words = [*PACELINE, "run", tmp_path / "program.py", "--run-dir", tmp_path / "r", "--plan", plan, "--", "held", "0"]
    with memory_of(tmp_path, 1200 << 20) as begin:
        done = subprocess.run(
            [*begin, *map(str, words)],
            capture_output=True,
            text=True,
            env=child_environment(),
            timeout=150,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    said = r"worker \d \(pid \d+\) ran out of memory, and the kernel killed it: both workers start again with micro-"
    assert re.search(said, done.stdout), done.stdout
