"""What an optimizer needs to see of the parameters: numbers, rows, whole ones, or all of them. Tried on small tensors.

Most optimizers treat each number by itself, so a worker that holds a part of a parameter can update that part. Some
look at a parameter as a whole: its norm (LARS, LAMB), its rows and columns (Adafactor), its singular values (Muon). On
the parts of a split layer they would silently take other steps. A few look at all parameters together: the norm of all
gradients (some forms of LAMB), or the overall progress (Prodigy). Where no worker has all parameters, each would
compute something else.

A trial compares numbers: a matrix and its halves, a parameter beside others with small and with large gradients. Some
parts act under rare conditions only (AdamP, where a gradient is at right angles to its parameter). So the operations of
the step are watched as well: one that brings numbers of a tensor together (a norm, a product) shows that the optimizer
looks at more than single numbers. Parts that act after many steps are reached as `optimizer_trial` describes.

For embedding tables by rows (sparse gradients) each row must be treated by itself. The optimizer's state is then stored
by rows, too, so it must be dense and have the table's rows.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.remote_tensors import sparse_rows
from paceline.parallel.check.optimizer_trial import (
    NUM_AT_EACH,
    NUM_FIRST,
    CrossElement,
    ElementOps,
    Phase,
    Trial,
    has_counts,
    late_steps,
    preserved_randomness,
    wants_closure,
)
from paceline.parallel.check.parameter_kinds import kinds_of, members_of_kinds

__all__ = [
    "BY_NUMBER",
    "ParameterNeeds",
    "cannot_be_tried",
    "draws_random_numbers",
    "needs_all_parameters",
    "needs_of",
    "needs_whole_parameters",
    "parameters_needed_whole",
    "steps_by_closure",
    "why_not_by_rows",
]

Scope = Literal["numbers", "rows", "whole", "unknown"]

# Known to treat each number by itself, with any options: a trial takes longer than a start may. Tests try them.
BY_NUMBER = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop)

SIDE = 6  # of the first two dims of a trial's parameters; further dims are smaller
WIDE = (160, 136)  # some treat matrices from 128 rows on in another way
NUM_ALIKE = 20  # of similar gradients: estimates of overall progress need that many
APART = 30.0  # factor between the gradients of the other parameter in two trials
SIZES = (1.0, 1e3, 1e-3)  # factors of gradients: some limit their norm


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterNeeds:
    """What an optimizer looks at, as a trial has shown it."""

    scope: Scope  # of one parameter; "unknown": it cannot be tried
    needs_all: bool
    draws: bool  # random numbers
    why: str  # the operation that shows it, or why it cannot be tried; else empty


def needs_of(optimizer: Optimizer) -> ParameterNeeds:
    """Return what an optimizer looks at in the parameters that it holds; it stays as it is."""
    watched = [_watch(optimizer, *one) for one in kinds_of(optimizer)]
    error = next((one.error for one in watched if one.error), "")
    across = next((one.across for one in watched if one.across), "")
    scope: Scope
    if error and not across:
        scope = "unknown"
    elif all(_is_same_in_halves(optimizer, *one, 1) for one in kinds_of(optimizer) if one[1] > 1):
        is_same = all(_is_same_in_halves(optimizer, *one, 0) for one in kinds_of(optimizer))
        scope = "numbers" if is_same and not across else "whole"
    else:
        scope = "rows" if all(_is_same_in_halves(optimizer, *one, 0) for one in kinds_of(optimizer)) else "whole"
    return ParameterNeeds(
        scope,
        needs_all=needs_all_parameters(optimizer),
        draws=any(one.draws for one in watched),
        why=across or error,
    )


def steps_by_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer cannot step without a closure; the optimizer stays as it is."""
    if wants_closure(optimizer):
        return True
    if type(optimizer).__module__.startswith("torch."):
        return False
    for group, dim in kinds_of(optimizer)[:1]:
        value, gradient = _numbers(_shape(dim), 1).to(torch.float32)
        for with_closure in (False, True):
            try:
                with preserved_randomness():
                    Trial(optimizer, [value], group=group, with_closure=with_closure, with_state=True).step([gradient])
            except Exception:  # an optimizer may raise anything
                continue
            return with_closure
    return False


