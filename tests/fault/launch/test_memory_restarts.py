"""A worker of a run with a fixed number of replicas is killed: all go on from memory, as if nothing had been."""

from __future__ import annotations

import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

import lasting
import quick
from paceline.monitor.audit.audit import audit
from programs import PACELINE, losses, record, run

PROGRAM = f"""\
import json
import os
import signal
import sys

sys.path.insert(0, {str(Path(__file__).resolve().parents[2] / "support")!r})

import torch

import paceline
from expert_models import AttendingMoeNet
from layout_runs import Net, Text, next_word
from paceline.comm.memory_checkpoint import SnapshotSlot

KILLS = json.loads(sys.argv[1])  # [attempt (0: each), worker, where, step in hand or committed]
write, num_writes = SnapshotSlot.write, [0]


def train(worker):
    def strike(where, step):
        for attempt, rank, place, when in KILLS:
            if attempt in (0, worker._files.attempt) and (rank, place, when) == (worker.rank, where, step):
                os.kill(os.getppid() if "warm" in sys.argv else os.getpid(), signal.SIGKILL)

    def torn(slot, offset, data):
        num_writes[0] += 1
        if num_writes[0] % 3 == 2:  # in the middle of a snapshot
            strike("snapshot", worker.step)
        write(slot, offset, data)

    def loss(output, target):
        strike("forward", worker.step + 1)
        return next_word(output, target)

    SnapshotSlot.write = torn
    strike("start", worker.step)
    torch.manual_seed(3)
    model = worker.prepare(AttendingMoeNet() if "routed" in sys.argv else Net(drop=0.0))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1))
    model.register_forward_pre_hook(lambda *_: strike("forward", worker.step + 1))
    step = worker.stepper(model, optim, loss)
    for batch in worker.batches(Text(), epochs=4):
        worker.report(seen=float(step(batch)))
        strike("loop", worker.step)
        if worker.step % 3 == 1:
            worker._parts.saver.wait()  # until the checkpoint is complete, where one is being saved
            strike("saved", worker.step)


if __name__ == "__main__":
    paceline.run(train, workers=2)
"""
MOMENTS = ("forward", "loop")


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@functools.cache
def undisturbed(*, routed: bool) -> list[float]:
    """The losses of one process that nothing happens to."""
    path = lasting.folder("undisturbed") / "program.py"
    path.write_text(PROGRAM)
    told = command(path, "replicas=1", [], "--workers", "1", "--no-save-at-end", routed=routed)
    code, output = run(*told, limit_s=150)
    assert code == 0, output
    return losses(path.with_name("r"))


def command(program: Path, layout: str, kills: list[Any], *more: str, routed: bool = False) -> tuple[str | Path, ...]:
    plan = f"{layout}+batch(size=16,micro=4)+compute(precision=fp64)+guard(snapshot_every=4)"
    return (
        *PACELINE,
        "run",
        program,
        "--run-dir",
        program.with_name("r"),
        "--plan",
        plan,
        *more,
        "--",
        json.dumps(kills),
        *(["routed"] if routed else []),
    )


def beginnings(run_dir: Path) -> list[tuple[int, int | None]]:
    """From which step of which attempt each attempt went on, by worker 0's ledger."""
    found: list[tuple[int, int | None]] = []
    for number in range(1, record(run_dir)["attempts"][-1]["attempt"] + 1):
        first = json.loads((run_dir / f"attempt_{number}/worker_0/ledger.jsonl").read_text().split("\n")[0])
        found.append((first["from_step"], first["of_attempt"]))
    return found


