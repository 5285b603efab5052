"""A pool on this machine, as its users start it: runs share its devices, nothing is lost when it or they are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.monitor.records.run_record import RunRecord
from pool_folders import PACELINE, PoolFolder, is_over


@pytest.fixture
def pool(tmp_path: Path) -> PoolFolder:
    return PoolFolder(tmp_path)


@pytest.mark.timeout(180)
def test_a_second_run_gets_a_device_of_the_first_and_gives_it_back(pool: PoolFolder) -> None:
    with pool.served():
        pool.queue("long", "--steps", "300")
        pool.until(lambda: pool.entry("long")["replicas"] == 2, what="all devices for the only run")
        pool.until(lambda: pool.entry("long")["step"] > 5, what="under way")
        pool.queue("short", "--steps", "20", options=("--deadline-s", "120", "--priority", "2"))
        pool.until(lambda: pool.entry("short")["step"] > 0, what="the second under way")
        pool.until(lambda: is_over(pool, "short"), what="the second done")
        pool.until(lambda: is_over(pool, "long"), what="both done", limit_s=120)
    assert {name: pool.entry(name)["phase"] for name in ("long", "short")} == {"long": "finished", "short": "finished"}
    assert len(pool.losses("long")) == 300, "no step twice, none left out"
    sizes = [
        row["after"]
        for row in map(json.loads, (pool.folder / "pool" / "decisions.jsonl").open())
        if row["run"] == "long"
    ]
    assert sizes.index(2) < sizes.index(1, 1), f"it has given one replica up: {sizes}"
    assert all(row["why"] for row in map(json.loads, (pool.folder / "pool" / "decisions.jsonl").open()))


@pytest.mark.timeout(180)
def test_after_kill_9_of_the_pool_runs_go_on_and_the_next_one_finds_them(pool: PoolFolder) -> None:
    with pool.served() as serving:
        pool.queue("first", "--steps", "100")
        pool.queue("second", "--steps", "100")
        pool.queue("third", "--steps", "10")
        pool.until(lambda: pool.entry("first")["step"] > 3, what="under way")
        serving.kill()
        serving.wait()
        before = RunRecord.load(pool.folder / "runs" / "first").pid
        time.sleep(1.0)
        assert RunRecord.load(pool.folder / "runs" / "first").is_alive(), "a run is no part of its pool's process"
    with pool.served():
        pool.until(lambda: is_over(pool, "first", "second", "third"), what="all done", limit_s=90)
    for name, steps in (("first", 100), ("second", 100), ("third", 10)):
        assert pool.entry(name)["phase"] == "finished"
        assert len(pool.losses(name)) == steps
    record = RunRecord.load(pool.folder / "runs" / "first")
    assert (record.pid, record.attempt) == (before, 1), "it was not started a second time"


@pytest.mark.further
@pytest.mark.timeout(180)
def test_a_run_that_was_taken_out_while_no_pool_was_there_ends_and_the_next_one_gets_its_devices(
    pool: PoolFolder,
) -> None:
    file = pool.folder / "pool" / "queue" / "run.json"
    with pool.served() as serving:
        pool.queue("run", "--steps", "2000")
        pool.until(lambda: pool.entry("run")["replicas"] == 2 and pool.entry("run")["step"] > 3, what="under way")
        serving.kill()
        serving.wait()
    file.unlink()  # and its process is not asked to end, as if that were on another host
    with pool.served() as serving:
        pool.until(lambda: "run" in pool.facts().get("taken_out", {}), what="noticed")
        serving.kill()
        serving.wait()
    with pool.served():
        pool.queue("next", "--steps", "20", replicas="2")
        pool.until(lambda: is_over(pool, "next"), what="the next one done", limit_s=90)
    record = RunRecord.load(pool.folder / "runs" / "run")
    assert (record.attempt, record.state, record.exit_code) == (1, "stopped", 75), "it has saved"
    assert (pool.entry("next")["phase"], pool.facts()["taken_out"]) == ("finished", {})


@pytest.mark.further
@pytest.mark.timeout(180)
def test_a_pool_that_is_stopped_has_its_runs_save_and_goes_on_with_them_later(pool: PoolFolder) -> None:
    with pool.served() as serving:
        pool.queue("run", "--steps", "240")
        pool.until(lambda: pool.entry("run")["step"] > 5, what="under way")
        serving.send_signal(signal.SIGINT)
        assert serving.wait(60) == 0
        assert "the pool ends: run save and end" in pool.said
    assert pool.entry("run")["phase"] == "waiting"
    record = RunRecord.load(pool.folder / "runs" / "run")
    assert (record.state, record.is_alive()) == ("stopped", False)
    with pool.served():
        pool.until(lambda: is_over(pool, "run"), what="done")
    assert len(pool.losses("run")) == 240
    assert RunRecord.load(pool.folder / "runs" / "run").attempt == 2


@pytest.mark.further
@pytest.mark.timeout(180)
def test_a_lost_run_is_started_again_and_a_failed_one_is_not(pool: PoolFolder) -> None:
    with pool.served():
        pool.queue("lost", "--steps", "300", options=("--save-every", "5"))
        pool.queue("broken", "--steps", "60", "--fails-at", "3")
        pool.until(lambda: pool.entry("lost")["step"] > 12, what="under way")
        os.kill(RunRecord.load(pool.folder / "runs" / "lost").pid, signal.SIGKILL)
        pool.until(lambda: is_over(pool, "lost", "broken"), what="both over")
    assert pool.entry("lost")["phase"] == "finished"
    assert len(pool.losses("lost")) == 300
    assert (pool.entry("broken")["phase"], pool.entry("broken")["exit_code"]) == ("failed", 1)
    assert "its data is broken" in (pool.folder / "pool" / "consoles" / "broken.log").read_text()
    assert "lost was lost at step" in pool.said


@pytest.mark.further
@pytest.mark.timeout(240)
def test_on_gpus_runs_see_their_own_and_change_their_number_by_saving_and_going_on(pool: PoolFolder) -> None:
    """The pool is told that there are GPUs; its runs find none and compute on the CPU."""
    pretended = "import sys, torch; torch.cuda.is_available = lambda: True; torch.cuda.device_count = lambda: 2; "
    pretended += "from paceline.cli.main import main; sys.exit(main())"
    with pool.served(command=[sys.executable, "-c", pretended]):
        pool.queue("elastic", "--steps", "300")
        pool.until(lambda: pool.entry("elastic")["step"] > 5, what="under way")
        assert pool.entry("elastic")["parts"][os.uname().nodename]["gpus"] == ["0", "1"]
        pool.queue("small", "--steps", "40", replicas="1")
        pool.until(lambda: pool.entry("small")["step"] > 0, what="the small run at work", limit_s=90)
        pool.until(lambda: is_over(pool, "elastic", "small"), what="both done", limit_s=120)
    assert [pool.entry(name)["phase"] for name in ("elastic", "small")] == ["finished", "finished"]
    assert (len(pool.losses("elastic")), len(pool.losses("small"))) == (300, 40)
    (one,) = seen_gpus(pool, "small")
    both, *others = seen_gpus(pool, "elastic")
    assert both == "0,1" and one in ("0", "1")
    assert ({"0", "1"} - {one}) & set(others), "beside the small run it has the other one"
    assert RunRecord.load(pool.folder / "runs" / "elastic").attempt == 1 + len(others)


def seen_gpus(pool: PoolFolder, run: str) -> list[str]:
    """What the first worker of each start of a run sees."""
    console = (pool.folder / "pool" / "consoles" / f"{run}.log").read_text()
    return [line.partition("sees GPUs ")[2] for line in console.splitlines() if "sees GPUs" in line]


@pytest.mark.further
@pytest.mark.timeout(240)
def test_a_batch_grows_with_the_replicas_where_noise_says_so_and_shrinks_with_them(pool: PoolFolder) -> None:
    def samples() -> list[int]:
        rows = map(json.loads, (pool.folder / "runs" / "grows" / "metrics.jsonl").open())
        return [row["num_samples"] for row in rows]

    plan = ("--plan", "replicas=1-2+batch(size=16)", "--batch-grows", "32")
    with pool.served():
        # Labels are noise, and a step takes as long on any number of replicas: so a larger batch pays.
        pool.queue("grows", "--steps", "1500", "--step-s", "0.06", options=plan)
        pool.until(lambda: pool.entry("grows")["batch"] == 32, what="grown", limit_s=90)
        pool.until(lambda: samples()[-1] == 32, what="steps of 32 samples")
        assert pool.entry("grows")["replicas"] == 2
        # A fixed run of one device takes one from it: then its batch may not stay.
        pool.queue("other", "--steps", "5000", options=("--plan", "replicas=1+batch(size=16)", "--priority", "100"))
        pool.until(lambda: pool.entry("grows")["batch"] == 16, what="smaller again", limit_s=90)
        pool.until(lambda: samples()[-1] == 16, what="steps of 16 samples")
        assert pool.entry("grows")["replicas"] == 1
        subprocess.run([*PACELINE, "pool", "pool", "--cancel", "other"], cwd=pool.folder, timeout=60, check=True)
        pool.until(lambda: is_over(pool, "grows"), what="done", limit_s=150)
    assert pool.entry("grows")["phase"] == "finished"
    assert sum(samples()) == 16 * 1500, "each sample once, whatever the batch"
    assert "grows goes from batches of 16 samples to 32 on 2 replicas" in pool.said
    audit = subprocess.run([*PACELINE, "audit", "runs/grows"], cwd=pool.folder, capture_output=True, text=True)
    assert audit.returncode == 0, audit.stdout


@pytest.mark.further
@pytest.mark.timeout(120)
def test_following_a_run_shows_what_it_prints_and_gives_its_exit_status(pool: PoolFolder) -> None:
    with pool.served():
        command = [*PACELINE, "run", "--pool", "pool", "--run-dir", "runs/followed", "train.py", "--steps", "10"]
        done = subprocess.run(command, cwd=pool.folder, capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stdout + done.stderr + pool.said
        assert "finished at step 10" in done.stdout
        pool.queue("kept", "--steps", "1000")
        pool.queue("large", "--steps", "10", options=("--plan", "replicas=3+batch(size=16)"))
        pool.until(lambda: pool.entry("kept")["step"] > 0, what="under way")
        shown = subprocess.run([*PACELINE, "pool", "pool", "--show"], cwd=pool.folder, capture_output=True, text=True)
        assert "2 of 2 devices in use" in shown.stdout
        row = next(line for line in shown.stdout.splitlines() if line.startswith("large"))
        assert "waiting" in row and "3" in row, "why it waits"
        cancelled = [*PACELINE, "pool", "pool", "--cancel", "kept"]
        assert subprocess.run(cancelled, cwd=pool.folder, timeout=60).returncode == 0
        record = pool.folder / "runs" / "kept"
        pool.until(lambda: RunRecord.load(record).state == "stopped", what="stopped")
        assert "kept" not in pool.facts()["runs"]
