"""Refuses models and losses that read again what an earlier forward left in a plain attribute, a closure or a global.

Each worker runs other micro-batches. So a running mean in `self.mean`, a hidden state that is carried on, a count that
forward acts on, or a generator of the model's own differs between workers, and from one process; and no checkpoint has
it. Buffers have rules for that (`buffer_rules`), global generators are seeded for each micro-batch.

Attributes are compared before and after a pass, in the first passes and in some later ones. Most that change are only
written (an attention map that is kept for a plot), or are caches that change nothing. A trial tells, the first time: a
micro-batch A runs from what the places held after the step, after A itself, and after another micro-batch B. It
also runs with counts far ahead, as `if self.calls > 1000` would see them. Where A comes out otherwise, the place
whose value makes the difference is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm.group import Disrupted, WorkerGroup
from paceline.errors import PlanError, Reason
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.step.plain_state import (
    Place,
    Restore,
    Scan,
    changed_places,
    holders_of_functions,
    holders_of_modules,
    is_generator,
    keep,
)
from paceline.worker.step.trial_runs import Run, TrialForwards, TrialRuns

__all__ = ["StateTrials"]

FIRST_PASSES, EVERY_PASSES = 4, 250  # when attributes are compared
RUNS = 2  # of a trial: what only a first forward does (stages record it) is no state
NAMED = 16  # attributes that are tried one by one
AHEAD = 999_983  # counts are moved on by it: a prime, so that counts modulo a number move, too

Digests = Callable[[Iterable[Tensor]], list[int]]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a worker's trial has shown."""

    is_carried: bool = False  # a micro-batch computes something else after another one
    is_counted: bool = False  # ... or with counts far ahead
    is_unknown: bool = False  # it could not be run, or does not repeat itself


class StateTrials:
    """Watches one worker's plain attributes during gradient passes."""

    def __init__(self, runs: TrialRuns, *, is_alone: Callable[[], bool]) -> None:
        """`is_alone`: whether each worker runs all micro-batches now, as one process does."""
        self._runs, self._is_alone = runs, is_alone
        self.digests: Digests | None = None  # None: nothing is compared
        self.unjudged: tuple[str, ...] = ()  # names of attributes of which no trial tells, once
        self._num_passes = self._num_modules = 0
        self._before: Scan | None = None
        self._changed: dict[str, Place] = {}  # in this pass, of which nothing is known
        self._written: set[int] = set()  # tensors that were there before
        self._known: set[Place] = set()  # that were tried

    def _is_due(self) -> bool:
        is_early = self._num_passes < FIRST_PASSES
        return not self._is_alone() and self.digests is not None and (is_early or self._num_passes % EVERY_PASSES == 0)

    @property
    def is_watching(self) -> bool:
        """Whether the present pass is watched."""
        return self._before is not None

    def begin(self, modules: Mapping[nn.Module, str], loss_of: Callable[[Any], Any] | None) -> None:
        """A pass begins. `modules`: all that are prepared, with their names. `loss_of`: runs a micro-batch; None: the
        script's own loop does."""
        if len(modules) != self._num_modules:
            self._num_passes, self._num_modules = 0, len(modules)
        self.unjudged, self._changed, self._before = (), {}, None
        if self._is_due():
            functions = [loss_of, *dict.fromkeys(type(module).forward for module in modules)]
            self._before = Scan([*holders_of_modules(modules), *holders_of_functions(functions, modules)])
        self._num_passes += 1

    def end(self) -> None:
        """The pass is over, or was left early."""
        self._before, self._changed = None, {}

    def mark(self) -> float:
        """All micro-batches of the pass have run: a number to be summed over the workers. 0: nothing is to be tried."""
        if self._before is None:
            return 0.0
        for one in changed_places(self._before, Scan(self._before.holders)):
            if one not in self._known:
                is_twice = one.label in self._changed
                self._changed[f"{one.label} of another one" if is_twice else one.label] = one
        self._written = self._before.tensors
        return float(bool(self._changed))

    def settle(self, batch: StepBatch, mark: float, group: WorkerGroup) -> None:
        """Make the trial, where any worker of the group asks for one; all call it, with the same summed `mark`.

        Raises PlanError, on all of them, where what forward computes depends on what other forwards left.
        """
        if not mark:
            return
        counts: dict[str, bool] = {}
        for some in group.gather_objects({name: _is_count(one.get()) for name, one in self._changed.items()}):
            counts |= some
        names, forwards = sorted(counts)[:NAMED], self._runs.forwards(batch)
        answers, culprits = list[Outcome](), list[str]()
        with self._runs.opened(batch) as run:
            trial = None  # a worker without a micro-batch makes none
            if forwards is not None and self.digests is not None:
                trial = _Trial(run, forwards, self.digests, self._changed, self._written)
            outcome = Outcome(is_unknown=True)
            for _ in range(RUNS):
                if trial is not None:
                    outcome = trial.outcome(has_counts=any(counts.values()))
                answers = group.gather_objects(outcome)
                if not all(one.is_unknown for one in answers):
                    break
            is_kept = any(one.is_carried or one.is_counted for one in answers)
            if is_kept:
                ahead = not outcome.is_carried
                each = [trial is not None and trial.depends_on(name, ahead=ahead) for name in names]
                several = group.gather_objects(each)
                culprits = [name for number, name in enumerate(names) if any(one[number] for one in several)] or names
        if is_kept:
            kinds = dict(pair for some in group.gather_objects(self._kinds(culprits)) for pair in some.items())
            _refuse([(name, kinds.get(name, "")) for name in culprits])
        self._known.update(self._changed.values())
        if all(one.is_unknown for one in answers):
            self.unjudged = tuple(names)

    def _kinds(self, names: Sequence[str]) -> dict[str, str]:
        return {name: _kind_of(self._changed[name].get()) for name in names if name in self._changed}


