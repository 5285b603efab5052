"""`paceline.fits`: yes, maybe or no, with bytes by part and what would fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import PlanError
from paceline.parallel.check import fits as room

SAMPLE = (torch.zeros(2, 64, 256),)


def encoder(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 4)


def test_a_small_model_fits_a_large_device_and_the_table_adds_up() -> None:
    found = paceline.fits(encoder(), "replicas=2+batch(size=64,micro=8)", cluster="h100x8-ib", sample=SAMPLE)
    assert found
    assert (found.verdict, found.workers, found.remedy) == ("fits", 2, "")
    assert found.memory.peak == pytest.approx(sum(found.memory.parts.values()))
    parameters = sum(one.numel() for one in encoder().parameters())
    assert found.memory.parts["state"] == pytest.approx(16 * parameters)
    text = str(found)
    assert text.startswith("fits     yes\nplan     replicas=2+batch(size=64,micro=8), 2 workers\nmemory   ")
    assert "of 80 GB on the fullest worker" in text
    assert len(text.splitlines()) == 3 + sum(1 for value in found.memory.parts.values() if value > 0)


@pytest.mark.thorough
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the host's memory is not the device's")
def test_on_this_machines_cpu_offload_to_its_own_memory_is_refused_and_servers_are_answered() -> None:
    with pytest.raises(PlanError, match="the CPU computes there: nothing would be gained"):
        paceline.fits(encoder(), "compute(offload=optimizer)", sample=SAMPLE)
    assert paceline.fits(encoder(), "replicas=2+parameterserver", sample=SAMPLE).verdict in ("fits", "unsure")


@pytest.mark.thorough
def test_what_does_not_fit_is_false_and_says_what_would() -> None:
    found = paceline.fits(encoder(), "batch(size=65536,micro=65536)", cluster="rtx4090x8-pcie", sample=SAMPLE)
    assert not found
    assert found.verdict == "does not fit"
    assert "remedy" in str(found)
    again = paceline.fits(encoder(), found.remedy.split(" with ")[1], cluster="rtx4090x8-pcie", sample=SAMPLE)
    assert again, "the remedy fits"


@pytest.mark.thorough
def test_kept_values_grow_with_the_micro_batch_and_recompute_drops_them() -> None:
    def kept(plan: str) -> float:
        return paceline.fits(encoder(), plan, cluster="h100x8-ib", sample=SAMPLE).memory.parts["kept"]

    assert kept("batch(size=64,micro=16)") == pytest.approx(2 * kept("batch(size=64,micro=8)"))
    assert kept("batch(size=64,micro=16)+compute(recompute=blocks)") < kept("batch(size=64,micro=16)") / 5


def test_the_optimizers_state_is_counted_exactly_and_split() -> None:
    model = encoder("cpu")
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = paceline.fits(model, "batch(size=64)", cluster="h100x8-ib", sample=SAMPLE, optimizer=plain)
    assert whole.memory.parts["state"] == pytest.approx(2 * weights)
    assert all(not one.is_meta for one in model.parameters()), "the model is as it was"


def test_without_a_cluster_the_workers_share_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "memory_limit_bytes", lambda: 8 << 30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = paceline.fits(encoder(), "replicas=4+batch(size=64)", sample=SAMPLE)
    assert found.available == (8 << 30) / 4


def test_more_workers_than_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(PlanError, match="4 workers, and this machine has 2 accelerators"):
        paceline.fits(encoder(), "replicas=4", sample=SAMPLE)


@pytest.mark.parametrize(
    ("plan", "workers", "message"),
    [("tensor=3", 3, "do not divide among 3 workers"), ("replicas=2", 3, "workers"), ("batch(size=0)", 1, "size")],
)
def test_plans_that_cannot_work_are_refused(plan: str, workers: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        paceline.fits(encoder(), plan, workers=workers, cluster="h100x8-ib", sample=SAMPLE)


def test_without_workers_one_replica_counts() -> None:
    assert paceline.fits(encoder(), "shard=2+batch(size=64)", cluster="h100x8-ib", sample=SAMPLE).workers == 2
