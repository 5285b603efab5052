"""`paceline drill` and the kit behind it: every kind of fault comes, is survived, and what is not kept is reported."""

from __future__ import annotations

import functools
import json
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import lasting
import paceline
import quick
import warm
from paceline.cli.drill.request import DrillRequest
from paceline.cli.drill.run import main_drill
from paceline.errors import LaunchError, PlanError, WorkerError
from paceline.testing import KINDS, Report, assert_unharmed, network_namespaces, run_with, runs
from paceline.testing import disk as disks
from paceline.testing.report import CURVE_TOLERANCE
from programs import PACELINE, command, run, write_program
from supervised_launch import Announcements

pytestmark = pytest.mark.timeout(420)

SCRIPT = """\
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
import paceline


def train(worker):
    torch.manual_seed(1)
    x = torch.randn(90, 8)
    data = TensorDataset(x, x.argmax(dim=1))
    layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8)]
    model = worker.prepare(torch.nn.Sequential(*layers))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data, epochs=1000):
        step(batch)


if __name__ == "__main__":
    paceline.run(train, workers=3, threads=1, plan="batch(size=20,micro=2)")
"""
STEPS = 32
OPTIONS: dict[str, Any] = {"max_steps": STEPS, "save_every": 4, "silence_s": 20.0, "tensorboard": False}
ELASTIC = ["plan.layout.replicas=1-3"]


@pytest.fixture(autouse=True)
def _runs_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "subprocess", warm.Subprocess)


@functools.cache
def script() -> Path:
    path = lasting.folder("drill") / "train.py"
    path.write_text(SCRIPT)
    return path


@functools.cache
def undisturbed() -> Report:
    report = run_with("", script(), folder=lasting.folder("undisturbed"), **OPTIONS)
    assert report.exit_code == 0, report.output
    assert list(report.losses) == list(range(1, STEPS + 1))
    return report


def drilled(folder: Path, faults: str, **options: Any) -> Report:
    return run_with(faults, script(), folder=folder, limit_s=150, **{"overrides": ELASTIC, **OPTIONS, **options})


def test_a_killed_server_that_has_a_mirror_costs_no_step(tmp_path: Path) -> None:
    sync = "plan.sync=parameterserver(servers=2,mirrored=true)"
    report = drilled(tmp_path, "kill_server:worker=1,step=10", overrides=[*ELASTIC, sync])
    assert report.broken(undisturbed()) == [], report.output
    assert report.restarted == (None,) and "took its place" in report.output


def test_a_poisoned_step_is_left_out_on_servers_too(tmp_path: Path) -> None:
    sync = ["plan.sync=parameterserver(servers=2,mirrored=true)", "plan.guard=guard(on_spike=skip,factor=100,window=8)"]
    report = drilled(tmp_path, "nan:worker=1,step=12", overrides=[*ELASTIC, *sync])
    assert report.broken(undisturbed()) == [], report.output


def test_a_replica_that_had_still_to_send_is_lost_and_nothing_else(tmp_path: Path) -> None:
    words = {**OPTIONS, "max_steps": 12, "overrides": [*ELASTIC, "plan.wire=onebit"]}
    like = run_with("", script(), folder=tmp_path / "like", **words)
    report = run_with("kill:worker=1,step=6,where=sum", script(), folder=tmp_path / "kill", limit_s=150, **words)
    assert_unharmed(report, like)
    assert report.loss_difference(like) > 1e-5, "the wire has rounded nothing, or what it keeps was not lost"


def test_a_killed_server_without_a_mirror_has_all_begin_again_from_disk(tmp_path: Path) -> None:
    waiting = tmp_path / "train.py"  # step 10 begins when each worker has seen the checkpoint of step 8 complete
    wait = "        if worker.step == 9:\n            worker._parts.saver.wait()\n"
    waiting.write_text(SCRIPT.replace("        step(batch)\n", f"        step(batch)\n{wait}"))
    words = {**OPTIONS, "overrides": [*ELASTIC, "plan.sync=parameterserver(servers=2)"]}
    report = run_with("kill_server:worker=1,step=11", waiting, folder=tmp_path / "run", limit_s=150, **words)
    assert_unharmed(report, undisturbed())
    assert len(report.starts) == 1 and report.resumed_from == (0, 8), "by itself, from the newest checkpoint"


