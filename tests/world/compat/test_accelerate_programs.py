"""A program written for Accelerate on real workers: the numbers of one process, states on other numbers of workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelerate_programs import run_program, steps_of, write_accelerate_program
from paceline.checkpoint.checkpoint_dir import read_commit_marker, verify
from paceline.environment import PROCESSES
from paceline.events import CheckpointSaved, decode
from paceline.monitor.audit.audit import audit
from programs import PACELINE, run

FAST = ("--epochs", "2")
SLOW = """
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.checkpoint import async_writer
from paceline.compat.accelerate import Accelerator

write = async_writer._fill


def write_slowly(*given):  # the first time: longer than the workers wait for each other
    async_writer._fill = write
    time.sleep(5)
    return write(*given)


async_writer._fill = write_slowly
accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
data = TensorDataset(torch.randn(40, 4), torch.randn(40, 1))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, batch_size=4)
)
for number, (x, y) in enumerate(loader):
    accelerator.backward(F.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    if number in (0, 3, 4) and accelerator.is_main_process:
        accelerator.save_state(f"state_{number + 1}")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return write_accelerate_program(tmp_path)


@pytest.mark.thorough
def test_two_workers_have_the_losses_of_one_that_runs_both_processes(program: Path, tmp_path: Path) -> None:
    words = ("--accumulate", "2", "--buffers", "--dropout", "0.3", *FAST)
    both = run_program(program, *words, workers=2, run_dir=tmp_path / "two")
    alone = run_program(program, *words, workers=1, run_dir=tmp_path / "one", environment={PROCESSES: "2"})
    assert steps_of(tmp_path / "two") == pytest.approx(steps_of(tmp_path / "one"), rel=1e-5)
    assert len(steps_of(tmp_path / "two")) == 2 * 4  # 101 samples in steps of 2 x 2 x 8
    assert both["weight"] == pytest.approx(alone["weight"], rel=1e-6)
    assert (both["measures"], both["rate"], both["lengths"]) == (alone["measures"], alone["rate"], alone["lengths"])
    assert audit(tmp_path / "two").verdict == "clean"


@pytest.mark.thorough
def test_a_state_saved_inside_an_epoch_goes_on_on_another_number_of_workers(program: Path, tmp_path: Path) -> None:
    words = ("--dropout", "0.3")
    run_program(program, *words, workers=2, run_dir=tmp_path / "whole")
    run_program(program, *words, "--save-at", "3", "--first-saves", workers=2, run_dir=tmp_path / "begun")
    more = (*words, "--save-at", "3", "--load")
    with pytest.raises(AssertionError, match=f"{PROCESSES}=2 keeps it"):
        run_program(program, *more, workers=1, run_dir=tmp_path / "another")
    run_program(program, *more, workers=1, run_dir=tmp_path / "rest", environment={PROCESSES: "2"})
    begun, rest = steps_of(tmp_path / "begun"), steps_of(tmp_path / "rest")
    assert len(begun) == 7 + 3
    assert [*begun, *rest] == pytest.approx(steps_of(tmp_path / "whole"), rel=1e-5)


@pytest.mark.further
@pytest.mark.parametrize("words", [(), ("--own-order",)], ids=["torch's order", "own order"])
def test_a_state_saved_after_an_epoch_has_the_orders_of_the_later_ones(
    program: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    whole = run_program(program, *words, workers=1, run_dir=tmp_path / "whole")
    begun = run_program(program, *words, "--save-after-epoch", workers=1, run_dir=tmp_path / "begun")
    rest = run_program(program, *words, "--save-after-epoch", "--load", workers=1, run_dir=tmp_path / "rest")
    assert [*begun["losses"], *rest["losses"]] == pytest.approx(whole["losses"], rel=1e-6)


@pytest.mark.further
@pytest.mark.parametrize("plan", ["shard=2", "shard=2+zero=1", "tensor=2"])
def test_layouts_have_the_losses_of_replicas(program: Path, tmp_path: Path, plan: str) -> None:
    words = ("--accumulate", "2", *FAST)
    run_program(program, *words, workers=2, run_dir=tmp_path / "split", options=("--plan", plan))
    processes = "1" if plan == "tensor=2" else "2"
    run_program(program, *words, workers=1, run_dir=tmp_path / "one", environment={PROCESSES: processes})
    assert steps_of(tmp_path / "split") == pytest.approx(steps_of(tmp_path / "one"), rel=1e-4)


@pytest.mark.further
@pytest.mark.parametrize("words", [(), ("--own-order",)], ids=["torch's order", "own order"])
def test_a_run_that_is_stopped_goes_on_where_it_was_without_a_word_in_the_program(
    program: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    run_program(program, *words, workers=1, run_dir=tmp_path / "whole")
    run_program(program, *words, workers=1, run_dir=tmp_path / "run", options=("--max-steps", "20"))
    run_program(program, *words, workers=1, run_dir=tmp_path / "run")
    assert steps_of(tmp_path / "run") == pytest.approx(steps_of(tmp_path / "whole"), rel=1e-6)
    assert audit(tmp_path / "run").verdict == "clean"


@pytest.mark.further
def test_replicas_that_take_steps_by_themselves_train_too(program: Path, tmp_path: Path) -> None:
    told = run_program(program, workers=2, run_dir=tmp_path / "run", options=("--plan", "localsgd(every=4)"))
    assert told["measures"][-1] > 0.7
    assert audit(tmp_path / "run").verdict == "clean"


def saved_steps(run_dir: Path) -> list[int]:
    """The steps of the checkpoints that were written, in order."""
    events = map(decode, (run_dir / "attempt_1" / "worker_0" / "events.jsonl").read_text().splitlines())
    return [one.event.step for one in events if isinstance(one.event, CheckpointSaved)]


@pytest.mark.thorough
def test_first_process_saves_alone_for_longer_than_the_others_wait(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    options = ("--timeout-s", "4", "--save-every", "2", "--run-dir", "run", "--no-tensorboard")
    code, output = run(*PACELINE, "run", "slow.py", "--workers", "2", *options, cwd=tmp_path)
    assert code == 0, output
    assert "state_1 is not complete yet: the state of step 1 is written while steps go on" in output
    for step in (1, 4, 5):
        directory = tmp_path / f"state_{step}"
        assert read_commit_marker(directory).step == step
        verify(directory)
    # The one due after step 4 was there already, and the loop's end knows of step 5's; the program's end saves its own.
    assert saved_steps(tmp_path / "run") == [1, 2, 4, 5, 5]
