"""A generation's groups, where it breaks while they are built: what there was of them is closed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.comm.flight_recorder import FlightRecorder
from paceline.comm.group import Disrupted, SingleWorkerGroup
from paceline.elastic.membership_messages import MembershipView
from paceline.plan import Layout, Plan
from paceline.worker.membership import generation_builder


class Built(SingleWorkerGroup):
    """Stands for a group over gloo; `open` are all that nobody has closed."""

    size = 2
    open: list[Built]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.open.append(self)

    def close(self) -> None:
        self.open.remove(self)


@pytest.mark.parametrize("breaks_at", [1, 2], ids=["the run's", "that between replicas"])
def test_a_group_that_breaks_while_memory_is_shared_is_closed_with_the_one_before(
    breaks_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_shared = 0
    Built.open = []

    def share(group: Any, **_: Any) -> tuple[Any, None]:
        nonlocal num_shared
        num_shared += 1
        if num_shared == breaks_at:
            raise Disrupted("worker 2 was killed by signal 9")
        return group, None

    monkeypatch.setattr(generation_builder, "connect_backend", lambda *_, **__: None)
    monkeypatch.setattr(generation_builder, "GenerationGroup", Built)
    monkeypatch.setattr(generation_builder, "with_shared_memory", share)
    monkeypatch.setattr(generation_builder, "with_selected_algorithm", lambda group, *_, **__: group)
    assignment = SimpleNamespace(rank=0, host_index=0, host="a", hosts=1, incarnation=0)
    context: Any = SimpleNamespace(
        assignment=assignment,
        plan=Plan(layout=Layout(replicas=(1, 2), shard=2)),
        job=SimpleNamespace(timeout_s=1.0, private_network=False),
        device=torch.device("cpu"),
        way="host",
        recorder=FlightRecorder.unread(),
        tell=lambda _: None,
    )
    nobody: Any = SimpleNamespace()
    generations = generation_builder.GenerationBuilder(context, nobody, nobody, cross_replica=nobody)
    form = MembershipView(generation=0, members=(0, 1, 2, 3), planned=False, holds=False, reason="the run begins")
    with pytest.raises(Disrupted, match="worker 2"):
        generations.build(form, False)
    assert num_shared == breaks_at and not Built.open
