"""The objective's values of trials in Optuna's storage, each once, also where a kill comes between two writes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from paceline.sweep.study_file import Objective

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

__all__ = ["TrialValues", "trial_id"]

REPORTED = "paceline:reported"  # of a trial: key and step of the last value, and of the one before


class TrialValues:
    """The values of a study's trials. `changed` is called before each write."""

    def __init__(
        self, study: Study, storage: BaseStorage, objective: Objective, *, changed: Callable[[], None]
    ) -> None:
        self._study, self._storage, self._objective, self._changed = study, storage, objective, changed

    def reported(self, trial: FrozenTrial) -> tuple[int, int]:
        """Return the key of the last value in the storage, and the step until which values are there; 0, 0: none."""
        said = trial.user_attrs.get(REPORTED)
        if said is None:
            return 0, 0
        key, step, before_key, before_step = said
        # The attribute is written first: a kill may have come before its value.
        return (key, step) if key in trial.intermediate_values else (before_key, before_step)

    def report(self, trial: FrozenTrial, step: int, value: float) -> None:
        """Note a value of a running trial; its steps rise."""
        last_key, last_step = self.reported(self._now(trial))
        key = step if self._objective.unit == "steps" else last_key + 1
        self._changed()
        self._storage.set_trial_user_attr(trial_id(trial), REPORTED, [key, step, last_key, last_step])
        self._storage.set_trial_intermediate_value(trial_id(trial), key, value)

    def should_prune(self, trial: FrozenTrial) -> bool:
        """Ask the pruner, about the last one of a running trial."""
        return bool(self._study.pruner.prune(self._study, self._now(trial)))

    def last(self, trial: FrozenTrial) -> tuple[int, float]:
        """The step and the value that were reported last; 0 and NaN where none were."""
        now = self._now(trial)
        key, step = self.reported(now)
        return step, now.intermediate_values.get(key, math.nan)

    def best(self, trial: FrozenTrial, final: float) -> float:
        """The best of a trial's values, of which `final` is the last."""
        values = [value for value in (*self._now(trial).intermediate_values.values(), final) if math.isfinite(value)]
        best = values[0] if values else final
        for value in values:
            best = value if self._objective.is_better(value, best) else best
        return best

    def _now(self, trial: FrozenTrial) -> FrozenTrial:
        return self._storage.get_trial(trial_id(trial))


def trial_id(trial: FrozenTrial | Trial) -> int:
    """The key of a trial in its storage, over all studies there."""
    return trial._trial_id  # pyright: ignore[reportPrivateUsage]  # the storage knows no other key
