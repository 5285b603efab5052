"""A job that is followed: what is shown, and when it ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.engines import follow as following
from paceline.launch.engines.console_files import ConsoleFiles
from paceline.launch.engines.engine import Console, EngineState
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.follow import follow


class FakeEngine:
    """Says one state after the other."""

    def __init__(self, folder: Path, *states: EngineState | LaunchError) -> None:
        self._folder, self._states = folder, iter(states)
        self.asked: list[int] = []

    def state(self, record: EngineRecord) -> EngineState:
        self.asked.append(record.hosts)
        state = next(self._states)
        if isinstance(state, LaunchError):
            raise state
        return state

    def console(self, record: EngineRecord) -> Console:
        return ConsoleFiles(self._folder, "*.log")


def waiting(says: str) -> EngineState:
    return EngineState(phase="waiting", says=says)


def running(says: str) -> EngineState:
    return EngineState(phase="running", says=says)


def over(code: int | None) -> EngineState:
    return EngineState(phase="ended", says=f"over ({code})", exit_code=code)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("READ_S", "ASK_S", "SELDOM_S"):
        monkeypatch.setattr(following, name, 0.001)
    yield


def record(folder: Path) -> EngineRecord:
    return EngineRecord(run_dir=folder / "r", engine={"kind": "Slurm"}, hosts=2).save()


def test_reasons_are_shown_when_they_change_and_the_output_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.log").write_text("one\ntwo")
    said: list[str] = []
    states = [waiting("full"), waiting("full"), waiting("soon"), running("runs"), running("runs on others"), over(75)]
    assert follow(FakeEngine(tmp_path, *states), record(tmp_path), say=said.append) == 75
    assert said == ["full", "soon", "over (75)"]
    assert capsys.readouterr().out == "one\n"


def test_an_engine_that_does_not_answer_for_a_while_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    lost = [LaunchError("no controller."), LaunchError("no controller.")]
    assert (
        follow(
            FakeEngine(tmp_path, running("runs"), *lost, running("runs"), over(0)), record(tmp_path), say=said.append
        )
        == 0
    )
    assert [text for text in said if "no controller" in text] == [
        "no controller. It is asked again; the job goes on meanwhile"
    ]
    monkeypatch.setattr(following, "UNHEARD_S", 0.0)
    with pytest.raises(LaunchError, match="no controller"):
        follow(FakeEngine(tmp_path, *lost, *lost), record(tmp_path), say=said.append)


def test_a_resize_is_noticed_and_an_end_without_a_status_is_a_failure(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path, running("runs"), over(None))
    first = record(tmp_path)
    first.changed(hosts=5)
    assert follow(engine, first, say=lambda _: None) == 1
    assert engine.asked == [5, 5]


def test_files_that_come_later_are_read_and_lines_are_whole(tmp_path: Path) -> None:
    console = ConsoleFiles(tmp_path, "host_*.log", {"host_1.log": 4})
    (tmp_path / "host_1.log").write_bytes(b"old\nnew\npar")
    assert console.read() == "new\n"
    (tmp_path / "host_2.log").write_bytes("zwei\nä".encode()[:-1])
    with (tmp_path / "host_1.log").open("ab") as file:
        file.write(b"tial\n")
    assert console.read() == "partial\nzwei\n"
    with (tmp_path / "host_2.log").open("ab") as file:
        file.write("ä".encode()[-1:] + b"\n")
    assert console.read() == "ä\n"
    assert console.read() == ""
