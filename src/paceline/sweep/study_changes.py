"""What of a study file makes its trials comparable, and what has changed of it since the first one.

It is kept in Optuna's storage, which others may read. A value of `[environment]` may be a password, so only its
fingerprint is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.sweep.study_file import StudyFile
from paceline.sweep.study_owner import StudyOwner

__all__ = ["comparable_part", "differences"]

CHANGEABLE = ("low", "high", "step")  # of a range, as Optuna allows it


def comparable_part(study: StudyFile, owner: StudyOwner) -> dict[str, Any]:
    """What of a study's file makes its trials comparable."""
    settings = study.settings
    return {
        "script": settings.script,
        "arguments": settings.arguments,
        "plan": settings.plan,
        "objective": dataclasses.asdict(settings.objective),
        "environment": {name: owner.fingerprint(name, text) for name, text in study.environment.items()},
        "job": {name: text for name, text in study.job.items() if name == "max_steps"},
        "parameters": study.space.table(),
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterable[tuple[str, bool]]:
    """Yield what differs in words, and whether Optuna takes such a change."""
    for name in ("script", "arguments", "plan", "objective", "job"):
        if before.get(name) != now[name]:
            yield f"{name} was {before.get(name)!r}, and is {now[name]!r}", False
    old, new = before["environment"], now["environment"]
    for name in dict.fromkeys((*old, *new)):
        if old.get(name) != new.get(name):
            how = "is new" if name not in old else "has changed" if name in new else "is gone"
            yield f"environment.{name} {how}", False
    old, new = before["parameters"], now["parameters"]
    for name in dict.fromkeys((*old, *new)):
        was, now_is = old.get(name), new.get(name)
        if was == now_is:
            continue
        if was is None or now_is is None:
            yield f"parameters.{name} is {'new' if was is None else 'gone'}", False
            continue
        is_range = isinstance(was, dict) and isinstance(now_is, dict) and "low" in was
        same = is_range and {**was, **dict.fromkeys(CHANGEABLE)} == {**now_is, **dict.fromkeys(CHANGEABLE)}
        yield f"parameters.{name} was {_range_text(was)}, and is {_range_text(now_is)}", same


def _range_text(said: Any) -> str:
    if not isinstance(said, dict):
        return repr(said)
    if "choices" in said:
        return f"one of {', '.join(map(str, said['choices']))}"
    step = f" in steps of {said['step']}" if said["step"] not in (None, 1) else ""
    return f"{said['kind']} {said['low']} to {said['high']}{step}{', log' if said['log'] else ''}"
