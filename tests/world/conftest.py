"""Workers are forked from this process, so what they would import lazily is imported here, once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import imported
from forked import World

torch.set_num_threads(1)
imported.import_all()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)
