"""Workers are forked from this process, so what optimizers import lazily is imported here, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from forked import World

torch.set_num_threads(1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
