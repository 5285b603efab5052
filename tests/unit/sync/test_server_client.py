"""The workers' side of parameter servers, without servers: what may end a step, and what may not."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import Parameter

from fake_servers import Knowing, PretendedServers
from paceline.comm.group import SingleWorkerGroup
from paceline.comm.messages.socket_directory import remove_socket_directories
from paceline.comm.messages.tensor_messages import ServerLost, ServerTimeout, TensorMessage
from paceline.errors import SyncError
from paceline.plan import ParameterServer, Raw
from paceline.schedule.staleness_clock import AsyncStream
from paceline.sync.parameter_server import server_process
from paceline.sync.parameter_server.async_updates import AsyncGradients
from paceline.sync.parameter_server.client import ServerRequest
from paceline.sync.parameter_server.embedding_tables import EmbeddingTables
from paceline.sync.parameter_server.served_parameters import ServerParameters, options_of
from paceline.sync.parameter_server.server import Server
from paceline.sync.parameter_server.sync_updates import SyncServerGradients


def test_after_the_vote_a_lost_member_ends_neither_the_step_nor_a_save() -> None:
    weight, servers = Parameter(torch.zeros(2)), PretendedServers()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    gradients = SyncServerGradients(
        [("weight", weight)],
        group=SingleWorkerGroup(),
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


class CountingServers(PretendedServers):
    """One server, whose optimizer has counted its steps in its group, and changed its betas."""

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        written = [[0, 0, "count", False, 5], [0, 0, "betas", False, [0.5, 0.9]], [0, 0, "mean", True, None]]
        return [TensorMessage({"entries": [], "written": written}, (torch.ones(2),)) for _ in questions]


def test_a_checkpoint_has_what_an_optimizer_has_written_into_its_groups_and_its_worker_no_longer() -> None:
    weight = Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([weight], lr=1.0)
    before = options_of(optimizer)
    about: dict[str, Any] = {"sync": ParameterServer(), "wire": Raw(), "servers": CountingServers()}
    gradients = SyncServerGradients([("weight", weight)], group=SingleWorkerGroup(), generation=lambda: 0, **about)
    gradients.serve([optimizer])
    gradients.begin(0)
    gradients.fetch_state()
    (group,) = optimizer.param_groups
    assert (group["count"], group["betas"], group["mean"].tolist()) == (5, (0.5, 0.9), [1.0, 1.0])
    gradients.drop_state()
    assert options_of(optimizer) == before and group["params"] == [weight]


class ServersOfRows(PretendedServers):
    """One server of a table, whose rows are others each time that one is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._is_met, self._versions = True, itertools.count()

    def ask_some(self, questions: Mapping[int, ServerRequest], **_: Any) -> dict[int, TensorMessage]:
        version = next(self._versions)
        return {
            server: TensorMessage({"version": version}, (torch.full((1, 2), float(version)),)) for server in questions
        }


def test_a_table_that_changes_while_it_is_read_is_refused_for_a_checkpoint_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.sync.parameter_server.embedding_tables.PIECE_BYTES", 1)  # row by row
    table = Parameter(torch.zeros(2, 2))
    tables = EmbeddingTables(ServersOfRows())
    tables.add(table)
    tables.settle([("table", table)])
    assert tables.whole(table).tolist() == [[0.0, 0.0], [1.0, 1.0]]
    with pytest.raises(SyncError, match="changed while they were read"):
        tables.fetch([], [])


def test_a_pass_that_is_aborted_keeps_no_rows() -> None:
    table, servers = Parameter(torch.zeros(1, 2)), ServersOfRows()
    tables = EmbeddingTables(servers)
    tables.add(table)
    about: dict[str, Any] = {"sync": ParameterServer(staleness=None), "wire": Raw(), "servers": servers}
    gradients = AsyncGradients([("table", table)], models=[], worker_rank=0, tables=tables, **about)
    first = torch.tensor([0])
    gradients.begin(0)
    assert tables.rows(table, first).tolist() == tables.rows(table, first).tolist() == [[0.0, 0.0]]
    gradients.drop()
    assert tables.rows(table, first).tolist() == [[1.0, 1.0]]
    assert tables.rows(table, first).tolist() == [[2.0, 2.0]]


