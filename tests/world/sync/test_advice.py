"""What is said of a wire in a real run: workers of one host share memory, where a codec is of no use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forked import World
from paceline.comm.shared_memory import arena
from paceline.events import WireJudged, decode
from paceline.plan import Batch, Int8, Plan
from paceline.worker.loop.wire_advisor import FIRST_AT

pytestmark = pytest.mark.skipif(arena.why_unsupported() is not None, reason=str(arena.why_unsupported()))


def train(worker: Any) -> None:
    torch.manual_seed(0)
    model = worker.prepare(torch.nn.Linear(64, 64))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    data = torch.utils.data.TensorDataset(torch.randn(8, 64), torch.randn(8, 64))
    for batch in worker.batches(data, epochs=FIRST_AT + 5):
        step(batch)


def test_in_one_host_s_memory_the_first_worker_says_once_that_a_codec_saves_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    world(train, 2, Plan(wire=Int8(), batch=Batch(size=8, micro=4)))
    said: list[list[WireJudged]] = []
    for rank in range(2):
        lines = (world.worker_dir(rank) / "events.jsonl").read_text().splitlines()
        events = [decode(line).event for line in lines]
        said.append([event for event in events if isinstance(event, WireJudged)])
    ((one,), others) = said
    assert others == []
    assert (one.kind, one.wire, one.step) == ("memory", "Int8()", FIRST_AT)
    assert 0 < one.encoding_s < one.step_s and one.saved_s == -one.encoding_s
