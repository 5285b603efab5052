"""README's first script under every way to agree, every wire and every layout, as a new user tries them: the file is as
README shows it, and only `--plan` changes. What cannot work is refused, in words that say what to do."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import quick
from markdown_pages import blocks
from programs import PACELINE, run

ROOT = Path(__file__).resolve().parent.parent.parent
STEPS = 6
COLUMNS = ((0, 24), (26, 66), (68, None))  # of the table of `paceline plan`: module, what, remedy

EXACT = [  # plan, workers: the losses of one process
    ("replicas=3", 3),
    ("allreduce(algorithm=ring)+sparse", 2),
    ("parameterserver(servers=2,mirrored=true)", 2),
    quick.further("shard=2+zero=1", 2),
    ("shard=2+zero=2", 2),
    ("shard=2", 2),
    ("tensor=3", 3),
    quick.further("stages=2+schedule=gpipe", 2),
    ("stages=2", 2),
    ("stages=2+schedule=zero-bubble", 2),
    quick.further("replicas=2+tensor=2", 4),
    ("shard=2+stages=2", 4),
]
NEAR = [  # gradients of the same batches, rounded or in part
    "cast(dtype=bf16)",
    "int8",
    "onebit",
    "topk(ratio=0.01)",
    "powersgd",
]
OTHERS = [  # other numbers than those of one process
    "localsgd(every=3)+int8",
    "localsgd(every=4,outer=nesterov,fragments=2,overlap=1)",
    "gossip",
    "allreduce(op=adasum)",
    "parameterserver(staleness=1)",
    "parameterserver(staleness=none)+cast(dtype=bf16)",
    "parameterserver(drop=1)",
]
REFUSED = [  # plan, workers, what has to be said
    ("context=2", 2, ["Sequential", "no attention over its tokens was found", "Use Layout(replicas=2)"]),
    ("experts=2", 2, ["Sequential", "found no routed experts", "Use shard=2 in its place"]),
    ("stages=3", 3, ["has 2 modules that could be on a stage", "makes 3 stages", "Use fewer stages, or shard=3"]),
    (
        "stages=2+schedule=interleaved+stages_per_worker=2",
        2,
        ["has 2 modules", "makes 4 stages", "Use fewer stages_per_worker, fewer stages, or shard=2"],
    ),
    ("tensor=128", 128, ["the 64 features of 0", "128 workers", "or 64, or worker.prepare(model, cut="]),
    ("replicas=2+stages=2", 3, ["needs 4 workers (2 replicas x stages 2)", "has 3", "Use workers=4"]),
    ("shard=2+powersgd", 2, ["looks at whole matrices", "only some rows", "Use a wire for single numbers"]),
    ("parameterserver+int8", 2, ["know no other codec yet", "Use wire=Raw() or Cast(dtype='bf16')"]),
]


def script(folder: Path) -> Path:
    """README's script, as it stands there, under the name that it has there."""
    (block,) = [block for block in blocks(ROOT / "README.md") if block.file_name == "train.py"]
    (folder / "train.py").write_text(block.text)
    return folder / "train.py"


def trained(folder: Path, plan: str, workers: int) -> list[float]:
    """The loss of each of the first steps; an error where the command does not end well."""
    run_dir = folder / "first"
    options = ["--workers", str(workers), "--threads", "1", "--max-steps", str(STEPS), "--run-dir", run_dir]
    code, output = run(*PACELINE, "run", script(folder), *options, "--plan", plan)
    assert code == 0, output
    assert f"finished at step {STEPS}" in output, output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in sorted(rows, key=lambda row: row["step"])]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    return trained(tmp_path_factory.mktemp("alone"), "default", 1)


@pytest.mark.parametrize(("plan", "workers"), EXACT)
def test_a_plan_that_is_exact_has_the_losses_of_one_process(
    tmp_path: Path, alone: list[float], plan: str, workers: int
) -> None:
    assert len(alone) == STEPS
    assert trained(tmp_path, plan, workers) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize(
    "plan", quick.without(("int8", "cast(dtype=bf16)", "parameterserver(staleness=1)"), [*NEAR, *OTHERS])
)
def test_any_other_plan_trains_too(tmp_path: Path, alone: list[float], plan: str) -> None:
    found = trained(tmp_path, plan, 2)
    assert len(found) == STEPS and all(map(math.isfinite, found))
    if plan in NEAR:
        assert found[0] == pytest.approx(alone[0], rel=1e-5)  # before the first gradients travel
    if "staleness" not in plan:  # there replicas may happen to take their few turns one after the other
        assert found != pytest.approx(alone, rel=1e-7)


def looked_at(output: str) -> str:
    """What the table of `paceline plan` says, without its lines' ends: all of a column before the next one."""
    rows = output.splitlines()
    first = next(place for place, row in enumerate(rows) if row.startswith("-----")) + 1
    table = rows[first : rows.index("", first) if "" in rows[first:] else None]
    return " ".join(" ".join(row[left:right].strip() for row in table) for left, right in COLUMNS)


@pytest.mark.parametrize(("plan", "workers", "says"), REFUSED)
def test_what_stands_against_a_plan_is_told_before_anything_is_started(
    tmp_path: Path, plan: str, workers: int, says: list[str]
) -> None:
    code, output = run(*PACELINE, "plan", script(tmp_path), "--check", "--plan", plan, "--workers", str(workers))
    assert code == 2, output
    assert all(part in looked_at(output) for part in says), output
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"], "nothing has been started"


@pytest.mark.parametrize(("plan", "workers", "says"), [REFUSED[2], REFUSED[5], REFUSED[7]])
def test_a_run_that_cannot_work_ends_before_its_first_step_with_the_same_words(
    tmp_path: Path, plan: str, workers: int, says: list[str]
) -> None:
    options = ["--workers", str(workers), "--threads", "1", "--run-dir", tmp_path / "first"]
    code, output = run(*PACELINE, "run", script(tmp_path), *options, "--plan", plan)
    assert code == 2, output
    (sentence,) = [line for line in output.splitlines() if line.startswith("paceline: ")]
    assert all(part in sentence for part in says), output
    assert "Traceback" not in output and "step 1 " not in output
    assert not any(path.stat().st_size for path in tmp_path.glob("first/metrics.jsonl")), "no step has been taken"
