"""Captures for `paceline parity`: each step's loss and gradients, and the state at the end, written by worker 0.

    losses.jsonl                    one line per committed step: {"step": 1, "loss": 2.3}
    gradients_<step>.safetensors    what the optimizers were about to use, by the parameters' full names
    weights.safetensors             parameters at the end
    buffers.safetensors             buffers at the end
    optimizers.safetensors          what optimizers keep for each parameter, at the end: `exp_avg of model.0.weight`
    optimizers.json                 class and whole-numbered options of each optimizer

Gradients are those that an optimizer sees: averaged over all workers, and clipped where the script clips. Types that
numpy does not know are written as float32, which holds all their values.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["BARE_LOOP", "DRAWS_BY_UNIT", "GatherWhole", "ParityCapture", "portable"]

# Files that the command puts there:
BARE_LOOP = "bare_loop"  # the run is to take its steps by a plain torch loop
DRAWS_BY_UNIT = "draws_by_unit"  # each unit of a model is to draw the random numbers that it draws under stages

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

    @property
    def wants_bare_loop(self) -> bool:
        """Whether the run is to take its steps by a plain torch loop, with none of Paceline's step code."""
        return (self._directory / BARE_LOOP).exists()

    @property
    def wants_draws_by_unit(self) -> bool:
        """Whether each unit of a model is to draw the random numbers that it draws under pipeline stages."""
        return (self._directory / DRAWS_BY_UNIT).exists()

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
                self._seen[name] = portable(gradient)
        if self._is_writer:
            self._write(f"gradients_{step}", self._seen)

    def weights(self, models: Mapping[str, nn.Module], whole: GatherWhole) -> None:
        """Note the parameters and buffers of all models; a tied parameter has its first name."""
        parameters = [
            (f"{prefix}.{name}", p) for prefix, model in models.items() for name, p in model.named_parameters()
        ]
        buffers = [(f"{prefix}.{name}", b) for prefix, model in models.items() for name, b in model.named_buffers()]
        for file, tensors in (("weights", parameters), ("buffers", buffers)):
            found: dict[str, Tensor] = {}
            for name, tensor in tensors:
                complete = whole(name, tensor)
                if self._is_writer and complete is not None:
                    found[name] = portable(complete)
            if self._is_writer:
                self._write(file, found)

    def optimizers(
        self,
        optimizers: Mapping[str, Optimizer],
        names: Mapping[int, str],
        whole: GatherWhole,
        keys: Callable[[str, Sequence[str]], Sequence[str]] = lambda _, here: here,
    ) -> None:
        """Note what optimizers keep for each parameter; `names` by the parameters' ids. `keys(name, here)`: what the
        worker that has the parameter keeps for it; all workers call it."""
        found: dict[str, Tensor] = {}
        for optimizer in optimizers.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                name = names[id(parameter)]
                state = optimizer.state.get(parameter, {})
                here = sorted(key for key, value in state.items() if isinstance(value, Tensor))
                for key in keys(name, here):
                    complete = whole(name, state.get(key))
                    if self._is_writer and complete is not None:
                        found[f"{key} of {name}"] = portable(complete)
        if self._is_writer:
            self._write("optimizers", found)
            facts = [{"class": type(one).__name__, "options": _whole_numbers(one)} for one in optimizers.values()]
            (self._directory / "optimizers.json").write_text(json.dumps(facts), encoding="utf-8")

    def _write(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file  # only parity needs it

        save_file(dict(tensors), self._directory / f"{name}.safetensors")


def _whole_numbers(optimizer: Optimizer) -> dict[str, int]:
    """The options of an optimizer that may be numbers of steps."""
    options = {key: value for group in optimizer.param_groups for key, value in group.items()}
    options |= {key: value for key, value in vars(optimizer).items() if not key.startswith("_")}
    return {key: value for key, value in options.items() if type(value) is int}


def portable(tensor: Tensor) -> Tensor:
    """A copy on the CPU, of a type that numpy has."""
    copy = tensor.detach().to("cpu", copy=True)
    if copy.is_complex():
        copy = torch.view_as_real(copy)
    elif copy.is_floating_point() and copy.dtype is not torch.float64:
        copy = copy.float()
    return copy.contiguous()