STREAM = AsyncStream(stream="train", limit=9, workers=(0, 1), saves=(0, 0, 1), step=0, epoch=0, position=0)


class RunningServers(PretendedServers):
    """One server of a run whose script has lowered its rate since."""

    def ask_first(self, question: Mapping[str, Any], *_: Any, **__: Any) -> TensorMessage:
        self.asked.append(question["op"])
        options = [[{"lr": 0.01, "betas": [0.8, 0.9]}, {"lr": 0.02}]]
        return TensorMessage({"dealt": STREAM.plain(), "is_over": False, "options": options})


def test_who_joins_a_run_goes_on_at_its_rates_and_not_at_those_of_the_script() -> None:
    weights, servers = [Parameter(torch.zeros(2)) for _ in range(2)], RunningServers()
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "lr": torch.tensor(0.5)}]
    optimizer = torch.optim.Adam(groups, lr=0.1, foreach=False)
    about: dict[str, Any] = {"sync": ParameterServer(staleness=None), "wire": Raw(), "servers": servers}
    named = [("first", weights[0]), ("second", weights[1])]
    gradients = AsyncGradients(named, models=[], worker_rank=1, **about)
    gradients.serve([optimizer])
    assert gradients.join("train") == (STREAM, False)
    assert servers.asked == ["hello", "about"]
    first, second = optimizer.param_groups
    assert (first["lr"], first["betas"]) == (0.01, (0.8, 0.9))
    assert isinstance(second["lr"], torch.Tensor) and second["lr"].item() == pytest.approx(0.02)


def test_a_process_of_another_host_is_not_the_one_with_its_number_that_this_worker_has_started() -> None:
    own, lost = Knowing(dist.HashStore()), ServerLost("it has gone")
    own._started, lost.listener = [4711], "parameter server 0"
    assert own.cause_of(lost, at_once=True) == "parameter server 0 was lost"
    assert own._started == [4711]


def test_why_one_worker_has_given_a_server_up_is_what_the_others_say_of_its_end() -> None:
    kv_store, late, lost = dist.HashStore(), ServerTimeout("no answer"), ServerLost("it has gone")
    late.listener = lost.listener = "parameter server 0"
    assert Knowing(kv_store).cause_of(lost, at_once=True) == "parameter server 0 was lost"
    said = Knowing(kv_store).cause_of(late)
    assert said == "parameter server 0 gave no answer for 8 s (timeout_s)"
    assert Knowing(kv_store).cause_of(lost) == said
    kv_store.set("paceline/servers/1/given_up/there/4711", "parameter server 0 stood still")
    assert Knowing(kv_store).cause_of(late) == "parameter server 0 stood still"


def test_the_worker_that_has_started_a_server_tells_the_others_which_signal_killed_it() -> None:
    kv_store, lost = dist.HashStore(), ServerLost("it has gone")
    lost.listener = "parameter server 0"
    starter, other = Knowing(kv_store), Knowing(kv_store)
    child = subprocess.Popen(["sleep", "60"])
    for one in (starter, other):
        one._addresses[lost.listener] = {"host": one._host, "pid": child.pid}
    starter._started = [child.pid]
    said: list[str] = []
    waiting = threading.Thread(target=lambda: said.append(other.cause_of(lost)))
    waiting.start()
    child.kill()
    assert starter.cause_of(lost) == "parameter server 0 killed by signal 9"
    waiting.join(timeout=30.0)
    child.wait(timeout=5.0)  # it was reaped above
    assert said == ["parameter server 0 killed by signal 9"]


def test_a_server_that_does_not_begin_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "BEGIN_S", 0.1)
    family = secrets.token_hex(4)
    monkeypatch.setenv("PACELINE_FAMILY", family)

    def make() -> ServerParameters:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()
        raise AssertionError("nobody wakes it")

    with pytest.raises(RuntimeError, match=r"did not begin within 0 s, and was killed"):
        server_process.fork_server(make, address="127.0.0.1", secret=b"s", server=Server)
    pid = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    assert not pid or not Path("/proc", pid).exists()  # it may have been killed before it had written anything
    remove_socket_directories(family)  # what it has left goes with its run
