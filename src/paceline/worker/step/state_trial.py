"""Refuses models and losses that read again what an earlier forward left in a plain attribute, a closure or a global.

Each worker runs other micro-batches. So a running mean in `self.mean`, a hidden state that is carried on, a count that
forward acts on, or a generator of the model's own differs between workers, and from one process; and no checkpoint has
it. Buffers have rules for that (`buffer_rules`), global generators are seeded for each micro-batch.

What is held is compared before and after a pass, in the first passes and in some later ones. Most that changes is only
written (an attention map that is kept for a plot), or is a cache that changes nothing. A trial tells: a micro-batch A
runs from what is held at the step's end, after A itself, and after another micro-batch B; B runs from what was held
before the step; and A runs with counts far ahead, as `if self.calls > 1000` would see them. Where outputs differ, the
place whose value makes the difference is named.

A forward that raises in a trial tells nothing. Where workers exchange tensors in a forward it must not be left half
way, so there counts stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from paceline.comm.group import Disrupted, WorkerGroup
from paceline.errors import PlanError, Reason
from paceline.host_memory import is_out_of_memory
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.step.kept_state import Keeper, Restore
from paceline.worker.step.plain_state import Grown, Scan, changed_places, is_generator
from paceline.worker.step.state_holders import Place, functions_of_modules, holders_of_functions, holders_of_modules
from paceline.worker.step.trial_runs import Run, TrialForwards, TrialRuns

__all__ = ["StateTrials"]

FIRST_PASSES, EVERY_PASSES = 4, 250  # when places are compared; what is known is tried again at 250, 500, 1000, ...
RUNS = 2  # of a trial: what only a first forward does (stages record it) is no state
NAMED = 16  # places that are tried one by one

AFTER_ITSELF, AFTER_OTHERS, BEFORE = range(3)  # what a micro-batch may begin with, other than the step's end
# ... or counts that are moved on: by a prime, or to a multiple of all small numbers, and to the number before it
COUNTS: dict[int, Callable[[Any], Any]] = {
    3: lambda count: count + 999_983,
    4: lambda count: count * 0 + 720_720_000,
    5: lambda count: count * 0 + 720_719_999,
}

Digests = Callable[[Iterable[Tensor]], list[int]]


class StateTrials:
    """Watches one worker's plain attributes during gradient passes."""

    def __init__(self, runs: TrialRuns, *, is_alone: Callable[[], bool], is_split: bool) -> None:
        """`is_alone`: whether each worker runs all micro-batches now, as one process does. `is_split`: workers exchange
        tensors in a forward."""
        self._runs, self._is_alone, self._is_split = runs, is_alone, is_split
        self.digests: Digests | None = None  # None: nothing is compared
        self.unjudged: tuple[str, ...] = ()  # names of places of which no trial tells
        self._num_passes = self._num_modules = 0
        self._before: Scan | None = None
        self._held: dict[Place, Any] = {}  # what has changed in this pass, and what was held before
        self._changed: dict[str, Place] = {}  # those of which nothing is known
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
        self.unjudged, self._held, self._changed, self._before = (), {}, {}, None
        looks, rest = divmod(self._num_passes, EVERY_PASSES)
        if not rest and looks & (looks - 1) == 0:
            self._known.clear()
        if self._is_due():
            functions = [loss_of, *functions_of_modules(modules)]
            self._before = Scan([*holders_of_modules(modules), *holders_of_functions(functions, modules)])
        self._num_passes += 1

    def end(self) -> None:
        """The pass is over, or was left early."""
        self._before, self._held, self._changed = None, {}, {}

    def mark(self) -> float:
        """All micro-batches of the pass have run: a number to be summed over the workers. 0: nothing is to be tried."""
        if self._before is None:
            return 0.0
        self._held = changed_places(self._before, Scan(self._before.holders))
        for one in self._held:
            if one not in self._known:
                is_twice = one.label in self._changed
                self._changed[f"{one.label} of another one" if is_twice else one.label] = one
        return float(bool(self._changed))

    def settle(self, batch: StepBatch, mark: float, group: WorkerGroup) -> None:
        """Make the trial, where any worker of the group asks for one; all call it, with the same summed `mark`.

        Raises PlanError, on all of them, where what forward computes depends on what other forwards left.
        """
        if not mark:
            return
        counts: dict[str, bool] = {}
        for some in group.gather_objects({name: is_count(one.get()) for name, one in self._changed.items()}):
            counts |= some
        names = sorted(counts)[:NAMED]
        ways = [AFTER_ITSELF, AFTER_OTHERS, BEFORE]
        if any(counts.values()) and not self._is_split:
            ways += COUNTS
        culprits, is_unknown = list[str](), True
        with self._trial(batch) as trial:
            for _ in range(RUNS):
                seen = trial.differences(ways)
                each = [one for one in group.gather_objects(seen) if one is not None]
                way = next((way for number, way in enumerate(ways) if any(one[number] for one in each)), None)
                if way is None:
                    is_unknown = not each
                    break
                repeats = trial.repeats(way)
                if any(group.gather_objects(repeats and seen is not None and seen[ways.index(way)])):
                    several = group.gather_objects([trial.depends_on(name, way) for name in names])
                    culprits = [name for number, name in enumerate(names) if any(one[number] for one in several)]
                    culprits = culprits or names
                    break
        if culprits:
            kinds = dict(pair for some in group.gather_objects(self._kinds(culprits)) for pair in some.items())
            _refuse([(name, kinds.get(name, "")) for name in culprits])
        if is_unknown and self._num_passes == 1:
            return  # what a first step makes may be seen more clearly in the second
        self._known.update(self._changed.values())
        self.unjudged = tuple(name for name in names if is_unknown or (self._is_split and counts[name]))

    @contextlib.contextmanager
    def _trial(self, batch: StepBatch) -> Iterator[_Trial]:
        """A trial of the present pass. Afterwards all places hold what they held, also where a worker is lost."""
        forwards = None if self.digests is None else self._runs.forwards(batch)
        written = set[int]() if self._before is None else self._before.tensors
        with self._runs.opened(batch, has_graph=not self._is_split) as run:
            trial = _Trial(
                self._runs.afresh(run),
                forwards,
                self.digests,
                self._changed,
                written=written,
                held=self._held,
                is_split=self._is_split,
            )
            try:
                yield trial
            finally:
                trial.restore()

    def _kinds(self, names: Sequence[str]) -> dict[str, str]:
        return {name: _kind_of(self._changed[name].get()) for name in names if name in self._changed}


