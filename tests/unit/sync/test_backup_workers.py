"""A server that leaves the slowest out, without processes: what counts, what is thrown away, and who is told what."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fake_listener import PretendedListener
from paceline.comm.messages.tensor_messages import TensorMessage
from paceline.plan import ParameterServer, Raw
from paceline.schedule.backup_workers import AsyncShares, BackupShare
from paceline.sync.parameter_server.async_updates import PendingCommit
from paceline.sync.parameter_server.backup_server import BackupWorkersServer
from paceline.sync.parameter_server.backup_workers import BackupWorkerGradients
from paceline.sync.parameter_server.client import ServerClient
from paceline.sync.parameter_server.served_parameters import ServerParameters, options_of

STREAM = {"stream": "train", "limit": 10, "epochs": [10, 10], "micros": [8, 8, 8]}


class Told:
    """A server of one weight (0, with SGD of rate 1) and two buffers, and what it answers."""

    def __init__(
        self, *, workers: int = 3, drop: int = 1, has_weight: bool = True, saves: Sequence[int] = (11, 11, 1)
    ) -> None:
        self.weight = Parameter(torch.zeros(2))
        self._optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self._listener = PretendedListener([])
        self._workers, self._saves, self._calls = workers, saves, 0
        self.server = BackupWorkersServer(
            ServerParameters({0: self.weight} if has_weight else {}, [self._optimizer]),
            self._listener,
            is_deserted=lambda: True,
            drop=drop,
            buffers=[torch.tensor([1.0, 1.0]), torch.tensor(4)],
        )

    def say(self, worker: int, op: str, tensors: Sequence[Tensor] = (), **fields: Any) -> int:
        self._calls += 1
        header = {
            **STREAM,
            "op": op,
            "worker": worker,
            "workers": [*range(self._workers)],
            "saves": self._saves,
            "call": self._calls,
            **fields,
        }
        self.server._handle(b"%d" % worker, TensorMessage(header, tuple(tensors)))
        return self._calls

    def answer(self, call: int) -> Mapping[str, Any] | None:
        return next((header for _, header, _ in self._listener.told if header["call"] == call), None)

    def tensors(self, call: int) -> Sequence[Tensor]:
        return next(tensors for _, header, tensors in self._listener.told if header["call"] == call)

    def share(self, worker: int) -> Mapping[str, Any]:
        told = self.answer(self.say(worker, "turn"))
        assert told is not None and told["turn"] == "share"
        return told

    def arrive(
        self,
        worker: int,
        share: Mapping[str, Any],
        gradient: Sequence[float] | None,
        *,
        buffers: Any = (),
        loss: float = 1.0,
    ) -> int:
        """Push a gradient, and say that it is there."""
        if gradient is not None:
            self.say(worker, "push", [torch.tensor(gradient)], walk=share["walk"], replica=share["index"], places=[0])
        changed = dict(buffers)
        about = {"number": share["number"], "samples": 2 + share["index"], "numbers": [loss, 0.0, 2.0, 0.0]}
        rules = ["mean"] * len(changed)
        return self.say(worker, "arrive", [*changed.values()], used=[0], buffers=[*changed], rules=rules, **about)

    def finish(self, worker: int, share: Mapping[str, Any], shares: Sequence[int]) -> float:
        """Take a step, as its closer; returns the square of the sum's norm."""
        squared = self.apply(worker, share, shares)
        self.say(worker, "settle", **{"taken": True, "norm": 1.5, "verdict": None})
        return squared

    def apply(self, worker: int, share: Mapping[str, Any], shares: Sequence[int]) -> float:
        """The same, but that nobody is told yet."""
        about = {"walk": share["walk"], "places": [0]}
        summed = self.answer(self.say(worker, "add", shares=shares, **about))
        self.say(worker, "apply", factor=0.5, norm=1.5, options=[options_of(self._optimizer)], **about)
        assert summed is not None
        return summed["squared"]


