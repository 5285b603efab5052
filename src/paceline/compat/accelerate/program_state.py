"""What checkpoints have of an Accelerate program beside its models and optimizers: its world, and its loops."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paceline.worker.data.random_state import capture_random_state

__all__ = ["LoaderProgress", "ProgramState"]


class LoaderProgress:
    """Where the loops over one loader that trains are.

    `epoch`: of the loop that was begun last, from 0; -1: none was. `is_over`: it has come to its end. `random`: every
    random state as it was when that loop began, and that of the loader's own generator, from which its order of samples
    follows. `order`: the generator's state after the order was drawn.
    """

    def __init__(self) -> None:
        self.epoch, self.is_over = -1, True
        self.random: dict[str, Any] | None = None
        self.order: torch.Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors."""
        return {"epoch": self.epoch, "is_over": self.is_over, "random": self.random, "order": self.order}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.epoch, self.is_over, self.random = state["epoch"], state["is_over"], state["random"]
        self.order = state.get("order")


class ProgramState:
    """Prepared by the accelerator, so that it is in every checkpoint, and comes back from it."""

    def __init__(self) -> None:
        self.processes: int | None = None  # of the world that the program sees; None: not decided yet
        self.loaders: dict[str, LoaderProgress] = {}  # by the names of streams
        self.saved: dict[str, dict[str, Any]] = {}  # of the checkpoint, by the names of streams
        self.random: dict[str, Any] | None = None  # of the checkpoint

    def loader(self, name: str) -> LoaderProgress:
        """The progress of a stream."""
        return self.loaders.setdefault(name, LoaderProgress())

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        unused = {name: saved for name, saved in self.saved.items() if name not in self.loaders}
        return {
            "processes": self.processes,
            "loaders": {**unused, **{name: one.state_dict() for name, one in self.loaders.items()}},
            "random": capture_random_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.processes = state["processes"]
        self.saved, self.random = dict(state["loaders"]), state["random"]
