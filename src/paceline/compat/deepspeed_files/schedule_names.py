"""The learning rate schedules of DeepSpeed's configuration, and their options. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from paceline.errors import PlanError

__all__ = ["OPTIONS", "ScheduleChoice", "choose_schedule"]

_WARMUP = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type")

# The options of each schedule, of which the ones with a star have no default.
OPTIONS: dict[str, tuple[str, ...]] = {
    "LRRangeTest": (
        "lr_range_test_min_lr",
        "lr_range_test_step_size",
        "lr_range_test_step_rate",
        "lr_range_test_staircase",
    ),
    "OneCycle": (
        "cycle_min_lr*",
        "cycle_max_lr*",
        "decay_lr_rate",
        "cycle_first_step_size",
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
        "cycle_momentum",
        "cycle_min_mom",
        "cycle_max_mom",
        "decay_mom_rate",
    ),
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": ("total_num_steps*", *_WARMUP),
    "WarmupCosineLR": ("total_num_steps*", "warmup_min_ratio", "warmup_num_steps", "cos_min_ratio", "warmup_type"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleChoice:
    """A class of `paceline.compat.deepspeed.schedules`, or of torch.optim.lr_scheduler, and its options."""

    name: str
    options: Mapping[str, Any]


def choose_schedule(kind: str, params: Mapping[str, Any]) -> ScheduleChoice:
    """Return the schedule of a type. Raises PlanError for an unknown type or option, and for one that is missing.

    A type that is none of DeepSpeed's is one of torch.optim.lr_scheduler, whose options torch checks.
    """
    options = {key: value for key, value in params.items() if key != "last_batch_iteration"}
    if kind not in OPTIONS:
        near = difflib.get_close_matches(kind, OPTIONS, n=1, cutoff=0.8)
        if near or not kind.endswith("LR"):
            raise PlanError(
                f"scheduler.type is {kind!r}; it must be one of {', '.join(OPTIONS)}, or a class of "
                f"torch.optim.lr_scheduler{f'. Did you mean {near[0]}?' if near else ''}."
            )
        return ScheduleChoice(name=kind, options=options)
    known = [one.rstrip("*") for one in OPTIONS[kind]]
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            raise PlanError(
                f"scheduler.params.{key}: {kind} has no such option{f', did you mean {near[0]}?' if near else ''}"
            )
    return ScheduleChoice(name=kind, options=options)
