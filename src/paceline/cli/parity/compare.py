"""The arithmetic of `paceline parity`: by how much two captures of the same steps differ. Needs numpy, no torch.

A difference is relative to something, and what that is decides whether the figure means anything:

    loss      |a - b| / |b|            with |b| at least FLOOR times the reference's largest loss
    tensor    max |a - b| / max |b|    with max |b| at least FLOOR times that of the reference's largest tensor

a is the configuration, b the reference, max goes over the elements of one tensor, and the figure is the worst tensor's.
The floor is for tensors that are zero in exact arithmetic, such as the gradient of a bias before a batch norm: all that
is in them is rounding, which differs by 100 % and means nothing.

Weights need one thing more. An optimizer of Adam's kind divides an element's gradient by its own size, so a gradient
that is only rounding becomes a full step of the learning rate, in a direction that rounding chose. An element whose
first gradient is below SMALL of its tensor's largest (or of the floor) is therefore left out of the weights' figure,
and shown beside it. Buffers may differ by as much as these elements before it counts: the running mean of a batch norm
follows the bias before it, and the loss sees neither.

Wires with error feedback are compared with themselves: what they send and keep must add up to the gradients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["FLOOR", "SMALL", "CaptureReader", "Difference", "Differences", "compare", "first_step_over"]

FLOOR = 0.01
SMALL = 1e-3

Array: TypeAlias = NDArray[Any]
Metrics: TypeAlias = Mapping[tuple[str, int], float]  # by name and step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The largest relative difference of one kind; infinite where one side is missing or not finite."""

    value: float = 0.0
    where: str = ""  # the tensor
    step: int | None = None  # None: at the end


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """By how much a configuration differs from its reference."""

    num_steps: int
    loss: Difference
    first_gradients: Difference  # at the first step, where both sides still have the same weights
    gradients: Difference  # over all steps
    weights: Difference  # of parameters at the end, without the elements that are left out
    left_out: Difference  # of these elements alone
    num_left_out: int
    buffers: Difference  # at the end
    optimizers: Difference  # what optimizers keep, at the end, without the elements that are left out
    metrics: tuple[Difference, ...]  # what the script reports: the largest of each
    wire: Difference  # between gradients and what a wire with error feedback has sent of them, and keeps


class CaptureReader:
    """What `paceline.worker.record.parity_capture` wrote into a directory, read one tensor at a time."""

    def __init__(self, directory: Path, metrics: Metrics | None = None) -> None:
        """`metrics`: what the script reported, by name and step."""
        self.metrics = metrics or {}
        self.directory = directory
        self.weights, self.buffers, self.optimizers = (
            directory / f"{kind}.safetensors" for kind in ("weights", "buffers", "optimizers")
        )
        path = directory / "losses.jsonl"
        options = directory / "optimizers.json"
        self.options: list[dict[str, Any]] = json.loads(options.read_text()) if options.exists() else []
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self.losses = {row["step"]: float(row["loss"]) for row in map(json.loads, lines)}
        sent = [
            json.loads(line) for one in directory.glob("wire_worker_*.jsonl") for line in one.open(encoding="utf-8")
        ]
        self.wire = [Difference(value=row["difference"], where=row["name"], step=row["step"]) for row in sent]
        # A step that was skipped, because its gradients were not finite, has none.
        found = {step: directory / f"gradients_{step}.safetensors" for step in self.losses}
        self.gradients = {step: path for step, path in found.items() if path.exists()}


def compare(capture: CaptureReader, reference: CaptureReader) -> Differences:
    """Compare a configuration's capture with its reference's; both must have taken at least one step."""
    by_step = [_gradients(capture, reference, step) for step in sorted(capture.gradients | reference.gradients)]
    left_out = _left_out(capture, reference)
    judged, not_judged, slack, floor = _weights(capture, reference, left_out)
    return Differences(
        num_steps=len(reference.losses),
        loss=_loss(capture.losses, reference.losses),
        first_gradients=by_step[0] if by_step else Difference(),
        gradients=_worst(by_step),
        weights=judged,
        left_out=not_judged,
        num_left_out=sum(int(mask.sum()) for mask in left_out.values()),
        buffers=_buffers(capture.buffers, reference.buffers, slack=slack, floor=floor),
        optimizers=_optimizers(capture.optimizers, reference.optimizers, left_out),
        metrics=_metrics(capture.metrics, reference.metrics),
        wire=_worst(capture.wire),
    )