def needs_whole_parameters(optimizer: Optimizer, parameters: Collection[Tensor] | None = None) -> bool:
    """Return whether the update of a parameter differs from those of its halves; the optimizer stays as it is.

    It is taken to differ if the optimizer cannot step without a closure, which evaluates the model; if it cannot step
    on such parameters, so nothing shows that it is right on halves; and if it draws random numbers, which would be
    others on each worker. `parameters`: those that matter; None: all that it holds.
    """
    if wants_closure(optimizer):
        return True
    return any(_needs_whole(optimizer, *one) for one in kinds_of(optimizer, parameters))


def parameters_needed_whole(optimizer: Optimizer, parameters: Collection[Tensor]) -> list[Tensor]:
    """Return those of these parameters of the optimizer that it looks at as wholes, in the same sense."""
    kinds = members_of_kinds(optimizer, parameters)
    return [one for kind, members in kinds.items() if _needs_whole(optimizer, *kind) for one in members]


def _needs_whole(optimizer: Optimizer, group: int, dim: int) -> bool:
    watched = _watch(optimizer, group, dim, stops=True)
    if watched.across or watched.draws or watched.error:
        return True
    return any(not _is_same_in_halves(optimizer, group, dim, along) for along in range(min(dim, 2)))


def cannot_be_tried(optimizer: Optimizer, parameters: Collection[Tensor]) -> bool:
    """Return whether nothing is known of how the optimizer steps some of these; it stays as it is."""
    watched = (_watch(optimizer, *one) for one in kinds_of(optimizer, parameters))
    return any(one.error and not one.across for one in watched)


def draws_random_numbers(optimizer: Optimizer) -> bool:
    """Return whether a step draws random numbers, one parameter after the other; the optimizer stays as it is."""
    return any(_watch(optimizer, *one).draws for one in kinds_of(optimizer))


def needs_all_parameters(optimizer: Optimizer) -> bool:
    """Return whether the update of a parameter depends on the other parameters; the optimizer stays as it is.

    True for an optimizer that cannot step without a closure. False, because nothing is known, for one that cannot step
    on such parameters (sparse gradients, GPU only).
    """
    if wants_closure(optimizer):
        return True
    for group, _ in {one[0]: one for one in kinds_of(optimizer)}.values():
        dims = [one[1] for one in kinds_of(optimizer) if one[0] == group]
        for lowers in (False, True) if has_counts(optimizer, group) else (False,):
            try:
                if _differs_beside_another(optimizer, group, 2 if 2 in dims else dims[0], lowers_counts=lowers):
                    return True
            except Exception:  # SparseAdam takes no dense gradients, others only those of a GPU
                continue
    return False


@dataclasses.dataclass(slots=True)
class _Watched:
    """What the operations of a step show."""

    across: str = ""  # an operation that brings numbers of a tensor together
    draws: bool = False
    error: str = ""


def _watch(optimizer: Optimizer, group: int, dim: int, *, stops: bool = False) -> _Watched:
    """Watch the operations of steps on a parameter with so many dims: as they come, later ones, and of a large one."""
    found = _Watched()
    late = late_steps(optimizer, group)
    dtype = next((one.dtype for one in optimizer.param_groups[group]["params"]), torch.float32)
    shapes = [_shape(dim), WIDE] if dim == 2 else [_shape(dim)]
    for shape, lowers in itertools.product(shapes, (False, True) if has_counts(optimizer, group) else (False,)):
        is_first = shape == shapes[0]
        value, *gradients = _numbers(shape, NUM_FIRST if is_first else 2).to(dtype)
        steps = [[one] for one in gradients]
        phases = [Phase(steps), *_late_phases(steps, late if is_first and not lowers else ())]
        error = ""
        with preserved_randomness(), ElementOps(stops=stops) as ops:
            try:
                _moves(optimizer, phases, [value], group=group, lowers_counts=lowers)
            except Exception as problem:  # an optimizer may raise anything
                error = f"{type(problem).__name__}: {problem}".partition("\n")[0]
        found.across = found.across or next(iter(ops.across), "")
        found.draws |= ops.draws
        if error and is_first and not lowers and not found.across:  # lowered numbers may be no valid ones
            found.error = error
        if found.across or found.error:
            break
    return found


