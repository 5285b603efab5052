"""Where a worker computes: a GPU of its own, or the CPU, and it is said when GPUs are left idle."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import PlanError
from paceline.worker.topology.device import choose_device, why_gpus_are_idle


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> list[int]:
    """Pretend that this host has so many GPUs; returns the list of those that are chosen."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


def test_each_worker_has_a_gpu_of_its_own_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = have_gpus(monkeypatch, 2)
    assert choose_device("auto", local_rank=1, local_workers=2) == torch.device("cuda", 1)
    assert chosen == [1]
    assert why_gpus_are_idle("auto", local_workers=2) is None


@pytest.mark.parametrize(
    ("count", "says"),
    [(1, "its GPU is not enough for one each. Use workers=1"), (3, "its 3 GPUs are not enough for one each")],
)
def test_more_workers_than_gpus_compute_on_the_cpu_and_it_is_said(
    count: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    have_gpus(monkeypatch, count)
    assert choose_device("auto", local_rank=0, local_workers=4) == torch.device("cpu")
    told = why_gpus_are_idle("auto", local_workers=4)
    assert told is not None
    assert told.startswith("all 4 workers of this host compute on the CPU") and says in told
    with pytest.raises(PlanError, match=f"workers on this host, which has {count}"):
        choose_device("cuda", local_rank=0, local_workers=4)


def test_a_host_without_gpus_and_one_that_was_told_to_use_the_cpu_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    assert why_gpus_are_idle("auto", local_workers=4) is None
    have_gpus(monkeypatch, 1)
    assert choose_device("cpu", local_rank=0, local_workers=1) == torch.device("cpu")
    assert why_gpus_are_idle("cpu", local_workers=4) is None
