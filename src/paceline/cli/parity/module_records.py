"""Reads what `paceline.worker.record.module_capture` has written: tensors of modules, and whole named tensors."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.cli.parity.compare import CaptureReader

__all__ = ["Array", "ModuleReader", "StepRecords", "TensorRecord", "owner_of", "part_of", "rms"]

Array: TypeAlias = NDArray[Any]
Pieces: TypeAlias = tuple[tuple[int, tuple[tuple[int, int], ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TensorRecord:
    """What a captured tensor is; see `TensorNote` there."""

    key: str
    kind: str  # "input" or "output"
    is_gradient: bool
    micro: tuple[int, int]
    module: str
    call: int
    item: int
    tensor: int
    pieces: Pieces
    is_void: bool
    worker: int

    @property
    def place(self) -> tuple[Any, ...]:
        """What it has in common with the same tensor of another run."""
        return self.kind, self.is_gradient, self.micro, self.module, self.call, self.item


class StepRecords:
    """What all workers captured of the modules in one step."""

    def __init__(self, records: list[TensorRecord], files: dict[int, Path]) -> None:
        self.records, self._files = records, files
        self.micros = {one.micro for one in records if not one.is_void}
        self._by_place: dict[tuple[Any, ...], list[TensorRecord]] = {}
        for one in records:
            if one.key and not one.is_void:
                self._by_place.setdefault(one.place, []).append(one)
        self._called = {one.module for one in records}

    def parts(self, record: TensorRecord) -> list[TensorRecord]:
        """What the workers of this run have of a tensor of another run."""
        return self._by_place.get(record.place, [])

    def array(self, record: TensorRecord) -> Array:
        """The tensor itself."""
        return _file(self._files[record.worker])[record.key]

    @property
    def root(self) -> str:
        """The name of the model whose modules were called first."""
        return min(self._called, key=lambda name: name.count("."), default="")

    def forward_order(self) -> dict[str, int]:
        """The modules, by the order in which their forwards first ended."""
        found: dict[str, int] = {}
        for one in self.records:
            if not one.is_gradient and one.kind == "output":
                found.setdefault(one.module, len(found))
        return found

    def caller_of(self, module: str) -> str:
        """The nearest module around this one that was called; itself where there is none."""
        parts = module.split(".")
        for depth in range(len(parts) - 1, 0, -1):
            if ".".join(parts[:depth]) in self._called:
                return ".".join(parts[:depth])
        return module

    def common_caller(self, one: str, other: str) -> str:
        """The innermost called module around both."""
        shared: list[str] = []
        for a, b in zip(one.split("."), other.split("."), strict=False):
            if a != b:
                break
            shared.append(a)
        name = ".".join(shared)
        return name if name in self._called else self.caller_of(name) if name else self.root

    def users_of(self, record: TensorRecord) -> list[str]:
        """The modules that got this tensor as an input, the innermost first."""
        found = {
            one.module
            for one in self.records
            if one.kind == "input" and one.tensor == record.tensor and one.micro == record.micro
        }
        return sorted(found, key=lambda name: -name.count("."))


class ModuleReader:
    """The module captures of one run."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._capture = CaptureReader(directory)
        found = [re.search(r"_worker_(\d+)\.json$", path.name) for path in directory.glob("modules_*_worker_*.json")]
        self.num_workers = 1 + max((int(match[1]) for match in found if match), default=0)
        self.losses, self.wire = self._capture.losses, self._capture.wire
        self.splits: dict[str, str] = {}  # how parameters are split, in words, by their names
        for path in directory.glob("splits_worker_*.json"):
            self.splits.update(json.loads(path.read_text(encoding="utf-8")))

    def step(self, step: int) -> StepRecords:
        """What was captured of the modules in a step."""
        return _step(self._directory, step, self.num_workers)

    def num_passes(self, step: int) -> int:
        """How many gradient passes a step had."""
        return len(list(self._directory.glob(f"summed_{step}_*_worker_0.safetensors")))

    def own_squares(self, step: int, number: int) -> list[dict[str, float]]:
        """By worker, the squares of the norms of its own parts of the gradients after their sum in a pass."""
        paths = [self._directory / f"squares_{step}_{number}_worker_{rank}.json" for rank in range(self.num_workers)]
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()]

    def whole(self, name: str, worker: int) -> dict[str, Array]:
        """The named tensors of one file of a worker; none where there is no such file."""
        if name in ("weights", "buffers", "optimizers") or name.startswith(
            "gradients_"
        ):  # those that every comparison has
            path = self._directory / f"{name}.safetensors"
            return _file(path) if worker == 0 and path.exists() else {}
        path = self._directory / f"{name}_worker_{worker}.safetensors"
        return _file(path) if path.exists() else {}


@functools.lru_cache(maxsize=8)
def _step(directory: Path, step: int, num_workers: int) -> StepRecords:
    records: list[TensorRecord] = []
    files: dict[int, Path] = {}
    for worker in range(num_workers):
        path = directory / f"modules_{step}_worker_{worker}.json"
        if not path.exists():
            continue
        files[worker] = path.with_suffix(".safetensors")
        for row in json.loads(path.read_text(encoding="utf-8")):
            pieces = tuple((dim, tuple((a, b) for a, b in ranges)) for dim, ranges in row["pieces"])
            fields: dict[str, Any] = {**row, "micro": tuple(row["micro"]), "pieces": pieces, "worker": worker}
            records.append(TensorRecord(**fields))
    return StepRecords(records, files)


@functools.lru_cache(maxsize=32)
def _file(path: Path) -> dict[str, Array]:
    from safetensors.numpy import load_file  # only parity needs it

    return load_file(path)


def owner_of(parameter: str) -> str:
    """The name of the module that has a parameter or a buffer of this name, also of `exp_avg of model.0.weight`."""
    return parameter.rpartition(" of ")[2].rpartition(".")[0]


def part_of(whole: Array, pieces: Pieces) -> Array | None:
    """The part of a whole array that pieces describe; None where they do not fit it."""
    for dim, ranges in pieces:
        if not 0 <= dim < whole.ndim or any(stop > whole.shape[dim] for _, stop in ranges):
            return None
        whole = np.concatenate([whole.take(range(start, stop), axis=dim) for start, stop in ranges], axis=dim)
    return whole


def rms(array: Array) -> float:
    """The root of the mean square; 0 of an empty array."""
    return float(np.sqrt(np.mean(np.square(array.astype(np.float64))))) if array.size else 0.0
