"""`paceline report`: a table of at most 100 columns, JSON that adds up, and one page that needs no network."""

from __future__ import annotations

import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli.main import main
from paceline.monitor.report.curves import NUM_COLUMNS, read_curves, thinned
from paceline.monitor.report.report import read_report
from paceline.monitor.report.svg_plots import number_ticks, time_ticks

BEGAN = 1_700_000_000.0
CAUSE = "worker 1 (pid 7) killed by <signal> 9"
SECONDS = {"data": 0.01, "compute": 0.05, "communication": 0.02, "optimizer": 0.01, "total": 0.1}
RECEIPT = {
    "cluster": "<lab>",
    "attempt": 1,
    "steps": 48,
    "receipt": {
        "model": "m",
        "plan": "replicas=2",
        "micro": 8,
        "workers": 2,
        "predicted_s": 0.2,
        "predicted_parts": {"products": 0.15, "data": 0.05},
        "predicted_bytes": 2e9,
        "measured_s": 0.1,
        "measured_parts": {"compute": 0.05, "communication": 0.02, "optimizer": 0.01, "data": 0.01},
        "measured_bytes": 1e9,
    },
    "predicted_s": 0.2,
    "predicted_bytes": 2e9,
    "corrected_by": 0,
    "corrected_of": "",
    "not_kept": "<b>",
}
VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Checks that tags close in order, and keeps what would be fetched and the texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            f"{name}={value}" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")
        ]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


class Run:
    """Writes the files of a run of two workers: three seconds of start-up, steps of a tenth of a second."""

    def __init__(self, path: Path, *, num_steps: int = 50, state: str = "finished") -> None:
        self.path, self.num_steps = path, num_steps
        self.ended = BEGAN + 3 + num_steps / 10 + 0.5
        for worker in range(2):
            (path / "attempt_1" / f"worker_{worker}").mkdir(parents=True)
        attempt = {"attempt": 1, "started": BEGAN, "state": state, "ended": self.ended, "exit_code": 0}
        record = {
            "state": state,
            "job": {"program": "train.py", "args": ["--lr", "0.1"]},
            "workers": 2,
            "attempts": [attempt],
        }
        (path / "run.json").write_text(json.dumps(record | {"started": BEGAN, "ended": self.ended, "exit_code": 0}))
        began = {"run_dir": "", "attempt": 1, "workers": 2, "hosts": 1, "program": "", "launcher": "local"}
        self.write("events.jsonl", [self.event("RunStarted", 0, None, **began)])
        for worker in range(2):
            about = {"rank": worker, "workers": 2, "host": "a", "pid": 1, "device": "cpu", "startup_s": 2}
            about |= {"plan": "replicas=2", "resumed_from_step": 0}
            lines = [self.event("WorkerStarted", 2, worker, **about)]
            for step in range(1, num_steps + 1):
                lines.append(self.event("StepDone", 3 + step / 10, worker, step=step, seconds=SECONDS))
            about = {"rank": worker, "step": num_steps, "peak_memory_bytes": 1}
            lines.append(self.event("WorkerFinished", 3.2 + num_steps / 10, worker, **about))
            self.write(f"worker_{worker}/events.jsonl", lines)
        self.metrics([4.0 * math.exp(-step / num_steps) for step in range(num_steps)])

    def event(self, kind: str, after_s: float, worker: int | None, **fields: Any) -> dict[str, Any]:
        return {"event": kind, "time": BEGAN + after_s, "worker": worker} | fields

    def write(self, name: str, lines: list[dict[str, Any]]) -> None:
        with open(self.path / "attempt_1" / name, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def lose_a_worker(self) -> None:
        about = {"causes": [CAUSE], "members": [0], "step": 20, "detected_s": 0.01, "regrouped_s": 0.02}
        self.write(
            "events.jsonl",
            [
                self.event("WorkerLost", 5.05, None, rank=1, host="a", step=20, reason=CAUSE),
                self.event("Regrouped", 5.08, None, **about, steps_lost=0, holds=False),
            ],
        )

    def metrics(self, losses: list[float | None]) -> None:
        with open(self.path / "metrics.jsonl", "w") as file:
            for step, loss in enumerate(losses, 1):
                row = {
                    "step": step,
                    "time": BEGAN + 3 + step / 10,
                    "num_samples": 8,
                    "loss": loss,
                    "samples_per_s": 80.0,
                }
                file.write(json.dumps(row) + "\n")
            file.write('{"step": 99, "ti')  # cut off by a kill


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path / "run")