def test_a_step_is_made_of_the_shares_in_time_and_the_late_one_is_told_so() -> None:
    told = Told()
    shares = [told.share(worker) for worker in range(3)]
    first = told.arrive(0, shares[0], [2.0, 0.0], loss=3.0)
    told.say(2, "push", [torch.tensor([100.0, 100.0])], walk=shares[2]["walk"], replica=2, places=[0])  # not all of it
    assert told.answer(first) is None
    closing = told.answer(told.arrive(1, shares[1], [4.0, 2.0], loss=5.0))
    assert closing is not None and closing["closes"] and closing["shares"] == [0, 1] and closing["used"] == [0]
    assert closing["numbers"] == [8.0, 0.0, 4.0, 0.0]
    assert told.finish(1, shares[1], [0, 1]) == pytest.approx(40.0)
    assert told.weight.tolist() == [-3.0, -1.0]
    late = told.arrive(2, shares[2], [100.0, 100.0])
    for call in (first, late):
        record = told.answer(call)
        assert record is not None and not record["closes"]
        assert (record["shares"], record["numbers"], record["norm"]) == ([0, 1], [8.0, 0.0, 4.0, 0.0], 1.5)
    assert not told.server._pending_sums  # what came late is not kept
    following = told.share(2)
    assert (following["number"], following["index"], following["version"]) == (1, 0, 1)


def test_buffers_become_their_mean_by_samples_over_the_shares_in_time() -> None:
    told = Told(workers=4)
    shares = [told.share(worker) for worker in range(4)]
    told.arrive(0, shares[0], [0.0, 0.0], buffers={0: torch.tensor([2.0, 1.0]), 1: torch.tensor(5)})  # of 2 samples
    told.arrive(1, shares[1], [0.0, 0.0], buffers={1: torch.tensor(5)})  # of 3
    told.arrive(2, shares[2], [0.0, 0.0], buffers={0: torch.tensor([1.0, 10.0]), 1: torch.tensor(5)})  # of 4
    told.finish(2, shares[2], [0, 1, 2])
    told.arrive(3, shares[3], [0.0, 0.0], buffers={0: torch.tensor([99.0, 99.0]), 1: torch.tensor(99)})
    asked = told.say(3, "weights", places=[0])
    answer, (_, mean, count) = told.answer(asked), told.tensors(asked)
    assert answer is not None and answer["buffers"] == [0, 1]
    assert mean.tolist() == pytest.approx([11 / 9, 45 / 9]) and count.item() == 5


def test_a_closer_that_breaks_off_leaves_a_step_without_an_update() -> None:
    told = Told()
    shares = [told.share(worker) for worker in range(2)]
    first = told.arrive(0, shares[0], [1.0, 1.0])
    told.arrive(1, shares[1], [1.0, 1.0])
    again = told.say(1, "turn")
    record, following = told.answer(first), told.answer(again)
    assert record is not None and not record["taken"] and math.isnan(record["norm"])
    assert following is not None and (following["number"], following["version"]) == (1, 0)
    assert told.weight.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("op", ["turn", "left"])
def test_a_step_that_its_closer_breaks_off_when_the_servers_have_taken_it_counts(op: str) -> None:
    told = Told()
    shares = [told.share(worker) for worker in range(3)]
    first = told.arrive(0, shares[0], [2.0, 0.0], buffers={1: torch.tensor(6)})
    told.arrive(1, shares[1], [4.0, 2.0])
    told.apply(1, shares[1], [0, 1])
    told.say(1, op)
    record = told.answer(first)
    assert record is not None and (record["taken"], record["norm"], record["shares"]) == (True, 1.5, [0, 1])
    told.say(0, "noted")
    following = told.share(0)
    assert (following["number"], following["version"], following["passed_over"]) == (1, 1, [])
    assert told.weight.tolist() == [-3.0, -1.0]
    assert told.tensors(told.say(2, "weights", places=[0]))[1].item() == 5


def test_the_writer_who_has_asked_first_saves_as_soon_as_the_last_one_has_noted() -> None:
    told = Told(saves=(1, 11, 1))
    shares = [told.share(worker) for worker in range(2)]
    for worker, share in enumerate(shares):
        told.arrive(worker, share, [1.0, 1.0])
    told.finish(1, shares[1], [0, 1])
    told.say(0, "noted")
    asked = told.say(0, "turn")
    assert told.answer(asked) is None
    told.say(1, "noted")  # and it asks for nothing as long as there are too few workers
    answer = told.answer(asked)
    assert answer is not None and (answer["turn"], answer["passed_over"]) == ("save", [])


