"""What a host offers to a pool. There are no GPUs here: torch is told that there are some."""

from __future__ import annotations

import os

import pytest
import torch

from paceline.errors import PlanError
from paceline.pool.devices import NodeOffer, own_offer

CORES = len(os.sched_getaffinity(0))


def have_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_host_without_gpus_offers_its_cores_or_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 0)
    assert own_offer() == NodeOffer(slots=CORES, cores=CORES)
    assert own_offer(17) == NodeOffer(slots=17, cores=CORES)
    with pytest.raises(PlanError, match="--slots is 0; it must be at least 1"):
        own_offer(0)


def test_a_host_with_gpus_offers_those_that_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert own_offer() == NodeOffer(slots=4, cores=CORES, gpus=("0", "1", "2", "3"))
    assert own_offer(2).gpus == ("0", "1")
    with pytest.raises(PlanError, match="--slots is 5, and this host has 4 GPUs"):
        own_offer(5)


@pytest.mark.parametrize("names", ["4,5", " GPU-12ab, GPU-34cd "])
def test_gpus_that_an_engine_gave_keep_their_names(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    have_gpus(monkeypatch, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert own_offer().gpus == tuple(name.strip() for name in names.split(","))
