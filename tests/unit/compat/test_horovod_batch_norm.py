"""`SyncBatchNorm` of numbers that do not fit into half precision when they are summed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from paceline.compat.horovod import session as sessions
from paceline.compat.horovod import sync_batch_norm
from paceline.compat.horovod.sync_batch_norm import SyncBatchNorm


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_has_the_moments_of_float32(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_of_two(given: Tensor, *, op: int) -> Tensor:
        return 2 * given  # the other worker has the same batch

    monkeypatch.setattr(sync_batch_norm, "allreduce", sum_of_two)
    monkeypatch.setattr(sessions, "is_open", lambda: True)
    monkeypatch.setattr(sessions, "current_session", lambda: SimpleNamespace(size=2))
    torch.manual_seed(0)
    given = (3 + torch.randn(70001, 2)).to(dtype)  # more numbers than float16 can count
    layer, plain = SyncBatchNorm(2), nn.BatchNorm1d(2)
    found, wanted = layer(given), plain(given.float())
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(layer.running_mean, plain.running_mean)
    torch.testing.assert_close(layer.running_var, plain.running_var, rtol=1e-4, atol=0)