@pytest.mark.parametrize(
    ("sync", "faults", "other_from"),
    [
        ("localsgd(every=4)", "kill:worker=1,step=7; nan:worker=2,step=12", 5),
        ("gossip(average_every=4)", "kill:worker=1,step=7", 7),
        ("localsgd(every=4,fragments=2,overlap=1)", "kill:worker=1,step=7", 5),
    ],
    ids=["local", "gossip", "streaming"],
)
def test_where_replicas_take_steps_by_themselves_a_killed_one_leaves_another_curve_and_all_samples(
    tmp_path: Path, sync: str, faults: str, other_from: int
) -> None:
    streams = "fragments" in sync  # between replicas that stay
    plan = f"{'replicas=3' if streams else 'replicas=1-3'}+{sync}+batch(size=20,micro=2)+guard(on_spike=skip)"
    words = {**OPTIONS, "plan": plan, "max_steps": 16}
    like = run_with("", script(), folder=tmp_path / "like", **words)
    report = run_with(faults, script(), folder=tmp_path / "faults", limit_s=150, **words)
    assert_unharmed(report, like)
    assert report.is_other_from == other_from and report.samples_repeated == 0
    assert 1e-5 < report.loss_difference(like) < CURVE_TOLERANCE
    assert [start.exit_code for start in report.starts] == ([76, 0] if streams else [0])


@pytest.mark.parametrize("staleness", [quick.further("none"), "3"])
def test_where_replicas_do_not_wait_a_killed_one_costs_nothing(tmp_path: Path, staleness: str) -> None:
    sync = f"plan.sync=parameterserver(staleness={staleness})"
    report = drilled(tmp_path, "kill:worker=1,step=10", overrides=[*ELASTIC, sync])
    assert_unharmed(report, undisturbed())
    assert [start.exit_code for start in report.starts] == [0] and report.samples_repeated == 0


def test_where_replicas_cannot_come_and_go_their_number_stays_and_the_drill_says_so() -> None:
    words = ["--set", "plan.sync=parameterserver(drop=1)", "--steps", "16", "--faults", "kill:worker=1,step=7"]
    code, output = run(*PACELINE, "drill", script(), *words, "--json", stderr=subprocess.DEVNULL, limit_s=200)
    assert code == 0, output
    told = json.loads(output)
    (row,) = told["runs"]
    assert row["exit_codes"] == [76, 0] and row["samples_repeated"] == 0
    kept, left_out = told["said"]
    assert "counted from the replicas that began" in kept and left_out.startswith("flip does not apply")


def test_one_fault_of_each_kind_keeps_all_promises(tmp_path: Path) -> None:
    words = ["--steps", str(STEPS), "--silence-s", "2", "--seed", "1", "--json", "--keep", tmp_path / "kept"]
    code, output = run(*PACELINE, "drill", script(), *words, stderr=subprocess.DEVNULL, limit_s=400)
    assert code == 0, output
    told = json.loads(output)
    assert told["holds"] and told["steps"] == STEPS
    faults = {fault["fault"].partition(":")[0]: (row, fault) for row in told["runs"] for fault in row["faults"]}
    assert list(faults) == list(KINDS)
    for kind, (row, fault) in faults.items():
        assert row["holds"] and row["samples_repeated"] == 0 and row["loss_difference"] < 1e-5, kind
        assert row["plan"].startswith("replicas=1-3"), "the script's own plan is not elastic"
        assert fault["came"]["step"] >= 8, kind
    stopped, torn = faults["stop"], faults["torn_checkpoint"]
    assert 1.0 < stopped[1]["recovery_s"] < 10.0, (
        "it is given up after 2 s, not after the 10 of a run that does not say"
    )
    assert torn[0]["exit_codes"] == [-9, 0] and torn[0]["steps_lost"] > 0
    assert all(row["exit_codes"] == [0] and row["steps_lost"] == 0 for row, _ in faults.values() if row is not torn[0])
    assert (tmp_path / "kept" / "run_1" / "run" / "run.json").exists()


