"""Where a configuration departs from its reference: the first module, in the order of the computation. Needs numpy.

`paceline.worker.record.module_capture` has written what each module got and returned, and the gradients that came back,
in three runs: the configuration, its reference, and the reference with weights changed by one rounding. The third tells
the level of noise of each tensor. A tensor *departs* where it differs from the reference by `margin` times as much:

    difference   rms(a - b) / rms(b)      a: the configuration's tensor or a part of it, b: the reference's
    noise        the same of the perturbed reference; at least the median of all tensors of its kind, and one rounding

Tensors are looked at in this order, step by step, and the first that departs names the module:

    weights, buffers     before the step: what the start, or the step before, has made of them
    micro-batches        which of them were run
    forward              what modules got and returned, in the reference's order
    loss                 of the whole step
    backward             gradients of what modules got and returned, in the reference's order
    gradients            of parameters, after their sum over the workers
    clipping             of parameters, as the optimizer uses them
    update               weights after the step, where the gradients were right
    optimizer            what optimizers keep at the end, where the weights are right

Of a wire with error feedback the gradients may differ, and what follows them: what it sends and keeps must not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.cli.parity.compare import Difference
from paceline.cli.parity.distances import distance, figure, floor_of, noise_of
from paceline.cli.parity.module_records import (
    ModuleReader,
    StepRecords,
    TensorRecord,
    owner_of,
    part_of,
    rms,
)

__all__ = ["MARGIN", "MARGIN_OF_HALF", "Departure", "locate"]

MARGIN = 50.0  # times the noise: sums of many numbers differ by several roundings
MARGIN_OF_HALF = 8.0  # its sums are of single precision, so single roundings differ
ALL = 0.8  # of the parameters: an error of more is none of a module
SAME_FACTOR = 1e-2  # relative spread of the factors of gradients that differ by a common one
WIRE_NOISE = 2e-7  # of sums of single precision, relative to the largest number
CLOSE = 0.02  # relative, between a norm and what would explain it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Departure:
    """The first place at which a configuration departs from its reference."""

    step: int
    phase: str
    module: str  # full name; the model's own name where all of it departs
    what: str  # in words
    difference: float
    noise: float
    worker: int | None = None
    margin: float = MARGIN

    def __str__(self) -> str:
        by = f"by {figure(self.difference)}"
        if self.noise:
            by += f" (tolerance {figure(self.margin * self.noise)}, from rounding)"
        return f"first departs in {self.module}, {self.phase} of step {self.step}: {self.what} differs {by}"


def locate(
    capture: Path,
    reference: Path,
    perturbed: Path,
    *,
    steps: int,
    margin: float = MARGIN,
    reported: Difference | None = None,
) -> Departure | None:
    """Return where a configuration departs first; None where it does not. The three are directories of captures, with
    the modules of the first `steps` steps. `margin`: times the noise that pass. `reported`: a value of the script that
    differs too much."""
    search = _Search(ModuleReader(capture), ModuleReader(reference), ModuleReader(perturbed), margin)
    for step in range(1, steps + 1):
        found = search.in_step(step)
        if found is not None:
            return found
    return search.at_end(steps) or search.reported(reported)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Judged:
    """One comparison."""

    name: str
    difference: float
    noise: float
    worker: int
    margin: float

    @property
    def departs(self) -> bool:
        return not self.difference <= self.margin * self.noise


class _Search:
    """Compares the captures of one configuration."""

    def __init__(self, ours: ModuleReader, theirs: ModuleReader, noisy: ModuleReader, margin: float) -> None:
        self._ours, self._theirs, self._noisy, self._margin = ours, theirs, noisy, margin
        self._order: dict[str, int] = {}  # of modules, in the reference's forward

    def in_step(self, step: int) -> Departure | None:
        """The first departure in a step."""
        theirs = self._theirs.step(step)
        self._order = self._order or theirs.forward_order()
        looks: Sequence[Callable[[], Departure | None]] = (
            lambda: self._weights(step, f"start_{step}"),
            lambda: self._buffers(step, f"buffers_{step}"),
            lambda: self._micro_batches(step, theirs),
            lambda: self._tensors(step, theirs, is_gradient=False),
            lambda: self._loss(step),
            lambda: self._tensors(step, theirs, is_gradient=True),
            lambda: self._gradients(step),
            lambda: self._clipping(step),
        )
        if self._ours.wire:  # what comes of it differs by what it leaves for later, and so does all that follows
            looks = looks[:6] if step == 1 else ()
            found = next((found for look in looks if (found := look()) is not None), None)
            return found or self._wire(step)
        return next((found for look in looks if (found := look()) is not None), None)

    def at_end(self, step: int) -> Departure | None:
        """The departure of the state after the last step."""
        if self._ours.wire:
            return None
        return self._weights(step + 1, "weights") or self._buffers(step + 1, "buffers") or self._optimizers(step)

    def reported(self, found: Difference | None) -> Departure | None:
        """The departure of what the script reports, where all that it is computed from agrees."""
        if found is None:
            return None
        what = f"only {found.where}, which the script reports,"
        one = _Judged(name=found.where, difference=found.value, noise=0.0, worker=0, margin=self._margin)
        return _departure(found.step or 1, "reports", self._root, what, one)

    @property
    def _root(self) -> str:
        return next(iter(sorted(self._order, key=lambda name: name.count("."))), "model")

    # ------------------------------------------------------------------------------------------ whole named tensors

    def _compare(self, name: str) -> list[_Judged]:
        """Compare a file of named tensors, of all workers, in the reference's order of modules."""
        theirs, noisy = self._theirs.whole(name, 0), self._noisy.whole(name, 0)
        noises = {key: distance(noisy.get(key), tensor) for key, tensor in theirs.items()}
        floor = floor_of(noises.values(), theirs.values())
        judged: list[_Judged] = []
        for worker in range(self._ours.num_workers):
            ours = self._ours.whole(name, worker)
            for key in theirs.keys() | ours.keys() if ours else ():
                difference = distance(ours.get(key), theirs.get(key))
                noise = max(noises.get(key, 0.0), floor)
                judged.append(_Judged(name=key, difference=difference, noise=noise, worker=worker, margin=self._margin))
        return sorted(judged, key=lambda one: (self._place(one.name), one.name, one.worker))

    def _place(self, parameter: str) -> int:
        return self._order.get(owner_of(parameter), len(self._order))

    def _weights(self, step: int, file: str) -> Departure | None:
        is_first = step == 1
        judged = self._compare(file)
        departed = [one for one in judged if one.departs]
        if not departed:
            return None
        what = "as it is split or sent to the workers" if is_first else "after the optimizer's step, of right gradients"
        return self._of_parameters(
            1 if is_first else step - 1, "weights" if is_first else "update", judged, departed[0], what
        )

    def _buffers(self, step: int, file: str) -> Departure | None:
        departed = [one for one in self._compare(file) if one.departs]
        if not departed:
            return None
        one = departed[0]
        return _departure(max(step - 1, 1), "buffers", owner_of(one.name), f"the buffer {one.name}", one)

    def _optimizers(self, step: int) -> Departure | None:
        """What optimizers keep at the end: `exp_avg of model.0.weight`."""
        judged = self._compare("optimizers")
        departed = [one for one in judged if one.departs]
        if not departed:
            return None
        what = "of what the optimizer keeps, with right weights"
        return self._of_parameters(step, "optimizer", judged, departed[0], what)

    def _gradients(self, step: int) -> Departure | None:
        for number in range(self._theirs.num_passes(step)):
            judged = self._compare(f"summed_{step}_{number}")[::-1]  # backward's order
            departed = [one for one in judged if one.departs]
            if departed:
                factor = self._common_factor(f"summed_{step}_{number}", judged)
                what = "its gradient after the sum over the workers"
                if factor is not None:
                    what += f" (all gradients are {factor:.4g} times the reference's)"
                return self._of_parameters(step, "gradients", judged, departed[0], what)
        return None

    def _wire(self, step: int) -> Departure | None:
        """Where what a wire with error feedback sends and keeps is not the gradient."""
        rows = sorted((one for one in self._ours.wire if one.step == step), key=lambda one: self._place(one.where))
        judged = [
            _Judged(name=one.where, difference=one.value, noise=WIRE_NOISE, worker=0, margin=MARGIN) for one in rows
        ]
        departed = [one for one in judged if one.departs]
        if not departed:
            return None
        return self._of_parameters(step, "wire", judged, departed[0], "what its gradient's error feedback keeps")

    def _clipping(self, step: int) -> Departure | None:
        name = f"gradients_{step}"
        judged = self._compare(name)[::-1]
        departed = [one for one in judged if one.departs]
        if not departed:
            return None
        factor = self._common_factor(name, judged)
        if factor is None:
            return self._of_parameters(step, "clipping", judged, departed[0], "its gradient as the optimizer uses it")
        found = self._of_parameters(
            step, "clipping", judged, departed[0], f"gradients as the optimizer uses them ({factor:.4g} times right)"
        )
        guess = self._norm_lacks(step, factor)
        if guess is None:
            return found
        module, text = guess
        return dataclasses.replace(found, module=module, what=f"the norm for clipping, which {text}")

    def _of_parameters(self, step: int, phase: str, judged: Sequence[_Judged], first: _Judged, what: str) -> Departure:
        """The departure of one parameter, or that of all."""
        names = {one.name for one in judged if one.departs}
        known = {one.name for one in judged}
        if len(known) > 1 and len(names) >= ALL * len(known):
            root = owner_of(first.name).partition(".")[0]
            return _departure(step, phase, root, f"every parameter, {what}", first)
        others = len(names) - 1
        more = f" (and {others} other{'s' * (others > 1)})" if others else ""
        return _departure(step, phase, owner_of(first.name), f"{first.name}{more}, {what}", first)

    def _common_factor(self, name: str, judged: Sequence[_Judged]) -> float | None:
        """The factor between our gradients and right ones, where it is the same for all."""
        theirs, ours = self._theirs.whole(name, 0), self._ours.whole(name, judged[0].worker)
        factors: list[float] = []
        for one in judged:
            a, b = ours.get(one.name), theirs.get(one.name)
            if a is None or b is None or a.shape != b.shape or one.noise > SAME_FACTOR or not np.any(b):
                continue
            factors.append(float(np.vdot(a.astype(np.float64), b) / np.vdot(b.astype(np.float64), b)))
        if len(factors) < 2 or min(factors) <= 0 or max(factors) - min(factors) > SAME_FACTOR * max(factors):
            return None
        return float(np.median(factors))

    def _norm_lacks(self, step: int, factor: float) -> tuple[str, str] | None:
        """What a wrong norm for clipping has left out, or counted more than once: a module, and it in words."""
        last = self._theirs.num_passes(step) - 1
        summed, clipped = self._theirs.whole(f"summed_{step}_{last}", 0), self._theirs.whole(f"gradients_{step}", 0)
        squares = {key: float(np.sum(tensor.astype(np.float64) ** 2)) for key, tensor in summed.items()}
        right = sum(squares.values())
        used = sum(float(np.sum(tensor.astype(np.float64) ** 2)) for tensor in clipped.values())
        if not 0 < used < right * (1 - SAME_FACTOR):
            return None  # it clipped nothing
        missing = right - right / factor**2  # of the square of the norm; negative: counted again
        candidates = self._groups(squares, self._ours.own_squares(step, last))
        best = min(candidates, key=lambda one: abs(abs(missing) - one[2]), default=None)
        if best is None or abs(abs(missing) - best[2]) > CLOSE * abs(missing):
            return None
        module, text, _ = best
        return module, f"{'leaves out' if missing > 0 else 'counts more than once'} {text}"

    def _groups(self, squares: dict[str, float], own: Sequence[dict[str, float]]) -> list[tuple[str, str, float]]:
        """Sets of parameters that a norm may lack, with their share of its square: what is split, and each module.
        `own`: by worker, the squares of the parts that it has."""
        splits, found = self._ours.splits, list[tuple[str, str, float]]()
        ways: dict[str, list[str]] = {
            way: [name for name in squares if splits.get(name) == way] for way in splits.values()
        }
        ways["of experts"] = [name for name in squares if splits.get(name, "").startswith("of experts")]
        ways["not whole on each worker"] = [name for name in squares if name in splits]
        for way, names in ways.items():
            if not names:
                continue
            ordered = sorted(names, key=self._place)
            module, such = owner_of(ordered[0]), f"{way} ({ordered[0]} and so on)"
            share = sum(squares[name] for name in names)
            found.append((module, f"the parameters that are {such}", share))
            for worker, parts in enumerate(own):
                rest = share - sum(parts.get(name, 0.0) for name in names)
                found.append((module, f"the parts that other workers than {worker} have of what is {such}", rest))
        whole = sorted(squares.keys() - splits.keys(), key=self._place)
        if whole and ways:
            share = sum(squares[name] for name in whole)
            found.append((owner_of(whole[0]), f"the parameters that are whole on all workers ({whole[0]} ...)", share))
        modules = {name.rpartition(".")[0] for name in squares}
        modules |= {".".join(name.split(".")[:depth]) for name in modules for depth in range(2, name.count(".") + 1)}
        for module in sorted(modules):
            share = sum(square for name, square in squares.items() if name.startswith(f"{module}."))
            found.append((module, f"the parameters of {module}", share))
        return found

    # --------------------------------------------------------------------------------------------- of micro-batches

    def _micro_batches(self, step: int, theirs: StepRecords) -> Departure | None:
        ours = self._ours.step(step)
        missing, more = theirs.micros - ours.micros, ours.micros - theirs.micros
        if not (missing or more):
            return None
        root = theirs.root or "the model"
        names = ", ".join(str(number) for _, number in sorted(missing or more))
        what = (
            f"micro-batch {names}, which no worker ran," if missing else f"micro-batch {names}, which does not exist,"
        )
        return Departure(step=step, phase="micro-batches", module=root, what=what, difference=1.0, noise=0.0)

    def _loss(self, step: int) -> Departure | None:
        ours, theirs, noisy = (reader.losses for reader in (self._ours, self._theirs, self._noisy))
        if step not in theirs or step not in ours:
            return None
        scale = abs(theirs[step]) or 1.0
        noise = max(abs(noisy.get(step, theirs[step]) - theirs[step]) / scale, float(np.finfo(np.float32).eps))
        difference = abs(ours[step] - theirs[step]) / scale
        one = _Judged(name="loss", difference=difference, noise=noise, worker=0, margin=self._margin)
        if not one.departs:
            return None
        return _departure(step, "loss", self._root, "the mean of the losses, of right outputs,", one)

    def _tensors(self, step: int, theirs: StepRecords, *, is_gradient: bool) -> Departure | None:
        """The first tensor of a forward, or gradient of a backward, in the reference's order over all micro-batches."""
        ours, noisy = self._ours.step(step), self._noisy.step(step)
        records = [one for one in theirs.records if one.is_gradient == is_gradient and one.key and not one.is_void]
        noises = {one.place: noise_of(one, theirs, noisy) for one in records}
        floor = floor_of(noises.values(), [theirs.array(one) for one in records[:1]])
        first: tuple[int, int, _Judged] | None = None
        for micro in sorted(theirs.micros):
            sequence = [one for one in records if one.micro == micro]
            for number, one in enumerate(sequence):
                if first is not None and number >= first[0]:
                    break
                judged = self._judge(one, ours, theirs, max(noises[one.place], floor))
                if judged is not None and judged.departs:
                    first = number, theirs.records.index(one), judged
                    break
        if first is None:
            return None
        record = theirs.records[first[1]]
        sequence = [one for one in records if one.micro == record.micro]
        module, what = (_backward_cause if is_gradient else _forward_cause)(theirs, sequence, record)
        arrived = [one for one in sequence if one.tensor == record.tensor and one.kind == "input"]
        judged = [self._judge(one, ours, theirs, max(noises[one.place], floor)) for one in arrived]
        if is_gradient and record.kind == "output" and any(one is not None and not one.departs for one in judged):
            module, what = record.module, f"the gradient of what {record.module} returns, on its way between workers,"
        number = f" of micro-batch {record.micro[1]}"
        return _departure(step, "backward" if is_gradient else "forward", module, what + number, first[2])

    def _judge(self, record: TensorRecord, ours: StepRecords, theirs: StepRecords, noise: float) -> _Judged | None:
        """Compare what all workers have of a tensor; None where nothing of it can be compared."""
        b = theirs.array(record)
        worst: _Judged | None = None
        for part in ours.parts(record):
            a = ours.array(part)
            whole = part_of(b, part.pieces)
            if whole is None or a.shape != whole.shape:
                continue
            difference = distance(a, whole, scale=rms(b))
            if worst is None or not difference <= worst.difference:
                worst = _Judged(
                    name=record.module, difference=difference, noise=noise, worker=part.worker, margin=self._margin
                )
        return worst


