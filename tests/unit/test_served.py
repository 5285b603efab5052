"""The workers' side of parameter servers, without servers: what may end a step, and what may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from paceline.comm.group import Alone, Disrupted
from paceline.comm.messages import Message
from paceline.plan import ParameterServer, Raw
from paceline.sync.served import ServedGradients
from paceline.sync.servers import Servers


class PretendedServers(Servers):
    """One server that is slow to answer, while a member is lost."""

    def __init__(self) -> None:
        self.count = 1
        self.asked: list[str] = []
        self._is_met = False

    @property
    def are_there(self) -> bool:
        return self._is_met

    def meet(self, *_: Any, **__: Any) -> None:
        self._is_met = True

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[Message]:
        self.asked.append(questions[0]["op"])
        if checks:
            raise Disrupted("a member was lost")
        return [Message({"entries": []}) for _ in questions]


def test_after_the_vote_a_lost_member_ends_neither_the_step_nor_a_save() -> None:
    weight, servers = Parameter(torch.zeros(2)), PretendedServers()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gradients = ServedGradients(
        [("weight", weight)],
        group=Alone(),
        sync=ParameterServer(),
        wire=Raw(),
        servers=servers,
        generation=lambda: 0,
    )
    gradients.serve([optimizer])
    gradients.begin(0)
    gradients.apply([optimizer])
    gradients.fetch_state()
    assert servers.asked == ["step", "state"]
