"""Finds parameters that a forward changes, or registers, within a step: replicas would differ from then on.

Each worker runs other micro-batches, and not equally many. So what a forward writes into a parameter (an initialisation
by the first batch, as ActNorm has it; a projection; rows scaled by `Embedding(max_norm=...)`; a codebook that is no
buffer) differs between workers, or from one process. Such a step is refused before its optimizer steps.

A write counts up the tensor's version, so an ordinary step compares integers. What versions miss is seen where it
happens: writes through `.data`, and parameters or modules that are registered (`parallel/parameter_watch.py`). What
goes past torch (memory that numpy shares, code that was compiled) is found by digests of all parameters, in the first
passes and in some later ones. They also tell a write that changes nothing (`flatten_parameters()` of torch's RNNs). Its
parameter is compared by digests in each pass from then on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from paceline.comm.sharded_tensors import is_sharded, local_part
from paceline.errors import PlanError, Reason
from paceline.parallel.class_name import class_name
from paceline.parallel.parameter_watch import Registration, changes, registered_at
from paceline.parallel.partial_parameter import PartialParameter, on_parts

__all__ = ["ForwardWrites"]

FIRST_PASSES, EVERY_PASSES = 10, 100  # when digests of all parameters are compared


class ForwardWrites:
    """Watches one worker's parameters during gradient passes."""

    def __init__(self, *, is_alone: Callable[[], bool]) -> None:
        """`is_alone`: whether one worker takes the steps now, so that a write in forward is that of one process."""
        self._is_alone = is_alone
        self._is_watching = False  # in this pass
        self.digests: Callable[[Iterable[Tensor]], list[int]] | None = None  # None: only versions are compared
        self._num_passes = 0
        self._lists: list[Sequence[tuple[str, Tensor]]] = []  # of parameters, which `begin` was given
        self._found_from = (0, 0)  # what `_named` and `_watched` were found from besides
        self._named: list[tuple[str, Tensor]] = []
        self._watched: list[Tensor] = []  # the tensors of `_named`
        self._versions: list[int] = []  # when the pass began
        self._digests: dict[int, int] = {}  # by place in `_watched`
        self._names: dict[nn.Module, tuple[str, ...]] = {}  # of the modules' parameters; {}: not compared
        self._gathered: dict[int, int] = {}  # versions of gathered parameters, by id
        self._unversioned: set[int] = set()  # ids of parameters that forwards write without a change

    def begin(
        self,
        parameters: Sequence[tuple[str, Tensor]],
        modules: Iterable[nn.Module],
        gathered: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """A pass begins. `parameters`: those that are trained. `modules`: those whose parameters are prepared.

        `gathered`: as for `check`.
        """
        self._is_watching = not self._is_alone()
        if not self._is_watching:
            return
        changes.install()
        modules = list(modules)
        found_from = (len(modules), changes.num_registered)
        if len(modules) != self._found_from[0]:
            self._num_passes = 0  # of the models that there are now
        is_new = not any(parameters is one for one in self._lists)
        if is_new or found_from != self._found_from:
            self._lists += [parameters] if is_new else []
            self._found_from = found_from
            self._named = _all_of(itertools.chain.from_iterable(self._lists), modules)
            self._watched = [one for _, one in self._named]
        is_due = self._num_passes < FIRST_PASSES or self._num_passes % EVERY_PASSES == 0
        self._names = {module: _parameter_names(module) for module in modules} if is_due else {}
        if is_due or self._unversioned:
            some = (number for number, one in enumerate(self._watched) if is_due or id(one) in self._unversioned)
            self._digests = self._digests_at(some)
        with on_parts():
            self._versions = [one._version for one in self._watched]
        self._gathered = {id(one): one._version for _, one in gathered}
        self._num_passes += 1
        changes.open()

    def check(self, gathered: Iterable[tuple[str, Tensor]] = (), modules: Iterable[nn.Module] = ()) -> None:
        """All micro-batches of the pass have run; raises PlanError if a parameter was changed or registered since.

        `gathered`: whole parameters that forwards have seen in place of sharded rows, whose versions begin at 0. A
        write to them would be lost when they are freed. `modules`: as for `begin`.
        """
        if not self._is_watching:
            return
        through_data, registered = changes.written(), changes.registered
        changes.close()
        before = self._gathered
        lost = [name for name, one in gathered if one._version != before.get(id(one), 0) or id(one) in through_data]
        if lost:
            _refuse_written(lost)
        _check_registered(registered, set(modules) if registered else set())
        for module, names in self._names.items():
            if (now := _parameter_names(module)) != names:
                _refuse_new(module, [name for name in now if name not in names])
        with on_parts():
            versions = [one._version for one in self._watched]
        written: list[int] = []
        if versions != self._versions or through_data:
            pairs = enumerate(zip(self._versions, versions, self._watched, strict=True))
            written = [number for number, (old, now, one) in pairs if old != now or id(one) in through_data]
        if self._digests:
            now_digests = self._digests_at(self._digests)
            changed = {number for number, digest in self._digests.items() if digest != now_digests[number]}
            same = [number for number in written if number in self._digests and number not in changed]
            self._unversioned.update(id(self._watched[number]) for number in same)
            written = sorted(changed.union(written).difference(same))
        self._names, self._digests = {}, {}
        if written:
            _refuse_written([self._named[number][0] for number in written])

    def end(self) -> None:
        """The pass is over, or was left early."""
        self._names, self._digests = {}, {}
        if self._is_watching:
            changes.close()

    def _digests_at(self, places: Iterable[int]) -> dict[int, int]:
        chosen = list(places)
        if self.digests is None or not chosen:
            return {}
        with on_parts():
            some = (self._watched[number] for number in chosen)
            tensors = [local_part(one) if is_sharded(one) else one.detach() for one in some]
        return dict(zip(chosen, self.digests(tensors), strict=True))


def _all_of(parameters: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module]) -> list[tuple[str, Tensor]]:
    """All parameters that are here, those that are not trained included, by their names."""
    found = {id(one): (name, one) for name, one in parameters}
    for module in modules:
        # What torch lists besides makes a generator for each module.
        for key, one in module._parameters.items():  # pyright: ignore[reportPrivateUsage]  # nothing public is as quick
            if one is not None:
                found.setdefault(id(one), (f"{class_name(module)}.{key}", one))
    with on_parts():
        return [(name, one) for name, one in found.values() if not one.is_meta]


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    # By `keys()`: what scripted modules have in these places is no dict, and gives something else where it is unpacked.
    return (*module._parameters.keys(), *module._modules.keys())  # pyright: ignore[reportPrivateUsage]  # as in `_all_of`


