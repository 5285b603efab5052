"""Every sink says what happened: metrics.jsonl, TensorBoard, Prometheus, summary.json."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.events import (
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    EventLog,
    Record,
    StepDone,
    WorkerFinished,
    WorkerStarted,
)
from paceline.monitor.console.closing_table import closing_table
from paceline.monitor.export import scrape_server
from paceline.monitor.export.metrics_jsonl import MetricsFile
from paceline.monitor.export.prometheus import PrometheusEndpoint
from paceline.monitor.export.summary_json import Summary
from paceline.monitor.export.tensorboard import EVERY_S, TensorBoardFile
from paceline.monitor.records.steps import Step

SECONDS = {"data": 0.1, "compute": 1.3, "communication": 0.4, "optimizer": 0.1, "total": 2.0}


def step(number: int, **fields: Any) -> Step:
    values: dict[str, Any] = {
        "step": number, "epoch": 0, "time": 100.0 + 2 * number, "num_samples": 8, "loss": 5.0 - number, "metrics": {},
        "samples_per_s": 4.0, "seconds": SECONDS, "skipped": False, "num_bytes_sent": 10, "workers": (0, 1),
    }  # fmt: skip
    return Step(**{**values, **fields})


def started(worker: int = 0, *, resumed_from_step: int = 0, startup_s: float = 1.5) -> Record:
    event = WorkerStarted(
        rank=worker, workers=2, host="a", pid=1, device="cpu", startup_s=startup_s, plan="replicas=2",
        resumed_from_step=resumed_from_step,
    )  # fmt: skip
    return said(event, when=100.0)


def said(event: Event, *, when: float = 200.0) -> Record:
    return Record(when, 0, event)


# -------------------------------------------------------------------------------------------------------------- metrics


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_have_one_line_a_step_readable_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = MetricsFile(path, attempt=1)
    sink.accept(started())
    sink.accept(step(1, metrics={"lr": 0.5}))
    (line,) = read(path)
    assert line == {
        "step": 1, "attempt": 1, "epoch": 0, "time": 102.0, "num_samples": 8, "loss": 4.0, "samples_per_s": 4.0,
        "skipped": False, "seconds": SECONDS, "lr": 0.5,
    }  # fmt: skip
    sink.accept(step(2, loss=float("nan"), metrics={"lr": float("inf")}))
    sink.close()
    assert (read(path)[1]["loss"], read(path)[1]["lr"]) == (None, None)


@pytest.mark.parametrize(("resumed_from_step", "kept"), [(0, []), (2, [1, 2]), (5, [1, 2, 3])])
def test_a_continued_attempt_drops_the_lines_of_later_steps_first(
    tmp_path: Path, resumed_from_step: int, kept: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number}) + "\n" for number in (1, 2, 3)) + '{"step": 4, "lo')
    sink = MetricsFile(path, attempt=1)
    sink.accept(started(resumed_from_step=resumed_from_step))
    assert [line["step"] for line in read(path)] == kept
    sink.accept(step(resumed_from_step + 1))
    sink.accept(started(worker=1, resumed_from_step=resumed_from_step))
    sink.close()
    assert [line["step"] for line in read(path)] == [*kept, resumed_from_step + 1]
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]


def told(directory: Path, attempt: int, worker: int, steps: range, loss: float) -> None:
    """What a worker of an attempt said of its steps; its last line was cut off by a kill."""
    place = directory / f"attempt_{attempt}" / f"worker_{worker}"
    place.mkdir(parents=True)
    log = EventLog(place / "events.jsonl", worker=worker)
    for number in steps:
        done = StepDone(step=number, epoch=0, num_samples=8, loss=loss, metrics={"lr": worker}, seconds=SECONDS)
        log.emit(done)
    log.close()
    with open(place / "events.jsonl", "a") as file:
        file.write('{"event": "StepDone", "ti')


def test_rows_that_a_killed_supervisor_did_not_write_come_from_the_newest_attempts_events(
    tmp_path: Path,
) -> None:
    for worker in (0, 1):
        told(tmp_path, 1, worker, range(1, 8), loss=1.0)
    told(tmp_path, 2, 0, range(5, 8), loss=2.0)  # went on from step 4, alone
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number, "loss": 0.0}) + "\n" for number in (1, 2)))
    sink = MetricsFile(path, attempt=3)
    sink.accept(started(resumed_from_step=6))
    assert [(line["step"], line["loss"]) for line in read(path)] == [
        (1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)
    ]  # fmt: skip
    assert [line.get("lr") for line in read(path)] == [None, None, 0.5, 0.5, 0.0, 0.0], "means over the workers"
    sink.accept(step(7))
    sink.close()
    assert [line["step"] for line in read(path)] == [1, 2, 3, 4, 5, 6, 7]


def begun(directory: Path, attempt: int, *, from_step: int = 0, of_attempt: int | None = None, **about: Any) -> None:
    """What a worker of an attempt says in its ledger that it went on from; the last word counts."""
    place = directory / f"attempt_{attempt}" / "worker_0"
    place.mkdir(parents=True, exist_ok=True)
    with open(place / "ledger.jsonl", "a") as file:
        file.write(json.dumps({"attempt": attempt, "from_step": from_step, "of_attempt": of_attempt, **about}) + "\n")


def test_an_attempt_that_led_nowhere_is_not_in_the_story(tmp_path: Path) -> None:
    """The second started over, came further than the first, and saved nothing: the third goes on from the first."""
    path = tmp_path / "metrics.jsonl"
    for attempt, loss, last, place in (
        (1, 1.0, 4, {}),
        (2, 2.0, 6, {}),
        (3, 3.0, 4, {"from_step": 3, "of_attempt": 1}),
    ):
        resumed = place.get("from_step", 0)
        told(tmp_path, attempt, 0, range(resumed + 1, last + 1), loss=loss)
        begun(tmp_path, attempt, **place)
        sink = MetricsFile(path, attempt=attempt)
        sink.accept(started(resumed_from_step=resumed))
        for number in range(resumed + 1, last + 1):
            sink.accept(step(number, loss=loss))
        sink.close()
    assert [(line["step"], line["attempt"], line["loss"]) for line in read(path)] == [
        (1, 1, 1.0), (2, 1, 1.0), (3, 1, 1.0), (4, 3, 3.0)
    ]  # fmt: skip


def test_a_script_that_goes_back_to_an_older_checkpoint_takes_the_later_steps_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    begun(tmp_path, 1)
    first = MetricsFile(path, attempt=1)
    first.accept(started())
    for number in range(1, 5):
        first.accept(step(number))
    first.close()
    begun(tmp_path, 2, from_step=4, of_attempt=1)
    second = MetricsFile(path, attempt=2)
    second.accept(started(resumed_from_step=4))
    begun(tmp_path, 2, from_step=2, of_attempt=1)  # worker.restore(), after the worker has started
    second.accept(step(3))
    second.close()
    assert [(line["step"], line["attempt"]) for line in read(path)] == [(1, 1), (2, 1), (3, 2)]


def test_what_came_before_another_runs_checkpoint_is_not_this_runs(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number, "attempt": 1}) + "\n" for number in (1, 2, 3)))
    begun(tmp_path, 1)
    begun(tmp_path, 2, from_step=2, source="another/step_2", starts={})
    sink = MetricsFile(path, attempt=2)
    sink.accept(started(resumed_from_step=2))
    sink.accept(step(3))
    sink.close()
    assert [(line["step"], line["attempt"]) for line in read(path)] == [(3, 2)]


def test_rows_of_replicas_that_take_steps_by_themselves_come_once_though_they_are_in_no_order(tmp_path: Path) -> None:
    told(tmp_path, 1, 0, range(1, 5), loss=1.0)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": number, "loss": 0.0}) + "\n" for number in (1, 3, 5, 2)))
    sink = MetricsFile(path, attempt=2)
    sink.accept(started(resumed_from_step=4))
    sink.close()
    assert [(line["step"], line["loss"]) for line in read(path)] == [(1, 0.0), (3, 0.0), (2, 0.0), (4, 1.0)]


@pytest.mark.parametrize(
    ("samples", "batch", "says"),
    [
        (1234.5, 8, "about 1,200 samples; the batch is 8: larger ones, on more workers, pay up to about that size"),
        (0.2, 64, "about 1 sample; the batch is 64: still larger ones, on more workers, would hardly save steps"),
        (99.6, 64, "about 100 samples; the batch is 64: larger ones, on more workers, pay up to about that size"),
    ],
)
def test_every_sink_tells_the_noise_scale_once_it_is_known(
    tmp_path: Path, samples: float, batch: int, says: str
) -> None:
    path, summary = tmp_path / "metrics.jsonl", Summary(tmp_path, attempt=1, workers=2)
    metrics, tensorboard = MetricsFile(path, attempt=1), TensorBoardFile(tmp_path / "tb")
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=2)
    rows = [step(1, num_samples=batch), step(2, num_samples=batch // 2, noise_scale=samples)]
    try:
        for sink in (metrics, tensorboard, summary, endpoint):
            sink.accept(started())
        for row, known in zip(rows, (False, True), strict=True):
            for sink in (metrics, tensorboard, summary, endpoint):
                sink.accept(row)
            assert scrape(endpoint.url).get("paceline_noise_scale") == (samples if known else None)
    finally:
        endpoint.close()
    tensorboard.close()
    assert [line.get("noise_scale") for line in read(path)] == [None, samples]
    assert scalars(tmp_path / "tb")["noise_scale"] == [(2, pytest.approx(samples))]
    facts = summary.facts("finished", 0)
    assert (facts["noise_scale"], facts["batch_size"]) == (samples, batch)
    assert f"noise scale    {says}" in closing_table(facts)


# ---------------------------------------------------------------------------------------------------------- tensorboard


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    names = accumulator.Tags()["scalars"]
    return {name: [(point.step, point.value) for point in accumulator.Scalars(name)] for name in names}


def test_tensorboard_reads_back_every_scalar(tmp_path: Path) -> None:
    sink = TensorBoardFile(tmp_path / "tb")
    sink.accept(step(1, metrics={"lr": 0.5}))
    sink.poll(10.0)
    assert not (tmp_path / "tb").exists()  # nobody waits for the import of TensorBoard at the first step
    sink.poll(10.0 + EVERY_S)
    assert scalars(tmp_path / "tb")["loss"] == [(1, 4.0)]
    sink.accept(step(2, loss=float("nan")))
    sink.accept(said(Evaluated(step=2, num_samples=3, metrics={"accuracy": 0.75}, duration_s=1.0)))
    sink.close()
    found = scalars(tmp_path / "tb")
    assert found["lr"] == [(1, 0.5)] and found["eval/accuracy"] == [(2, 0.75)]
    assert found["samples_per_second"] == [(1, 4.0), (2, 4.0)] and found["progress/epoch"] == [(1, 0.0), (2, 0.0)]
    parts = {name.removeprefix("seconds/"): points[0][1] for name, points in found.items() if "seconds/" in name}
    assert parts == pytest.approx({**SECONDS, "other": 0.1})
    assert [number for number, _ in found["loss"]] == [1, 2]
    assert found["progress/workers"] == [(1, 2.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("count", "names"), [(1, set()), (3, {"worker_0", "worker_1", "worker_2"}), (40, {"least", "most"})]
)
def test_tensorboard_has_the_idle_share_of_each_worker_or_of_many_the_extremes(
    tmp_path: Path, count: int, names: set[str]
) -> None:
    sink = TensorBoardFile(tmp_path)
    sink.accept(
        step(1, waited_s={worker: worker / 100 for worker in range(count)}, took_s=dict.fromkeys(range(count), 1))
    )
    sink.close()
    idle = {name.removeprefix("idle/"): points[0][1] for name, points in scalars(tmp_path).items() if "idle/" in name}
    assert idle.keys() == names
    assert not idle or max(idle.values()) == pytest.approx((count - 1) / 100)


def test_a_continued_run_replaces_its_later_points_in_tensorboard(tmp_path: Path) -> None:
    for resumed_from_step, steps, loss in ((0, (1, 2, 3, 4), 1.0), (2, (3,), 7.0)):
        sink = TensorBoardFile(tmp_path)
        sink.accept(started(resumed_from_step=resumed_from_step))
        for number in steps:
            sink.accept(step(number, loss=loss))
        sink.close()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 7.0)]


@pytest.mark.thorough
def test_writing_tensorboard_files_starts_no_thread_and_imports_neither_torch_nor_tensorflow(tmp_path: Path) -> None:
    script = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from paceline.events import Evaluated, Record\n"
        "from paceline.monitor.export.tensorboard import TensorBoardFile\n"
        "assert 'tensorboard' not in sys.modules\n"
        "sink = TensorBoardFile(Path('tb'))\n"
        "sink.accept(Record(1.0, 0, Evaluated(step=1, num_samples=1, metrics={'a': 1.0}, duration_s=1.0)))\n"
        "sink.close()\n"
        "assert threading.active_count() == 1\n"
        "assert not {'torch', 'tensorflow'} & set(sys.modules)\n"
        "assert list(Path('tb').iterdir())\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, cwd=tmp_path)


# ----------------------------------------------------------------------------------------------------------- prometheus


def scrape(url: str) -> dict[str, float]:
    assert url.startswith("http://127.0.0.1:") and url.endswith("/metrics")
    text = urllib.request.urlopen(url, timeout=10).read().decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines if "_created" not in name}


def test_prometheus_serves_counters_gauges_and_seconds_without_a_step_label() -> None:
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=2)
    try:
        assert scrape(endpoint.url)["paceline_workers"] == 2
        endpoint.accept(started(startup_s=1.5))
        endpoint.accept(started(worker=1, startup_s=1.0))
        endpoint.accept(step(41, metrics={"lr": 0.5}))
        endpoint.accept(step(42, skipped=True))
        endpoint.accept(said(Evaluated(step=42, num_samples=3, metrics={"accuracy": 0.75}, duration_s=1.0)))
        endpoint.accept(said(CheckpointSaved(step=42, path="c", num_bytes=7, stall_s=0.25, write_s=2.0)))
        endpoint.accept(said(CheckpointFailed(step=42, path="c", reason="full")))
        values = scrape(endpoint.url)
        assert values["paceline_steps_total"] == 2
        assert values["paceline_skipped_steps_total"] == 1
        assert values["paceline_samples_total"] == 16
        assert values["paceline_sent_bytes_total"] == 20
        assert values["paceline_loss"] == -37
        assert values['paceline_step_seconds_sum{phase="communication"}'] == pytest.approx(0.8)
        of_steps = {name: value for name, value in values.items() if "paceline_step_seconds_sum" in name}
        assert of_steps['paceline_step_seconds_sum{phase="other"}'] == pytest.approx(0.2)
        assert sum(of_steps.values()) == pytest.approx(4.0)  # the phases are the whole: nothing is counted twice
        assert (values["paceline_last_step"], values["paceline_epoch"]) == (42, 0)
        assert values['paceline_checkpoint_seconds_sum{part="stall"}'] == 0.25
        assert values["paceline_checkpoint_failures_total"] == 1
        assert values['paceline_evaluation{name="accuracy"}'] == 0.75
        assert values['paceline_metric{name="lr"}'] == 0.5
        assert values["paceline_startup_seconds"] == 1.5
        labels = {label for name in values for label in re.findall(r'(\w+)="', name)}
        assert labels == {"phase", "part", "name", "worker"}
    finally:
        endpoint.close()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(endpoint.url, timeout=10)


def test_prometheus_says_of_each_metric_what_it_is() -> None:
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=1)
    try:
        endpoint.accept(started())
        endpoint.accept(step(1, metrics={"lr": 0.5}, waited_s={0: 0.4}, took_s={0: 2.0}))
        lines = urllib.request.urlopen(endpoint.url, timeout=10).read().decode().splitlines()
    finally:
        endpoint.close()
    about = {
        name: text for _, kind, name, text in (line.split(" ", 3) for line in lines if line[0] == "#") if kind == "HELP"
    }
    kinds = {
        name: text for _, kind, name, text in (line.split(" ", 3) for line in lines if line[0] == "#") if kind == "TYPE"
    }
    samples = {re.split(r"[ {]", line)[0] for line in lines if line[0] != "#"}
    families = {re.sub(r"_(sum|count)$", "", name) for name in samples}
    assert families <= about.keys() == kinds.keys()
    assert all(re.fullmatch(r"[A-Z].{15,}\.", text) for text in about.values()), about
    counters = {name for name, kind in kinds.items() if kind == "counter"}
    assert counters == {name for name in families if name.endswith("_total")}


def of_workers(values: dict[str, float], name: str) -> dict[int, float]:
    found = {re.fullmatch(rf'{name}{{worker="(\d+)"}}', key): value for key, value in values.items()}
    return {int(match[1]): value for match, value in found.items() if match}


def test_prometheus_tells_of_the_workers_that_take_part_and_of_no_others() -> None:
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=2)
    times: dict[str, Any] = {"waited_s": {0: 0.5, 1: 0.1}, "took_s": {0: 2.0, 1: 2.0}}
    try:
        for worker in (0, 1):
            endpoint.accept(started(worker, startup_s=1.0 + worker))
        for number in (1, 2):
            endpoint.accept(step(number, **times))
        values = scrape(endpoint.url)
        assert values["paceline_workers"] == 2
        assert of_workers(values, "paceline_worker_waiting_seconds_total") == {0: 1.0, 1: pytest.approx(0.2)}
        assert of_workers(values, "paceline_worker_step_seconds_total") == {0: 4.0, 1: 4.0}
        assert of_workers(values, "paceline_worker_idle_ratio") == {0: 0.25, 1: pytest.approx(0.05)}
        assert of_workers(values, "paceline_worker_startup_seconds") == {0: 1.0, 1: 2.0}
        endpoint.follow({0})
        endpoint.accept(step(3, **times))  # the lost one's last word
        endpoint.accept(started(1, startup_s=9.0))  # its successor, not at work yet
        values = scrape(endpoint.url)
        assert values["paceline_workers"] == 1
        for name in ("waiting_seconds_total", "step_seconds_total", "idle_ratio", "startup_seconds"):
            assert of_workers(values, f"paceline_worker_{name}").keys() == {0}, name
        endpoint.follow({0, 1, 2})
        endpoint.accept(started(2, startup_s=8.0))
        endpoint.accept(step(4, waited_s={2: 1.0}, took_s={2: 2.0}))
        values = scrape(endpoint.url)
        assert values["paceline_workers"] == 3
        assert of_workers(values, "paceline_worker_startup_seconds") == {0: 1.0, 1: 9.0, 2: 8.0}
        assert of_workers(values, "paceline_worker_idle_ratio")[2] == 0.5
        assert values["paceline_startup_seconds"] == 8.0, "not of successors"
    finally:
        endpoint.close()


def test_a_port_in_use_is_an_error_that_says_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            LaunchError, match=rf"cannot listen on 127.0.0.1:{port}: Address already in use.*metrics_port"
        ):
            PrometheusEndpoint("127.0.0.1", port, workers=1)


def test_a_host_that_is_not_ours_is_an_error_too() -> None:
    with pytest.raises(LaunchError, match=r"cannot listen on 192\.0\.2\.1:0"):
        PrometheusEndpoint("192.0.2.1", 0, workers=1)


def test_the_endpoint_listens_on_loopback_only() -> None:
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=1)
    port = int(endpoint.url.split(":")[2].split("/")[0])
    try:
        with (
            pytest.raises(OSError, match=r"refused|unreachable"),
            socket.create_connection(("127.0.0.2", port), timeout=5),
        ):
            pass
    finally:
        endpoint.close()


def test_silent_and_slow_strangers_take_no_threads_and_stop_no_scrapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "MOST_OPEN", 8)
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=1)
    port, threads = int(endpoint.url.split(":")[2].split("/")[0]), threading.active_count()
    with contextlib.ExitStack() as strangers:
        strangers.callback(endpoint.close)
        for number in range(40):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            stranger.sendall(b"GET /metrics HTTP/1.0\r\n"[: number % 5])
        endpoint.accept(step(1))
        assert scrape(endpoint.url)["paceline_steps_total"] == 1
        assert threading.active_count() == threads
        for hostile in (
            b"\r\n\r\n",
            b"\xff\x00 / HTTP/9\r\n\r\n",
            b"GET " + b"/" * 20_000,
            b"GET / HTTP/1.0\r\nA\r\n\r\n",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
                stranger.sendall(hostile)
                with contextlib.suppress(ConnectionError):
                    while stranger.recv(4096):
                        pass
        assert scrape(endpoint.url)["paceline_steps_total"] == 1


def test_a_slow_stranger_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape_server, "SCRAPE_TIMEOUT_S", 0.2)
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=1)
    port = int(endpoint.url.split(":")[2].split("/")[0])
    with contextlib.closing(endpoint), socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
        stranger.sendall(b"GET /")
        assert stranger.recv(1) == b""


def test_two_endpoints_of_one_process_do_not_share_their_numbers() -> None:
    one, other = (PrometheusEndpoint("127.0.0.1", 0, workers=1) for _ in range(2))
    try:
        one.accept(step(1))
        assert scrape(one.url)["paceline_steps_total"] == 1
        assert scrape(other.url)["paceline_steps_total"] == 0
    finally:
        one.close()
        other.close()


# -------------------------------------------------------------------------------------------------------------- summary


def test_the_summary_adds_up(tmp_path: Path) -> None:
    summary = Summary(tmp_path, attempt=2, workers=2)
    items: list[Record | Step] = [
        started(startup_s=1.5, resumed_from_step=10),
        started(worker=1, startup_s=2.5, resumed_from_step=10),
        step(11, samples_per_s=8.0),
        step(12, samples_per_s=2.0, skipped=True, loss=float("nan")),
        step(13, epoch=1, time=142.0, samples_per_s=4.0, metrics={"lr": 0.5}, loss=3.0),
        said(Evaluated(step=13, num_samples=3, metrics={"accuracy": 0.75}, duration_s=1.0)),
        said(CheckpointSaved(step=13, path="RUN/checkpoints/step_13", num_bytes=7, stall_s=0.25, write_s=2.0)),
        said(CheckpointFailed(step=13, path="c", reason="full")),
        said(WorkerFinished(rank=0, step=13, peak_memory_bytes=50)),
    ]
    for item in items:
        summary.accept(item)
    summary.peak_memory(1, 70)
    facts = summary.facts("finished", 0)
    summary.write(facts)
    assert json.loads((tmp_path / "summary.json").read_text()) == facts
    expected = {
        "state": "finished", "exit_code": 0, "attempt": 2, "workers": 2, "plan": "replicas=2", "resumed_from_step": 10,
        "step": 13, "steps": 3, "skipped_steps": 1, "samples": 24, "epochs": 2, "first_loss": -6.0, "last_loss": 3.0,
        "evaluation": {"accuracy": 0.75}, "evaluation_step": 13, "samples_per_s": 0.8, "samples_per_s_median": 4.0,
        "share_communication": 0.2, "startup_s": 2.5, "started": 97.5, "first_step_began_s": 22.5,
        "first_commit_s": 24.5, "peak_memory_bytes": 70, "checkpoints_saved": 1,
        "checkpoint": "RUN/checkpoints/step_13",
        "checkpoints_failed": 1, "log_dir": str(tmp_path / "attempt_2"), "num_bytes_sent": 30, "metrics": {"lr": 0.5},
    }  # fmt: skip
    assert {name: facts[name] for name in expected} == expected


def test_a_run_of_one_step_or_none_has_a_summary(tmp_path: Path) -> None:
    summary = Summary(tmp_path, attempt=1, workers=1)
    facts = summary.facts("failed", 1)
    assert (facts["steps"], facts["samples_per_s"], facts["share_communication"]) == (0, None, None)
    summary.accept(step(1))
    assert summary.facts("finished", 0)["samples_per_s"] == 4.0


def test_every_sink_tells_learning_rates_and_the_norm_and_a_reported_one_counts(tmp_path: Path) -> None:
    path, summary = tmp_path / "metrics.jsonl", Summary(tmp_path, attempt=1, workers=2)
    metrics, tensorboard = MetricsFile(path, attempt=1), TensorBoardFile(tmp_path / "tb")
    endpoint = PrometheusEndpoint("127.0.0.1", 0, workers=2)
    rows = [
        step(1, optimizer={"lr": 0.5, "grad_norm": 2.0}),
        step(2, optimizer={"lr": 0.25, "lr/1": 0.125, "grad_norm": 3.0}, metrics={"grad_norm": 7.0}),
    ]
    try:
        for item in (started(), *rows):
            for sink in (metrics, tensorboard, summary, endpoint):
                sink.accept(item)
        scraped = scrape(endpoint.url)
    finally:
        endpoint.close()
    tensorboard.close()
    names = ("lr", "lr/1", "grad_norm")
    assert [[line.get(name) for name in names] for line in read(path)] == [[0.5, None, 2.0], [0.25, 0.125, 7.0]]
    drawn = scalars(tmp_path / "tb")
    assert [drawn[name] for name in names] == [[(1, 0.5), (2, 0.25)], [(2, 0.125)], [(1, 2.0), (2, 7.0)]]
    assert summary.facts("finished", 0)["metrics"] == {"lr": 0.25, "lr/1": 0.125, "grad_norm": 7.0}
    assert [scraped[f'paceline_metric{{name="{name}"}}'] for name in names] == [0.25, 0.125, 7.0]
