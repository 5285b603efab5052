"""What `paceline pool` is on a host: the pool, or one of its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.cli.main import main
from paceline.pool import serve


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, Any]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    called: list[tuple[str, Any]] = []
    for name in ("serve", "serve_node"):
        monkeypatch.setattr(serve, name, lambda pool, offer, *, say, name=name: called.append((name, offer.slots)))
    return called


def engine(monkeypatch: pytest.MonkeyPatch, *, tasks: int, per_node: int) -> None:
    """As srun starts a process."""
    numbers = {"STEP_NUM_TASKS": tasks, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 1, "STEP_ID": 0}
    for name, value in {**numbers, "STEP_TASKS_PER_NODE": f"{per_node}(x{tasks // per_node})"}.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    monkeypatch.setenv("SLURM_STEP_NODELIST", f"n[1-{tasks // per_node}]")


def test_alone_it_is_the_pool_and_with_node_one_of_its_nodes(served: list[tuple[str, Any]]) -> None:
    assert main(["pool", "p", "--slots", "3"]) == 0
    assert main(["pool", "p", "--slots", "2", "--node"]) == 0
    assert served == [("serve", 3), ("serve_node", 2)]


def test_where_an_engine_starts_one_on_each_host_all_are_nodes(
    served: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(monkeypatch, tasks=3, per_node=1)
    assert main(["pool", "p", "--slots", "3"]) == 0
    assert served == [("serve_node", 3)]


def test_several_on_one_host_are_refused_with_how_to_start_one(
    served: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine(monkeypatch, tasks=4, per_node=2)
    assert main(["pool", "p"]) == 2
    said = capsys.readouterr().err
    assert "slurm started this command 2 times on this host" in said and "srun --ntasks-per-node=1" in said
    assert served == []
