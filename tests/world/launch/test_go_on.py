"""The command that an interrupted run prints goes on with it, and prints it again; also of a script without a file."""

from __future__ import annotations

import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

import programs
import quick
from paceline.environment import RUN_DIR
from programs import record, the_run

run = partial(programs.run, cold=True)  # as users start them: the words of the process are what is printed

# Each attempt takes three steps, and is then interrupted as by Ctrl-C.
TRAIN = """\
import os, signal
import torch
from torch.utils.data import TensorDataset
import paceline

os.environ.setdefault("SUPERVISOR", str(os.getpid()))

def train(worker):
    model = worker.prepare(torch.nn.Linear(2, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, torch.nn.functional.mse_loss)
    began = worker.step
    for batch in worker.batches(TensorDataset(torch.ones(400, 2), torch.ones(400, 1)), epochs=1000):
        step(batch)
        if worker.step == began + 3:
            os.kill(int(os.environ["SUPERVISOR"]), signal.SIGINT)

if __name__ == "__main__":
    paceline.run(train, workers=1, plan="batch(size=4)")
"""
MARK = "go on with: "


def go_on(output: str) -> str:
    """What the last line says, after a run that was interrupted and has saved."""
    last = output.splitlines()[-1]
    assert last.startswith(f"paceline: {MARK}") and "Traceback" not in output, output
    return last.partition(MARK)[2]


def assert_goes_on(command: str, run_dir: Path) -> None:
    """What is printed is pasted: that is the second attempt in the same directory, and prints the same."""
    code, output = run("bash", "-c", command)
    assert code == 75, output
    assert len(record(run_dir)["attempts"]) == 2, output
    assert go_on(output) == command


@pytest.mark.further
def test_the_printed_command_goes_on_again_and_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    code, output = run(sys.executable, "train.py")
    assert code == 75, output
    assert_goes_on(go_on(output), the_run(tmp_path))


@pytest.mark.further
def test_a_directory_whose_name_has_control_characters_is_gone_on_with(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    name = "a\x1b[31m 'b'\n\\x\u202e"
    code, output = run(sys.executable, "train.py", environment={RUN_DIR: name})
    assert code == 75, output
    assert_goes_on(go_on(output), tmp_path / name)


@pytest.mark.further
def test_a_script_of_an_option_ends_and_goes_on_as_one_of_a_file(tmp_path: Path) -> None:
    code, output = run(sys.executable, "-c", TRAIN)
    assert code == 75, output
    assert_goes_on(go_on(output), the_run(tmp_path))


@pytest.mark.further
@pytest.mark.parametrize("words", [("-",), quick.further(("/dev/stdin",))])
def test_a_script_from_a_pipe_ends_as_one_of_a_file(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "text").write_text(TRAIN)
    line = shlex.join([sys.executable, *words])
    code, output = run("bash", "-c", f"cat text | {line}")
    assert code == 75, output
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "by standard input" in go_on(output) and f"{RUN_DIR}=runs/{run_dir.name} " in go_on(output)
    code, output = run("bash", "-c", f"cat text | {RUN_DIR}=runs/{run_dir.name} {line}")
    assert (code, len(record(run_dir)["attempts"])) == (75, 2), output