@pytest.mark.parametrize(
    ("layout", "workers"),
    [
        ("shard=2", 2),
        quick.further("tensor=2", 2),
        ("stages=2", 2),
        quick.further("context=2", 2),
        ("experts=2", 2),
        ("replicas=2", 2),
        quick.further("stages=2+tensor=2", 4),
    ],
)
def test_kills_at_any_moment_cost_the_steps_since_the_last_whole_snapshot(
    program: Path, tmp_path: Path, layout: str, workers: int
) -> None:
    draw, routed = random.Random(layout), "experts" in layout
    kills = [
        [1, 1, "forward", 11],
        # Where both have the same state, worker 0 has the only copy.
        [2, 0, "snapshot", 12],
        [3, draw.randrange(workers), draw.choice(MOMENTS), draw.choice([14, 15])],
    ]
    told = command(program, layout, kills, "--no-save-at-end", "--workers", str(workers), routed=routed)
    code, output = run(*told, limit_s=150)
    assert code == 0, output
    who = "both workers" if workers == 2 else f"all {workers} workers"
    said = re.findall(rf"\(pid \d+\) killed by signal 9 after step (\d+): {who} start again at step (\d+) from", output)
    assert [int(step) for _, step in said] == [8, 8, 12], output
    assert [int(step) for step, _ in said[:2]] == [10, 12], output
    assert output.count("this host's memory") == output.count("no disk read") == 3
    assert len(re.findall(r"step (?:9|13) is committed, \d+\.\d\d s after the loss", output)) == 3, output
    run_dir = tmp_path / "r"
    assert not (run_dir / "checkpoints").exists()
    assert losses(run_dir) == pytest.approx(undisturbed(routed=routed), rel=1e-9)
    assert beginnings(run_dir) == [(0, None), (8, 1), (8, 1), (12, 3)]
    found = audit(run_dir)
    assert found.is_clean and found.verdict == "clean", found
    assert [one["state"] for one in record(run_dir)["attempts"]] == ["failed", "failed", "failed", "finished"]


def test_a_killed_warm_parent_is_started_again_and_all_go_on_from_memory(program: Path, tmp_path: Path) -> None:
    told = command(program, "shard=2", [[1, 0, "forward", 11]], "--no-save-at-end")
    code, output = run(*told, "warm", limit_s=150)
    assert code == 0, output
    assert "was killed by signal 9 (SIGKILL): it is started again; the workers of this host are lost with it" in output
    assert "both workers start again at step 8 from this host's memory" in output
    assert losses(tmp_path / "r") == pytest.approx(undisturbed(routed=False), rel=1e-9)
    assert audit(tmp_path / "r").is_clean


@pytest.mark.further
def test_a_loss_that_comes_back_ends_the_run_when_three_restarts_brought_no_step(program: Path, tmp_path: Path) -> None:
    code, output = run(*command(program, "shard=2", [[1, 1, "forward", 2], [0, 1, "forward", 7]]), limit_s=120)
    assert code == 1, output
    first = "after step 1: both workers start again at the beginning, nothing was kept or saved: 1 step is done again"
    assert first in output
    assert output.count("after step 6: both workers start again at step 4 from this host's memory") == 3
    assert "the workers have begun again 3 times in a row, and none came beyond step 6: the run ends" in output
    assert re.search(r"worker 1 \(host .*\) was killed by signal 9 \(SIGKILL\) after step 6", output), output
    assert len(record(tmp_path / "r")["attempts"]) == 5


@pytest.mark.further
def test_a_checkpoint_that_is_newer_than_what_is_in_memory_counts(program: Path, tmp_path: Path) -> None:
    kills = [[1, 0, "saved", 7], [2, 1, "start", 6]]  # and once more before anybody is at work again
    code, output = run(*command(program, "shard=2", kills, "--save-every", "3"), limit_s=120)
    assert code == 0, output
    said = r"after step [67]: both workers start again from the checkpoint of step 6 on disk: [01] steps? (is|are) done"
    assert re.search(said, output), output
    assert "after step 6: both workers start again from the checkpoint of step 6 on disk: 0 steps are done" in output
    assert losses(tmp_path / "r") == pytest.approx(undisturbed(routed=False), rel=1e-9)
    assert audit(tmp_path / "r").is_clean
