"""Where workers cannot come and go, and where there can be no parameter servers: what is said, and which remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import PlanError
from paceline.plan import Layout, ParameterServer, Plan
from paceline.plan.job import Job
from paceline.worker.build import server_client
from paceline.worker.membership.join_run import _refuse_where_fixed

ELASTIC = Plan(layout=Layout(replicas=(2, 4)))
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("launcher", "has_supervisor", "says", "remedy"),
    [
        # srun, mpirun and torchrun: workers of a world that somebody else started have no supervisor of ours.
        (
            "local",
            False,
            "lets workers come and go, but the program that started these workers keeps their number fixed.",
            "Use Layout(replicas=n), or start the workers with paceline run (on every host, where there are several).",
        ),
        (
            "inline",
            True,
            "lets workers come and go, but launcher='inline' keeps their number fixed.",
            "Use Layout(replicas=n), or start the workers with paceline run (on every host, where there are several).",
        ),
    ],
)
def test_an_elastic_run_is_refused_where_workers_cannot_come_and_go(
    launcher: Any, has_supervisor: bool, says: str, remedy: str
) -> None:
    with pytest.raises(PlanError) as refused:
        _refuse_where_fixed(ELASTIC, Job(launcher=launcher), has_supervisor=has_supervisor)
    assert str(refused.value) == f"Layout(replicas=(2, 4)) {says} {remedy}"


def test_an_elastic_run_of_our_own_launcher_is_not_refused() -> None:
    _refuse_where_fixed(ELASTIC, Job(launcher="local"), has_supervisor=True)


def test_parameter_servers_are_refused_on_gpus() -> None:
    given: dict[str, Any] = {"place": None, "device": GPU, "files": None, "host": "h", "timeout_s": 1.0}
    with pytest.raises(PlanError) as refused:
        server_client(Plan(sync=ParameterServer()), **given)
    assert str(refused.value) == (
        "ParameterServer(...) is built for the CPU so far, not for cuda. Use sync=AllReduce(), or device='cpu'."
    )
    assert server_client(Plan(), **given) is None
