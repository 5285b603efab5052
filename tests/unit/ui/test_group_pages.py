"""The pages of pools and sweeps as a browser asks for them, and a run that is taken out where that is allowed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asgi_calls import AsgiCalls, talk
from paceline.ui import control, run_view, runs_folder
from paceline.ui.access import CONTROL_HEADER
from synthetic_groups import queue, searched, write_pool, write_sweep
from synthetic_runs import SyntheticRun

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_view.RunView, "is_report_due", lambda self: False)
    monkeypatch.setattr(runs_folder, "SCAN_EVERY_S", 0.0)
    folder = tmp_path / "runs"
    run = SyntheticRun(path=folder / "one", steps=30).write()
    queue(write_pool(folder / "lab", {"one": {"phase": "running", "replicas": 1, "devices": 1}}), run)
    write_sweep(folder / "study", searched(5))
    return folder


def test_a_pool_is_told_at_once_and_again_when_it_changes(runs: Path) -> None:
    def more(num: int) -> None:
        if num == 1:
            write_pool(runs / "lab", {"one": {"phase": "waiting", "why": HOSTILE}})

    async def look(calls: AsgiCalls) -> None:
        first, second = await calls.listen("/api/pool/stream?pool=lab", 2, then=more)
        assert (first["held"], first["runs"][0]["page"]) == (1, "one")
        assert (second["held"], second["runs"][0]["why"]) == (0, HOSTILE)
        assert first["whole"] and not second["whole"] and "path" not in second
        (again,) = await calls.listen("/api/pool/stream?pool=lab", 1, last_event_id=first["id"])
        assert (again["held"], again["whole"]) == (0, False)
        (other,) = await calls.listen("/api/pool/stream?pool=lab", 1, last_event_id="other.5")
        assert other["whole"] and other["names"] == ["one"]
        for path in ("/api/pool/stream?pool=study", "/api/pool/stream?pool=../runs/lab", "/api/pool/stream"):
            assert (await calls.get(path)).status == 404

    talk(runs, look)


def test_a_sweep_is_told_trial_by_trial_and_says_when_it_is_gone(runs: Path) -> None:
    def more(num: int) -> None:
        if num == 1:
            write_sweep(runs / "study", [*searched(5), {"number": 5, "parameters": {}, "state": "running"}])
        elif num == 2:
            (runs / "study").rename(runs.parent / "away")

    async def look(calls: AsgiCalls) -> None:
        first, second, third = await calls.listen("/api/sweep/stream?sweep=study", 3, then=more)
        assert first["whole"] and len(first["trials"]) == 5
        assert not second["whole"] and [one["number"] for one in second["trials"]] == [5]
        assert third["is_gone"]
        assert (await calls.get("/api/sweep/stream?sweep=lab")).status == 404

    talk(runs, look)


def test_a_run_names_its_pool_and_the_overview_has_all(runs: Path) -> None:
    async def look(calls: AsgiCalls) -> None:
        (found,) = await calls.listen("/api/run/stream?run=one", 1)
        assert found["groups"] == [{"kind": "pool", "name": "lab"}]
        overview = (await calls.get("/api/runs")).json
        assert [one["name"] for one in overview["pools"]] == ["lab"]
        assert [one["name"] for one in overview["sweeps"]] == ["study"]

    talk(runs, look)


def test_a_run_is_taken_out_of_its_pool_by_the_command_and_only_with_control(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, tuple[str, ...]]] = []

    async def command(path: Path, words: tuple[str, ...]) -> tuple[int, str]:
        asked.append((path, words))
        return 0, "one is taken out"

    monkeypatch.setattr(control, "_command", command)

    async def cancel(calls: AsgiCalls, *, secret: str, **body: Any) -> Any:
        headers = {"cookie": f"{calls.access.cookie}={calls.access.token}", CONTROL_HEADER: secret}
        return await calls.ask("POST", "/api/pool/cancel", body=json.dumps(body).encode(), **headers)

    async def look(calls: AsgiCalls) -> None:
        secret = calls.access.control_secret()
        assert (await cancel(calls, secret="wrong", pool="lab", name="one")).status == 403
        for pool, name in (("none", "one"), ("../lab", "one"), ("lab", "--slots"), ("lab", "a/b"), ("lab", "")):
            assert (await cancel(calls, secret=secret, pool=pool, name=name)).status == 404
        assert asked == []
        assert (await cancel(calls, secret=secret, pool="lab", name="one")).json == {"says": "one is taken out"}
        assert asked == [(runs / "lab", ("pool", "--cancel", "one"))]

    talk(runs, look, needs_token=True, can_control=True)

    async def shown_only(calls: AsgiCalls) -> None:
        assert (await calls.ask("POST", "/api/pool/cancel", body=b"{}")).status == 403

    talk(runs, shown_only)


@pytest.mark.thorough
def test_the_command_takes_the_run_out(runs: Path) -> None:
    async def look(calls: AsgiCalls) -> None:
        headers = {
            "cookie": f"{calls.access.cookie}={calls.access.token}",
            CONTROL_HEADER: calls.access.control_secret(),
        }
        body = json.dumps({"pool": "lab", "name": "other"}).encode()
        answer = (await calls.ask("POST", "/api/pool/cancel", body=body, **headers)).json
        assert "has no run named 'other'. It has: one." in answer["error"]

    (runs / "lab/queue/one.json").chmod(0o600)
    talk(runs, look, needs_token=True, can_control=True)
