"""The examples of `Worker`'s methods run as they stand, on two workers."""

from __future__ import annotations

import inspect
from pathlib import Path

import paceline
from docstring_examples import example

FIRST = ("restore", "prepare", "stepper")  # in this order; the others use what these have made
METHODS = [name for name, _ in inspect.getmembers(paceline.Worker, inspect.isfunction) if not name.startswith("_")]


def test_examples_of_worker_methods_run(tmp_path: Path) -> None:
    rest = sorted(set(METHODS) - set(FIRST))
    examples = {name: example(getattr(paceline.Worker, name)) for name in [*FIRST, *rest]}
    examples["StepBatch"] = example(paceline.StepBatch)

    def train(worker: paceline.Worker) -> list[str]:
        import torch

        data = torch.utils.data.TensorDataset(torch.randn(16, 8), torch.randn(16, 1))
        names = {"worker": worker, "torch": torch, "dataset": data, "paceline": paceline}
        done: list[str] = []
        for name, code in examples.items():
            exec(code, names)
            done.append(name)
        return done

    assert all(examples.values())
    done = paceline.run(train, workers=2, plan="batch(size=8)", run_dir=tmp_path / "run", threads=1)
    assert done == list(examples)
