"""The live page in a real browser: what it shows, what changes while one looks, and no error or overflow anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from chromium import Chromium, Page
from live_server import serve
from synthetic_groups import decide, queue, searched, write_pool, write_sweep
from synthetic_runs import SyntheticRun

pytestmark = [pytest.mark.further, pytest.mark.needs("chromium"), pytest.mark.timeout(240)]

HOSTILE = '<img src=x onerror="document.title=1">'
PLAN = "replicas=4+wire=powersgd(rank=4)+batch(size=64,micro=8)+compute(precision=bf16,recompute=blocks)"
CUT_OFF = """[...document.querySelectorAll('.row > *, .tile, .chart, .card')].filter(one => {
    const box = one.getBoundingClientRect(), around = one.parentElement.getBoundingClientRect();
    return box.width && (box.right > around.right + 1.5 || box.left < around.left - 6);
}).map(one => one.className)"""  # what lies partly outside of what it is in
IS_DRAWN = "!!document.querySelector('.accounts') && document.querySelectorAll('canvas').length > 5"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    SyntheticRun(path=folder / "one", steps=120, workers=4, plan=PLAN, evaluate_every=20, lose_at=50).write()
    SyntheticRun(path=folder / "two", steps=90, seed=2, evaluate_every=20).write()
    SyntheticRun(path=folder / HOSTILE, steps=9, state="failed", error=HOSTILE, program=HOSTILE).write()
    return folder


@pytest.fixture
def groups(runs: Path) -> Path:
    """The runs with a pool, in which one runs and one waits, and a sweep."""
    entries = {"two": {"phase": "running", "replicas": 2, "devices": 2, "step": 90, "why": HOSTILE, "last_step": 200}}
    pool = write_pool(
        runs / "lab", entries | {"later-run-with-a-long-name": {"phase": "waiting", "why": "waits " * 20}}
    )
    queue(pool, runs / "two", most=4)
    queue(
        pool,
        runs / "later-run-with-a-long-name",
        least=3,
        most=4,
        submitted=1_795_000_009.0,
        deadline=2e9,
        priority=2.5,
    )
    decide(pool, [(1_795_000_000.0, "two", 0, 1, "two starts"), (1_795_000_500.0, "two", 1, 2, HOSTILE)])
    trials = searched(30)
    trials[0]["parameters"]["optimizer"] = HOSTILE
    write_sweep(runs / "study", trials)
    for number in range(4):
        SyntheticRun(path=runs / f"study/trials/trial-{number:04}", steps=40, seed=number).write()
    return runs


SHOWN = "document.querySelector('.chart').chart.plot.scales.x"


def type_into(page: Page, selector: str, text: str) -> None:
    page.ask(f"document.querySelector('{selector}').value = '{text}'")
    page.ask(f"document.querySelector('{selector}').dispatchEvent(new Event('input'))")


@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("is_dark", [False, True])
def test_every_page_fits_its_screen_and_nothing_goes_wrong(runs: Path, width: int, is_dark: bool) -> None:
    with serve(runs) as served, Chromium() as browser:
        for where, ready in (
            ("#/", "document.querySelectorAll('.rows .row').length == 3"),
            ("#/run/one", IS_DRAWN),
            (f"#/run/{HOSTILE.replace('/', '%2F')}", "document.querySelectorAll('canvas').length > 2"),
            ("#/compare/one/two", "!!document.querySelector('.compared td')"),
        ):
            page = browser.open(served.address + where, width=width, is_dark=is_dark)
            page.wait_for(ready)
            assert page.ask("document.documentElement.scrollWidth <= innerWidth"), where
            assert page.ask(CUT_OFF) == [], where
            assert page.ask("document.querySelectorAll('main img').length") == 0, "a name was read as HTML"
        assert browser.problems() == []


@pytest.mark.parametrize("width", [360, 800, 1400])
@pytest.mark.parametrize("is_dark", [False, True])
def test_pages_of_pools_and_sweeps_fit_their_screens(groups: Path, width: int, is_dark: bool) -> None:
    with serve(groups, "--control") as served, Chromium() as browser:
        browser.open(served.address, width=width, is_dark=is_dark)  # with the token, which becomes a cookie
        address = served.address.partition("?")[0]
        for where, ready in (
            ("#/", "document.querySelectorAll('.group').length == 2"),
            (
                "#/pool/lab",
                "!!document.querySelector('.plot rect') && document.querySelectorAll('.queued').length == 2",
            ),
            ("#/sweep/study", "document.querySelectorAll('.trials tbody tr').length == 30"),
            ("#/run/two", "document.querySelector('.program')?.innerText.includes('pool lab')"),
        ):
            page = browser.open(address + where, width=width, is_dark=is_dark)
            page.wait_for(ready)
            assert page.ask("document.documentElement.scrollWidth <= innerWidth"), where
            assert page.ask(CUT_OFF) == [], where
            assert page.ask("document.querySelectorAll('main img').length") == 0, "a name was read as HTML"
        assert browser.problems() == []


def test_a_run_is_cancelled_by_two_clicks_and_goes(groups: Path) -> None:
    for path in (groups / "lab/queue").iterdir():
        path.chmod(0o600)
    with serve(groups, "--control") as served, Chromium() as browser:
        page = browser.open(served.address)
        page = browser.open(served.address.partition("?")[0] + "#/pool/lab")
        button = "document.querySelectorAll('.queued .button')[1]"
        page.wait_for(f"!!{button}")
        page.ask(f"{button}.click()")
        page.wait_for(f"{button}.innerText == 'Sure?'")
        write_pool(groups / "lab", {"two": {"phase": "running", "replicas": 1, "devices": 1}})
        page.wait_for("document.querySelector('.of-replicas').innerText.startsWith('1')")
        assert page.ask(f"{button}.innerText") == "Sure?", "news of the pool do not take back a first click"
        page.ask(f"{button}.click()")
        page.wait_for("document.querySelectorAll('.queued').length == 1")
        assert [path.name for path in (groups / "lab/queue").iterdir()] == ["two.json"]
        assert browser.problems() == []


def test_trials_are_sorted_marked_and_compared(groups: Path) -> None:
    numbers = "[...document.querySelectorAll('.trials tbody tr td:nth-child(2)')].map(one => Number(one.textContent))"
    with serve(groups) as served, Chromium() as browser:
        page = browser.open(served.address + "#/sweep/study")
        page.wait_for("document.querySelectorAll('.trials tbody tr').length == 30")
        assert page.ask("document.querySelector('.trials tbody tr').className") == "best"
        best = page.ask(numbers)[0]
        page.ask("document.querySelector('.trials th:nth-child(2) button').click()")
        assert page.ask(numbers) == list(range(30))
        page.ask("document.querySelector('.trials th:nth-child(2) button').click()")
        assert page.ask(numbers) == list(range(29, -1, -1)) and best in range(30)
        page.ask("document.querySelector('.trials th:nth-child(2) button').click()")
        page.ask("document.querySelectorAll('.trials tbody input')[1].click()")
        write_sweep(groups / "study", searched(31))
        page.wait_for("document.querySelectorAll('.trials tbody tr').length == 31")
        assert page.ask("document.querySelectorAll('.trials tbody input')[1].checked"), "a choice outlives news"
        page.ask("document.querySelectorAll('.trials tbody input')[2].click()")
        page.ask("document.querySelector('.picked a').click()")
        page.wait_for("location.hash.startsWith('#/compare/') && !!document.querySelector('.compared td')")
        assert browser.problems() == []


def test_trials_are_one_row_that_opens_and_runs_of_a_pool_wait(groups: Path) -> None:
    run = SyntheticRun(path=groups / "paused", steps=20, last_step=60, state="stopped").write()
    queue(groups / "lab", run)
    names = "[...document.querySelectorAll('.of-name a')].map(one => one.textContent)"
    chip = "[...document.querySelectorAll('.chip')].find(one => one.textContent.startsWith('{}'))"
    with serve(groups) as served, Chromium() as browser:
        page = browser.open(served.address)
        page.wait_for(f"{names}.length == 5 && !!document.querySelector('.of-sweep')")
        assert set(page.ask(names)) == {HOSTILE, "one", "two", "paused", "study"}
        assert page.ask("document.querySelector('.of-sweep').innerText").count("30 of 40 trials") == 1
        page.ask("document.querySelector('.fold').click()")
        assert len(page.ask(names)) == 9
        assert page.ask(f"{names}.slice({names}.indexOf('study') + 1, {names}.indexOf('study') + 5)") == [
            f"study/trials/trial-{number:04}" for number in range(4)
        ]
        page.ask("document.querySelector('.fold').click()")
        assert len(page.ask(names)) == 5
        page.ask(f"{chip.format('trials')}.click()")
        assert len(page.ask(names)) == 4
        page.ask(f"{chip.format('waits')}.click()")
        assert page.ask(names) == ["paused"]
        assert page.ask("document.querySelector('.rows .of-state').textContent") == "waitsin pool lab"
        assert not page.ask(f"!!{chip.format('stopped')}")
        page = browser.open(served.address + "#/run/paused")
        page.wait_for("document.querySelector('h1')?.innerText.includes('waits in pool lab')")
        assert browser.problems() == []


def test_each_run_of_a_pool_has_its_own_color_and_choices_have_their_ticks(groups: Path) -> None:
    rows = [(1_795_001_000.0 + number, f"trial-{number:02}", 0, 1, "") for number in range(30)]
    decide(groups / "lab", rows)
    colors = "[...document.querySelectorAll('.legend i')].map(one => one.style.background)"
    with serve(groups) as served, Chromium() as browser:
        page = browser.open(served.address + "#/pool/lab")
        page.wait_for(f"{colors}.length > 10")
        found = page.ask(colors)
        assert len(found) == len(set(found)) == 16
        assert page.ask("document.querySelector('.legend').lastChild.innerText") == "16 more"
        assert (
            page.ask("Math.max(...[...document.querySelectorAll('.plot .up')].map(one => Number(one.textContent)))")
            == 4
        )
        page = browser.open(served.address + "#/sweep/study")
        ticks = "[...document.querySelectorAll('.chart')].find(one => one.innerText.includes('over width'))"
        page.wait_for(f"!!{ticks}?.querySelector('.plot')")
        found = page.ask(f"[...{ticks}.querySelectorAll('.tick:not(.up)')].map(one => one.firstChild.data)")
        assert set(map(int, found)) <= {64, 128, 256, 512} and "512" in found and len(found) > 2
        assert browser.problems() == []


def test_a_run_is_followed_and_its_logs_are_filtered(runs: Path) -> None:
    run = SyntheticRun(path=runs / "two", steps=90, seed=2)
    with serve(runs) as served, Chromium() as browser:
        page = browser.open(served.address + "#/run/two")
        page.wait_for("!!document.querySelector('.progress')?.innerText.includes('step 90 of 90')")
        run.append(91, 95)
        page.wait_for("document.querySelector('.progress').innerText.includes('step 95')")
        page.wait_for(f"{SHOWN}.max == 95")
        page.ask("(plot => plot.setScale('x', {min: 20, max: 40}))(document.querySelector('.chart').chart.plot)")
        run.append(96, 97)
        page.wait_for("document.querySelector('.progress').innerText.includes('step 97')")
        assert page.ask(f"[{SHOWN}.min, {SHOWN}.max]") == [20, 40], "what was chosen by hand stays"
        page.ask("document.getElementById('logs').scrollIntoView()")
        page.wait_for("document.querySelectorAll('.lines div').length > 20")
        type_into(page, "#logs input", "epoch 17")
        page.wait_for("document.querySelectorAll('.lines div').length == 2")
        assert browser.problems() == []


def test_runs_are_sorted_filtered_and_chosen_for_a_comparison(runs: Path) -> None:
    names = "[...document.querySelectorAll('.of-name a')].map(one => one.textContent)"
    with serve(runs) as served, Chromium() as browser:
        page = browser.open(served.address)
        page.wait_for(f"{names}.length == 3")
        page.ask("document.querySelector('.heads .of-name').click()")
        assert page.ask(names) == [HOSTILE, "one", "two"]
        page.ask("document.querySelector('.heads .of-name').click()")
        assert page.ask(names) == ["two", "one", HOSTILE]
        type_into(page, ".tools input", "powersgd")
        assert page.ask(names) == ["one"]
        page.ask("document.querySelector('.chip').click()")
        type_into(page, ".tools input", "")
        page.ask("document.querySelectorAll('.rows input').forEach((box, place) => { if (place < 2) box.click(); })")
        page.ask("document.querySelector('.picked a').click()")
        page.wait_for("location.hash.startsWith('#/compare/') && !!document.querySelector('.compared td')")
        assert browser.problems() == []


def test_a_folder_without_runs_says_what_to_do(tmp_path: Path) -> None:
    with serve(tmp_path) as served, Chromium() as browser:
        page = browser.open(served.address)
        page.wait_for("document.body.innerText.includes('No runs yet')")
        SyntheticRun(path=tmp_path / "first", steps=5).write()
        page.wait_for("document.querySelectorAll('.rows .row').length == 1")
        assert browser.problems() == []
