"""The rows of tables that a server has: cut, told, added up, and stepped on, without processes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from fake_listener import PASS_KEY, PretendedListener
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.comm.remote_tensors import sparse_rows
from paceline.schedule.parameter_placement import rows_on
from paceline.sync.parameter_server.embedding_rows import summed_rows
from paceline.sync.parameter_server.served_parameters import ServerParameters, options_of
from paceline.sync.parameter_server.server import Server

SERVERS, ROWS, WIDTH = 3, 8, 2


def trained() -> tuple[Parameter, torch.optim.Optimizer]:
    """A table after a step."""
    table = Parameter(torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH))
    optimizer = torch.optim.SparseAdam([table], lr=0.1)
    table.grad = sparse_rows(torch.tensor([1, 2, 6]), torch.ones(3, WIDTH), (ROWS, WIDTH))
    optimizer.step()
    return table, optimizer


def part(server: int) -> ServerParameters:
    table, optimizer = trained()
    return ServerParameters({4: table}, [optimizer], rows={4: rows_on(server, servers=SERVERS)})


def test_whatever_the_servers_have_of_a_table_is_the_table_again() -> None:
    made, (table, optimizer) = [part(server) for server in range(SERVERS)], trained()
    whole, state = table.detach(), optimizer.state[table]
    entries = made[0].rows.entries()
    assert [entry[:4] for entry in entries] == [[0, 4, key, "float32"] for key in ("exp_avg", "exp_avg_sq")]
    for entry, expected in [
        (None, whole),
        ([0, "exp_avg"], state["exp_avg"]),
        ([0, "exp_avg_sq"], state["exp_avg_sq"]),
    ]:
        again = torch.zeros(ROWS, WIDTH)
        for first in (0, 2):  # pieces of two rows
            for server, one in enumerate(made):
                header = {"op": "piece", "place": 4, "entry": entry, "first": first, "stop": first + 2}
                again[rows_on(server, servers=SERVERS)][first : first + 2] = one.rows.read(header, ())
        assert torch.equal(again, expected)
    asked = made[1].rows.read({"op": "rows", "place": 4}, [torch.tensor([2, 0], dtype=torch.int32)])
    assert torch.equal(asked, whole[[7, 1]])
    kept, none = made[2].state()
    assert kept["entries"] == [[0, 4, "step", False, 1]] and none == []


def test_rows_are_added_up_in_the_order_of_the_replicas() -> None:
    of_rows = {0: {3: 1e8, 5: 1.0}, 1: {3: 1.0}, 2: {1: 2.0, 3: -1e8}}
    gradients = [
        sparse_rows(torch.tensor([*some]), torch.tensor([*some.values()]).view(-1, 1), (7, 1))
        for some in of_rows.values()
    ]
    total = summed_rows(gradients)
    assert total.indices().tolist() == [[1, 3, 5]] and total.values().view(-1).tolist() == [2.0, 0.0, 1.0]
    assert summed_rows([gradients[0], gradients[2], gradients[1]]).values().view(-1).tolist() == [2.0, 1.0, 1.0]


def test_rows_are_pushed_summed_and_stepped_on_once() -> None:
    table = Parameter(torch.zeros(ROWS, WIDTH))
    optimizer = torch.optim.SGD([table], lr=1.0)
    second = ServerParameters({0: table}, [optimizer], rows={0: rows_on(1, servers=SERVERS)})  # rows 1, 4, 7

    def pushed(replica: int, *numbers: int) -> TensorMessage:
        about = {"op": "push_rows", "walk": PASS_KEY, "place": 0, "replica": replica}
        return TensorMessage(about, (torch.tensor(numbers, dtype=torch.int32), torch.ones(len(numbers), WIDTH)))

    ask = {"walk": PASS_KEY, "places": [], "tables": [0]}
    wants_sum = TensorMessage({**ask, "op": "sum", "replicas": 2, "call": 1}, ())
    has_it_taken = TensorMessage(
        {**ask, "op": "step", "factor": 0.5, "options": [options_of(optimizer)], "call": 2}, ()
    )
    wants_rows = TensorMessage({"op": "rows", "place": 0, "call": 3}, (torch.tensor([0, 1, 2]),))
    said = [pushed(0, 0, 2), wants_sum, pushed(1, 2), wants_sum, has_it_taken, has_it_taken, wants_rows]
    listener = PretendedListener([(b"one", message) for message in said])
    Server(second, listener, is_deserted=lambda: True).serve()
    squared = [header["squared"] for _, header, _ in listener.told if header["call"] == 1]
    assert squared == [pytest.approx(WIDTH * (1 + 4))] * 2
    ((rows,),) = (tensors for _, header, tensors in listener.told if header["call"] == 3)
    assert rows.tolist() == [[-0.5] * WIDTH, [0.0] * WIDTH, [-1.0] * WIDTH]


def test_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        part(0).rows.gradient(4, torch.tensor([5]), torch.ones(1, WIDTH))