def test_what_another_worker_has_not_recorded_is_in_the_writers_log_before_it_saves() -> None:
    told = Told(saves=(2, 11, 1))
    for worker in (0, 1, 2):
        told.share(worker)
    asked = [told.say(worker, "turn") for worker in (2, 0, 1)]  # all pass the step over
    turns = [told.answer(one) or {} for one in asked]
    assert [turn["passed_over"] for turn in turns] == [[0], [], []]
    for worker, turn in zip((0, 1), turns[1:], strict=True):
        told.arrive(worker, turn, [1.0, 1.0])
    told.finish(1, turns[2], [1, 2])
    for worker in (0, 1):
        told.say(worker, "noted")
    asked = told.say(0, "turn")
    assert told.answer(asked) is None
    told.say(2, "turn")  # its weights were of two steps: it has not come to note the one that was passed over
    answer = told.answer(asked)
    assert answer is not None and (answer["turn"], answer["passed_over"]) == ("save", [0])


def test_a_worker_that_has_left_while_it_waited_gets_no_share() -> None:
    told = Told(workers=2)
    shares = [told.share(worker) for worker in range(2)]
    told.arrive(0, shares[0], [1.0, 1.0])
    asked = told.say(1, "turn")
    told.say(1, "left")
    told.finish(0, shares[0], [0])
    told.say(0, "noted")
    assert told.answer(asked) is None
    assert told.share(0)["count"] == 1


def test_what_was_asked_before_an_error_was_caught_is_not_answered() -> None:
    told = Told(workers=3)
    shares = [told.share(worker) for worker in range(3)]
    first = told.arrive(0, shares[0], [1.0, 1.0])
    for worker in (0, 1):
        told.say(worker, "turn")
    assert told.answer(told.say(2, "turn")) is not None  # nobody is left who could finish the step
    assert told.answer(first) is None


def test_a_verdict_of_the_closer_is_everybodys() -> None:
    told = Told()
    shares = [told.share(worker) for worker in range(2)]
    first = told.arrive(0, shares[0], [1.0, 1.0])
    told.arrive(1, shares[1], [1.0, 1.0])
    verdict = {"loss": 9.0, "limit": 3.0, "in_a_row": 1}
    told.say(1, "settle", taken=False, norm=1.0, verdict=verdict)
    record = told.answer(first)
    assert record is not None and record["verdict"] == verdict and not record["taken"]
    assert told.share(0)["version"] == 0


def test_a_server_without_parameters_takes_part_in_steps_all_the_same() -> None:
    told = Told(has_weight=False)
    shares = [told.share(worker) for worker in range(2)]
    for worker, share in enumerate(shares):
        told.arrive(worker, share, None)
    about = {"walk": shares[1]["walk"], "places": []}
    squared = told.answer(told.say(1, "add", shares=[0, 1], **about))
    assert squared is not None and squared["squared"] == 0.0
    told.say(1, "apply", factor=1.0, norm=0.0, options=[[]], **about)
    assert told.server.part.version == 1


def test_gradients_of_skipped_steps_do_not_pile_up() -> None:
    told = Told(workers=2)
    for _ in range(8):
        share = told.share(0)
        told.arrive(0, share, [1.0, 1.0])
        told.say(0, "settle", taken=False, norm=math.inf, verdict=None)
        told.say(0, "noted")
    assert len(told.server._pending_sums) <= 2
    assert len(told.server._streams["train"].records) == 1


class PretendedCaller:
    """One connection to them."""

    def __init__(self, servers: PretendedServers) -> None:
        self._servers = servers

    def begin(self, header: Mapping[str, Any], tensors: Sequence[Tensor] = ()) -> int:
        self._servers.asked.append(header["op"])
        return 0

    def answer(self, call: int, **_: Any) -> TensorMessage:
        match self._servers.asked[-1]:
            case "synced":
                return TensorMessage({})
            case "arrive":
                record = {"shares": [0, 2], "numbers": [3.0, 0.0, 2.0, 0.0], "used": [0], "norm": 7.0, "verdict": None}
                return TensorMessage({"closes": False, **record})
            case _:
                number, version = next(self._servers.turns)
                share = {"number": number, "index": 1, "count": 3, "walk": [0, number, 0]}
                return TensorMessage({"turn": "share", "version": version, "passed_over": [2], **share})