def test_two_at_once_one_of_them_during_the_recovery_from_the_other(tmp_path: Path) -> None:
    report = drilled(tmp_path, "kill:worker=1,step=9,where=forward; kill:worker=2,step=9,where=regroup")
    assert_unharmed(report, undisturbed())
    assert [came and came.place for came in report.came] == ["forward", "regroup"]


def test_without_root_connections_are_shut_down_and_writes_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(disks.subprocess, "run", _refused)
    report = drilled(tmp_path, "full_disk:step=5; cut:worker=2,step=12,where=forward", silence_s=3.0)
    assert_unharmed(report, undisturbed())
    assert report.failed_saves == (8,)
    assert "cut: the worker's connections are shut down (only root makes network namespaces)" in report.notes
    assert "full_disk: the write is refused (mount needs root)" in report.notes
    assert 2 not in report.regrouped[0].members


class _refused:
    """What `mount` says to who is not root."""

    returncode = 32

    def __init__(self, *_: object, **__: object) -> None: ...


def test_a_plan_of_a_fixed_number_is_started_again(tmp_path: Path) -> None:
    report = drilled(tmp_path, "term:worker=1,step=9,where=sum; kill:worker=2,step=22,where=sum", overrides=())
    assert_unharmed(report, undisturbed())
    assert [start.exit_code for start in report.starts] == [75, 76, 0]
    assert report.resumed_from[2] == 20
    assert report.steps_lost == report.committed[1] - 20


@pytest.mark.further
def test_the_only_replica_begins_again_from_memory_where_it_is_several_workers(tmp_path: Path) -> None:
    plan = "shard=2+batch(size=20,micro=2)"
    words = ["--workers", "2", "--plan", plan, "--steps", "16", "--faults", "kill:worker=1,step=9"]
    code, output = run(*PACELINE, "drill", script(), *words, environment={"TMPDIR": str(tmp_path)}, limit_s=200)
    assert code == 0, output
    assert "(memory)" in output and "kill: all workers begin again with the newest state in memory" in output


def test_a_pipeline_survives_wrong_numbers_of_any_stage(tmp_path: Path) -> None:
    plan = "stages=2,tensor=2+batch(size=20,micro=2)+guard(on_spike=skip,factor=100,window=8)"
    faults = "nan:worker=0,step=3; nan:worker=2,step=5; spike:worker=1,step=8"
    faults += "; spike:worker=3,step=10"  # whose loss is that of worker 2
    options = {**OPTIONS, "workers": 4, "max_steps": 10, "plan": plan}
    report = run_with(faults, script(), folder=tmp_path, limit_s=150, **options)
    assert_unharmed(report, report)
    assert [came and (came.step, came.place) for came in report.came] == [(step, "forward") for step in (3, 5, 8, 10)]


def test_a_slow_worker_is_slow_and_a_stopped_one_may_go_on(tmp_path: Path) -> None:
    faults = "slow:worker=1,step=6,times=20,steps=10; stop:worker=2,step=20,seconds=0.5"
    report = drilled(tmp_path, faults)
    assert_unharmed(report, undisturbed())
    assert not report.regrouped
    assert compute_s(report, 1, range(6, 16)) > 5 * compute_s(report, 2, range(6, 16))


def compute_s(report: Report, worker: int, steps: range) -> float:
    lines = (report.run_dir / "attempt_1" / f"worker_{worker}" / "events.jsonl").read_text().splitlines()
    done = [event for event in map(json.loads, lines) if event["event"] == "StepDone"]
    return sum(event["seconds"]["compute"] for event in done if event["step"] in steps)


