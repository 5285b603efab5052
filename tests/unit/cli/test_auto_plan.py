"""`plan="auto"`: where it is read, what is refused, and how the choice goes from the planner's process to the run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.cli.main import main
from paceline.cli.plan_costs import choose
from paceline.cli.plan_costs.subject import Subject
from paceline.cli.plan_costs.verify import Verified
from paceline.errors import PlanError
from paceline.plan import Batch, CommandPlan, Job, Layout, Plan
from paceline.planner.named_cluster import NamedCluster, cluster_named
from paceline.planner.receipt import Receipt
from paceline.runs import auto_plan

SCRIPT = """
import paceline, torch
from torch.utils.data import TensorDataset

def train(worker):
    model = worker.prepare(torch.nn.Linear(4, 4), sample=(torch.zeros(2, 4),))

if __name__ == "__main__":
    paceline.run(train{plan})
"""
CHOOSER = """
import json, sys
asked, script, *args = sys.argv[1:]
if "fail" in args:
    sys.exit("paceline: no plan ran")
print("noise")
print("paceline tried 1 of at most 5: replicas=2: 2.00 s a step")
print(json.dumps({"plan": "shard=2+batch(size=64)", "why": json.dumps([json.loads(asked), args])}))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(plan=', plan="auto+batch(size=64,micro=8)"'))
    return path


def receipt(plan: Plan, seconds: float) -> Receipt:
    return Receipt(
        model="m",
        plan=str(plan),
        micro=8,
        workers=2,
        predicted_s=1.0,
        predicted_parts={},
        predicted_bytes=1e9,
        measured_s=seconds,
        measured_parts={},
        measured_bytes=None,
    )


@pytest.fixture
def chooser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake_chooser.py").write_text(CHOOSER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(auto_plan, "CHOOSER", "fake_chooser")


def test_the_choice_comes_from_a_process_of_its_own(script: Path, chooser: None) -> None:
    said: list[str] = []
    found = auto_plan.choose_plan(
        script,
        Job(workers=2),
        base=Plan(batch=Batch(size=64)),
        overrides=["plan.batch.micro=4"],
        args=["--lr", "1"],
        say=said.append,
    )
    assert found == Plan(layout=Layout(shard=2), batch=Batch(size=64))
    assert "measuring this machine" in said[0]
    assert said[1] == "plan auto: 1 of at most 5: replicas=2: 2.00 s a step"
    asked, args = json.loads(said[2].split(" (", 1)[1].removesuffix(")"))
    assert asked == {"plan": "batch(size=64)", "overrides": ["plan.batch.micro=4"], "workers": 2}
    assert args == ["--lr", "1"]


def test_why_there_is_no_plan_is_said(script: Path, chooser: None) -> None:
    with pytest.raises(PlanError, match="plan='auto' found no plan: no plan ran"):
        auto_plan.choose_plan(script, Job(workers=2), args=["fail"], say=lambda _: None)


@pytest.mark.parametrize(
    ("job", "has_script", "says"),
    [
        (Job(workers=4, hosts=2, head="a:1"), True, "the job has 2 hosts"),
        (Job(workers=4), False, "has no script"),
        (Job(), True, "needs the number of workers"),
    ],
)
def test_where_nothing_can_be_chosen(script: Path, job: Job, has_script: bool, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        auto_plan.choose_plan(script if has_script else None, job, args=(), say=lambda _: None)


@pytest.mark.parametrize(
    ("own", "words", "base", "overrides"),
    [
        (', plan="auto"', (), None, []),
        (', plan="replicas=2"', ("--plan", "auto"), None, []),
        ("", ("--plan", "auto+batch(size=8)"), "batch(size=8)", []),
        (', plan="auto"', ("--set", "plan.batch.size=8"), None, ["plan.batch.size=8"]),
        ("", ("--plan", "auto+batch(size=8)", "--set", "plan.batch.micro=2"), "batch(size=8,micro=2)", []),
    ],
)
def test_where_auto_is_read(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    words: tuple[str, ...],
    base: str | None,
    overrides: list[str],
) -> None:
    asked: dict[str, Any] = {}

    def choose_plan(path: Path, job: Job, **given: Any) -> Plan:
        asked.update(given, workers=job.workers)
        raise PlanError("asked")

    (tmp_path / "train.py").write_text(SCRIPT.format(plan=own))
    monkeypatch.setattr(auto_plan, "choose_plan", choose_plan)
    assert main(["run", str(tmp_path / "train.py"), "--workers", "2", *words]) == 2
    assert (asked["workers"], asked["overrides"]) == (2, overrides)
    assert asked["base"] == (None if base is None else Plan.parse(base))


def test_a_dry_run_chooses_nothing(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(script), "--workers", "2", "--dry-run"]) == 0
    assert "plan   the script's own" in capsys.readouterr().out


def test_an_engines_hosts_are_not_this_machine(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(script), "--workers", "2", "--on", "slurm"]) == 2
    assert "plan='auto' runs plans on this machine" in capsys.readouterr().err


def test_in_a_world_of_another_launcher_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29511")
    with pytest.raises(PlanError, match="plan='auto' runs plans on this machine"):
        paceline.run(lambda worker: None, plan="auto")


@pytest.mark.thorough
@pytest.mark.parametrize("own", ["batch(size=64,micro=8)", "replicas=4+batch(size=64,micro=8)"])
def test_the_fastest_that_ran_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(plan=f', plan="{own}"'))
    here = cluster_named("rtx4090x8-pcie", 2)

    def run(
        subject: Subject, where: NamedCluster, count: int, *, script: Path, args: Sequence[str], tell: Any
    ) -> list[Verified]:
        assert (where, script, args, subject.plan.layout.workers) == (here, path, ("--lr", "1"), 2)
        plans = [dataclasses.replace(subject.plan, layout=one) for one in (Layout(replicas=2), Layout(shard=2))]
        slow, fast = (subject.price(one, where.cluster, workers=2) for one in plans)
        return [
            Verified(priced=slow, receipt=receipt(slow.plan, 2.0)),
            Verified(priced=fast, receipt=receipt(fast.plan, 1.0)),
            Verified(priced=slow, receipt=None, problem="it failed"),
        ]

    monkeypatch.setattr(choose, "this_machine", lambda workers: here)
    monkeypatch.setattr(choose, "verified_plans", run)
    found, why = choose.chosen(path, CommandPlan(), ("--lr", "1"), workers=2)
    assert found == Plan(layout=Layout(shard=2), batch=Batch(size=64, micro=8))
    assert why == "1.00 s a step, the fastest of 2 that were run"


def test_where_no_plan_ran_each_reason_is_told(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(subject: Subject, where: NamedCluster, *_: Any, **__: Any) -> list[Verified]:
        priced = subject.price(subject.plan, where.cluster, workers=2)
        return [Verified(priced=priced, receipt=None, problem="the data is missing")]

    monkeypatch.setattr(choose, "this_machine", lambda workers: cluster_named("rtx4090x8-pcie", workers))
    monkeypatch.setattr(choose, "verified_plans", run)
    with pytest.raises(PlanError, match=r"none of 1 plans ran: .*: the data is missing"):
        choose.chosen(script, CommandPlan(), (), workers=2)
