"""Ctrl-C while a checkpoint is being written: the first lets it be whole, and the second leaves nothing of it."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from pathlib import Path

import pytest

from paceline.monitor.audit.audit import audit
from programs import TRAIN, Announcements, Program, checkpoints, command, record, write_program
from supervised_launch import Lines

# A save stands in the middle of its write until there is a file "go".
HOLDS = """
from pathlib import Path
from paceline.checkpoint import async_writer
fill = async_writer._fill

def held(*given):
    with open("pipe", "a") as pipe:
        pipe.write('"saves"\\n')
    while not Path("go").exists():
        time.sleep(0.01)
    return fill(*given)

async_writer._fill = held
parser"""


def interrupted(program: Program, pipe: Announcements) -> Lines:
    """Send Ctrl-C into a live save, and wait until the run has said so."""
    assert program.told(pipe, 1) == ["saves"]
    assert program.process.stdout is not None
    program.signal(signal.SIGINT)
    lines = Lines(program.process.stdout.fileno())
    lines.until("Ctrl-C came: finishing the step in hand", limit_s=60.0)
    return lines


@pytest.mark.parametrize("plan", ["replicas=2", "shard=2"])
def test_ctrl_c_into_a_live_save_leaves_a_whole_one_or_at_the_second_time_none(plan: str, tmp_path: Path) -> None:
    text = TRAIN.replace("\nparser", HOLDS, 1).replace("import sys\n", "import sys\nimport time\n", 1)
    train = write_program(tmp_path, text=text)
    words = [sys.executable, "-m", "paceline", "run", train, "--plan", plan, "--run-dir", "run", "--epochs", "100000"]
    with contextlib.closing(Announcements(tmp_path / "pipe")) as pipe:
        with command(*words, cwd=tmp_path) as program:
            interrupted(program, pipe)
            program.signal(signal.SIGINT)
            code, output = program.end()
            assert code == record(tmp_path / "run")["exit_code"] == 130, output
            assert not program.left()
        assert list((tmp_path / "run" / "checkpoints").iterdir()) == [], output
        with command(*words, cwd=tmp_path) as program:
            interrupted(program, pipe)
            (tmp_path / "go").touch()
            code, output = program.end()
            assert code == record(tmp_path / "run")["exit_code"] == 75, output
    assert "everything is saved" in output
    saved = checkpoints(tmp_path / "run")[-1]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["step"] == saved
    assert not list((tmp_path / "run" / "checkpoints").glob("*partial*"))
    assert audit(tmp_path / "run").is_clean
