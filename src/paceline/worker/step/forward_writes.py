"""Finds parameters that a forward changes, or registers, within a step: replicas would differ from then on.

Each worker runs other micro-batches, and not equally many. So what a forward writes into a parameter (an initialisation
by the first batch, as ActNorm has it; a projection; rows scaled by `Embedding(max_norm=...)`) differs between workers,
or from one process. Such a step is refused before its optimizer steps.

A write counts up the tensor's version, so an ordinary step compares integers. `p.data` has a count of its own. So in
the first passes, and in some later ones, digests of all parameters are compared as well. They also tell a write that
changes nothing (`flatten_parameters()` of torch's RNNs), whose parameter is no longer watched by its version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from paceline.comm.sharded_tensors import is_sharded, local_part
from paceline.errors import PlanError, Reason
from paceline.parallel.class_name import class_name

__all__ = ["ForwardWrites"]

FIRST_PASSES, EVERY_PASSES = 3, 100  # when digests are compared


class ForwardWrites:
    """Watches one worker's parameters during gradient passes."""

    def __init__(self, *, is_alone: bool) -> None:
        """`is_alone`: one worker takes the steps, so that a write in forward is that of one process."""
        self._is_alone = is_alone
        self.digests: Callable[[Iterable[Tensor]], list[int]] | None = None  # None: only versions are compared
        self._num_passes = 0
        self._watched: list[tuple[str, Tensor, int]] = []  # with their versions when the pass began
        self._digests: list[int] | None = None
        self._names: dict[nn.Module, tuple[str, ...]] = {}  # of the modules' parameters when the pass began
        self._unversioned: set[int] = set()  # ids of parameters that forwards write without a change

    def begin(self, parameters: Iterable[tuple[str, Tensor]], modules: Iterable[nn.Module]) -> None:
        """A pass begins. `modules`: those whose parameters are prepared."""
        if self._is_alone:
            return
        self._watched = [(name, one, one._version) for name, one in parameters if not one.is_meta]
        self._names = {module: _parameter_names(module) for module in modules}
        is_due = self._num_passes < FIRST_PASSES or self._num_passes % EVERY_PASSES == 0
        self._digests = self._digests_of(self._watched) if is_due and self.digests is not None else None
        self._num_passes += 1

    def check(self, gathered: Iterable[tuple[str, Tensor]] = ()) -> None:
        """All micro-batches of the pass have run; raises PlanError if a parameter was changed or registered since.

        `gathered`: whole parameters that forwards have seen in place of sharded rows, whose versions begin at 0. A
        write to them would be lost when they are freed.
        """
        if self._is_alone:
            return
        lost = [name for name, one in gathered if one._version]
        if lost:
            _refuse_written(lost)
        for module, names in self._names.items():
            if (now := _parameter_names(module)) != names:
                _refuse_new(module, [name for name in now if name not in names])
        written = [
            number
            for number, (_, one, version) in enumerate(self._watched)
            if one._version != version and id(one) not in self._unversioned
        ]
        if self._digests is not None:
            now = self._digests_of(self._watched)
            changed = [number for number, digest in enumerate(now) if digest != self._digests[number]]
            self._unversioned.update(id(self._watched[number][1]) for number in set(written) - set(changed))
            written = changed
        self._names, self._digests = {}, None
        watched, self._watched = self._watched, []
        if written:
            _refuse_written([watched[number][0] for number in written])

    def end(self) -> None:
        """The pass is over, or was left early."""
        self._watched, self._names, self._digests = [], {}, None

    def _digests_of(self, watched: Sequence[tuple[str, Tensor, int]]) -> list[int]:
        tensors = (local_part(one) if is_sharded(one) else one.detach() for _, one, _ in watched)
        return [] if self.digests is None else self.digests(tensors)


def _parameter_names(module: nn.Module) -> tuple[str, ...]:
    # what torch lists besides makes a generator for each module
    return (*module._parameters, *module._modules)  # pyright: ignore[reportPrivateUsage]  # see above


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
