"""The samplers, pruners and storages of Optuna by the names that a study file has for them, with Optuna's own options.

A sampler begins anew with each start of the sweep. With a seed it would propose the same values again, so its seed is
the study's plus the number of the trial, but where the sampler's own state is in the storage or follows from it.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline import config
from paceline.errors import PlanError
from paceline.sweep.space import Categorical, Float, Int, Range, Space, Value
from paceline.sweep.study_file import JOURNAL

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.storages import BaseStorage

__all__ = ["distributions_of", "grid_of", "make_pruner", "make_sampler", "open_storage", "require_optuna"]

SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "grid": "GridSampler",
    "cmaes": "CmaEsSampler",
    "qmc": "QMCSampler",
    "gp": "GPSampler",
}
SAME_SEED = ("grid", "qmc")  # the place in their sequence is in the storage
PRUNERS = {
    "none": "NopPruner",
    "median": "MedianPruner",
    "percentile": "PercentilePruner",
    "asha": "SuccessiveHalvingPruner",
    "successive-halving": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "threshold": "ThresholdPruner",
    "patient": "PatientPruner",
    "wilcoxon": "WilcoxonPruner",
}
PACKAGES = {"cmaes": "cmaes", "gp": "scipy"}  # that a sampler needs beside Optuna
MOST_GRID = 100_000  # points


def require_optuna() -> None:
    """Raise PlanError where Optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise PlanError("A sweep needs Optuna, which this Python does not have: pip install 'paceline[sweep]'.")


def make_sampler(said: Mapping[str, Any], space: Space, *, number: int) -> BaseSampler:
    """Return the sampler that proposes trial `number`; `said`: the table [sampler]. Raises PlanError."""
    import optuna

    options = dict(said)
    kind = _kind(options, SAMPLERS, default="tpe", path="sampler")
    package = PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise PlanError(f"sampler.kind = {kind!r} needs the package {package}: pip install {package}.")
    seed = options.get("seed")
    if seed is not None:
        options["seed"] = config.convert_value(seed, int, path="sampler.seed", owner=Space, name="seed")
        options["seed"] += 0 if kind in SAME_SEED else number
    if kind == "grid":
        return _Grid.made(grid_of(space), options)
    made: BaseSampler = _make(getattr(optuna.samplers, SAMPLERS[kind]), options, path="sampler")
    return made


def make_pruner(said: Mapping[str, Any], *, path: str = "pruner") -> BasePruner:
    """Return the pruner of the table [pruner]; without a kind it prunes nothing. Raises PlanError."""
    import optuna

    options = dict(said)
    kind = _kind(options, PRUNERS, default="none", path=path)
    if kind == "patient":
        inner = options.pop("wrapped", None)
        if inner is not None and not isinstance(inner, Mapping):
            raise PlanError(f'{path}.wrapped is {inner!r}; it must be a table such as {{ kind = "median" }}.')
        options["wrapped_pruner"] = None if inner is None else make_pruner(inner, path=f"{path}.wrapped")
    made: BasePruner = _make(getattr(optuna.pruners, PRUNERS[kind]), options, path=path)
    return made


def open_storage(url: str) -> BaseStorage:
    """Return the storage of an URL: one of SQLAlchemy's, or journal:PATH. Raises PlanError where it cannot be used."""
    from optuna import storages
    from optuna.storages.journal import JournalFileBackend

    try:
        if url.startswith(JOURNAL):
            return storages.JournalStorage(JournalFileBackend(url.removeprefix(JOURNAL)))
        return storages.get_storage(url)
    except Exception as error:  # SQLAlchemy's, and the driver's, have no class in common
        says = next(iter(str(error).splitlines()), "no more is said")
        raise PlanError(
            f"storage cannot be used ({type(error).__name__}: {says}). Give an URL such as "
            "sqlite:////path/optuna.db or mysql://user@host/optuna, or journal:/path/optuna.log."
        ) from error


def distributions_of(space: Space) -> dict[str, BaseDistribution]:
    """Return what Optuna calls the ranges of a space."""
    return {name: _distribution(one) for name, one in space.ranges.items()}


def grid_of(space: Space) -> dict[str, Sequence[Value]]:
    """Return the values of each range; PlanError where one has no end of them."""
    found = {name: _values(name, one) for name, one in space.ranges.items()}
    points = math.prod(map(len, found.values()))
    if points > MOST_GRID:
        raise PlanError(f"The grid has {points:,} points; at most {MOST_GRID:,} are taken. Use larger steps.")
    return found


def _values(name: str, one: Range) -> Sequence[Value]:
    if isinstance(one, Categorical):
        return one.choices
    if one.step is None or one.log:
        raise PlanError(f"sampler.kind = 'grid' needs a step for parameters.{name}, or an array of values.")
    if isinstance(one, Int):
        return range(one.low, one.high + 1, one.step)
    count = math.floor((one.high - one.low) / one.step + 1e-9) + 1
    return [one.low + place * one.step for place in range(min(count, MOST_GRID + 1))]


def _distribution(one: Range) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    match one:
        case Categorical(choices=choices):
            return CategoricalDistribution(choices)
        case Float(low=low, high=high, log=log, step=step):
            return FloatDistribution(low, high, log=log, step=step)
        case Int(low=low, high=high, log=log, step=step):
            return IntDistribution(low, high, log=log, step=step)


class _Grid:
    """Makes Optuna's grid sampler for trials that are asked for one by one."""

    @staticmethod
    def made(grid: Mapping[str, Sequence[Value]], options: Mapping[str, Any]) -> BaseSampler:
        import optuna

        class GridByAsking(optuna.samplers.GridSampler):
            """Does not end `study.optimize`, which does not run here: the sweep counts the points itself."""

            def after_trial(self, study: Any, trial: Any, state: Any, values: Any) -> None:
                pass

        return _make(GridByAsking, {"search_space": grid, **options}, path="sampler", own=("search_space",))


def _kind(options: dict[str, Any], legal: Mapping[str, str], *, default: str, path: str) -> str:
    kind = options.pop(config.KIND, default)
    if kind not in legal:
        near = config.suggest(str(kind), legal)
        raise PlanError(f"{path}.kind is {kind!r}; it must be one of {', '.join(legal)}.{near}")
    return str(kind)


def _make(cls: type[Any], options: Mapping[str, Any], *, path: str, own: Sequence[str] = ()) -> Any:
    """Make one of Optuna's objects; options that it does not know, or refuses, are PlanErrors."""
    import warnings

    legal = [name for name in inspect.signature(cls).parameters if name not in own]
    for name in itertools.filterfalse(lambda one: one in (*legal, *own), options):
        raise PlanError(
            f"{path}.{name}: Optuna's {cls.__name__} has no option {name!r}.{config.suggest(name, legal)} "
            f"It has {', '.join(legal) or 'none'}."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of options that are experimental: the user has asked for them
            return cls(**options)
    except (TypeError, ValueError) as error:
        raise PlanError(f"[{path}]: Optuna's {cls.__name__} refuses it: {error}") from error
