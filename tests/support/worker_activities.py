"""What workers pretend to do, for the tests of flight records and of the hang detector."""

from __future__ import annotations

import dataclasses

from paceline.comm.flight_recorder import (
    RecordedCollective,
    RecordedGroup,
    WorkTotals,
)
from paceline.monitor.hang.worker_activity import WorkerActivity

__all__ = ["EVERYBODY", "OWN", "USERS", "doing"]


OWN, USERS = 7, 8  # ids of the run's own group, and of one that the user's code has made


EVERYBODY = (0, 1, 2, 3)


def doing(
    worker: int,
    *calls: RecordedCollective,
    waited_s: float = 0.0,
    idle_s: float = 0.0,
    step_s: float = 1.0,
    generation: int = 0,
    **fields: object,
) -> WorkerActivity:
    """A worker that has entered these calls, and waits for the last one if it has waited at all."""
    entered = {group: max((c.sequence for c in calls if c.group == group), default=0) for group in (OWN, USERS)}
    made = WorkerActivity(
        worker=worker,
        host="a",
        pid=4700 + worker,
        limit_s=600.0,
        state="running",
        step=812,
        steps_s=(step_s,) * 3 if step_s else (),
        phase="forward and backward",
        phase_s=waited_s,
        line="train.py:30 in train",
        work=WorkTotals(),
        run_delay_s=None,
        idle_s=max(idle_s, waited_s),
        waits_for=calls[-1].serial if calls and waited_s else 0,
        waited_s=waited_s,
        groups=(
            RecordedGroup(id=OWN, name=f"generation {generation}", members=EVERYBODY, entered=entered[OWN]),
            RecordedGroup(id=USERS, name="torch group 0", members=EVERYBODY, entered=entered[USERS]),
        ),
        calls=calls,
    )
    return dataclasses.replace(made, **fields)
