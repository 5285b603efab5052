"""Jobs, job files and assignments: read with types, checked as a whole, written and read back."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

import paceline
import paceline.errors
from paceline.errors import PacelineError, PlanError
from paceline.plan import Assignment, Batch, Cast, CommandPlan, Job, Layout, Plan, read_job_file
from paceline.plan.job import assignment_from_json, assignment_to_json, head_address
from paceline.runs.run import run

ASSIGNMENT = Assignment(
    rank=3,
    workers=4,
    local_rank=1,
    local_workers=2,
    host="node2",
    host_index=1,
    hosts=2,
    address="10.0.0.2",
    run_dir="runs/x",
    attempt=1,
    worker_dir="runs/x/attempt_1/worker_3",
    channel_fd=7,
    command_started=1234.5,
    job=Job(program="train.py", args=("--lr", "1"), hosts=2, head="node1:29500", timeout_s=3.0),
    plan=CommandPlan.of(Plan(layout=Layout(replicas=4)), ["plan.batch.size=64", "plan.wire=cast(dtype=bf16)"]),
    given=("hosts", "head"),
)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"workers": 0}, "Job.workers is 0; it must be at least 1."),
        ({"keep": 0}, "Job.keep is 0"),
        ({"workers": "4"}, "Job.workers is '4'; it must be a whole number or none."),
        ({"timeout_s": 0}, "Job.timeout_s is 0; it must be more than 0 seconds."),
        ({"metrics_port": 70000}, "Job.metrics_port is 70000; it must be from 0 (any free port) to 65535."),
        ({"launcher": "slurm"}, "Job(launcher='slurm') is not built yet. Use launcher='local'"),
        ({"launcher": "lokal"}, "Job.launcher is 'lokal'; it must be 'local' or 'inline'. Did you mean 'local'?"),
        ({"show": "none"}, "Job.show is 'none'; it must be 'first' or 'all'."),
        ({"hosts": 2}, "A job on 2 hosts needs a rendezvous address"),
        ({"hosts": 2, "head": "node1"}, "Job.head is 'node1'; it must be HOST:PORT"),
        ({"hosts": 3, "head": "node1:1", "workers": 2}, "2 workers cannot fill 3 hosts: use workers=3 or more"),
        ({"hosts": 2, "head": "node1:1", "launcher": "inline"}, "use hosts=1, or launcher='local'"),
    ],
)
def test_a_job_that_cannot_work_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Job(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("head", "address"),
    [("node1:29500", ("node1", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:65535", ("::1", 65535))],
)
def test_a_head_is_a_host_and_a_port(head: str, address: tuple[str, int]) -> None:
    assert head_address(head) == address


@pytest.mark.parametrize("head", ["node1:0", "node1:65536", ":1", "node1:x", "node1:", ""])
def test_a_head_without_a_usable_port_is_refused(head: str) -> None:
    with pytest.raises(PlanError, match="it must be HOST:PORT"):
        head_address(head)


def test_an_assignment_survives_json() -> None:
    text = assignment_to_json(ASSIGNMENT)
    assert "\n" not in text
    assert assignment_from_json(text) == ASSIGNMENT


def test_a_damaged_assignment_is_refused() -> None:
    with pytest.raises(PlanError, match=r"assignment\.rank is 'x'; it must be a whole number"):
        assignment_from_json(assignment_to_json(ASSIGNMENT).replace('"rank": 3', '"rank": "x"', 1))
    with pytest.raises(ValueError):
        assignment_from_json("not json")


JOB_FILE = """
program = "train.py"
args = ["--lr", "0.1"]
workers = 4
timeout_s = 30

[plan]
layout = {replicas = 4}
wire = "cast(dtype=bf16)"
batch = {size = 64, micro = 8}
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_job_file_holds_job_and_plan_and_says_what_it_set(tmp_path: Path) -> None:
    job, plan, given = read_job_file(write(tmp_path / "jobs" / "job.toml", JOB_FILE))
    assert job == Job(program=str(tmp_path / "jobs/train.py"), args=("--lr", "0.1"), workers=4, timeout_s=30.0)
    assert plan == Plan(layout=Layout(replicas=4), wire=Cast(dtype="bf16"), batch=Batch(size=64, micro=8))
    assert given == ("program", "args", "workers", "timeout_s")


