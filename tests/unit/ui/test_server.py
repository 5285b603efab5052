"""What the server answers: pages, runs, logs and comparisons; and which requests it refuses, whatever they send."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from asgi_calls import AsgiCalls, receiver, scope_of, talk
from paceline.ui import control, event_stream, run_view, runs_folder, server
from paceline.ui.access import CONTROL_HEADER, is_loopback
from synthetic_runs import SyntheticRun

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in ("one", "sweep/two"):
        SyntheticRun(path=tmp_path / "runs" / name, steps=30, evaluate_every=10).write()
    (tmp_path / "secret.txt").write_text("secret")
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def _no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for a report, but where a test says so."""
    monkeypatch.setattr(run_view.RunView, "is_report_due", lambda self: False)


def test_pages_and_their_files_are_served_with_a_strict_policy(runs: Path) -> None:
    async def look(calls: AsgiCalls) -> None:
        page = await calls.get("/")
        assert page.status == 200 and b"<main" in page.body and page.headers["content-type"].startswith("text/html")
        assert "script-src 'self'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for name in ("app.js", "style.css", "uPlot.esm.js", "favicon.svg", "uPlot.LICENSE.txt"):
            assert (await calls.get(f"/static/{name}")).status == 200, name
        about = await calls.get("/api/about")
        assert about.json == {"root": str(runs), "can_control": False}
        assert about.headers["cache-control"] == "no-store"

    talk(runs, look)


def test_the_page_loads_nothing_from_elsewhere_and_reads_no_text_as_html() -> None:
    folder = Path(server.__file__).parent / "static"
    own = [path for path in folder.iterdir() if path.suffix in (".js", ".css", ".html") and "uPlot" not in path.name]
    assert len(own) > 8
    for path in own:
        text = path.read_text()
        assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text, path
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), path


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/server.py",
        "/static//etc/passwd",
        "/api/run/logs?run=../secret.txt",
        "/api/run/logs?run=/etc",
        "/api/run/logs?run=one/attempt_1",
        "/api/run/stream?run=..",
        "/api/compare?run=one&run=../runs/one",
    ],
)
def test_no_path_leads_out_of_the_folder(runs: Path, path: str) -> None:
    answer = talk(runs, lambda calls: calls.get(path))
    assert answer.status == 404 and b"secret" not in answer.body and b"import" not in answer.body


def test_a_stream_tells_a_run_and_then_what_is_new_and_a_browser_that_returns_gets_only_that(runs: Path) -> None:
    run = SyntheticRun(path=runs / "one", steps=30)

    def more(num: int) -> None:
        if num == 1:
            run.append(31, 33)

    async def look(calls: AsgiCalls) -> None:
        first, second = await calls.listen("/api/run/stream?run=one", 2, then=more)
        assert first["summary"]["step"] == 30 and first["curves"]["whole"]
        told = [
            point[1]
            for one in (first, second)
            if "curves" in one
            for point in one["curves"]["series"]["loss"]["points"]
        ]
        assert 33 in told and not second.get("curves", {}).get("whole")
        run.append(34, 34)
        (third,) = await calls.listen("/api/run/stream?run=one", 1, last_event_id=second["id"])
        assert [point[1] for point in third["curves"]["series"]["loss"]["points"]] == [34]
        (again,) = await calls.listen("/api/run/stream?run=one", 1, last_event_id="other.5.5")
        assert again["curves"]["whole"]

    talk(runs, look)


def test_the_overview_is_told_what_changes_and_hostile_names_stay_text(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs_folder, "SCAN_EVERY_S", 0.0)

    def more(num: int) -> None:
        if num == 1:
            SyntheticRun(path=runs / HOSTILE, steps=3, state="running", plan=HOSTILE, program=HOSTILE).write()

    async def look(calls: AsgiCalls) -> None:
        first, second = await calls.listen("/api/runs/stream", 2, then=more)
        assert {run["name"] for run in first["runs"]} == {"one", "sweep/two"} and first["whole"]
        (found,) = second["runs"]
        assert found["name"] == found["program"] == found["plan"] == HOSTILE
        assert (await calls.get("/api/runs")).headers["content-type"].startswith("application/json")

    talk(runs, look)


