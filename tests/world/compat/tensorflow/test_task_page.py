"""The live page of a program that another framework distributes: its tasks, and nothing about steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from chromium import Chromium
from live_server import serve
from programs import PACELINE, run

PROGRAM = Path(__file__).resolve().parents[3] / "support" / "cluster_program.py"


@pytest.mark.further
@pytest.mark.needs("chromium")
def test_the_page_shows_the_tasks_and_no_steps(tmp_path: Path) -> None:
    words = ["run", "--for", "tensorflow", str(PROGRAM), "--workers", "2", "--servers", "1", "--run-dir", "runs/one"]
    code, output = run(*PACELINE, *words, cwd=tmp_path)
    assert code == 0, output
    with serve(tmp_path / "runs") as served, Chromium() as browser:
        page = browser.open(f"{served.address}#/run/one", width=1200)
        page.wait_for(
            "document.querySelectorAll('table.workers tbody tr').length == 4 && !!document.querySelector('.accounts')"
        )
        rows = page.ask(
            "[...document.querySelectorAll('table.workers tbody tr')].map(row => row.innerText.split('\\t')[0])"
        )
        assert rows == ["chief", "worker 0", "worker 1", "server 0"]
        heads = page.ask("[...document.querySelectorAll('table.workers th')].map(head => head.innerText.toLowerCase())")
        assert "restarts" in heads and "step" not in heads and "idle" not in heads
        assert "tensorflow: chief, 2 workers, 1 server" in page.ask("document.querySelector('.head').innerText")
        tiles = page.ask("document.querySelector('.tiles').innerText.toLowerCase()")
        assert "goodput" in tiles and "tasks" in tiles and "step" not in tiles and "samples" not in tiles
        assert "program" in page.ask("document.querySelector('#time').innerText")
        assert not page.ask("!!document.getElementById('receipt')?.checkVisibility()")
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