def test_a_promise_that_the_program_breaks_is_reported(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    loss = "lambda output, target: F.cross_entropy(output, target) * worker.workers"
    broken.write_text(SCRIPT.replace("F.cross_entropy)", f"{loss})"))
    words = ["--steps", "12", "--faults", "kill:worker=1,step=5"]
    code, output = run(*PACELINE, "drill", broken, *words, environment={"TMPDIR": str(tmp_path)})
    assert code == 1, output
    assert "BROKEN" in output
    assert "1 of 1 runs did not keep what is promised" in output
    assert "the loss differs by" in output
    kept = output.partition("the runs are kept in ")[2].splitlines()[0]
    assert (Path(kept) / "run_1" / "run" / "metrics.jsonl").exists()


@pytest.mark.further
def test_a_drill_that_is_asked_to_end_leaves_nothing_behind(tmp_path: Path) -> None:
    runs_in, program = tmp_path / "runs", write_program(tmp_path)
    runs_in.mkdir()
    with closing(Announcements(tmp_path / "pipe")) as pipe:
        words = ["--steps", "8", "--faults", "full_disk:step=5", "--", "--tell", pipe.path, "--tell-at", "3"]
        with command(*PACELINE, "drill", program, *words, environment={"TMPDIR": str(runs_in)}) as drill:
            drill.told(pipe, 4 * 2)  # both workers of the undisturbed runs, of that with other samples, and of this one
            drill.process.terminate()
            code, output = drill.end()
            assert code == 128 + signal.SIGTERM, output
            assert not drill.left(limit_s=10.0)
    assert not list(runs_in.iterdir()), "a folder with a mounted file system cannot be removed"


def test_a_script_that_fails_undisturbed_is_not_drilled(tmp_path: Path) -> None:
    failing = tmp_path / "failing.py"
    failing.write_text(SCRIPT.replace("        step(batch)", "        raise ValueError('no luck')"))
    code, output = run(*PACELINE, "drill", failing)
    assert code == 1
    assert "fails undisturbed, so there is nothing to compare" in output and "no luck" in output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("torch.manual_seed(1)", "torch.seed()"),
            "is not deterministic: two undisturbed runs differ, first at step 1",
        ),
        (("F.cross_entropy)", "lambda *_: F.cross_entropy(model(x[:2]), x[:2].argmax(dim=1)))"), "does not use its"),
    ],
    ids=["by_chance", "without_batches"],
)
def test_a_script_whose_losses_would_prove_nothing_is_named_and_not_drilled(
    change: tuple[str, str], said: str, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(SCRIPT.replace(*change).replace("workers=3", "workers=1"))
    asked = DrillRequest(script=own, steps=5, faults="slow:worker=0,step=2", keep=tmp_path / "kept")
    with pytest.raises(WorkerError, match=said):
        main_drill(asked)


def function(worker: paceline.Worker) -> None:
    import torch
    import torch.nn.functional as F

    torch.manual_seed(1)
    x = torch.randn(40, 4)
    model = worker.prepare(torch.nn.Linear(4, 4))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(torch.utils.data.TensorDataset(x, x.argmax(dim=1)), epochs=100):
        step(batch)


def test_a_function_can_be_run_under_faults_too(tmp_path: Path) -> None:
    options = {"workers": 2, "plan": "replicas=1-2+batch(size=8,micro=2)", "max_steps": 10}
    like = run_with((), function, folder=tmp_path / "like", **options)
    report = run_with("kill:worker=0,step=5", function, folder=tmp_path / "killed", **options)
    assert_unharmed(report, like)


def test_a_run_that_takes_no_step_is_an_error_with_its_words(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('nothing here')\n")
    with pytest.raises(LaunchError, match=r"(?s)took no step.*ended without becoming a worker"):
        run_with("", script, folder=tmp_path / "run", workers=1)
    with pytest.raises(PlanError, match="sets run_dir itself"):
        run_with("", script, run_dir="x")
