"""The same program under Accelerate and here, but for its import: the same losses, measures and lengths."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate_programs import run_program, steps_of, write_accelerate_program
from paceline.environment import PROCESSES

pytest.importorskip("accelerate", reason="Accelerate is not installed: make test-compat")


@pytest.fixture
def programs(tmp_path: Path) -> tuple[Path, Path]:
    return write_accelerate_program(tmp_path, package="accelerate"), write_accelerate_program(tmp_path)


def both(programs: tuple[Path, Path], *words: str) -> tuple[dict[str, Any], dict[str, Any]]:
    theirs, ours = programs
    return run_program(theirs, *words), run_program(ours, *words)


def test_the_version_is_one_that_these_claims_are_about() -> None:
    assert importlib.metadata.version("accelerate").split(".")[0] == "1"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--accumulate", "3"),
        ("--accumulate", "3", "--loop", "manual"),
        ("--accumulate", "4", "--loop", "ahead"),
        ("--drop-last", "--accumulate", "2"),
        ("--buffers", "--batch", "16"),
        ("--mixed-precision", "bf16"),
        ("--mixed-precision", "bf16", "--matmul-loss"),
    ],
    ids=" ".join,
)
def test_losses_of_every_batch_are_those_under_accelerate(programs: tuple[Path, Path], words: tuple[str, ...]) -> None:
    theirs, ours = both(programs, *words)
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
    assert ours["measures"] == theirs["measures"]
    assert ours["lengths"] == theirs["lengths"]
    assert ours["rate"] == theirs["rate"]
    assert ours["weight"] == pytest.approx(theirs["weight"], rel=1e-6)


def test_two_workers_have_the_losses_of_two_processes_of_accelerate(
    programs: tuple[Path, Path], tmp_path: Path
) -> None:
    theirs, ours = programs
    words = ("--drop-last",)  # Accelerate fills uneven batches with repeated samples
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    expected = run_program(theirs, *words, launcher=launcher, environment={"ACCELERATE_USE_CPU": "true"})
    found = run_program(ours, *words, workers=2, run_dir=tmp_path / "run")
    assert len(expected["losses"]) == 3 * 6
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert {**found, "losses": [], "weight": 0.0} == {**expected, "losses": [], "weight": 0.0}
    assert found["weight"] == pytest.approx(expected["weight"], rel=1e-6)


def test_two_workers_that_split_batches_have_the_losses_of_accelerate_in_one_process(
    programs: tuple[Path, Path], tmp_path: Path
) -> None:
    theirs, ours = programs
    words = ("--batch", "16", "--split-batches", "--accumulate", "2")
    expected = run_program(theirs, *words)
    found = run_program(ours, *words, workers=2, run_dir=tmp_path / "run")
    losses = expected["losses"]  # seven batches in an epoch, two in a step; the last is short, and alone in its step
    per_epoch = [losses[first : first + 7] for first in range(0, 21, 7)]
    steps = [(a + b) / 2 for epoch in per_epoch for a, b in zip(epoch[:6:2], epoch[1:6:2], strict=True)]
    ran = steps_of(tmp_path / "run")
    assert [loss for place, loss in enumerate(ran) if place % 4 != 3] == pytest.approx(steps, rel=1e-5)
    assert ran[3::4] == pytest.approx([epoch[6] for epoch in per_epoch], rel=1e-5)
    assert found["measures"] == expected["measures"]
    assert found["weight"] == pytest.approx(expected["weight"], rel=1e-5)


def test_accelerate_loads_the_weights_that_two_workers_have_saved(programs: tuple[Path, Path], tmp_path: Path) -> None:
    from accelerate import load_checkpoint_in_model  # pyright: ignore[reportMissingImports]

    _, ours = programs
    words = ("--weights", str(tmp_path / "weights"))
    told = run_program(ours, *words, workers=2, run_dir=tmp_path / "run", options=("--plan", "shard=2"))
    model = nn.Sequential(nn.Linear(20, 32), nn.Identity(), nn.Tanh(), nn.Dropout(), nn.Linear(32, 2))
    load_checkpoint_in_model(model, str(tmp_path / "weights"))
    weight = float(sum(value.detach().double().abs().sum() for value in model.state_dict().values()))
    assert weight == pytest.approx(told["weight"], rel=1e-12)
    assert torch.isfinite(next(model.parameters())).all()


def test_a_state_goes_on_as_a_run_that_was_never_stopped(programs: tuple[Path, Path], tmp_path: Path) -> None:
    theirs, ours = programs
    whole = run_program(theirs)
    begun = run_program(ours, "--save-at", "5")
    rest = run_program(ours, "--save-at", "5", "--load", environment={PROCESSES: "1"})
    assert [*begun["losses"], *rest["losses"]] == pytest.approx(whole["losses"], rel=1e-5)
    assert rest["weight"] == pytest.approx(whole["weight"], rel=1e-6)
