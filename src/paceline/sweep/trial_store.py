"""The study in Optuna's storage: what the sweep writes there, and what a later start reads.

Everything that has to outlive a kill is here or in the pool, and each step is one that can be taken again: a trial is
in the storage before its run is queued, and it is told there before its run is taken out.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.errors import PlanError
from paceline.sweep.optuna_parts import distributions_of, grid_of, make_pruner, make_sampler, open_storage
from paceline.sweep.space import Value
from paceline.sweep.study_changes import comparable_part, differences
from paceline.sweep.study_file import StudyFile
from paceline.sweep.study_owner import StudyOwner
from paceline.sweep.trial_values import TrialValues, trial_id

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

__all__ = ["ERROR", "REFUSED", "RETRY_OF", "USER", "TrialStore", "is_queued", "parameters_of"]

OWNER, FOLDER = "paceline:owner", "paceline:folder"  # of the study: whose it is; where that was last, for people
SAID = "paceline:study"  # of the study: its file, as far as it counts
POOL = "paceline:pool"  # of the study: the pool's folder
RUN_DIR = "run_dir"  # of a trial; set before its run is queued
ERROR, RETRY_OF, TRIES = "error", "retry_of", "tries"  # of a trial, for people, too
ENDED_BY = "ended_by"  # of a failed trial that is not tried again: its user, or the sweep, before it counted
USER, REFUSED = "user", "refused"


class TrialStore:
    """The study of one file, opened or made."""

    def __init__(self, study: StudyFile) -> None:
        """Raises PlanError where the storage cannot be used, or its study does not fit the file."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        logging.getLogger("alembic").setLevel(logging.ERROR)
        self._file, self._objective = study, study.objective
        self._trials: list[FrozenTrial] | None = None  # as they were read; None: since then they have changed
        self.notes: list[str] = []  # sentences for the user
        self._storage = open_storage(study.storage)
        self._distributions = distributions_of(study.space)
        self._study = optuna.create_study(
            storage=self._storage,
            study_name=study.name,
            direction=study.objective.direction,
            load_if_exists=True,
            sampler=make_sampler(study.sampler, study.space, number=0),
            pruner=make_pruner(study.pruner),
        )
        self.values = TrialValues(self._study, self._storage, study.objective, changed=self.refresh)
        self._owner = StudyOwner(study.folder)
        self._check_owner()
        self._check_changes()
        self._study.set_user_attr(OWNER, self._owner.identity)
        self._study.set_user_attr(FOLDER, self._owner.place)
        self._study.set_user_attr(SAID, json.dumps(comparable_part(study, self._owner)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is experimental: the dashboard shows the name, nothing else needs it
            self._study.set_metric_names([study.objective.metric])

    # What there is.

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number, as they are after this process's last word; what others write is seen by `refresh`."""
        if self._trials is None:
            self._trials = self._study.get_trials(deepcopy=False)
        return self._trials

    def refresh(self) -> None:
        """Have trials read anew, which costs some milliseconds."""
        self._trials = None

    def running(self) -> list[FrozenTrial]:
        from optuna.trial import TrialState

        return [one for one in self.trials() if one.state == TrialState.RUNNING]

    def wanted(self) -> int | None:
        """How many trials the study asks for, retries not counted; None: no limit."""
        wanted = self._file.settings.trials
        if self._file.sampler.get("kind") != "grid":
            return wanted
        points = math.prod(map(len, grid_of(self._file.space).values()))
        return points if wanted is None else min(points, wanted)

    def is_one_more_wanted(self) -> bool:
        """Whether there is a trial to start: one that waits in the storage, or one more of those that are wanted."""
        trials, wanted = self.trials(), self.wanted()
        if any(one.state.name == "WAITING" for one in trials):
            return True
        num_started = sum(RETRY_OF not in one.user_attrs and one.user_attrs.get(ENDED_BY) != REFUSED for one in trials)
        return wanted is None or num_started < wanted

    def best(self) -> FrozenTrial | None:
        """The finished trial with the best value; None where none has finished."""
        best: tuple[float, FrozenTrial] | None = None
        for one in self.trials():
            if one.state.name != "COMPLETE" or one.value is None:
                continue
            if best is None or self._objective.is_better(one.value, best[0]):
                best = one.value, one
        return None if best is None else best[1]

    @property
    def pool(self) -> str | None:
        """The folder of the pool in which the running trials were queued."""
        return self._study.user_attrs.get(POOL)

    @pool.setter
    def pool(self, folder: str) -> None:
        self._study.set_user_attr(POOL, folder)

    # What comes next.

    def ask(self) -> FrozenTrial:
        """Return a new trial, with all its parameters: one that waits in the storage, or what the sampler proposes."""
        number = sum(one.state.name != "WAITING" for one in self.trials())
        self.refresh()
        self._study.sampler = make_sampler(self._file.sampler, self._file.space, number=number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask(self._distributions)
        return self._storage.get_trial(trial_id(trial))

    def complete(self, trial: FrozenTrial) -> FrozenTrial:
        """Return a trial with the parameters that it still lacks, where the sweep was killed while it was proposed."""
        import optuna

        if trial.params.keys() >= self._distributions.keys():
            return trial
        self._study.sampler = make_sampler(self._file.sampler, self._file.space, number=trial.number)
        self.refresh()
        opened = optuna.trial.Trial(self._study, trial_id(trial))
        for name, distribution in self._distributions.items():
            opened._suggest(name, distribution)  # pyright: ignore[reportPrivateUsage]  # as Study.ask does
        return self._storage.get_trial(trial_id(trial))

    # How a trial goes.

    def set_queued(self, trial: FrozenTrial, run_dir: str) -> None:
        self.refresh()
        self._storage.set_trial_user_attr(trial_id(trial), RUN_DIR, run_dir)

    def finish(self, trial: FrozenTrial, value: float) -> None:
        """Tell that it is done. Optuna takes a finite value only."""
        from optuna.trial import TrialState

        self.refresh()
        self._study.tell(trial.number, value, TrialState.COMPLETE)

    def prune(self, trial: FrozenTrial) -> None:
        """Tell that it was pruned, with its last value."""
        from optuna.trial import TrialState

        self.refresh()
        self._study.tell(trial.number, state=TrialState.PRUNED)

    def fail(self, trial: FrozenTrial, error: str, *, ended_by: str | None = None) -> None:
        """Tell that it has failed, and why. `ended_by` USER or REFUSED: it is not tried again."""
        from optuna.trial import TrialState

        self.refresh()
        if ended_by is not None:
            self._storage.set_trial_user_attr(trial_id(trial), ENDED_BY, ended_by)
        self._storage.set_trial_user_attr(trial_id(trial), ERROR, error)
        self._study.tell(trial.number, state=TrialState.FAIL)

    def enqueue_retries(self) -> list[int]:
        """Queue failed trials again, each as often as the study says; returns their numbers. What was queued before is
        not queued twice, also after a kill.
        """
        retries = self._file.settings.retries
        trials = self.trials()
        retried = {one.user_attrs.get(RETRY_OF) for one in trials}
        found: list[int] = []
        for one in trials:
            tries = one.user_attrs.get(TRIES, 0)
            if one.state.name != "FAIL" or one.number in retried or tries >= retries or ENDED_BY in one.user_attrs:
                continue
            self.refresh()
            self._study.enqueue_trial(dict(one.params), user_attrs={RETRY_OF: one.number, TRIES: tries + 1})
            found.append(one.number)
        return found

    # Whether file and storage fit together.

    def _check_owner(self) -> None:
        owner, place = self._study.user_attrs.get(OWNER), self._study.user_attrs.get(FOLDER, "")
        if owner is None and self.running():
            raise PlanError(
                f"{self._file.path}: the storage has a study {self._file.name!r} with running trials that no sweep has "
                "started. Wait for their end, or give this study another name."
            )
        if owner is not None and owner != self._owner.identity:
            raise PlanError(
                f"{self._file.path}: the storage has a study {self._file.name!r} of {place}, and this one's folder is "
                f"{self._owner.place}. Give this study another name, or another storage."
            )
        if self._owner.is_copy_of(place):
            raise PlanError(
                f"{self._file.path}: {self._file.folder} is a copy of {place}, which is still there and has the study "
                f"{self._file.name!r}. Go on there, or give this study another name."
            )

    def _check_changes(self) -> None:
        """Refuse a file whose trials cannot be compared with those of the storage; note what is taken."""
        direction = self._study.direction.name.lower()
        counting = [one for one in self.trials() if _counts(one)]
        if direction != self._objective.direction:
            raise self._changed([f"objective.direction was {direction}, and is {self._objective.direction}"])
        before = self._study.user_attrs.get(SAID)
        if before is None or not counting:
            return
        differing = list(
            differences(json.loads(before), json.loads(json.dumps(comparable_part(self._file, self._owner))))
        )
        refused = [text for text, is_allowed in differing if not is_allowed]
        if refused:
            raise self._changed(refused)
        self.notes += [f"{text}: new trials follow it" for text, _ in differing]

    def _changed(self, texts: Sequence[str]) -> PlanError:
        return PlanError(
            f"{self._file.path} was changed since its first trial, and trials would not be comparable: "
            f"{'; '.join(texts)}. Give the study another name to begin anew, or change it back."
        )


def is_queued(trial: FrozenTrial) -> bool:
    """Whether its run was queued at some time, or was about to be."""
    return RUN_DIR in trial.user_attrs


def parameters_of(study: StudyFile, trial: FrozenTrial) -> dict[str, Value]:
    """The values of a trial in the file's order, the fixed ones too."""
    space = study.space
    found = {name: trial.params[name] for name in space.ranges if name in trial.params}
    return {**found, **space.fixed}


def _counts(trial: FrozenTrial) -> bool:
    """Whether it has to be comparable with others: one that has failed without a value need not be."""
    return bool(trial.intermediate_values) or trial.state.name in ("RUNNING", "COMPLETE", "PRUNED")