def _moves(
    optimizer: Optimizer, phases: Sequence[Phase], values: Sequence[Tensor], *, seed: int = 0, **how: Any
) -> list[list[Tensor]]:
    """Return by how much each step of a trial moves each parameter."""
    problem: Exception | None = None
    for with_closure, with_state in itertools.product((False, True), (False, True)):
        try:
            with preserved_randomness(seed):
                trial = Trial(optimizer, values, with_closure=with_closure, with_state=with_state, **how)
                return list(trial.run(phases))
        except CrossElement:
            raise
        except Exception as error:  # an optimizer may raise anything
            problem = problem or error
    raise problem or RuntimeError("the optimizer was not tried")


def _is_same_in_halves(optimizer: Optimizer, group: int, num_dims: int, along: int) -> bool:
    """Whether the halves of a parameter, along a dim, move as the whole does."""
    for lowers in (False, True) if has_counts(optimizer, group) else (False,):
        value, *gradients = _numbers(_shape(num_dims), NUM_FIRST)
        phases = _phases([value], [[one] for one in gradients], late_steps(optimizer, group) if not lowers else ())
        try:
            whole = _moves(optimizer, phases, [value], group=group, lowers_counts=lowers)
            for half in (0, 1):
                part = [_halved(one, along, half) for one in phases]
                moved = _moves(optimizer, part, [value.chunk(2, along)[half]], group=group, lowers_counts=lowers)
                for (of_half,), (of_whole,) in zip(moved, whole, strict=True):
                    if not _is_close(of_half, of_whole.chunk(2, along)[half], of_whole, tolerance=1e-3):
                        return False
        except Exception:  # an optimizer may raise anything, the more so with lowered numbers
            if not lowers:
                return False
    return True


def _differs_beside_another(optimizer: Optimizer, group: int, num_dims: int, *, lowers_counts: bool) -> bool:
    """Whether a parameter moves otherwise if another one of the optimizer has other gradients."""
    first, second, third = (_numbers(_shape(num_dims), NUM_ALIKE, seed=seed) for seed in (0, 1, 2))
    for one in (first, second, third):
        one[2:] = one[1:2] + 0.1 * one[2:]
    third[1:] *= APART
    late = () if lowers_counts else late_steps(optimizer, group)
    found: list[list[list[Tensor]]] = []
    for other in (second, third):
        pairs = [list(pair) for pair in zip(first[1:], other[1:], strict=True)]
        phases = [Phase(pairs), *_late_phases(pairs, late)]
        found.append(_moves(optimizer, phases, [first[0], second[0]], group=group, lowers_counts=lowers_counts))
    return any(not _is_close(b[0], a[0], a[0], tolerance=1e-8) for a, b in zip(*found, strict=True))


def _is_close(moved: Tensor, expected: Tensor, of_whole: Tensor, *, tolerance: float) -> bool:
    """Whether a step moves numbers as it should; it may be tiny compared with the parameter."""
    size = float(of_whole.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(moved, expected, rtol=0.0, atol=tolerance * size + 1e-13, equal_nan=True)


def _phases(values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]], late: Sequence[int]) -> list[Phase]:
    """Steps as they come; with gradients at right angles to the parameters, as wholes and by rows; and later steps."""
    few = gradients[:NUM_AT_EACH]
    found = [Phase(gradients)]
    for by_rows in (False, True):
        pairs = ([*zip(values, each, strict=True)] for each in few)
        found.append(Phase([[_at_right_angles(*pair, by_rows=by_rows) for pair in each] for each in pairs]))
    return [*found, *_late_phases(gradients, late)]