def _check_registered(registered: Sequence[Registration], modules: set[nn.Module]) -> None:
    """Refuse what was registered in a prepared module and stayed there.

    Layouts do so, too: rows and gathered parameters take turns, and parameters of other stages go.
    """
    for one in {(one.module, one.name): one for one in reversed(registered)}.values():  # the first of each name
        now = registered_at(one.module, one.name)
        is_ours = is_sharded(one.before) or is_sharded(one.now) or isinstance(now, PartialParameter)
        if one.module in modules and one.before is not now and not is_ours:
            _refuse_new(one.module, [one.name])


def _refuse_written(names: Sequence[str]) -> None:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    what = (
        f"parameter {names[0]}{more} was changed while the step's micro-batches ran (in forward, or in the loop over "
        "them). Each worker runs other micro-batches, so workers would differ from each other and from one process."
    )
    remedy = (
        "Initialise by data before worker.prepare(model): call the model on one batch there (ActNorm, weight "
        "standardisation). Project or clip weights after the optimizer's step, or compute them in forward without "
        "writing them (torch.nn.utils.parametrizations). What is no weight belongs in a buffer."
    )
    raise PlanError(f"{what} {remedy}", reasons=[Reason(module=names[0], what=what, remedy=remedy)])


def _refuse_new(module: nn.Module, names: Sequence[str]) -> None:
    name = names[0] if names else "a parameter"
    what = (
        f"{class_name(module)} registered or removed {name!r} within a step, where each worker runs other "
        "micro-batches: it would be neither equal on all workers nor averaged."
    )
    remedy = (
        "Register it in __init__, or call the model on one batch before worker.prepare(model), so that lazy modules "
        "are complete."
    )
    raise PlanError(f"{what} {remedy}", reasons=[Reason(module=class_name(module), what=what, remedy=remedy)])
