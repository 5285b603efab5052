"""What a plan says about memory: its text, and what is refused before anything starts."""

from __future__ import annotations

import string
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import config, settings
from paceline.errors import PlanError
from paceline.parallel.offload.memory import HostMemory, MappedMemory, memory_for, refuse_useless, why_no_disk
from paceline.plan import Compute, Layout, Plan

SAFE = set(string.ascii_letters + string.digits + "+-_.,=()%~")


@given(st.text().map(lambda text: f"/{text}".strip()))
def test_any_path_reads_back_from_text_that_is_safe_in_a_file_name(path: str) -> None:
    plan = Plan(compute=Compute(offload="optimizer", offload_path=path))
    assert set(str(plan)) <= SAFE
    assert Plan.parse(str(plan)) == plan


def test_a_path_may_be_written_as_it_is() -> None:
    wanted = Compute(offload="optimizer", offload_path="/fast/disk 2")
    assert Plan.parse("compute(offload=optimizer,offload_path=/fast/disk 2)").compute == wanted
    assert config.read(Plan, {"compute": {"offload": "optimizer", "offload_path": "/fast/disk 2"}}).compute == wanted
    overrides = ["plan.compute.offload_path=/fast/disk 2", "plan.compute.offload=optimizer"]
    assert settings.apply(Plan(), *overrides).compute == wanted


@pytest.mark.parametrize("path", ["", "disk", "./disk"])
def test_a_path_that_depends_on_where_a_worker_runs_is_refused(path: str) -> None:
    with pytest.raises(PlanError, match=r"it must begin with / \(or ~\).*name a directory"):
        Compute(offload="optimizer", offload_path=path)


def test_a_path_that_nothing_would_use_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'/disk', but offload='none' keeps nothing there: use .*or leave it out"):
        Compute(offload_path="/disk")


@pytest.mark.parametrize(
    ("layout", "rule"),
    [
        (Layout(replicas=(1, 2)), "streaming-needs-fixed-replicas"),
        (Layout(shard=2, zero=2), "streaming-keeps-nothing-gathered"),
        (Layout(tensor=2), "streaming-needs-whole-layers"),
    ],
)
def test_parameters_stream_only_where_nothing_holds_them(layout: Layout, rule: str) -> None:
    assert [broken.rule for broken in Plan(layout=layout, compute=Compute(offload="all")).check()] == [rule]
    assert Plan(layout=layout, compute=Compute(offload="optimizer")).check() == ()


def test_the_hosts_memory_gains_only_beside_another_one(tmp_path: Path) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    optimizer, all_of_it = Compute(offload="optimizer"), Compute(offload="all", offload_path=str(tmp_path))
    on_disk = Compute(offload="optimizer", offload_path=str(tmp_path))
    for compute in (optimizer, all_of_it):
        refuse_useless(compute, gpu)
        with pytest.raises(PlanError, match=r"nothing would be gained.*offload_path="):
            refuse_useless(compute, cpu)
    refuse_useless(on_disk, cpu)
    refuse_useless(Compute(), cpu)
    assert isinstance(memory_for(optimizer), HostMemory)
    assert isinstance(memory_for(on_disk), MappedMemory)


def test_a_path_in_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path}/in\\040memory tmpfs rw 0 0\n")
    monkeypatch.setattr("paceline.parallel.offload.memory.MOUNTS", mounts)
    inside = Compute(offload="optimizer", offload_path=f"{tmp_path}/in memory/deep")
    assert "is on a tmpfs, which is memory" in str(why_no_disk(inside))
    assert why_no_disk(Compute(offload="optimizer", offload_path=f"{tmp_path}/elsewhere")) is None