def first_step_over(capture: CaptureReader, reference: CaptureReader, tolerance: float) -> int:
    """Return the first step whose loss or gradients differ by more; the last one where only the end's weights do."""
    steps = sorted(capture.losses.keys() | reference.losses.keys())
    for step in steps:
        ours, theirs = ({step: losses[step]} if step in losses else {} for losses in (capture.losses, reference.losses))
        has_gradients = step in capture.gradients or step in reference.gradients
        found = [_loss(ours, theirs), *([_gradients(capture, reference, step)] if has_gradients else [])]
        if not _worst(found).value <= tolerance:
            return step
    return steps[-1]


def _loss(ours: dict[int, float], theirs: dict[int, float]) -> Difference:
    floor = FLOOR * max((abs(loss) for loss in theirs.values() if np.isfinite(loss)), default=0.0)
    found: list[Difference] = []
    for step in sorted(ours.keys() | theirs.keys()):
        a, b = (np.asarray(losses[step]) if step in losses else None for losses in (ours, theirs))
        found.append(Difference(value=_relative(_distance(a, b), max(_size(b), floor)), where="loss", step=step))
    return _worst(found)


def _gradients(capture: CaptureReader, reference: CaptureReader, step: int) -> Difference:
    if step not in capture.gradients or step not in reference.gradients:  # only one of them took the step
        return Difference(value=float("inf"), where="all of them", step=step)
    return _tensors(capture.gradients[step], reference.gradients[step], step)


def _tensors(ours: Path, theirs: Path, step: int) -> Difference:
    with _opened(ours) as mine, _opened(theirs) as other:
        floor = FLOOR * other.largest
        found: list[Difference] = []
        for name in sorted(mine.names | other.names):
            b = other.get(name)
            value = _relative(_distance(mine.get(name), b), max(_size(b), floor))
            found.append(Difference(value=value, where=name, step=step))
    return _worst(found)


def _weights(
    capture: CaptureReader, reference: CaptureReader, left_out: dict[str, Array]
) -> tuple[Difference, Difference, float, float]:
    """The difference of what is judged, that of the elements that are left out, by how much these differ, and the least
    size that counts."""
    judged: list[Difference] = []
    not_judged: list[Difference] = []
    slack = 0.0
    with _opened(capture.weights) as mine, _opened(reference.weights) as other:
        floor = FLOOR * other.largest
        for name in sorted(mine.names | other.names):
            a, b = mine.get(name), other.get(name)
            scale = max(_size(b), floor)
            if a is None or b is None or a.shape != b.shape:
                judged.append(Difference(value=float("inf"), where=name))
                continue
            mask = left_out.get(name, np.zeros(b.shape, dtype=bool))
            aside = _distance(a[mask], b[mask])
            slack = max(slack, aside)
            not_judged.append(Difference(value=_relative(aside, scale), where=name))
            judged.append(Difference(value=_relative(_distance(a[~mask], b[~mask]), scale), where=name))
    return _worst(judged), _worst(not_judged), slack, floor


def _buffers(ours: Path, theirs: Path, *, slack: float, floor: float) -> Difference:
    """The difference of buffers; `slack`: what elements of weights that are not judged differ by, and these follow.
    Whole numbers have no slack."""
    found: list[Difference] = []
    with _opened(ours) as mine, _opened(theirs) as other:
        for name in sorted(mine.names | other.names):
            b = other.get(name)
            distance = _distance(mine.get(name), b)
            is_whole = b is not None and not np.issubdtype(b.dtype, np.floating)
            if not is_whole and np.isfinite(distance):
                distance = max(distance - slack, 0.0)
            scale = max(_size(b), 1.0 if is_whole else floor)
            found.append(Difference(value=_relative(distance, scale), where=name))
    return _worst(found)