def test_a_plan_may_be_one_line_of_text_or_a_kind(tmp_path: Path) -> None:
    _, plan, _ = read_job_file(write(tmp_path / "a.toml", 'plan = "replicas=2+cast(dtype=fp16)"'))
    assert plan == Plan(layout=Layout(replicas=2), wire=Cast(dtype="fp16"))
    _, plan, _ = read_job_file(write(tmp_path / "b.toml", '[plan]\nwire = {kind = "Cast", dtype = "fp16"}'))
    assert plan == Plan(wire=Cast(dtype="fp16"))
    assert read_job_file(write(tmp_path / "c.toml", "workers = 2"))[1] is None


def test_an_absolute_program_stays_as_it_is(tmp_path: Path) -> None:
    job, _, _ = read_job_file(write(tmp_path / "job.toml", 'program = "/opt/train.py"'))
    assert job.program == "/opt/train.py"


def test_changes_win_and_are_merged_before_the_job_is_checked(tmp_path: Path) -> None:
    path = write(tmp_path / "job.toml", "hosts = 2\nworkers = 2")
    with pytest.raises(PlanError, match="needs a rendezvous address"):
        read_job_file(path)
    job, _, given = read_job_file(path, {"head": "node1:29500", "workers": 8})
    assert (job.hosts, job.head, job.workers) == (2, "node1:29500", 8)
    assert given == ("hosts", "workers", "head")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker = 4", "worker: Job has no field 'worker'. Did you mean 'workers'?"),
        ("workers = '4'", "workers is '4'; it must be a whole number or none."),
        ("args = [1]", "args is (1,); it must be a tuple (in TOML an array) of text."),
        ("plan = 3", "plan is 3; it must be a table, or one line of text such as 'replicas=2'."),
        ("[plan]\nwires = 'raw'", "plan.wires: Plan has no field 'wires'. Did you mean 'wire'?"),
        ("[plan]\nbatch = {size = '64'}", "plan.batch.size is '64'; it must be a whole number."),
        ("[plan]\nlayout = {experts = 0}", "Layout.experts is 0; it must be at least 1"),
        ("[plan]\nlayout = {replicas = [8, 2]}", "a pair is (least, most)"),
        ("[plan]\nsync = {kind = 'LocalSGD'}", "plan.sync.every is missing"),
        (
            "[plan]\nsync = {kind = 'LocalSGD', every = 64, outer = 3}",
            "plan.sync.outer is 3; it must be Nesterov or none",
        ),
        ("[plan]\ncompute = {fp8_recipe = 'rowwise'}", "Compute(precision='fp8', fp8_recipe='rowwise')"),
        ("[plan]\nreplicas = 4", "Did you mean 'plan.layout.replicas'?"),
    ],
)
def test_a_mistake_in_a_job_file_names_the_file_and_the_place(tmp_path: Path, text: str, says: str) -> None:
    path = write(tmp_path / "job.toml", text)
    with pytest.raises(PlanError) as caught:
        read_job_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_script_may_say_every_field_of_a_job_but_the_program_and_each_is_documented() -> None:
    taken = inspect.signature(run).parameters
    of_programs = {"run_as", "run_for", "servers", "restart_lost"}  # that call no paceline.run
    fields = {field.name for field in dataclasses.fields(Job)} - {"program", "args"} - of_programs
    assert set(taken) - {"function", "plan", "on", "loggers", "unknown"} == fields
    assert all(taken[name].default is None and taken[name].annotation != "Any" for name in fields)
    documented = inspect.getdoc(run) or ""
    assert all(f":param {name}:" in documented for name in fields | {"function", "plan", "on"})


def test_a_misspelt_keyword_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(PlanError, match=r"Job has no field 'worker'\. Did you mean 'workers'"):
        run(lambda worker: None, worker=2)


def test_every_error_that_is_raised_on_purpose_is_exported_and_says_when() -> None:
    errors = [one for one in vars(paceline.errors).values() if isinstance(one, type) and issubclass(one, PacelineError)]
    assert {one.__name__ for one in errors} <= set(paceline.__all__)
    assert all(one.__doc__ for one in errors)
