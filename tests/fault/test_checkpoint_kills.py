"""A process that saves in a loop is killed again and again: the newest complete checkpoint is always there, and right."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from paceline.checkpoint.reader import Found, find, open_checkpoint

NUM_KILLS = 20
NUM_TENSORS = 8
NUM_ELEMENTS = 100_000

# Goes on from the newest checkpoint, says each step that it starts to save, saves without end.
PROGRAM = f"""
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import torch
from paceline.checkpoint.reader import find
from paceline.checkpoint.writer import Writer
directory = Path(sys.argv[1])
step = find(directory).step
writer = Writer(directory, keep=2, on_event=lambda event: None)
while True:
    step += 1
    tensors = {{f"model.{{k}}": torch.full(({NUM_ELEMENTS},), float(step * 1000 + k)) for k in range({NUM_TENSORS})}}
    writer.save(step, tensors, {{"step": step, "rng": torch.tensor(step)}}, {{"plan": "replicas=1"}})
    print(step, flush=True)
"""


@pytest.mark.timeout(180)
def test_a_kill_at_any_instant_leaves_the_newest_complete_checkpoint_in_use(tmp_path: Path) -> None:
    seed = 11
    random.seed(seed)
    directory = tmp_path / "checkpoints"
    interrupted = 0
    last_step = 0
    for _ in range(NUM_KILLS):
        announced = _save_until_killed(directory)
        found = find(directory)
        # The save before the last announced one was complete when that one was announced.
        assert found.step >= max(last_step, announced - 1), f"seed {seed}: a committed checkpoint was lost"
        _check_content(found)
        present = {path for path in directory.iterdir()}
        for path, reason in found.skipped:
            assert path in present and (".partial-" in path.name or ".removed-" in path.name), path
            assert "did not come to its end" in reason or "being deleted" in reason, reason
        _check_the_others(directory, found)
        interrupted += bool(found.skipped)
        last_step = found.step
    assert last_step > NUM_KILLS, "every process came to save"
    assert interrupted >= NUM_KILLS // 4, "the kills met saves"


def _save_until_killed(directory: Path) -> int:
    """Run the program, kill it within the time of a few saves after its second one; returns the step it announced last."""
    command = [sys.executable, "-c", PROGRAM, str(directory), *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            lines = b""
            while lines.count(b"\n") < 2:
                ready, _, _ = select.select([process.stdout], [], [], 60)
                assert ready, "the program saves nothing"
                chunk = os.read(process.stdout.fileno(), 4096)
                assert chunk, "the program ended by itself"
                lines += chunk
            deadline = time.monotonic() + random.uniform(0, 0.06)
            while (remaining := deadline - time.monotonic()) > 0 and select.select([process.stdout], [], [], remaining)[
                0
            ]:
                lines += os.read(process.stdout.fileno(), 4096)
        finally:
            process.send_signal(signal.SIGKILL)
            rest, _ = process.communicate(timeout=30)
    return int((lines + rest).split()[-1])


def _check_content(found: Found) -> None:
    assert found.newest is not None
    checkpoint = open_checkpoint(found.newest)
    assert checkpoint.step == found.step == checkpoint.state["step"] == int(checkpoint.state["rng"])
    assert checkpoint.about["plan"] == "replicas=1"
    tensors = checkpoint.load()
    assert len(tensors) == NUM_TENSORS
    for name, tensor in tensors.items():
        expected = float(found.step * 1000 + int(name.removeprefix("model.")))
        assert torch.equal(tensor, torch.full((NUM_ELEMENTS,), expected)), name


def _check_the_others(directory: Path, found: Found) -> None:
    """Older ones that are not named as skipped are complete too, and there are no more than are to be kept (and one)."""
    skipped = {path for path, _ in found.skipped}
    complete = [path for path in directory.iterdir() if path not in skipped]
    assert 1 <= len(complete) <= 3
    for path in complete:
        open_checkpoint(path).load()
