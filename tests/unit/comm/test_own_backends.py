"""Groups of ours as back ends of torch.distributed: torch's own flight recorder leaves them alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paceline.comm.own_backends import add_backend


@pytest.mark.parametrize("has_recorder", [True, False])  # from torch 2.15 on, and before
def test_a_group_of_ours_is_registered_once_and_records_itself(
    has_recorder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, own = f"ours_{has_recorder}".lower(), {"gloo"}
    if has_recorder:
        monkeypatch.setattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", own, raising=False)
    else:
        monkeypatch.delattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", raising=False)
    for table in ("_plugins", "backend_capability", "backend_type_map"):
        monkeypatch.setattr(dist.Backend, table, dict(getattr(dist.Backend, table)))
    monkeypatch.setattr(dist.Backend, "backend_list", list(dist.Backend.backend_list))
    made: list[int] = []
    add_backend(name, lambda *_: made.append(1))
    add_backend(name, lambda *_: made.append(2))
    try:
        assert dist.Backend.backend_capability[name] == ["cpu"]
        assert own == ({"gloo", name} if has_recorder else {"gloo"})
        dist.Backend._plugins[name.upper()].creator_fn()
        assert made == [1]
    finally:
        delattr(dist.Backend, name.upper())