class _Trial:
    """Runs of one micro-batch from what attributes held at different times."""

    def __init__(
        self,
        run: Run,
        forwards: TrialForwards,
        digests: Digests,
        places: Mapping[str, Place],
        written: set[int],
    ) -> None:
        self._run, self._forwards, self._digests = run, forwards, digests
        self._places, self._written = places, written
        self._start = self._kept()
        self._later: Mapping[str, Restore] = {}
        self._first: list[Any] = []

    def outcome(self, *, has_counts: bool) -> Outcome:
        """A from the start, after itself, after B twice, from the start once more, and with counts far ahead."""
        self._first = self._output(0)
        is_carried = False
        for before in ((), (1, 1)):
            for number in before:
                self._output(number)
            kept = self._kept()
            is_other = self._output(0) != self._first
            if not is_carried:
                self._later, is_carried = kept, is_other
        self.restore()
        again = self._output(0)
        ahead = self._output_ahead(self._places) if has_counts else None
        self.restore()
        if not self._first or self._first != again:
            return Outcome(is_unknown=True)
        return Outcome(is_carried=is_carried, is_counted=ahead is not None and ahead != self._first)

    def depends_on(self, name: str, *, ahead: bool) -> bool:
        """Whether what this attribute alone held later makes the difference; all workers of a replica call it."""
        own = {name: self._places[name]} if name in self._places else {}
        if ahead:
            found = self._output_ahead(own)
        else:
            self.restore()
            for key, one in own.items():
                one.set(self._later[key]())
            found = self._output(0)
        self.restore()
        return found is not None and found != self._first

    def restore(self) -> None:
        """Give the attributes what they held when the trial began."""
        for name, one in self._places.items():
            one.set(self._start[name]())

    def _kept(self) -> dict[str, Restore]:
        return {name: keep(one.get(), self._written) for name, one in self._places.items()}

    def _output(self, number: int) -> list[Any]:
        leaves = [
            one for one in tree_leaves(self._run(self._forwards, number)) if isinstance(one, (Tensor, float, int))
        ]
        tensors = [one.detach() for one in leaves if isinstance(one, Tensor)]
        return [*self._digests(tensors), *(repr(one) for one in leaves if not isinstance(one, Tensor))]

    def _output_ahead(self, places: Mapping[str, Place]) -> list[Any] | None:
        """As from the start, with counts moved on; None: forward cannot run so."""
        self.restore()
        for one in places.values():
            value = one.get()
            if _is_count(value):
                one.set(value + AHEAD)
        try:
            return self._output(0)
        except Disrupted:
            raise
        except Exception:  # whatever the model says about a count that does not fit
            return None


def _is_count(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_floating_point() and not value.is_complex() and not value.is_meta
    return isinstance(value, int) and not isinstance(value, bool)


def _kind_of(value: Any) -> str:
    if is_generator(value):
        return "generator"
    return "count" if _is_count(value) else ""


REMEDIES = {
    "generator": (
        "Draw from torch's global generator, which is seeded for each micro-batch, so numbers are the same on any "
        "number of workers."
    ),
    "count": (
        "To act on the number of steps, set the attribute between steps, in your loop (worker.step). To count in "
        "forward, register_buffer: what micro-batches add is summed, and checkpoints have it."
    ),
    "": (
        "register_buffer in __init__: buffers are combined by a rule (docs/explanation/steps.md#buffers), and "
        "checkpoints have them. A loss that has buffers is prepared like a model: worker.prepare(loss). A hidden state "
        "that goes from batch to batch has no such rule: it needs one worker."
    ),
}


def _refuse(found: Sequence[tuple[str, str]]) -> None:
    name, kind = found[0]
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    what = (
        f"{name}{more} is no parameter or buffer of a prepared model, but forward changes it and computes something "
        "else afterwards. "
        "Workers run other micro-batches than each other, and stages run some once more to record them: the numbers "
        "would not be those of one process. And no checkpoint has it."
    )
    raise PlanError(
        f"{what} {REMEDIES[kind]}", reasons=[Reason(module=name.split(":")[0], what=what, remedy=REMEDIES[kind])]
    )