def test_logs_and_comparisons_are_checked(runs: Path) -> None:
    async def look(calls: AsgiCalls) -> None:
        logs = (await calls.get("/api/run/logs?run=sweep/two&worker=1&stream=stdout&find=EPOCH")).json
        assert len(logs["lines"]) == 39 and logs["workers"] == [0, 1]
        for query in ("worker=-1", "worker=x", "stream=etc", "worker=12345678"):
            assert (await calls.get(f"/api/run/logs?run=one&{query}")).status == 400, query
        found = (await calls.get("/api/compare?run=one&run=sweep/two&run=one")).json
        assert [run["name"] for run in found["runs"]] == ["one", "sweep/two"]
        assert found["runs"][0]["curves"]["series"]["loss"]["points"] and found["facts"]
        assert (await calls.get("/api/compare")).status == 400
        many = "&".join(f"run={k}" for k in range(13))
        assert (await calls.get(f"/api/compare?{many}")).status == 400

    talk(runs, look)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:7700", 200), ("127.0.0.1", 200), ("[::1]:9", 200), ("LOCALHOST", 200),
        ("evil.example", 421), ("127.0.0.1.evil.example:7700", 421), ("localhost.evil.example", 421), ("", 421),
        ("evil.example#@localhost", 421), ("[::1", 421),
    ],
)  # fmt: skip
def test_on_loopback_only_this_machines_names_are_answered(runs: Path, host: str, status: int) -> None:
    assert talk(runs, lambda calls: calls.get("/api/about", host=host)).status == status


def test_elsewhere_each_request_needs_the_token_which_becomes_a_cookie(runs: Path) -> None:
    async def look(calls: AsgiCalls) -> None:
        token = calls.access.token
        assert token is not None and len(token) >= 32
        for path in ("/", "/static/app.js", "/api/runs", "/api/run/stream?run=one", "/nowhere"):
            for query in ("", "?token=", "?token=wrong", f"?token={token}x", "?token=%ff"):
                wrong = await calls.get(f"{path}{query}", host="node1:7700", cookie=f"{calls.access.cookie}=wrong")
                assert wrong.status == 401 and token.encode() not in wrong.body, path + query
        entered = await calls.get(f"/?a=1&token={token}", host="node1:7700")
        assert entered.status == 303 and entered.headers["location"] == "/?a=1"
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        own = cookie.partition(";")[0]
        assert (await calls.get("/api/runs", host="node1:7700", cookie=own)).status == 200
        away = await calls.get(f"//evil.example/?token={token}", host="node1:7700")
        assert away.headers["location"] == "/evil.example/"

    talk(runs, look, needs_token=True, is_local=False)


def post(calls: AsgiCalls, what: str, body: Any, **headers: str) -> Any:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return calls.ask("POST", f"/api/run/{what}", body=text, **headers)


def test_nothing_is_changed_without_control_and_not_by_another_page(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Path, tuple[str, ...]]] = []

    async def command(run_dir: Path, words: tuple[str, ...]) -> tuple[int, str]:
        asked.append((run_dir, words))
        return (0, "done") if words[0] == "stop" else (1, "it is not elastic")

    monkeypatch.setattr(control, "_command", command)

    async def refused(calls: AsgiCalls) -> None:
        assert (
            await post(calls, "stop", {"run": "one"}, **{CONTROL_HEADER: calls.access.control_secret()})
        ).status == 403

    talk(runs, refused)

    async def look(calls: AsgiCalls) -> None:
        own = {"cookie": f"{calls.access.cookie}={calls.access.token}"}
        secret = (await calls.get("/api/about", **own)).json["control"]
        right = own | {CONTROL_HEADER: secret}
        assert (await post(calls, "stop", {"run": "one"}, **{CONTROL_HEADER: secret})).status == 401
        assert (await post(calls, "stop", {"run": "one"}, **own)).status == 403
        assert (await post(calls, "stop", {"run": "one"}, **own, **{CONTROL_HEADER: "x"})).status == 403
        assert (await post(calls, "stop", {"run": "one"}, **right, origin="http://evil.example")).status == 403
        assert (await calls.get("/api/run/stop?run=one", **right)).status == 405
        assert (await post(calls, "stop", {"run": "../one"}, **right)).status == 404
        assert (await post(calls, "stop", b"[1]", **right)).status == 400
        assert (await post(calls, "stop", b"x" * 10_000, **right)).status == 413
        for replicas in (0, -1, "2", True, 2.5, None, 10**9):
            assert (await post(calls, "resize", {"run": "one", "replicas": replicas}, **right)).status == 400, replicas
        assert asked == []
        stopped = await post(calls, "stop", {"run": "one"}, **right, origin="http://127.0.0.1:7700")
        assert stopped.json == {"says": "done"} and asked == [(runs / "one", ("stop",))]
        resized = await post(calls, "resize", {"run": "sweep/two", "replicas": 3}, **right)
        assert resized.json == {"error": "it is not elastic"} and asked[1] == (runs / "sweep/two", ("resize", "3"))

    talk(runs, look, needs_token=True, can_control=True)