def _late_phases(gradients: Sequence[Sequence[Tensor]], late: Sequence[int]) -> list[Phase]:
    """A few steps around each of these numbers of steps, with small and large gradients in turn."""
    few = gradients[:NUM_AT_EACH]
    return [
        Phase([[one * size for one in each] for each in few], count=number - NUM_AT_EACH // 2)
        for number, size in zip(late, itertools.cycle(SIZES), strict=False)
    ]


def _at_right_angles(value: Tensor, gradient: Tensor, *, by_rows: bool) -> Tensor:
    """Return a gradient without its part along the parameter."""
    shape = (len(value), -1) if by_rows and value.dim() > 1 else (1, -1)
    flat, along = gradient.reshape(shape), value.reshape(shape)
    share = (flat * along).sum(1, keepdim=True) / (along * along).sum(1, keepdim=True)
    return (flat - share * along).reshape(value.shape)


def _halved(phase: Phase, along: int, half: int) -> Phase:
    gradients = [[one.chunk(2, along)[half].contiguous() for one in each] for each in phase.gradients]
    return Phase(gradients, phase.count)


def _numbers(shape: Sequence[int], num_gradients: int, *, seed: int = 0) -> Tensor:
    """Return a parameter's value, and gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_gradients + 1, *shape, generator=generator, dtype=torch.float64)


def _shape(num_dims: int) -> tuple[int, ...]:
    return (SIDE, SIDE, 3, 3, *[2] * num_dims)[:num_dims]


ROWS, COLUMNS = 5, 3
TOUCHED = ((0, 1, 4), (1, 2), (0, 3, 4))  # rows, in each step; the first step may be a special one


def why_not_by_rows(optimizer: Optimizer, parameter: Tensor) -> str | None:
    """Return why `parameter`, one of the optimizer's, cannot be updated by rows; None if it can. It stays as it is."""
    group = next(one for one in optimizer.param_groups if any(held is parameter for held in one["params"]))
    entries = dict(optimizer.state.get(parameter, {}))
    numbers = torch.randn(len(TOUCHED) + 1, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _stepped_by_rows(optimizer, group, entries, numbers, slice(0, None, 1))
            parts = [_stepped_by_rows(optimizer, group, entries, numbers, slice(first, None, 2)) for first in (0, 1)]
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            return f"it cannot step with sparse gradients ({str(error).strip().partition(chr(10))[0]})"
    for value, state in (whole, *parts):
        for key, entry in state.items():
            if isinstance(entry, Tensor) and entry.dim() and (entry.is_sparse or len(entry) != len(value)):
                return (
                    f"what it keeps of a matrix ({key}) is not one row for each of the matrix's, and cannot be divided"
                )
    together = torch.empty_like(whole[0])
    for first, (value, _) in enumerate(parts):
        together[first::2] = value
    if not torch.allclose(together, whole[0], rtol=1e-3, atol=1e-6):
        return "it looks at a matrix as a whole (norms, products), and each server has only some of the rows"
    return None


def _stepped_by_rows(
    optimizer: Optimizer, group: dict[str, object], entries: dict[str, object], numbers: Tensor, rows: slice
) -> tuple[Tensor, dict[str, object]]:
    """Return some rows after steps of a copy of the optimizer, and its state for them."""
    torch.random.default_generator.manual_seed(0)  # within the caller's fork_rng
    parameter = torch.nn.Parameter(numbers[0][rows].clone())
    trial = type(optimizer).__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.__dict__.update(
        {name: type(value)() for name, value in vars(optimizer).items() if isinstance(value, collections.OrderedDict)}
    )  # hooks are about the real optimizer's step
    trial.state = collections.defaultdict(dict)
    if entries:  # some optimizers make their state when they are created
        trial.state[parameter] = {key: _row_state_like(value, parameter) for key, value in entries.items()}
    rates = {"lr": 0.1} if "lr" in group else {}  # it may be 0 now, before a warm-up
    trial.param_groups = [{**group, **rates, "params": [parameter]}]
    for gradient, touched in zip(numbers[1:], TOUCHED, strict=True):
        parameter.grad = _sparse_rows(gradient, touched, range(ROWS)[rows])
        type(optimizer).step(trial)  # schedulers replace the real optimizer's step
    return parameter.detach(), dict(trial.state[parameter])


def _row_state_like(value: object, parameter: Tensor) -> object:
    """Return an optimizer's initial state, resized for a small matrix."""
    if not isinstance(value, Tensor):
        return value
    shape = (len(parameter), *[COLUMNS] * (value.dim() - 1))
    return value.new_zeros(shape) if value.dim() else value.clone()


def _sparse_rows(gradient: Tensor, touched: Sequence[int], here: range) -> Tensor:
    """Return the sparse gradient of the rows `here`, with those of them that were touched."""
    found = [row for row in here if row in touched]
    places = torch.tensor([here.index(row) for row in found], dtype=torch.long)
    return sparse_rows(places, gradient[found], (len(here), gradient.shape[1]))