class PretendedServers(ServerClient):
    """Two servers, of which the second takes a step between the two answers of one look at the weights."""

    def __init__(self) -> None:
        self.count = 2
        self.versions = iter([(4, 5), (5, 5)])
        self.turns = iter([(3, 4), (4, 5)])  # numbers, and versions
        self.asked: list[str] = []

    @property
    def are_there(self) -> bool:
        return True

    def caller(self, number: int) -> Any:
        return PretendedCaller(self)

    def ask_first(self, question: Mapping[str, Any], tensors: Sequence[Tensor] = (), **_: Any) -> TensorMessage:
        return PretendedCaller(self).answer(PretendedCaller(self).begin(question, tensors))

    def push(self, number: int, header: Mapping[str, Any], *tensors: Tensor) -> Callable[[], None]:
        self.asked.append(f"push to {number}")
        return lambda: None

    def ask(self, questions: Sequence[Mapping[str, Any]], *, checks: bool = True) -> list[TensorMessage]:
        self.asked.append(questions[0]["op"])
        first, second = next(self.versions)
        weights = [torch.tensor([float(first)]), torch.tensor([float(second)])]
        return [
            TensorMessage({"version": version, "buffers": []}, (weight,))
            for version, weight in zip((first, second), weights, strict=True)
        ]


def backed_by(servers: ServerClient, weights: Sequence[Parameter]) -> BackupWorkerGradients:
    named = [(f"weight_{number}", weight) for number, weight in enumerate(weights)]
    sync = ParameterServer(servers=2, drop=1)
    return BackupWorkerGradients(named, models=[], sync=sync, wire=Raw(), servers=servers, worker_rank=1)


def next_of(gradients: BackupWorkerGradients) -> Any:
    about = {"workers": (0, 1, 2), "saves": (10, 10, 1), "step": 0, "epoch": 0, "position": 0}
    stream = AsyncShares(stream="train", limit=9, **about, epochs=(9, 9), micros=(8, 8, 8))
    return gradients.next(stream, wants_pause=lambda: False)


def test_weights_of_two_versions_are_not_computed_on_their_share_is_late() -> None:
    weights, servers = [Parameter(torch.zeros(1)) for _ in range(2)], PretendedServers()
    gradients = backed_by(servers, weights)
    gradients.begin(0)
    assert next_of(gradients) == BackupShare(4, 1, 3)
    assert servers.asked == ["turn", "weights"] * 2
    assert gradients.pending_commits == [PendingCommit("train", 2, is_skipped=True)]  # of which it was told again
    assert [weight.item() for weight in weights] == [5.0, 5.0]


def test_a_share_has_arrived_when_all_servers_have_its_gradients_and_the_late_one_learns_how_the_step_ended() -> None:
    weights, servers = [Parameter(torch.zeros(1)) for _ in range(2)], PretendedServers()
    gradients = backed_by(servers, weights)
    gradients.begin(0)
    next_of(gradients)
    servers.asked.clear()
    gradients.begin(0)
    gradients.arm()
    (weights[0] * 2.0 + weights[1]).sum().backward()
    gradients.flush([1.0, 1.0, 0.0, 0.0, 5.0, 0.0, 1.0, 0.0, 0.0])
    assert gradients.collect() == [1.0, 1.0, 0.0, 0.0, 3.0, 0.0, 2.0, 0.0, 0.0]
    assert sorted(servers.asked[:2]) == ["push to 0", "push to 1"] and servers.asked[2:] == ["synced", "arrive"]
    gradients.land(scale=0.5)
    assert gradients.is_late and gradients.chosen == (0, 2) and float(gradients.norm()) == 7.0
    assert gradients.unused() == ("weight_1",)
    gradients.apply([])
    assert servers.asked[-1] == "arrive"  # it is not for this replica to end the step
