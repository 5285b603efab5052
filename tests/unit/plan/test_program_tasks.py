"""Jobs of other frameworks' programs: how their tasks are counted and called, and what they cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import PlanError
from paceline.plan import CommandPlan, Job, Plan
from paceline.plan.program_tasks import asked_workers, refuse_plan, settled_tasks, task_name, task_names, tasks_text

PROGRAM: dict[str, Any] = {"program": "train.py", "run_for": "tensorflow"}


def test_workers_are_counted_as_tensorflow_does_and_processes_as_places() -> None:
    settled = settled_tasks(Job(**PROGRAM, workers=2, servers=1))
    assert settled.workers == 4  # a chief, two workers, a server
    assert [task_name(settled, rank) for rank in range(4)] == ["chief", "worker 0", "worker 1", "server 0"]
    assert asked_workers(settled.workers, settled.servers) == 2
    assert tasks_text(4, 1) == "chief, 2 workers, 1 server" and tasks_text(1, None) == "1 worker"


def test_without_servers_names_are_ranks() -> None:
    settled = settled_tasks(Job(**PROGRAM, workers=3))
    assert settled.workers == 3 and task_names(3, None) == ("worker 0", "worker 1", "worker 2")
    assert asked_workers(3, None) == 3
    assert task_name({"workers": 4, "servers": None}, 2) == "worker 2"
    assert task_name({"workers": 4, "servers": 1}, 9) == "worker 9"  # of a damaged record


def test_without_a_number_there_is_a_worker_on_each_host() -> None:
    assert settled_tasks(Job(**PROGRAM, hosts=3, head="node1:1")).workers == 3
    assert settled_tasks(Job(**PROGRAM, servers=2)).workers == 4


def test_other_jobs_stay_as_they_are() -> None:
    job = Job(program="train.py", workers=2)
    assert settled_tasks(job) is job


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"servers": 0, **PROGRAM}, "Job.servers is 0; it must be at least 1."),
        ({"servers": 1}, "Job.servers is 1; it is for programs with servers of their own: add run_for='tensorflow'"),
        ({"run_for": "tensorflow"}, "run_for='tensorflow' needs a script: paceline run --for tensorflow train.py."),
        ({"run_for": "tensorflaw", "program": "t.py"}, "Job.run_for is 'tensorflaw'; it must be 'tensorflow' or none."),
        ({"run_as": "horovod", **PROGRAM}, "exclude each other: a program is of one framework."),
        ({"launcher": "inline", **PROGRAM}, "needs one of its own: use launcher='local'."),
        ({"max_steps": 5, **PROGRAM}, "max_steps=5 cannot be used with run_for='tensorflow': the program takes its"),
        ({"fresh": True, "save_every": 3, **PROGRAM}, "fresh=True, save_every=3 cannot be used with"),
        ({"cluster": "lab.toml", **PROGRAM}, "cluster='lab.toml' cannot be used with"),
    ],
)
def test_what_a_program_cannot_have_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Job(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize("plan", [CommandPlan(whole=Plan()), CommandPlan.of(None, ["plan.batch.size=64"])])
def test_a_plan_is_refused(plan: CommandPlan) -> None:
    with pytest.raises(PlanError, match=r"Leave --plan, --set plan\.\.\. and the job file's plan out"):
        refuse_plan(Job(**PROGRAM), plan)
    refuse_plan(Job(program="train.py"), plan)
    refuse_plan(Job(**PROGRAM), CommandPlan())
