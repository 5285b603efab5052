"""A process that saves in a loop is killed again and again: the newest complete checkpoint is there, and right."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.reader import FoundCheckpoint, find, open_checkpoint
from programs import PACELINE, checkpoints, losses, reference_losses, run, write_program

NUM_KILLS = 30
NUM_TENSORS = 8
NUM_ELEMENTS = 100_000

# For each line that it reads: a fork that goes on from the newest checkpoint and saves, telling each step.
# Its imports are paid once.
PROGRAM = f"""
import os, sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import torch, torch.distributed.checkpoint
from paceline.checkpoint.reader import find
from paceline.checkpoint.async_writer import AsyncWriter

def tell(what):
    os.write(1, f"{{what}}\\n".encode())  # at once: print() may write the end of the line apart, and two processes tell

def save_forever(directory):
    step = find(directory).step
    writer = AsyncWriter(directory, keep=2, on_event=lambda event: None)
    while True:
        step += 1
        values = {{f"model.{{k}}": float(step * 1000 + k) for k in range({NUM_TENSORS})}}
        tensors = {{name: torch.full(({NUM_ELEMENTS},), value) for name, value in values.items()}}
        writer.save(step, tensors, {{"step": step, "rng": torch.tensor(step)}}, {{"plan": "replicas=1"}})
        tell(step)

for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        save_forever(Path(sys.argv[1]))
    tell(f"pid {{pid}}")
    os.waitpid(pid, 0)
    tell("dead")
"""


class Lines:
    """Lines of a pipe, each waited for at most so long."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._rest = descriptor, b""

    def next(self, timeout_s: float) -> str | None:
        while b"\n" not in self._rest:
            if not select.select([self._descriptor], [], [], timeout_s)[0]:
                return None
            chunk = os.read(self._descriptor, 4096)
            assert chunk, "the program ended by itself"
            self._rest += chunk
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "checkpoints"), *sys.path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()  # ends its loop
        assert process.wait(timeout=30) == 0


@pytest.mark.timeout(240)
def test_a_kill_at_any_instant_leaves_the_newest_complete_checkpoint_in_use(
    tmp_path: Path, saver: subprocess.Popen[bytes]
) -> None:
    directory = tmp_path / "checkpoints"
    delays = random.Random(11)
    interrupted, last_step = 0, 0
    for _ in range(NUM_KILLS):
        announced = _save_until_killed(saver, after_s=delays.uniform(0, 0.06))
        found = find(directory)
        # The save before the last announced one was complete when that one was announced.
        assert found.step >= max(last_step, announced - 1), "a committed checkpoint was lost"
        _check_content(found)
        present = set(directory.iterdir())
        for path, reason in found.skipped:
            assert path in present and (".partial-" in path.name or ".removed-" in path.name), path
            assert "was not completed" in reason or "being deleted" in reason, reason
        _check_the_others(directory, found)
        interrupted += bool(found.skipped)
        last_step = found.step
    assert last_step >= NUM_KILLS, "every process came to save"
    assert interrupted >= NUM_KILLS // 4, "the kills met saves"


def _save_until_killed(saver: subprocess.Popen[bytes], *, after_s: float) -> int:
    """Let a fork save, kill it some time after its second save began; returns the step it announced last."""
    assert saver.stdin is not None and saver.stdout is not None
    lines = Lines(saver.stdout.fileno())
    saver.stdin.write(b"go\n")
    saver.stdin.flush()
    pid, announced = 0, list[int]()
    while not pid or len(announced) < 2:
        line = lines.next(timeout_s=60)
        assert line is not None, "the program saves nothing"
        if line.startswith("pid "):
            pid = int(line.removeprefix("pid "))
        else:
            announced.append(int(line))
    deadline = time.monotonic() + after_s
    while (remaining := deadline - time.monotonic()) > 0 and (line := lines.next(timeout_s=remaining)) is not None:
        announced.append(int(line))
    os.kill(pid, signal.SIGKILL)
    while (line := lines.next(timeout_s=30)) != "dead":
        assert line is not None, "the killed process does not end"
        announced.append(int(line))
    return announced[-1]


def _check_content(found: FoundCheckpoint) -> None:
    assert found.newest is not None
    checkpoint = open_checkpoint(found.newest)
    assert checkpoint.step == found.step == checkpoint.state["step"] == int(checkpoint.state["rng"])
    assert checkpoint.about["plan"] == "replicas=1"
    tensors = checkpoint.load()
    assert len(tensors) == NUM_TENSORS
    for name, tensor in tensors.items():
        expected = float(found.step * 1000 + int(name.removeprefix("model.")))
        assert torch.equal(tensor, torch.full((NUM_ELEMENTS,), expected)), name


def _check_the_others(directory: Path, found: FoundCheckpoint) -> None:
    """Older ones that are not named as skipped are complete too; at most one more than are kept."""
    skipped = {path for path, _ in found.skipped}
    complete = [path for path in directory.iterdir() if path not in skipped]
    assert 1 <= len(complete) <= 3
    for path in complete:
        open_checkpoint(path).load()


def test_a_start_passes_over_a_checkpoint_whose_bytes_changed_and_names_the_file(tmp_path: Path) -> None:
    program, run_dir = write_program(tmp_path), tmp_path / "run"
    words = [*PACELINE, "run", program, "--run-dir", run_dir]
    assert run(*words)[0] == 0
    assert checkpoints(run_dir) == [4, 8]
    path = run_dir / "checkpoints" / "step_00000008" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    code, output = run(*words)
    assert code == 0, output
    assert "step_00000008 was passed over: the file __0_0.distcp is damaged: its checksum does not match" in output
    assert "continued after step 4" in output
    assert losses(run_dir) == pytest.approx(reference_losses(), rel=1e-5)
    assert find(run_dir / "checkpoints", verified=True).step == 8, "saved anew"
