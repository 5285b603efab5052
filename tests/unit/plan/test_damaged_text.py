"""Text that describes a job may hold anything: it is refused in one sentence, quickly, and within little memory."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import quick
from paceline.errors import LaunchError, PlanError
from paceline.plan import Plan
from paceline.plan.job import read_job_file
from paceline.world_detection import expand_hosts, expand_tasks_per_node, find_world

PLANS = ["replicas=2-4", "shard=4+zero=1", "localsgd(every=16)", "parameterserver(staleness=3)", "topk(ratio=0.01)"]
JOB = 'program = "train.py"\nworkers = 4\nplan = "replicas=2"\nsave_every_s = 1.5\n[batch]\nsize = 3\n'
HOSTS = ["n[1-2,05],gpu7", "a[1-3]b[08-10]", "2(x2),1"]
ODD = [
    "9" * 400, "9" * 5000, "1e999", "nan", "inf", "-1", "(" * 5000, "[" * 5000, "\x00", "\x1b[2J", "=", "+", ",", "''",
    "True", "None", "é", "a" * 100_000, "{", "0x10", "1_0", "٣", ".", "-", "[0-99999999999]", "(x99999999999)", "[a-b]",
]  # fmt: skip
WORLD = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": "29500"}
every = settings(max_examples=quick.examples(150), deadline=None, phases=[Phase.generate])


@st.composite
def damaged(draw: st.DrawFn, texts: list[str]) -> str:
    text = draw(st.sampled_from(texts))
    for _ in range(draw(st.integers(1, 3))):
        begin, end = sorted(draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        text = text[:begin] + draw(st.sampled_from(ODD)) + text[end if draw(st.booleans()) else begin :]
    return text


@given(text=damaged(PLANS))
@every
def test_damaged_text_of_a_plan_is_read_or_refused_in_a_sentence(text: str) -> None:
    try:
        Plan.parse(text)
    except PlanError as error:
        assert len(str(error)) < 20_000


@given(text=damaged([JOB]))
@every
def test_a_damaged_job_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "job.toml"
    path.write_text(text)
    with contextlib.suppress(PlanError):
        read_job_file(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = " + b"[" * 5000, b"workers = " + b"9" * 5000, b"#" * (2 << 20)])
def test_a_file_that_is_no_job_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"job\.toml (is not|has more)"):
        read_job_file(path)


@given(text=damaged(HOSTS), name=st.sampled_from(list(WORLD)))
@every
def test_damaged_variables_of_a_cluster_are_read_or_refused(text: str, name: str) -> None:
    for read in (expand_hosts, expand_tasks_per_node, lambda value: find_world({**WORLD, name: value})):
        with contextlib.suppress(LaunchError):
            read(text)


@pytest.mark.parametrize("text", ["n[1-99999999999]", "n[3-1]", "n[a-b]", "n[1-2000]m[1-2000]"])
def test_a_list_of_nodes_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(LaunchError, match="is no list of Slurm's nodes"):
        expand_hosts(text)
