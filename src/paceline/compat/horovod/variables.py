"""The environment variables that Horovod's users set, read at `init()`, and those that their programs read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from paceline import environment
from paceline.errors import PlanError
from paceline.plan.job import Assignment

__all__ = ["HorovodVariables", "allow_dynamic_process_sets", "set_place"]

DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"
MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HorovodVariables:
    """What the environment says. Times are in seconds."""

    fusion_bytes: int = 128 * MIB  # HOROVOD_FUSION_THRESHOLD
    cycle_s: float = 0.1  # HOROVOD_CYCLE_TIME, in milliseconds: what nobody waits for is sent so often
    warn_s: float = 60.0  # HOROVOD_STALL_CHECK_TIME_SECONDS; 0 with HOROVOD_STALL_CHECK_DISABLE
    stall_s: float | None = None  # HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; None: the job's timeout
    timeline: str = ""  # HOROVOD_TIMELINE
    marks_cycles: bool = False  # HOROVOD_TIMELINE_MARK_CYCLES
    has_dynamic_sets: bool = False  # HOROVOD_DYNAMIC_PROCESS_SETS
    is_elastic: bool = False  # HOROVOD_ELASTIC

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> HorovodVariables:
        """Read them; raises PlanError for values that are no numbers or negative."""
        given = environment.variables_of("HOROVOD_") if variables is None else variables
        stall_s = _number(given, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
        return cls(
            fusion_bytes=int(_number(given, "HOROVOD_FUSION_THRESHOLD", 128 * MIB)),
            cycle_s=_number(given, "HOROVOD_CYCLE_TIME", 100.0) / 1000,
            warn_s=0.0
            if _is_set(given, "HOROVOD_STALL_CHECK_DISABLE")
            else _number(given, "HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0),
            stall_s=stall_s or None,
            timeline=given.get("HOROVOD_TIMELINE", ""),
            marks_cycles=_is_set(given, "HOROVOD_TIMELINE_MARK_CYCLES"),
            has_dynamic_sets=_is_set(given, DYNAMIC),
            is_elastic=_is_set(given, "HOROVOD_ELASTIC"),
        )


def allow_dynamic_process_sets() -> None:
    """Let process sets be added after `init()`, as `init(process_sets="dynamic")` does."""
    environment.set_variables({DYNAMIC: "1"})


def set_place(assignment: Assignment) -> None:
    """Set what programs read to know their place before `init()`."""
    environment.set_variables(
        {
            "HOROVOD_RANK": str(assignment.rank),
            "HOROVOD_SIZE": str(assignment.workers),
            "HOROVOD_LOCAL_RANK": str(assignment.local_rank),
            "HOROVOD_LOCAL_SIZE": str(assignment.local_workers),
            "HOROVOD_CROSS_RANK": str(assignment.host_index),
            "HOROVOD_CROSS_SIZE": str(assignment.hosts),
            "HOROVOD_HOSTNAME": assignment.host,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
        }
    )


def _is_set(given: Mapping[str, str], name: str) -> bool:
    return given.get(name, "") not in ("", "0")


def _number(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if value < 0:
        raise PlanError(f"{name} is {text!r}; it must be a number, 0 or more.")
    return value