def _optimizers(ours: Path, theirs: Path, left_out: dict[str, Array]) -> Difference:
    """The difference of what optimizers keep; sizes are those of the same entry, over all parameters."""
    found: list[Difference] = []
    with _opened(ours) as mine, _opened(theirs) as other:
        floors: dict[str, float] = {}
        for name in other.names:
            entry = name.partition(" of ")[0]
            floors[entry] = max(floors.get(entry, 0.0), FLOOR * _size(other.get(name)))
        for name in sorted(mine.names | other.names):
            entry, _, parameter = name.partition(" of ")
            a, b = mine.get(name), other.get(name)
            mask = left_out.get(parameter)
            scale = max(_size(b), floors.get(entry, 0.0))
            if a is not None and b is not None and mask is not None and a.shape == b.shape == mask.shape:
                a, b = a[~mask], b[~mask]
            found.append(Difference(value=_relative(_distance(a, b), scale), where=name))
    return _worst(found)


def _metrics(ours: Metrics, theirs: Metrics) -> tuple[Difference, ...]:
    """The largest difference of each value that the script reports; NaN equals NaN."""
    worst: list[Difference] = []
    for name in sorted({key for key, _ in theirs} | {key for key, _ in ours}):
        mine = {step: value for (key, step), value in ours.items() if key == name}
        other = {step: value for (key, step), value in theirs.items() if key == name}
        floor = FLOOR * max((abs(value) for value in other.values() if np.isfinite(value)), default=0.0)
        found: list[Difference] = []
        for step in sorted(mine.keys() | other.keys()):
            a, b = (np.asarray(values[step]) if step in values else None for values in (mine, other))
            found.append(Difference(value=_relative(_distance(a, b), max(_size(b), floor)), where=name, step=step))
        worst.append(dataclasses.replace(_worst(found), where=name))
    return tuple(worst)


def _left_out(capture: CaptureReader, reference: CaptureReader) -> dict[str, Array]:
    """For each parameter that had a gradient: the elements whose first one was too small to judge by."""
    left_out: dict[str, Array] = {}
    waiting: dict[str, Array] = {}  # elements that had no gradient but exact zeros so far: no optimizer amplifies these
    for step in sorted(capture.gradients.keys() & reference.gradients.keys()):
        with _opened(capture.gradients[step]) as mine, _opened(reference.gradients[step]) as other:
            floor = FLOOR * other.largest
            for name in sorted(mine.names & other.names):
                a, b = mine.get(name), other.get(name)
                if a is None or b is None or a.shape != b.shape:
                    continue
                still = waiting.setdefault(name, np.ones(b.shape, dtype=bool))
                arrived = still & ((a != 0) | (b != 0))
                small = np.abs(b) < SMALL * max(_size(b), floor)
                left_out[name] = left_out.get(name, np.zeros(b.shape, dtype=bool)) | (arrived & small)
                waiting[name] = still & ~arrived
    return left_out


class _TensorFile:
    """An open file of tensors."""

    def __init__(self, file: Any) -> None:
        """`file`: None for one that is not there, and has no tensor."""
        self._file = file
        self.names = frozenset[str](file.keys() if file is not None else ())

    def get(self, name: str) -> Array | None:
        return np.asarray(self._file.get_tensor(name)) if name in self.names else None

    @property
    def largest(self) -> float:
        """The size of the largest tensor."""
        return max((_size(self.get(name)) for name in self.names), default=0.0)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[_TensorFile]:
    from safetensors import safe_open  # only parity needs it

    if not path.exists():  # the run's plan has nothing of this kind on the workers
        yield _TensorFile(None)
        return

    with safe_open(path, framework="np") as file:
        yield _TensorFile(file)


def _size(tensor: Array | None) -> float:
    """max |b| over the elements that are finite."""
    if tensor is None or tensor.size == 0:
        return 0.0
    sizes = np.abs(tensor.astype(np.float64))
    return float(sizes.max(initial=0.0, where=np.isfinite(sizes)))


def _distance(a: Array | None, b: Array | None) -> float:
    """max |a - b|; equal elements, also infinite ones and NaN, do not differ."""
    if a is None or b is None or a.shape != b.shape:
        return float("inf")
    if a.size == 0:
        return 0.0
    with np.errstate(invalid="ignore"):
        distances = np.abs(a.astype(np.float64) - b.astype(np.float64))
    distances = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, distances)
    return float(np.nan_to_num(distances, nan=np.inf, posinf=np.inf).max())


def _relative(distance: float, size: float) -> float:
    if distance == 0.0:
        return 0.0
    return distance / size if size > 0.0 else float("inf")


def _worst(found: list[Difference]) -> Difference:
    return max(found, key=lambda difference: difference.value, default=Difference())
