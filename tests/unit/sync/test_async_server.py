"""Two servers with bounded staleness, without processes: each update is on each of them once, whatever is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.schedule.staleness_clock import AsyncStream
from paceline.sync.parameter_server.async_server import AsyncServer
from paceline.sync.parameter_server.served_parameters import ServerParameters

STREAM = AsyncStream(stream="train", limit=3, workers=(0, 1), saves=(4, 4, 1), step=0, epoch=0, position=0)
LATER: dict[str, Any] = {"stream": "later", "saves": (1, 4, 1)}  # another loop over batches


class Listener:
    """Keeps what was answered; knows who is there."""

    def __init__(self) -> None:
        self.told: dict[bytes, list[Mapping[str, Any]]] = {}
        self.gone = set[bytes]()

    def send(self, peer: bytes, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        self.told.setdefault(peer, []).append({**header, "tensors": list(tensors)})

    def is_connected(self, peer: bytes) -> bool:
        return peer not in self.gone


class Pair:
    """Each server has one number, which an update makes smaller by its gradient."""

    def __init__(self) -> None:
        self.listeners = [Listener(), Listener()]
        self.servers = list[AsyncServer]()
        for place, listener in enumerate(self.listeners):
            number = Parameter(torch.zeros(1))
            part = ServerParameters({place: number}, [torch.optim.SGD([number], lr=1.0)])
            made: Any = listener
            self.servers.append(
                AsyncServer(
                    part, made, is_deserted=lambda: False, staleness=None, buffers=[torch.tensor([True, False, False])]
                )
            )

    def say(self, name: str, op: str, *tensors: Tensor, server: int = 0, **fields: Any) -> Mapping[str, Any] | None:
        """What a worker, whose name begins with its rank, is answered; None: nothing yet."""
        heard = self.listeners[server].told.setdefault(name.encode(), [])
        num_heard = len(heard)
        header = {"op": op, "call": 1, "worker": int(name[0]), "name": name, "buffers": [], "rules": []}
        header |= {**STREAM.plain(), **fields}
        self.servers[server]._handle(name.encode(), TensorMessage(header, tensors))
        return heard[-1] if len(heard) > num_heard else None

    def ask(self, name: str, *, num_losses: int = 0, **fields: Any) -> Mapping[str, Any] | None:
        """A worker that has noted what it has done wants more."""
        self.say(name, "noted", **fields)
        return self.say(name, "turn", num_losses=num_losses, **fields)

    def update(
        self,
        name: str,
        number: int,
        gradient: float,
        *,
        server: int,
        changes: Sequence[int] = (),
        **fields: Any,
    ) -> Mapping[str, Any] | None:
        about = {"places": [[server]], "tables": [], "options": [[{"lr": 1.0}]]}
        about |= {"buffers": [0], "rules": ["sum"]} if changes else {}
        tensors = [torch.tensor([gradient]), *([torch.tensor(changes, dtype=torch.int8)] if changes else ())]
        about = {**about, "number": number, "is_last": server == 0, **fields}
        return self.say(name, "update", *tensors, server=server, **about)

    def last_told(self, name: str) -> Mapping[str, Any]:
        return self.listeners[0].told[name.encode()][-1]

    def weights(self, name: str, *, lost: Sequence[str] = ()) -> list[float]:
        """What a worker gets that has heard of these losses."""
        told = [self.say(name, "weights", server=n, places=[n], lost=list(lost), is_first=False) for n in (0, 1)]
        return [float(one["tensors"][0]) for one in told if one is not None]

    def lose(self, name: str) -> None:
        """The first server sees a connection close."""
        self.listeners[0].gone.add(name.encode())
        self.servers[0]._poll()


def begun(**fields: Any) -> Pair:
    """Worker 0 has batch 0, which may be applied, and worker 1 batch 1."""
    pair = Pair()
    for name in ("0a", "1a"):
        assert pair.say(name, "hello") is not None
    assert (pair.ask("0a", **fields) or {})["number"] == 0
    assert (pair.ask("1a", **fields) or {})["number"] == 1
    assert pair.say("0a", "permit", **fields) is not None
    return pair


def done(pair: Pair, name: str, number: int, gradient: float, **fields: Any) -> None:
    assert pair.say(name, "permit", **fields) is not None
    for server in (1, 0):
        assert "is_lost" not in (pair.update(name, number, gradient, server=server, **fields) or {"is_lost": True})


def test_an_update_that_one_server_has_is_left_out_there_when_its_batch_is_taken_again() -> None:
    pair = begun()
    pair.update("0a", 0, 1.0, server=1)
    pair.lose("0a")
    done(pair, "1a", 1, 10.0)
    again = pair.ask("1a") or {}
    assert (again["number"], again["losses"]) == (0, [{"name": "0a", "unnoted": None}])
    assert pair.weights("1a", lost=["0a"]) == [-10.0, -11.0]
    done(pair, "1a", 0, 2.0)
    assert pair.weights("1a") == [-12.0, -11.0]


def test_what_a_lost_worker_has_said_and_a_server_has_not_read_is_not_heard() -> None:
    pair = begun()
    pair.lose("0a")
    done(pair, "1a", 1, 10.0)
    assert (pair.ask("1a") or {})["number"] == 0
    assert pair.weights("1a", lost=["0a"]) == [-10.0, -10.0]
    assert (pair.update("0a", 0, 1.0, server=1) or {})["is_lost"] is True
    assert (pair.ask("0a") or {})["is_lost"] is True
    done(pair, "1a", 0, 2.0)
    assert pair.weights("1a") == [-12.0, -12.0]


def test_an_update_that_is_done_counts_and_the_other_workers_learn_of_it() -> None:
    pair = begun()
    for server in (1, 0):
        pair.update("0a", 0, 1.0, server=server)
    pair.lose("0a")
    done(pair, "1a", 1, 10.0)
    told = pair.ask("1a") or {}
    assert (told["number"], told["losses"]) == (2, [{"name": "0a", "unnoted": ("train", 0, False)}])
    pair.say("2a", "hello")
    done(pair, "1a", 2, 100.0)
    assert (pair.ask("2a") or {"losses": []})["losses"] == []  # not over: that batch 2 is done may be in no ledger
    told = pair.ask("1a", num_losses=1) or {}
    assert (told["turn"], told["losses"]) == ("over", [])
    assert pair.listeners[0].told[b"2a"][-1]["turn"] == "over"
    assert pair.weights("1a") == [-111.0, -111.0]


def test_of_truth_values_those_that_a_batch_has_changed_are_what_it_has_made_of_them() -> None:
    pair = begun()
    pair.update("0a", 0, 1.0, server=0, changes=[-1, 1, 0])
    assert pair.say("1a", "permit") is not None
    pair.update("1a", 1, 1.0, server=0, changes=[-1, 0, 0])  # both began with the first ones
    told = pair.say("1a", "weights", places=[0], lost=[], is_first=True) or {}
    assert told["tensors"][-1].tolist() == [False, True, False]


def test_who_has_noted_a_batch_leaves_nothing_to_be_noted() -> None:
    pair = begun()
    for server in (1, 0):
        pair.update("0a", 0, 1.0, server=server)
    assert (pair.ask("0a") or {})["number"] == 2
    pair.lose("0a")
    done(pair, "1a", 1, 10.0)
    told = pair.ask("1a") or {}
    assert (told["number"], told["losses"]) == (2, [{"name": "0a", "unnoted": None}])


def test_a_batch_that_was_passed_over_is_not_taken_again() -> None:
    pair = Pair()
    for name in ("0a", "1a"):
        pair.say(name, "hello")
    assert (pair.ask("0a") or {})["number"] == 0
    assert pair.say("0a", "skip", number=0) is not None
    pair.lose("0a")
    told = pair.ask("1a") or {}
    assert (told["number"], told["losses"]) == (1, [{"name": "0a", "unnoted": ("train", 0, True)}])


def test_a_replacement_learns_the_stream_and_gets_the_lost_workers_batch() -> None:
    pair = begun()  # nobody has seen the connection of 0a close
    assert pair.say("0b", "hello") is not None
    assert AsyncStream.from_plain((pair.say("0b", "about") or {})["dealt"]) == STREAM
    told = pair.ask("0b") or {}
    assert (told["number"], told["losses"]) == (0, [{"name": "0a", "unnoted": None}])
    assert (pair.update("0a", 0, 1.0, server=0) or {})["is_lost"] is True


def in_later_loop() -> Pair:
    """The first loop is over; worker 0 has the first batch of the next one, and 1 waits until that is saved."""
    pair = Pair()
    for name in ("0a", "1a"):
        pair.say(name, "hello")
    for number in range(3):
        assert (pair.ask("1a") or {})["number"] == number
        done(pair, "1a", number, 1.0)
    for name in ("1a", "0a"):
        assert (pair.ask(name) or {})["turn"] == "over"
    assert (pair.ask("0a", **LATER) or {})["number"] == 0
    assert pair.ask("1a", **LATER) is None
    return pair


def test_nobody_waits_for_who_has_come_later_and_has_not_reached_this_loop() -> None:
    pair = in_later_loop()
    pair.lose("0a")
    assert pair.last_told("1a")["number"] == 0
    pair.say("0b", "hello")
    done(pair, "1a", 0, 1.0, **LATER)
    assert (pair.say("0b", "about") or {})["is_over"] is True
    assert (pair.ask("1a", **LATER) or {})["turn"] == "save"
    pair.say("1a", "saved", number=1, **LATER)
    assert (pair.ask("1a", **LATER) or {})["number"] == 1
    assert (pair.say("0b", "about", **LATER) or {"is_over": True})["is_over"] is False
    done(pair, "1a", 1, 1.0, **LATER)
    assert pair.ask("1a", **LATER) is None, "0b is the first one here from now on"
    assert (pair.ask("0b", **LATER) or {})["turn"] == "save"


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_loop_begins_with_those_in_the_place_of_lost_ones_who_were_in_an_earlier_one(has_joined: bool) -> None:
    pair = begun()
    pair.say("0b", "hello")  # 0a is lost
    if has_joined:
        assert (pair.say("0b", "about") or {"is_over": True})["is_over"] is False
    assert (pair.ask("1a", **LATER) or {})["number"] == 0
    done(pair, "1a", 0, 1.0, **LATER)
    told = pair.ask("1a", **LATER)
    assert told is None if has_joined else told is not None and told["turn"] == "save"


def test_a_worker_that_comes_before_the_stream_is_known_waits() -> None:
    pair = Pair()
    pair.say("2a", "hello")
    assert pair.say("2a", "about") is None
    pair.say("0a", "hello")
    pair.ask("0a")
    assert AsyncStream.from_plain(pair.listeners[0].told[b"2a"][-1]["dealt"]) == STREAM


def test_who_says_twice_that_it_is_there_is_no_other_one() -> None:
    pair = Pair()
    for name in ("0a", "0a", "1a"):  # the answer to the first was not waited for, as somebody else was lost meanwhile
        assert pair.say(name, "hello") == {"call": 1, "tensors": []}
    assert (pair.ask("0a") or {})["number"] == 0
    assert pair.say("0b", "hello") is not None
    assert "is_lost" in (pair.say("0a", "permit") or {})


def test_who_leaves_in_good_order_is_not_waited_for() -> None:
    pair = begun()
    for server in (1, 0):
        pair.update("0a", 0, 1.0, server=server)
    pair.say("0a", "noted")
    pair.say("0a", "gone")
    done(pair, "1a", 1, 10.0)
    assert (pair.ask("1a") or {})["losses"] == [{"name": "0a", "unnoted": None}]
    done(pair, "1a", 2, 100.0)
    assert (pair.ask("1a", num_losses=1) or {})["turn"] == "over"


def test_a_save_waits_for_nobody_who_has_noted_its_batch_and_asks_for_no_more() -> None:
    saves: dict[str, Any] = {"saves": (2, 4, 1)}
    pair = begun(**saves)
    for server in (1, 0):
        pair.update("0a", 0, 1.0, server=server, **saves)
    assert pair.ask("0a", **saves) is None
    done(pair, "1a", 1, 10.0, **saves)
    assert pair.last_told("0a").get("turn") != "save"
    pair.say("1a", "noted", **saves)
    assert pair.last_told("0a")["turn"] == "save"


def test_who_leaves_in_the_middle_of_a_step_counts_as_lost_and_its_update_is_applied_once() -> None:
    pair = begun()
    pair.update("0a", 0, 1.0, server=1)
    pair.say("0a", "left", is_broken=True)
    done(pair, "1a", 1, 10.0)
    again = pair.ask("1a") or {}
    assert (again["number"], again["losses"]) == (0, [{"name": "0a", "unnoted": None}])
    assert pair.weights("1a", lost=["0a"]) == [-10.0, -11.0]
    done(pair, "1a", 0, 2.0)
    assert pair.weights("0b") == [-12.0, -11.0]  # it goes on under another name


def test_who_leaves_before_it_has_noted_an_update_has_the_others_note_it() -> None:
    pair = begun()
    for server in (1, 0):
        pair.update("0a", 0, 1.0, server=server)
    pair.say("0a", "left", is_broken=True)
    done(pair, "1a", 1, 10.0)
    told = pair.ask("1a") or {}
    assert (told["number"], told["losses"]) == (2, [{"name": "0a", "unnoted": ("train", 0, False)}])


def test_who_gives_a_batch_back_under_another_name_takes_it_again() -> None:
    pair = begun()
    pair.update("0a", 0, 1.0, server=1)
    pair.say("0a", "gone")
    assert pair.say("0b", "hello") is not None
    again = pair.ask("0b") or {}
    assert (again["number"], again["losses"]) == (0, [{"name": "0a", "unnoted": None}])
    assert pair.weights("0b", lost=["0a"]) == [0.0, -1.0]
    done(pair, "0b", 0, 2.0)
    assert pair.weights("0b") == [-2.0, -1.0]
    assert (pair.ask("0b", **LATER, num_losses=1) or {})["number"] == 0, "the first one of the next loop, too"


def test_who_comes_later_is_told_the_options_of_the_last_update() -> None:
    pair = begun()
    for server in (1, 0):
        pair.update("0a", 0, 1.0, server=server)
    told = pair.say("2a", "about") or {}
    assert told["options"] == [[{"lr": 1.0}]]
