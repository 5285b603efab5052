"""How many workers a script asks for is read in its text, by the command, before any of them runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cli.run import show_dry_run
from paceline.errors import PlanError
from paceline.plan import CommandPlan, Job, Plan
from paceline.plan.script_scan import auto_plan_of_script, cluster_of_script, workers_of_script
from paceline.settings import settings_of

ELASTIC = "Plan(layout=Layout(replicas=(2, 4), shard=2), batch=Batch(size=b))"


def asked(tmp_path: Path, text: str, *overrides: str) -> tuple[int | None, list[str]]:
    said: list[str] = []
    script = tmp_path / "train.py"
    script.write_text(text)
    settings = settings_of(Plan(), overrides)
    return workers_of_script(script, settings, args=("--lr", "0.1"), say=said.append), said


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("paceline.run(train, workers=3)", 3),
        ("n = 3\nif __name__ == '__main__':\n    run(train, workers=n, plan=plan)", 3),
        ("paceline.run(train, plan='replicas=2-4+batch(size=64)')", 4),
        (f"paceline.run(train, plan={ELASTIC})", 8),
        (f"plan = {ELASTIC}\ndef main():\n    paceline.run(train, plan=plan)", 8),
        ("most: int = 5\nl = Layout(replicas=most)\np = paceline.Plan(layout=l)\npaceline.run(train, plan=p)", 5),
        ("paceline.run(train, workers=None, plan='replicas=2')", 2),
        ("paceline.run(train, plan=Plan(layout=Layout(shard=args.shard)))", None),
        ("paceline.run(train, plan=Plan(batch=Batch(size=args.size)))", None),
        ("paceline.run(train, plan=None)", None),
        ("paceline.run(train)", None),
        ("print('no call of run')", None),
        ("this is no Python", None),
    ],
)
def test_what_is_written_out_is_read(tmp_path: Path, text: str, workers: int | None) -> None:
    assert asked(tmp_path, text) == (workers, [])


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("paceline.run(train, workers=args.n)", "args.n"),
        ("n = 1\nfor n in (2, 3):\n    paceline.run(train, workers=n)", "n"),
        (
            "plan = Plan(layout=Layout(replicas=4 if a else (2, 4)))\npaceline.run(train, plan=plan)",
            "Layout(replicas=4 if a else (2, 4))",
        ),
    ],
)
def test_a_number_that_is_computed_is_asked_for_with_the_command_to_type(
    tmp_path: Path, text: str, source: str
) -> None:
    with pytest.raises(PlanError) as refused:
        asked(tmp_path, text)
    assert f"computes how many workers it wants ({source}), and workers are started before" in str(refused.value)
    assert str(refused.value).endswith(f": paceline run {tmp_path}/train.py --workers N --lr 0.1")


@pytest.mark.parametrize(
    "text",
    [
        "paceline.run(train, plan=make_plan())",
        "if a:\n    plan = Plan()\nelse:\n    plan = 'replicas=2'\npaceline.run(train, plan=plan)",
        "def main(plan):\n    paceline.run(train, plan=plan)",
    ],
)
def test_a_plan_of_which_nothing_can_be_seen_is_said_at_once_and_not_refused(tmp_path: Path, text: str) -> None:
    workers, said = asked(tmp_path, text)
    assert workers is None
    assert len(said) == 1 and said[0].endswith(f"say so: paceline run {tmp_path}/train.py --workers N --lr 0.1")


@pytest.mark.parametrize(
    ("text", "workers"),
    [
        ("paceline.run(train, plan='replicas=2+shard=2')", 12),
        ("paceline.run(train, plan=Plan())", 6),
        ("paceline.run(train, plan=make_plan())", 6),
        ("paceline.run(train)", 6),
        ("paceline.run(train, workers=3)", 3),
    ],
)
def test_overrides_of_the_layout_count(tmp_path: Path, text: str, workers: int) -> None:
    assert asked(tmp_path, text, "plan.batch.size=8", "plan.layout.replicas=2-6") == (workers, [])


def test_a_dry_run_knows_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(f"paceline.run(train, plan={ELASTIC})")
    assert show_dry_run(Job(program=str(tmp_path / "train.py")), plan=CommandPlan()) == 0
    assert "start  8 workers on this host" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("paceline.run(train, plan='auto')", "auto"),
        ("p = 'auto+batch(size=64)'\npaceline.run(train, plan=p)", "auto+batch(size=64)"),
        ("paceline.run(train, plan='replicas=2')", None),
        ("paceline.run(train, plan=Plan())", None),
        ("paceline.run(train)", None),
        ("this is no Python", None),
    ],
)
def test_whether_the_script_asks_for_auto(tmp_path: Path, text: str, plan: str | None) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert auto_plan_of_script(script) == plan


def test_auto_has_no_workers_of_its_own(tmp_path: Path) -> None:
    assert asked(tmp_path, "paceline.run(train, plan='auto+batch(size=64)')") == (None, [])
    assert asked(tmp_path, "paceline.run(train, plan='auto', workers=4)") == (4, [])


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("paceline.run(train, cluster='lab.toml')", "lab.toml"),
        ("where = 'h100x8-ib'\npaceline.run(train, cluster=where)", "h100x8-ib"),
        ("paceline.run(train, cluster=options.cluster)", None),
        ("paceline.run(train, cluster=None)", None),
        ("paceline.run(train", None),
    ],
)
def test_which_cluster_the_script_names(tmp_path: Path, text: str, cluster: str | None) -> None:
    (tmp_path / "train.py").write_text(text)
    assert cluster_of_script(tmp_path / "train.py") == cluster
    assert cluster_of_script(tmp_path / "gone.py") is None
