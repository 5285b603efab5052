from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forked import World


@pytest.fixture(scope="session", autouse=True)
def _warm() -> None:
    """Import what optimizers import lazily, once, before anything is forked."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
