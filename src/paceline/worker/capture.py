"""Captures for `paceline parity`: each step's loss and gradients, and the weights at the end, written by worker 0."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor, nn

__all__ = ["Capture"]


class Capture:
    """Writes losses.jsonl, gradients_<step>.safetensors and weights.safetensors into one directory."""

    def __init__(self, directory: Path, worker_rank: int) -> None:
        self._directory = directory
        self._is_writer = worker_rank == 0
        self._seen: dict[int, dict[str, Tensor]] = {}
        if self._is_writer:
            directory.mkdir(parents=True, exist_ok=True)

    def loss(self, step: int, loss: float) -> None:
        """Note the loss of a committed step."""
        if self._is_writer:
            with open(self._directory / "losses.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss}) + "\n")

    def gradients(self, step: int, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Note averaged gradients as an optimizer is about to see them; several optimizers add up to one file a step."""
        if self._is_writer:
            found = self._seen.setdefault(step, {})
            found.update({name: p.grad.detach().cpu().clone() for name, p in parameters if p.grad is not None})
            self._write(f"gradients_{step}", found)

    def weights(self, models: Mapping[str, nn.Module]) -> None:
        """Note the parameters and buffers of all models."""
        if self._is_writer:
            found = {
                f"{prefix}.{name}": tensor.detach().cpu().clone()
                for prefix, model in models.items()
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            }
            self._write("weights", found)

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file  # only parity needs it

        save_file({key: value.contiguous() for key, value in tensors.items()}, self._directory / f"{name}.safetensors")
