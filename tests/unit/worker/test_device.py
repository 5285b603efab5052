"""Where a worker computes: a GPU of its own, or the CPU, and it is said when GPUs are left idle."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import PlanError
from paceline.worker.topology.device import backend_for, choose_device, tensor_way, why_gpus_are_idle


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


def test_workers_that_may_share_gpus_take_them_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = have_gpus(monkeypatch, 2)
    found = [choose_device("cuda-shared", local_rank=rank, local_workers=5) for rank in range(5)]
    assert [device.index for device in found] == chosen == [0, 1, 0, 1, 0]
    assert why_gpus_are_idle("cuda-shared", local_workers=5) is None
    with pytest.raises(
        PlanError, match=r"has 2. Use workers=2, or device='cpu'. To try a layout, device='cuda-shared'"
    ):
        choose_device("cuda", local_rank=0, local_workers=5)


def test_gpus_that_are_to_be_shared_and_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    with pytest.raises(PlanError, match=r"torch finds none on this host\. Use device='cpu', or 'auto'"):
        choose_device("cuda-shared", local_rank=0, local_workers=2)


def test_tensors_of_a_shared_gpu_go_through_the_host_and_others_from_gpu_to_gpu() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [tensor_way(cpu, "cpu"), tensor_way(gpu, "cuda"), tensor_way(gpu, "cuda-shared")] == [
        "host",
        "device",
        "staged",
    ]
    assert backend_for(gpu) == "cpu:gloo,cuda:nccl"
    assert backend_for(gpu, way="staged") == "cpu:gloo,cuda:gloo"
