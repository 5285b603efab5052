"""Counts the collectives of a step, and their bytes: those that torch dispatches, or those of Paceline's groups.

Both count a collective once, with the bytes of the whole tensor that it is about: of a gather what comes out, of a
scatter what goes in.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.comm.elastic.generation_group import ElasticGroup

__all__ = ["Counts", "Dispatched", "watch_groups"]

KINDS = {"all_reduce": 0, "all_gather_into_tensor": 1, "reduce_scatter_tensor": 0, "all_to_all_single": 0}


class Counts:
    """What was counted since the last `clear`: how often each kind, and how many bytes."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, int]] = {}

    def add(self, kind: str, num_bytes: int) -> None:
        calls, total = self.found.get(kind, (0, 0))
        self.found[kind] = (calls + 1, total + num_bytes)

    def write(self, out: str, worker_rank: int) -> None:
        """Write OUT.RANK."""
        Path(f"{out}.{worker_rank}").write_text(json.dumps(self.found))


class Dispatched(TorchDispatchMode):
    """Counts what torch dispatches within it."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("_c10d_functional::") and (kind := name.split("::")[1].rstrip("_")) in KINDS:
            tensor = out if KINDS[kind] else args[0]
            self._counts.add(kind.removesuffix("_tensor").removesuffix("_into"), num_bytes_of(tensor))
        elif name.startswith("c10d::") and not name.endswith("barrier"):
            self._counts.add(name.removeprefix("c10d::"), 0)
        return out


def watch_groups(counts: Counts, of_layers: Callable[[str], bool]) -> None:
    """From now on count what this process's groups do; what is not about layers counts under another name."""

    def watched(kind: str, about: Callable[[tuple[Any, ...]], int]) -> None:
        original = getattr(ElasticGroup, kind)

        def counting(group: ElasticGroup, *args: Any, what: str) -> Any:
            if group.size > 1:
                counts.add(kind if of_layers(what) else f"besides: {what}", about(args))
            return original(group, *args, what=what)

        setattr(ElasticGroup, kind, counting)

    watched("all_reduce", lambda args: num_bytes_of(args[0]))
    watched("all_gather", lambda args: sum(map(num_bytes_of, args[1])))
    watched("reduce_scatter", lambda args: sum(map(num_bytes_of, args[0])))


def num_bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
