"""Which unit is on which stage, the stages of parameters and buffers, and which values cross stage boundaries.

A partition divides the units, in the order of their first calls, into contiguous stages. Units that the forward ties
together (one uses what a later one makes, for example) stay on one stage. A value travels from stage to stage, up to
the last one that uses it. Its gradient comes back the same way, and each stage adds its part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from paceline.errors import PlanError, Reason
from paceline.parallel.meta.meta_device import absent, own_tensors
from paceline.parallel.model_units import ModelUnit
from paceline.parallel.partial_parameter import HeldPart, mark_partial, whole_shape
from paceline.parallel.pipeline.tape import Tape
from paceline.schedule.balanced_partition import partition_evenly

__all__ = ["StagePartition", "ValueRoute", "closed_boundaries", "keep_stages", "partition_units", "route"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StagePartition:
    """The units of each stage, by name, and the stages of each parameter and buffer, the first one its home."""

    stages: tuple[tuple[str, ...], ...]
    parameters: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[int, ...]]

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """Parameters on several stages (tied weights): their gradients have to be summed over these stages."""
        return {name: stages for name, stages in self.parameters.items() if len(stages) > 1}

    def stage_of(self, unit: str) -> int:
        return next(index for index, names in enumerate(self.stages) if unit in names)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ValueRoute:
    """How values travel in one tape. `stage_of`: each unit's stage; `crossing[s]`: values that go from stage s to s +
    1.

    `with_gradient[s]` are those of them whose gradient comes back. `copied` are values that their own stage changes in
    place although a later stage still needs the former value.
    """

    stage_of: tuple[int, ...]
    crossing: tuple[tuple[int, ...], ...]
    with_gradient: tuple[tuple[int, ...], ...]
    copied: frozenset[int]


def closed_boundaries(tape: Tape) -> dict[int, list[str]]:
    """Return the boundaries where no stage may begin (the index of the unit after it), with the reasons."""
    closed: dict[int, list[str]] = {}
    for joint in tape.joints:
        for place in range(joint.first + 1, joint.last + 1):
            closed.setdefault(place, []).append(joint.reason)
    return closed


def partition_units(
    model: nn.Module,
    tape: Tape,
    *,
    units: Sequence[ModelUnit],
    num_stages: int,
    costs: Sequence[float] = (),
    starts: Sequence[str] = (),
) -> StagePartition:
    """Divide the units into stages, by `starts` (the first unit of each stage after the first) or by cost.

    `costs`: one number for each of `tape.units`; without it, the number of parameters counts. Raises PlanError with
    every reason against it.
    """
    closed = closed_boundaries(tape)
    places = _places(tape, num_stages, starts) if starts else None
    wrong = [
        Reason(
            module=tape.units[place],
            what=f"a stage cannot begin with {tape.units[place]}: {'; '.join(closed[place])}.",
            remedy="Let it begin with another unit.",
        )
        for place in places or ()
        if place in closed
    ]
    if places is None:
        num_free = len(tape.units) - 1 - len(closed)
        if num_free < num_stages - 1:
            wrong.append(
                Reason(
                    module=type(model).__name__,
                    what=f"{num_stages} stages were asked for, but at most {num_free + 1} can be made of the "
                    f"{len(tape.units)} units {', '.join(tape.units)}.",
                    remedy=f"Use stages={num_free + 1} or fewer, or name smaller units.",
                )
            )
            joints = {joint.reason: joint for joint in reversed(tape.joints)}
            wrong += [
                Reason(
                    module=tape.units[joint.first],
                    what=f"these belong together: {why}.",
                    remedy="Let what is shared pass as an argument or a result.",
                )
                for why, joint in reversed(joints.items())
            ]
        else:
            row = costs or parameter_costs(tape, units)
            places = list(partition_evenly(row, num_stages, closed=closed))[1:]
    if wrong:
        said = "\n".join(f"- {reason}" for reason in wrong)
        raise PlanError(
            f"{type(model).__name__} cannot be partitioned into {num_stages} stages:\n{said}", reasons=wrong
        )
    return _partition_at(model, tape, units, places or [])


def parameter_costs(tape: Tape, units: Sequence[ModelUnit]) -> list[float]:
    """Return the number of parameters of each of `tape.units`."""
    sizes = {unit.name: float(sum(p.numel() for p in unit.module.parameters())) for unit in units}
    return [sizes[name] for name in tape.units]


def keep_stages(model: nn.Module, partition: StagePartition, stages: Sequence[int]) -> None:
    """Free what other stages hold, in place: their parameters and buffers go to the meta device."""
    homes = {**partition.parameters, **partition.buffers}
    made: dict[int, object] = {}
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for module, key, tensor in own_tensors(model.modules()):
        if not set(homes[names[id(tensor)]]) & set(stages):
            placeholder = made.setdefault(id(tensor), absent(tensor))
            if isinstance(tensor, nn.Parameter) and isinstance(placeholder, nn.Parameter):
                name = names[id(tensor)]
                because = f"Layout(stages={partition.num_stages}) put it on stage {homes[name][0]}"
                held = HeldPart(name=name, whole=whole_shape(tensor), dim=None, because=because)
                mark_partial(tensor, held)  # lists of parameters that were made before still have it
                mark_partial(placeholder, held)
            setattr(module, key, placeholder)


def route(tape: Tape, partition: StagePartition) -> ValueRoute:
    """Return what crosses stage boundaries in this tape's forward; raises PlanError if the partition does not fit
    it.
    """
    stage_of = tuple(partition.stage_of(name) for name in tape.units)
    wrong = [j.reason for j in tape.joints if stage_of[j.first] != stage_of[j.last]]
    wrong += [
        f"{tape.units[index]} is called after {tape.units[index - 1]}, which is on a later stage"
        for index in range(1, len(stage_of))
        if stage_of[index] < stage_of[index - 1]
    ]
    if wrong:
        said = "\n".join(f"- {reason}." for reason in wrong)
        raise PlanError(
            f"The forward of this micro-batch does not fit the stages that were made from another one:\n{said}\n"
            "Give the first micro-batch the same kind of inputs, or let stages begin with other units."
        )
    last_use = [stage_of[value.unit] for value in tape.values]
    for call in tape.calls:
        for number in call.needs:
            last_use[number] = max(last_use[number], stage_of[call.unit])
    for number in tape.results:
        last_use[number] = partition.num_stages - 1
    crossing = tuple(
        tuple(n for n, value in enumerate(tape.values) if stage_of[value.unit] <= stage < last_use[n])
        for stage in range(partition.num_stages - 1)
    )
    copied = frozenset(
        former
        for call in tape.calls
        for _, _, former in call.changed
        if former is not None and stage_of[call.unit] == stage_of[tape.values[former].unit] < last_use[former]
    )
    return ValueRoute(
        stage_of=stage_of,
        crossing=crossing,
        with_gradient=tuple(tuple(n for n in numbers if tape.values[n].has_gradient) for numbers in crossing),
        copied=copied,
    )


def _places(tape: Tape, num_stages: int, starts: Sequence[str]) -> list[int]:
    wrong = [f"{name!r} is no unit that is called" for name in starts if name not in tape.units]
    places = [tape.units.index(name) for name in starts if name in tape.units]
    if not wrong and (len(places) != num_stages - 1 or places != sorted(set(places) - {0})):
        wrong.append(f"{num_stages} stages need {num_stages - 1} first units, in order, none of them the model's first")
    if wrong:
        what = f"Stages cannot begin with {', '.join(starts)}: {'; '.join(wrong)}."
        remedy = f"Units, in order: {', '.join(tape.units)}."
        raise PlanError(f"{what} {remedy}", reasons=[Reason(module=starts[0], what=what, remedy=remedy)])
    return places


def _partition_at(model: nn.Module, tape: Tape, units: Sequence[ModelUnit], places: Sequence[int]) -> StagePartition:
    bounds = [0, *places, len(tape.units)]
    stage_of = [stage for stage in range(len(bounds) - 1) for _ in range(bounds[stage], bounds[stage + 1])]
    homes = {name: stage_of[index] for index, name in enumerate(tape.units)}
    homes |= {name: stage_of[index] for name, index in tape.unused.items()}
    users = {name: {stage_of[index] for index in found} for name, found in tape.parameters.items()}
    every = tuple(range(len(bounds) - 1))
    buffer_names = {id(buffer): name for name, buffer in model.named_buffers()}
    buffers = dict.fromkeys(buffer_names.values(), every)  # root-level code runs on all stages
    for name, found in tape.buffers.items():  # but what takes a unit's values runs on its stage alone
        if len(at := {stage_of[index] for index in found}) == 1:
            buffers[name] = (*at, *(stage for stage in every if stage not in at))
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    for unit in units:
        buffers |= {buffer_names[id(buffer)]: (homes[unit.name],) for buffer in unit.module.buffers()}
        for parameter in unit.module.parameters():
            if unit.name not in tape.unused or not users[parameter_names[id(parameter)]]:
                users[parameter_names[id(parameter)]].add(homes[unit.name])
    return StagePartition(
        stages=tuple(tuple(name for name, home in homes.items() if home == stage) for stage in every),
        parameters={name: tuple(sorted(found)) or (0,) for name, found in users.items()},
        buffers=buffers,
    )