def test_the_table_says_where_the_time_went_and_where_the_page_is(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.lose_a_worker()
    assert main(["report", "run"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("run: finished, 8.50 s, 2 workers, 1 attempt\ngoodput ")
    assert max(map(len, shown.splitlines())) <= 100
    assert re.search(r"^\+ compute .* forward and backward$", shown, re.MULTILINE)
    assert re.search(r"^  total +8\.50 s +100\.0% +17\.0 s", shown, re.MULTILINE)
    assert f"0:05  {CAUSE} after step 20; detected in 0.01 s, regrouped in" in shown
    assert shown.endswith("\npage  run/report.html\n")
    assert (run.path / "report.html").exists()


def test_json_adds_up_and_no_page_is_written_where_none_is_asked_for(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run.lose_a_worker()
    assert main(["report", "run", "--json", "--no-html"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["page"] is None and not (run.path / "report.html").exists()
    assert sum(facts["wall_s"].values()) == pytest.approx(facts["duration_s"], abs=0.02) == pytest.approx(8.5)
    assert sum(facts["worker_s"].values()) == pytest.approx(17.0, abs=0.02)
    assert facts["goodput"] == pytest.approx(sum(facts["wall_s"][name] for name in facts["useful"]) / 8.5, abs=1e-3)
    assert facts["incidents"][0]["causes"] == [CAUSE] and facts["last_step"] == 50


def test_the_page_is_one_file_that_fetches_nothing(run: Run) -> None:
    run.lose_a_worker()
    (run.path / "receipt.json").write_text(json.dumps(RECEIPT))
    assert main(["report", "run", "--html", "somewhere.html"]) == 0
    text = Path("somewhere.html").read_text()
    page = Page(text)
    assert page.open == [] and page.addresses == []
    assert not re.search(r"https?:|@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "<signal>" not in text and CAUSE in " ".join(page.texts)  # what a user's run says is no markup
    assert "incident, 1 worker lost" in page.texts
    assert {"Where the time went", "Loss", "Samples per second", "Workers", "Incidents"} <= set(page.texts)
    assert {"Receipt", "200 ms", "100 ms", "-50 %", "memory of the fullest worker"} <= set(page.texts)
    assert "<b>" not in " ".join(re.findall("Not kept.*", text))


def test_plots_are_well_formed_and_stay_inside_their_frames(run: Run) -> None:
    run.lose_a_worker()
    run.metrics([None, 3.0, 1e30, *(2.0 - step / 100 for step in range(47))])
    assert main(["report", "run"]) == 0
    plots = re.findall(r'<svg class="plot".*?</svg>', (run.path / "report.html").read_text(), re.DOTALL)
    assert len(plots) == 4
    for plot in plots:
        root = ElementTree.fromstring(plot)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for line in root.iter("polyline"):
            for point in line.attrib["points"].split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width and 0 <= y <= height
        assert json.loads(root.attrib["data-hover"])


def test_a_run_without_a_step_and_one_of_a_single_step_have_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        Run(tmp_path / f"run_{number}", num_steps=number)
        assert main(["report", str(tmp_path / f"run_{number}")]) == 0
        assert Page((tmp_path / f"run_{number}" / "report.html").read_text()).open == []
    assert "goodput 0.0%" in capsys.readouterr().out


def test_a_directory_that_is_no_run_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "it is not the directory of a run" in said.err


def test_a_page_that_cannot_be_written_is_an_error_that_names_it(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run", "--html", "nowhere/page.html"]) == 1
    assert "nowhere/page.html" in capsys.readouterr().err


def test_damaged_lines_cost_nothing_but_themselves(run: Run) -> None:
    with open(run.path / "attempt_1" / "worker_0" / "events.jsonl", "a") as file:
        file.write('{"event": "StepDone", "time": 17\nnonsense\n{"event": "Unheard of", "time": 1, "worker": 0}\n')
    assert read_report(run.path).last_step == 50


@pytest.mark.thorough
def test_reporting_imports_no_torch(run: Run) -> None:
    code = "import sys; from paceline.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, "report", run.path], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_a_long_curve_is_thinned_and_keeps_its_spikes(tmp_path: Path) -> None:
    xs, ys = [float(step) for step in range(100_000)], [1.0] * 100_000
    ys[77_777], ys[33_333] = 9.0, -9.0
    points = thinned(xs, ys)
    assert len(points) <= NUM_COLUMNS
    assert max(point.most for point in points) == 9.0 and min(point.least for point in points) == -9.0
    assert all(one.x < other.x for one, other in itertools.pairwise(points))
    assert points[0].mean == 1.0


@pytest.mark.parametrize("num_steps", [20, 5000])
def test_a_stall_is_level_and_no_slope_however_long_the_run(tmp_path: Path, num_steps: int) -> None:
    moments = [(step / 10, 80.0) for step in range(1, num_steps + 1)]
    began = moments[-1][0]
    moments.append((began + 35.0, 8 / 35))
    moments += [(began + 35.0 + step / 10, 80.0) for step in range(1, num_steps + 1)]
    rows = [
        {"step": step, "time": when, "num_samples": 8, "loss": 1.0, "samples_per_s": speed}
        for step, (when, speed) in enumerate(moments, 1)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    points = read_curves(path, lambda when: when).speed
    column_s = moments[-1][0] / NUM_COLUMNS
    within = [point for point in points if began + 2 * column_s <= point.x <= began + 35.0 - 2 * column_s]
    assert within[0].x < began + 4 * column_s  # the line falls at once
    assert all(point.most == pytest.approx(8 / 35) for point in within)
    assert next(point for point in reversed(points) if point.x <= began - column_s).mean == pytest.approx(80)
    assert len(points) <= NUM_COLUMNS


@pytest.mark.thorough
def test_the_page_of_a_long_run_is_small(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", num_steps=20_000)
    assert main(["report", str(run.path)]) == 0
    assert (run.path / "report.html").stat().st_size < 500_000


def test_the_mean_of_a_speed_is_weighted_by_time() -> None:
    fast_and_slow = thinned([0.0, 0.1, 1.0], [100.0, 10.0, 50.0], weights=[1.0, 10.0, 1.0], columns=2)
    assert fast_and_slow[0].mean == pytest.approx(200 / 11)


def test_curves_leave_out_losses_that_are_not_finite(run: Run) -> None:
    run.metrics([2.0, None, None, 1.0])
    curves = read_curves(run.path / "metrics.jsonl", lambda when: when)
    assert [point.mean for point in curves.loss] == [2.0, 1.0]
    assert (curves.num_broken, curves.num_losses, curves.speed_mean) == (2, 2, 80.0)


@pytest.mark.parametrize(
    ("duration_s", "last"),
    [(0.5, "500 ms"), (8.9, "8 s"), (150.0, "2:30"), (4000.0, "1 h"), (4e5, "4 d"), (1e9, "10000 d")],
)
def test_time_axes_have_a_few_round_ticks(duration_s: float, last: str) -> None:
    ticks = time_ticks(duration_s)
    assert 2 <= len(ticks) <= 9
    assert ticks[-1][1] == last


def test_step_axes_have_whole_numbers() -> None:
    assert [text for _, text in number_ticks(1, 3)] == ["1", "2", "3"]
    assert number_ticks(1, 1_000_000)[-1] == (1_000_000, "1,000,000")
