"""Captures for `paceline parity`: each step's loss and gradients, and the weights at the end, written by worker 0.

    losses.jsonl                    one line per committed step: {"step": 1, "loss": 2.3}
    gradients_<step>.safetensors    what the optimizers were about to use, by the parameters' full names
    weights.safetensors             parameters and buffers at the end

Gradients are those that an optimizer sees: averaged over all workers, and clipped where the script clips. Types that
numpy does not know are written as float32, which holds all their values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["ParityCapture"]

GatherWhole = Callable[
    [str, Tensor | None], Tensor | None
]  # what all workers have of the tensor of this name, put together; all call it


class ParityCapture:
    """Writes one run's captures into one directory; on other workers than 0 it does nothing."""

    def __init__(self, directory: Path, worker_rank: int) -> None:
        self._directory = directory
        self._is_writer = worker_rank == 0
        self._step = 0
        self._seen: dict[str, Tensor] = {}  # gradients of the present step: several optimizers share its file
        if self._is_writer:
            directory.mkdir(parents=True, exist_ok=True)

    def loss(self, step: int, loss: float) -> None:
        """Note the loss of a committed step."""
        if self._is_writer:
            with open(self._directory / "losses.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")

    def gradients(self, step: int, parameters: Iterable[tuple[str, Tensor]], whole: GatherWhole) -> None:
        """Note averaged gradients as an optimizer is about to use them; several optimizers share one file per step."""
        if step != self._step:
            self._step, self._seen = step, {}
        for name, parameter in parameters:
            gradient = whole(name, parameter.grad)
            if self._is_writer and gradient is not None:
                self._seen[name] = _portable(gradient)
        if self._is_writer:
            self._write(f"gradients_{step}", self._seen)

    def weights(self, models: Mapping[str, nn.Module], whole: GatherWhole) -> None:
        """Note the parameters and buffers of all models; a tied parameter has its first name."""
        found: dict[str, Tensor] = {}
        for prefix, model in models.items():
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
                complete = whole(f"{prefix}.{name}", tensor)
                if self._is_writer and complete is not None:
                    found[f"{prefix}.{name}"] = _portable(complete)
        if self._is_writer:
            self._write("weights", found)

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file  # only parity needs it

        save_file(dict(tensors), self._directory / f"{name}.safetensors")


def _portable(tensor: Tensor) -> Tensor:
    """A copy on the CPU, of a type that numpy has."""
    copy = tensor.detach().to("cpu", copy=True)
    if copy.is_complex():
        copy = torch.view_as_real(copy)
    elif copy.is_floating_point() and copy.dtype is not torch.float64:
        copy = copy.float()
    return copy.contiguous()
