"""horovodrun command lines become commands of `paceline run`: each option is taken, named as idle, or refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.compat.horovod import discovery, horovodrun
from paceline.compat.horovod.discovery import HostScript
from paceline.compat.horovod.horovodrun import IGNORED, REFUSED, SWITCHES, TAKEN, VARIABLES, run_command
from paceline.errors import PlanError


def words(line: str) -> list[str]:
    return list(run_command(line.split()).words[3:])


def test_the_usual_command_line() -> None:
    assert run_command(["-np", "4", "python", "train.py", "--lr", "0.1"]).words == (
        *("run", "--as", "horovod", "--workers", "4"),
        *("train.py", "--", "--lr", "0.1"),
    )


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("-np 2 -H localhost:2 python3 train.py", "--workers 2 train.py"),
        ("--num-proc=2 python -u train.py", "--workers 2 train.py"),
        ("-np 5 -H a:4,b:4 python train.py", "--on ssh --hosts a:4,b:1 train.py"),
        ("-np 2 --hosts a,b python train.py", "--on ssh --hosts a:1,b:1 train.py"),
        ("-np 2 ./train.py", "--workers 2 ./train.py"),
        ("--min-np 2 --max-np 4 -H localhost:4 python train.py", "--workers 4 --plan replicas=2-4 train.py"),
        ("-np 2 --min-np 1 --max-np 4 python train.py", "--workers 2 --plan replicas=1-4 train.py"),
        ("-np 2 --min-np 1 python train.py", "--workers 2 --plan replicas=1-64 train.py"),
        ("-np 2 --min-np 2 --max-np 2 python train.py", "--workers 2 train.py"),
        (
            "-np 2 --max-np 3 --elastic-timeout 9 -H a:2,b:2 python train.py",
            "--on ssh --hosts a:2,b:1 --plan replicas=2-3 --patience-s 9 train.py",
        ),
    ],
)
def test_where_workers_run(line: str, wanted: str) -> None:
    assert words(line) == wanted.split()


def test_hosts_come_from_a_file_or_a_script(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\na slots=2\nb slots=3\n")
    assert "a:2,b:1" in words(f"-np 3 -hostfile {tmp_path}/hosts python t.py")
    script = tmp_path / "discover.sh"
    script.write_text("#!/bin/sh\necho a:1\necho b\n")
    script.chmod(0o755)
    assert "a:1,b:2" in words(f"-np 3 --slots-per-host 2 --host-discovery-script {script} python t.py")


def test_a_script_says_while_the_run_goes_on_how_many_workers_there_are(tmp_path: Path) -> None:
    script = tmp_path / "discover.sh"
    script.write_text(f"#!/bin/sh\ncat {tmp_path}/hosts\n")
    script.chmod(0o755)
    (tmp_path / "hosts").write_text("localhost:3\n")
    line = f"-np 2 --min-np 1 --max-np 4 --host-discovery-script {script} python t.py"
    command = run_command(line.split())
    assert command.words[3:] == ("--workers", "3", "--plan", "replicas=1-4", "t.py")
    assert command.script is not None
    wanted: list[int] = []
    for hosts in ("localhost:2", "localhost:9", "elsewhere:3", "localhost"):
        (tmp_path / "hosts").write_text(f"{hosts}\n")
        wanted.append(command.script.wanted())
    assert wanted == [2, 4, 1, 1]


def test_a_script_is_followed_until_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discovery, "EVERY_S", 0.001)
    said, ends, asked = (
        iter([3, 3, PlanError("it has failed"), PlanError("it has failed"), 4, 4, 4]),
        threading.Event(),
        [],
    )

    def wanted(script: HostScript) -> int:
        found = next(said, None)
        if found is None:
            ends.set()
            return 4
        if isinstance(found, PlanError):
            raise found
        return found

    def resize(workers: int) -> str | None:
        asked.append(workers)
        return {2: "not now", 3: None}.get(len(asked), "")

    monkeypatch.setattr(HostScript, "wanted", wanted)
    HostScript(path="x", slots=1, least=1, most=4).follow(resize, begins_with=2, ends=ends)
    assert asked == [3, 4, 4, 4]  # refused, then not answered, and asked for again each time
    assert capsys.readouterr().err == "horovodrun: it has failed\nhorovodrun: not now\n"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (ConnectionError("does not answer"), None),
        ({"error": "it has not begun", "has_begun": False}, None),
        ({"error": "it has a fixed number", "has_begun": True}, "it has a fixed number"),
        ({"error": "the run is ending"}, "the run is ending"),
        ({"says": "it will have 3 replicas"}, ""),
    ],
    ids=["no run", "early", "fixed", "late", "done"],
)
def test_a_run_that_takes_no_requests_yet_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, answer: Any, found: str | None
) -> None:
    def send(pid: int, request: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(horovodrun, "send_command", send)
    assert horovodrun._resize(3) == found


def test_a_module_is_run_as_a_module() -> None:
    program, *args = words("-np 2 python -m pytest tests -q")[2:]
    assert Path(program).name == "run_module.py"
    assert args == ["--", "pytest", "tests", "-q"]


def test_tuneable_options_reach_the_workers() -> None:
    line = (
        "-np 2 --fusion-threshold-mb 3 --cycle-time-ms=7.5 --timeline-filename /x/t.json --timeline-mark-cycles "
        "--stall-check-warning-time-seconds 9 --stall-check-shutdown-time-seconds 20 python t.py"
    )
    command = run_command(line.split())
    assert command.variables == {
        "HOROVOD_FUSION_THRESHOLD": str(3 << 20),
        "HOROVOD_CYCLE_TIME": "7.5",
        "HOROVOD_TIMELINE": "/x/t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "9",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
    }
    assert command.notes == ()


@pytest.mark.parametrize("option", sorted(IGNORED))
def test_what_has_no_effect_is_said(option: str) -> None:
    command = run_command([option, *["1"] * IGNORED[option][0], "-np", "2", "python", "t.py"])
    assert command.words == run_command(["-np", "2", "python", "t.py"]).words
    (note,) = command.notes
    assert note.startswith(f"{option} has no effect: ")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        *((f"-np 2 {option} x python t.py", option) for option in sorted(REFUSED)),
        ("-np 2 --lr 3 python t.py", "--lr"),
        ("python t.py", "-np"),
        ("-np 5 --min-np 1 --max-np 4 python t.py", "--max-np"),
        ("-np two python t.py", "'two'"),
        ("-np 0 python t.py", "'0'"),
        ("-np 3 -H localhost:2 python t.py", "2 slots"),
        ("-np 2 -H :2 python t.py", "HOST:SLOTS"),
        ("-np 2 -H a:1,b:1 -p 2222 python t.py", "ssh/config"),
        ("-np 2", "program is missing"),
        ("-np 2 bash train.sh", "bash train.sh"),
        ("-np", "needs a value"),
        ("-np 2 --fusion-threshold-mb much python t.py", "'much'"),
        ("-np 2 -hostfile /nowhere/hosts python t.py", "/nowhere/hosts"),
        ("-np 2 --host-discovery-script /nowhere/x python t.py", "/nowhere/x"),
    ],
)
def test_what_cannot_be_taken_is_refused_by_its_name(line: str, says: str) -> None:
    with pytest.raises(PlanError) as error:
        run_command(line.split())
    assert says in str(error.value)


def test_no_option_is_in_two_tables() -> None:
    tables = [IGNORED, REFUSED, SWITCHES, TAKEN, VARIABLES]
    assert len({option for table in tables for option in table}) == sum(map(len, tables))


def test_the_command_is_shown_and_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    def record(words: tuple[str, ...]) -> int:
        seen.append(words)
        return 3

    monkeypatch.setattr(horovodrun.cli, "main", record)
    monkeypatch.setattr(horovodrun, "set_variables", lambda variables: None)
    assert horovodrun.main(["-np", "2", "--gloo", "python", "t.py"]) == 3
    assert seen == [("run", "--as", "horovod", "--workers", "2", "t.py")]
    assert "paceline run --as horovod --workers 2 t.py" in capsys.readouterr().err
    assert horovodrun.main(["-np"]) == 2