@pytest.mark.thorough
def test_control_is_what_the_commands_do(runs: Path) -> None:
    async def look(calls: AsgiCalls) -> None:
        right = {"cookie": f"{calls.access.cookie}={calls.access.token}", CONTROL_HEADER: calls.access.control_secret()}
        stopped = (await post(calls, "stop", {"run": "one"}, **right)).json
        assert "does not run: it is finished" in stopped["says"]
        assert "does not run" in (await post(calls, "resize", {"run": "one", "replicas": 2}, **right)).json["error"]

    talk(runs, look, needs_token=True, can_control=True)


@pytest.mark.thorough
def test_the_report_of_a_run_is_read_by_a_process_of_its_own(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    SyntheticRun(path=runs / "one", steps=30, evaluate_every=10, lose_at=10).write()

    async def look(calls: AsgiCalls) -> None:
        found: dict[str, Any] = {}
        for wanted in range(1, 20):
            found = (await calls.listen("/api/run/stream?run=one", wanted))[-1]
            if "report" in found:
                break
        report = found["report"]
        assert report["goodput"] > 0 and report["incidents"][0]["text"].startswith("worker 1 (pid 4711) killed")
        assert {stay["end"] for stay in report["presence"]} == {"finished", "lost"}
        assert {one["name"] for one in report["measures"]} >= {"accuracy", "lr", "perplexity"}

    talk(runs, look)


def test_a_browser_that_reads_nothing_and_one_that_has_gone_end_their_streams(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_stream, "SEND_S", 0.05)

    async def look(calls: AsgiCalls) -> None:
        async def stuck(message: Any) -> None:
            await asyncio.Event().wait()

        path = "/api/run/stream?run=one"
        async with asyncio.timeout(5):
            await calls.ui.app(scope_of("GET", path, {}), receiver(b""), stuck)
        await calls.listen(path, 1)
        assert calls.ui.streams.num_open == 0

    talk(runs, look)


def test_streams_are_limited_and_end_at_once_when_the_server_does(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MOST_STREAMS", 2)
    monkeypatch.setattr(server, "RUN_EVERY_S", 60.0)

    async def look(calls: AsgiCalls) -> None:
        path = "/api/run/stream?run=one"
        open_ones = [asyncio.create_task(calls.get(path)) for _ in range(2)]
        async with asyncio.timeout(5):
            while calls.ui.streams.num_open < 2:
                await asyncio.sleep(0.01)
            assert (await calls.get(path)).status == 503
            calls.ui.streams.close()
            answers = await asyncio.gather(*open_ones)  # though the next look is a minute away
        assert [one.status for one in answers] == [200, 200]

    talk(runs, look)


def test_runs_that_no_page_shows_are_forgotten_and_without_a_viewer_no_file_is_looked_at(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEPT_S", 0.0)
    looks: list[str] = []
    monkeypatch.setattr(run_view.RunView, "look", lambda self: looks.append(self.name))

    async def look(calls: AsgiCalls) -> None:
        await calls.get("/api/compare?run=one")
        await calls.get("/api/compare?run=sweep/two")
        assert list(calls.ui._views) == ["sweep/two"]
        num = len(looks)
        await asyncio.sleep(0.6)
        assert len(looks) == num

    talk(runs, look)


def test_only_loopback_addresses_are_local() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "node1", "localhost.evil.example", "")))


def test_a_run_that_is_removed_while_it_is_shown_is_told_so(runs: Path) -> None:
    def remove(num: int) -> None:
        if num == 1:
            os.rename(runs / "one", runs.parent / "away")

    async def look(calls: AsgiCalls) -> None:
        messages = await calls.listen("/api/run/stream?run=one", 2, then=remove)
        assert messages[0]["summary"]["step"] == 30
        assert messages[1]["is_gone"]

    talk(runs, look)
