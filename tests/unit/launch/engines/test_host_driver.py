"""The driver that stays with its hosts, with hosts that are pretended."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launch.engines import host_driver
from paceline.launch.engines.host_driver import HELLO, LOST, HostDriver


class FakeHost:
    """Says what its script of answers says: one entry for each start."""

    def __init__(self, name: str, *lives: Callable[[FakeHost], int | None]) -> None:
        self.name, self._lives = name, list(lives)
        self.started, self.ended = 0, 0
        self.told: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self._life: Callable[[FakeHost], int | None] = lambda _: LOST

    def begin(self) -> None:
        self.started += 1
        self.told = []
        self._life = self._lives.pop(0) if self._lives else (lambda _: LOST)

    def send(self, line: str) -> None:
        self.told.append(json.loads(line))

    def read(self) -> list[str]:
        self._code = self._life(self)
        found, self.lines = self.lines, []
        return found

    def exit_code(self) -> int | None:
        return self._code

    def end(self) -> None:
        self.ended += 1

    def hello(self, **about: Any) -> None:
        self.lines.append(f"{HELLO} {json.dumps({'host': f'real-{self.name}', 'pid': 1, **about})}")


def living(turns: int, code: int, *, head: bool = False, says: Sequence[str] = ()) -> Callable[[FakeHost], int | None]:
    """A host that answers, prints, and ends with this code after so many turns in which it knew where to meet."""
    left = {"turns": turns, "has_said": False}

    def life(host: FakeHost) -> int | None:
        if not left["has_said"]:
            left["has_said"] = True
            host.hello(**({"head": "10.0.0.1:7"} if head else {}))
            host.lines += says
        if head or any("head" in told for told in host.told):
            left["turns"] -= 1
        return code if left["turns"] < 0 else None

    return life


def dead(*lines: str) -> Callable[[FakeHost], int | None]:
    def life(host: FakeHost) -> int | None:
        host.lines += lines
        return LOST

    return life


def driver(*hosts: FakeHost, log: Path | None = None, said: list[str] | None = None) -> HostDriver:
    return HostDriver(
        [(host, number) for number, host in enumerate(hosts, start=1)],
        runs=lambda slots: {"words": ["run", "train.py", "--slots", str(slots)]},
        about={"token": "secret"},
        say=(said if said is not None else []).append,
        log=log,
        grace_s=0.1,
    )


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TURN_S": 0.001, "AGAIN_S": 0.01, "SELDOM_S": 0.05, "END_S": 0.05, "START_S": 1.0}.items():
        monkeypatch.setattr(host_driver, name, value)


def test_each_host_is_told_its_words_and_where_the_first_one_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = FakeHost("a", living(20, 0, head=True, says=["step 1", "paceline: hm"]))
    b = FakeHost("b", living(20, 0, says=["paceline: joined"]))
    names: dict[str, str] = {}
    running = driver(a, b, log=tmp_path / "log")
    running.on_names = names.update
    assert running.run() == 0
    assert a.told == [{"token": "secret", "words": ["run", "train.py", "--slots", "1"], "is_first": True}]
    assert b.told[1:] == [{"head": "10.0.0.1:7"}]
    assert b.told[0]["is_first"] is False
    assert names == {"real-a": "a", "real-b": "b"}
    shown = capsys.readouterr().out
    assert shown.splitlines() == ["step 1", "a: paceline: hm", "b: paceline: joined"]
    assert (tmp_path / "log").read_text() == shown
    assert HELLO not in shown


@pytest.mark.thorough
def test_hosts_that_cannot_be_reached_are_all_named_and_the_others_ended() -> None:
    a, b = FakeHost("a", living(10_000, 0, head=True)), FakeHost("b", dead("ssh: no route to host"))
    c = FakeHost("c", dead("warning", "paceline: Permission denied"))
    with pytest.raises(LaunchError) as raised:
        driver(a, b, c).run()
    assert str(raised.value).splitlines() == [
        "The job cannot begin: 2 of its 3 hosts failed:",
        "  b: ssh: no route to host",
        "  c: Permission denied",
    ]
    assert a.ended and b.ended and c.ended


@pytest.mark.thorough
def test_a_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_driver, "START_S", 0.05)
    a, b = FakeHost("a", living(10_000, 0, head=True)), FakeHost("b", lambda host: LOST if host.ended else None)
    with pytest.raises(LaunchError, match=r"b: it did not answer within 0 s"):
        driver(a, b).run()


def test_a_lost_host_is_started_again_and_told_where_the_run_is() -> None:
    a = FakeHost("a", living(400, 0, head=True))
    b = FakeHost("b", living(5, LOST, says=["cut"]), dead("still down"), living(300, 0))
    said: list[str] = []
    assert driver(a, b, said=said).run() == 0
    assert b.started == 3
    assert b.told[1:] == [{"head": "10.0.0.1:7"}]
    assert said[0] == "host b is lost: cut"


def test_a_host_that_the_others_gave_up_joins_again_and_one_that_left_does_not() -> None:
    a = FakeHost("a", living(200, 0, head=True))
    b, c = FakeHost("b", living(5, 76), living(100, 0)), FakeHost("c", living(5, 75), living(5, 1))
    assert driver(a, b, c).run() == 0
    assert (b.started, c.started) == (2, 1)


def test_the_exit_status_is_that_of_a_host_that_ended_by_itself() -> None:
    a, b = FakeHost("a", living(5, LOST, head=True)), FakeHost("b", living(3, 75))
    assert driver(a, b).run() == 75
    a, b = FakeHost("a", living(5, LOST, head=True)), FakeHost("b", living(3, LOST))
    assert driver(a, b).run() == 76


@pytest.mark.parametrize(("codes", "expected"), [((75, 0), 0), ((75, 1), 1), ((75, 75), 75), ((75, 76), 75)])
def test_a_host_that_has_left_does_not_say_how_the_run_ended(codes: tuple[int, int], expected: int) -> None:
    first, other = codes
    assert driver(FakeHost("a", living(10, first, head=True)), FakeHost("b", living(30, other))).run() == expected


def test_signals_are_passed_on_ctrl_c_to_one_host_and_sigterm_to_all() -> None:
    a, b = FakeHost("a", living(30, 75, head=True)), FakeHost("b", living(30, 75))
    running = driver(a, b)
    running.note_signal(2)
    assert running.run() == 75
    assert [told for told in a.told if "signal" in told] == [] or a.told[-1] == {"signal": 2}
    a, b = FakeHost("a", living(60, 75, head=True)), FakeHost("b", living(60, 75))
    running = driver(a, b)
    turn = running._turn

    def turned(now: float) -> None:
        turn(now)
        if a.told and b.told[1:] and not running._signals and running._signalled_at is None:
            running.note_signal(15)

    running._turn = turned  # pyright: ignore[reportAttributeAccessIssue]
    assert running.run() == 75
    assert a.told[-1] == b.told[-1] == {"signal": 15}


def test_a_host_that_does_not_fit_ends_the_wait_of_the_others() -> None:
    a, b = FakeHost("a", living(100_000, 0, head=True)), FakeHost("b", living(2, 2, says=["no script there"]))
    running = driver(a, b)

    def ended(host: FakeHost) -> int | None:
        return 75 if any("signal" in told for told in host.told) else None

    first = a._lives[0]
    a._lives[0] = lambda host: ended(host) if ended(host) else first(host)
    assert running.run() in (2, 75)
    assert {"signal": 15} in a.told