def _forward_cause(theirs: StepRecords, sequence: Sequence[TensorRecord], first: TensorRecord) -> tuple[str, str]:
    """The module that made a tensor of a forward, and the tensor in words."""
    if first.kind == "output":
        return first.module, f"what {first.module} returns"
    outermost = theirs.users_of(first)[-1]  # a module hands on what it was given
    caller = theirs.caller_of(outermost)
    if caller == outermost:
        return caller, f"what {caller} is given"
    return caller, f"what {caller} computes itself for {outermost}"


def _backward_cause(theirs: StepRecords, sequence: Sequence[TensorRecord], first: TensorRecord) -> tuple[str, str]:
    """The module whose backward made a gradient, and the gradient in words.

    The gradient of a module's input was made by this module, the gradient of its output by those that use it.
    """
    if first.kind == "input" and not any(one.tensor == first.tensor and one.kind == "output" for one in sequence):
        users = theirs.users_of(first)
        before = _before(sequence, first)
        module = before.module if before is not None and before.module in users else first.module
        return module, f"the gradient that {module} gives for its input"
    before, users = _before(sequence, first), theirs.users_of(first)
    if before is None:
        same = [one.module for one in sequence if one.tensor == first.tensor and one.kind == "output"]
        outermost = min(same, key=lambda name: name.count("."), default=first.module)
        return outermost, f"the gradient of what {outermost} returns, which the loss gives,"
    makers = {one.module for one in sequence if one.tensor == before.tensor and one.kind == "output"}
    made = next((one for one in users if one in makers), None)  # a module may return what one inside it has returned
    if made is not None:
        return made, f"the gradient that {made} gives for its input"
    inner = [one for one in users if before.module.startswith(f"{one}.")]
    if inner:
        return inner[0], f"the gradient that {inner[0]} gives for its input"
    shared = theirs.common_caller(first.module, before.module)
    return shared, f"the gradient that {shared}'s own code between {first.module} and {before.module} gives"


def _before(sequence: Sequence[TensorRecord], first: TensorRecord) -> TensorRecord | None:
    """The gradient that came just before this one, of another tensor."""
    earlier = [one for one in sequence[: sequence.index(first)] if one.tensor != first.tensor]
    return earlier[-1] if earlier else None


def _departure(step: int, phase: str, module: str, what: str, judged: _Judged) -> Departure:
    return Departure(
        step=step,
        phase=phase,
        module=module,
        what=what,
        difference=judged.difference,
        noise=judged.noise,
        worker=judged.worker,
        margin=judged.margin,
    )