class _Trial:
    """Runs of two micro-batches from what places held at different times."""

    def __init__(
        self,
        run: Run,
        forwards: TrialForwards | None,
        digests: Digests | None,
        places: Mapping[str, Place],
        *,
        written: set[int],
        held: Mapping[Place, Any],
        is_split: bool,
    ) -> None:
        """`held`: all places that have changed, with what was held before. `places`: those of them that are judged.
        `written`: ids of the tensors that were there before."""
        self._run, self._forwards, self._digests = run, forwards, digests
        self._places, self._is_split = places, is_split
        self._written, keeper = written, Keeper(written)
        self._start = {one: keeper.keep(one.get()) for one in held}
        before = {name: held[one] for name, one in places.items() if held[one] is not one.get()}
        if is_split and len(before) < len(held):
            before = {}  # what was changed in place is not as it was then, and a forward that raises must not be tried
        self._states: dict[int, dict[str, Restore]] = {
            BEFORE: {
                name: value.shortened if isinstance(value, Grown) else functools.partial(_same, value)
                for name, value in before.items()
            }
        }
        for way, moved in COUNTS.items():
            values = {name: one.get() for name, one in places.items() if is_count(one.get())}
            self._states[way] = {name: functools.partial(moved, value) for name, value in values.items()}
        self._references: list[list[Any]] = []  # outputs of A and of B from the step's end
        self._outputs: dict[int, list[Any]] = {}

    def differences(self, ways: Sequence[int]) -> list[bool] | None:
        """For each way, whether the output differs from that of the step's end; None: there is none here."""
        try:
            self.restore()
            self._references, self._outputs = [self._output(0)], {}
            for way, before in ((AFTER_ITSELF, ()), (AFTER_OTHERS, (1, 1))):
                for number in before:
                    self._output(number)
                self._states[way] = self._kept()
                self._outputs[way] = self._output(0)
            self.restore()
            self._references.append(self._output(1))
        except Disrupted:
            raise
        except Exception as error:  # a forward may do anything when it is run once more
            if is_out_of_memory(error):
                raise
            self._require_independence(error)
            return None
        if not self._references[0]:
            for way in ways:
                if way not in self._outputs:
                    self._output_by(way, self._places)  # with the others of the replica
            return None
        for way in ways:
            if way not in self._outputs:
                self._outputs[way] = self._output_by(way, self._places)
        return [bool(self._outputs[way]) and self._outputs[way] != self._reference(way) for way in ways]

    def repeats(self, way: int) -> bool:
        """Whether the outputs come again; of kernels that add up in any order they do not."""
        found = self._output_by(way, self._places)
        again = self._output_by(way, {})
        return len(self._references) == 2 and again == self._reference(way) and found == self._outputs.get(way)

    def depends_on(self, name: str, way: int) -> bool:
        """Whether this place alone makes the difference; all workers of a replica call it."""
        found = self._output_by(way, {name: self._places[name]} if name in self._places else {})
        return bool(found) and len(self._references) == 2 and found != self._reference(way)

    def restore(self) -> None:
        """Give all places what they held when the trial began."""
        for one, restore in self._start.items():
            one.set(restore())

    def _reference(self, way: int) -> list[Any]:
        return self._references[way == BEFORE]

    def _kept(self) -> dict[str, Restore]:
        keeper = Keeper(self._written)
        return {name: keeper.keep(one.get()) for name, one in self._places.items()}

    def _output(self, number: int) -> list[Any]:
        if self._forwards is None or self._digests is None:  # a worker without a micro-batch has none
            return []
        result = self._run(self._forwards, number)
        leaves = [one for one in tree_leaves(result) if isinstance(one, (Tensor, float, int))]
        tensors = [one.detach() for one in leaves if isinstance(one, Tensor)]
        return [*self._digests(tensors), *(repr(one) for one in leaves if not isinstance(one, Tensor))]

    def _output_by(self, way: int, places: Mapping[str, Place]) -> list[Any]:
        """The output from the step's end, but for these places; [] where forward cannot run so."""
        self.restore()
        states = self._states.get(way, {})
        for name, one in places.items():
            if name in states:
                one.set(states[name]())
        try:
            return self._output(int(way == BEFORE))
        except Disrupted:
            raise
        except Exception as error:  # whatever the model says about what does not fit
            if is_out_of_memory(error):
                raise
            self._require_independence(error)
            return []

    def _require_independence(self, error: Exception) -> None:
        """Where workers exchange tensors in a forward, one that has raised leaves them out of step: the run ends."""
        if self._is_split:
            raise PlanError(
                f"the forward changes {', '.join(self._places) or 'plain attributes'}, and to find out whether it "
                "reads them again it was run once more without gradients, which has failed "
                f"({type(error).__name__}: {error}). Use Layout(replicas=n), or keep nothing there"
            ) from error


def _same(value: Any) -> Any:
    return value


def is_count(value: Any) -> bool:
    """Whether a value is a whole number, as counts are."""
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_floating_point() and not value.is_complex() and not value.is_meta
    return type(value) is int or isinstance(value, np.integer) or (type(value) is float and value.is_integer())


def _kind_of(value: Any) -> str:
    if is_generator(value):
        return "generator"
    return "count" if is_count(value) else ""


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
        "else afterwards. Workers run other micro-batches than each other, and stages run some once more to record "
        "them: the numbers would not be those of one process. And no checkpoint has it."
    )
    raise PlanError(
        f"{what} {REMEDIES[kind]}", reasons=[Reason(module=name.split(":")[0], what=what, remedy=REMEDIES[kind])]
    )
