"""`hvd.elastic.run` where no worker is lost: commits, going back, interrupts, callbacks and the sampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import horovod_workers
import paceline.compat.horovod as hvd


def goes_back(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    model: Any = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, float(rank + 1))  # rank 0's counts
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    seen: list[Any] = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        seen.append(("begins", state.batch, model.weight.item(), list(state.sampler)))
        while state.batch < 6:
            state.batch += 1
            state.sampler.record_batch(state.batch, 1)
            with torch.no_grad():
                model.weight.add_(1.0)
            if state.batch == 2:
                state.commit()
            if state.batch == 3 and len(seen) == 1:
                raise hvd.HorovodInternalError("a collective has failed")
            if state.batch == 4 and len(seen) == 3:
                state.on_hosts_updated(1.0, 2)  # on all ranks: only rank 0's counts
                state.commit()
        return "done"

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, batch=0, sampler=hvd.elastic.ElasticSampler(range(12), shuffle=False)
    )
    state.register_reset_callbacks([lambda: seen.append("reset")])
    value = train(state)
    return {"seen": seen, "value": value, "weight": model.weight.item(), "again": hvd.allreduce(torch.ones(1)).item()}


def test_a_failure_goes_back_to_the_last_commit_and_an_interrupt_does_not(tmp_path: Path) -> None:
    for rank, value in enumerate(horovod_workers.start(tmp_path, 2, goes_back).values()):
        assert value["seen"] == [
            ("begins", 0, 1.0, list(range(rank, 12, 2))),
            "reset",
            ("begins", 2, 3.0, list(range(4 + rank, 12, 2))),  # two batches of one sample on each of two
            "reset",
            ("begins", 4, 5.0, list(range(8 + rank, 12, 2))),
        ]
        assert (value["value"], value["weight"], value["again"]) == ("done", 7.0, 1.0)
    assert not list(tmp_path.glob("horovod_commit*"))  # it has come to its end


def shares(rank: int, size: int) -> list[list[int]]:
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(7), seed=5)
    found = [list(sampler)]
    sampler.record_batch(0, 2)
    sampler.reset()
    found.append(list(sampler))
    other = hvd.elastic.ElasticSampler(range(7), seed=5)
    other.load_state_dict(sampler.state_dict())
    assert list(other) == found[-1]
    sampler.set_epoch(1)
    found.append(list(sampler))
    sampler.record_batch(0, 4)
    sampler.reset()
    assert (list(sampler), len(sampler)) == ([], 0)  # more than there are
    return found


def test_the_sampler_shares_out_what_is_left(tmp_path: Path) -> None:
    values = horovod_workers.start(tmp_path, 2, shares).values()
    whole, rest, next_epoch = ([*one, *other] for one, other in zip(*values, strict=True))
    assert set(whole) == set(next_epoch) == set(range(7))
    assert len(whole) == 8  # one sample twice, so both have as many
    done = {*values[0][0][:2], *values[1][0][:2]}
    assert set(rest) == set(range(7)) - done
    assert whole != next_epoch
