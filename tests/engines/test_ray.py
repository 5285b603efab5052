"""`paceline run --on ray` on a cluster of pretended nodes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from engine_runs import losses, one_machine, until, write_program
from examined_clusters import doctor_command, require_cluster
from ray_cluster import RayCluster, ray_cluster

pytest.importorskip("ray", reason="needs Ray: make test-engines installs it")
LIMIT_S = 180.0
FIXED = ("--plan", "batch(size=24,micro=4)")
ELASTIC = ("--plan", "replicas=1-3+batch(size=24,micro=4)")


@pytest.fixture
def site() -> Iterator[RayCluster]:
    with ray_cluster(nodes=("n1", "n2")) as made:
        yield made


@contextlib.contextmanager
def running(site: RayCluster, program: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    words = [sys.executable, "-m", "paceline", "run", str(program), "--on", f"ray(address={site.address})"]
    words += [*options, "--run-dir", "r"]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled"}
    with (program.parent / "console").open("wb") as log:
        process = subprocess.Popen(words, cwd=program.parent, stdout=log, stderr=log, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        process.kill()
        process.wait()


def console(program: Path) -> str:
    return (program.parent / "console").read_text()


def joined(program: Path) -> int:
    """How many workers have joined the run that went on."""
    return console(program).count(" joined at step ")


def step(program: Path) -> int:
    try:
        return max(losses(program.parent / "r"), default=0)
    except (OSError, ValueError):
        return 0


def command(program: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", words[0], "r", *words[1:]],
        cwd=program.parent,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.timeout(400)
def test_a_run_has_the_losses_of_one_machine(site: RayCluster, tmp_path: Path) -> None:
    program = write_program(tmp_path, sleep_s=0.0)
    with running(site, program, "--hosts", "2", "--workers", "4", *FIXED) as run:
        assert run.wait(LIMIT_S) == 0, console(program)
    assert console(program).count("finished at step 20") == 1
    assert losses(tmp_path / "r") == pytest.approx(one_machine(program, tmp_path / "one", *FIXED), rel=1e-6)


@pytest.mark.timeout(400)
def test_nodes_are_examined_though_they_share_no_disk_with_the_command(site: RayCluster, tmp_path: Path) -> None:
    program = write_program(tmp_path)
    words = ["--on", f"ray(address={site.address})", "--hosts", "2", "--workers", "4"]
    done = doctor_command(tmp_path, *words, env={"RAY_AUTH_MODE": "disabled"}, hides=True)
    require_cluster(done, program, hosts=2, each=2)


@pytest.mark.timeout(600)
def test_nodes_that_are_lost_are_replaced_also_the_coordinators_and_no_step_is_lost(
    site: RayCluster, tmp_path: Path
) -> None:
    program = write_program(tmp_path, samples=24_000, sleep_s=0.03)
    with running(site, program, "--hosts", "2", "--workers", "2", "--set", "engine.cpus=3", *ELASTIC) as run:
        until(lambda: step(program) > 10, "it is at work", limit_s=LIMIT_S)
        for number, name in enumerate(("n1", "n2"), start=1):  # one of them is the coordinator's
            before = step(program)
            site.ask("remove", name)
            until(lambda before=before: step(program) > before + 10, f"it goes on without {name}")
            site.ask("add", f"m{number}")
            until(lambda n=number: joined(program) >= n, "a host has come in its place", limit_s=LIMIT_S)
        assert command(program, "stop").returncode == 0
        assert run.wait(60) == 75, console(program)
    assert "leads the run now" in console(program)
    assert "Traceback" not in console(program)
    alone = one_machine(
        write_program(tmp_path / "alone", samples=24_000, sleep_s=0.0),
        tmp_path / "one",
        *("--plan", "batch(size=24,micro=4)", "--max-steps", str(step(program))),
    )
    assert losses(tmp_path / "r") == pytest.approx(alone, rel=1e-4)


NOTEBOOK = """\
import paceline, torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset
X = torch.randn(480, 6, generator=torch.Generator().manual_seed(1))

def train(worker):
    data = TensorDataset(X, X.abs().sum(dim=1).long() % 3)
    torch.manual_seed(3)
    model = worker.prepare(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data):
        worker.report(loss=step(batch))
    return worker.step, worker.workers, sorted(set(worker.gather(__import__("os").getppid())))

ray = paceline.Ray(address=ADDRESS, cpus=2)
steps, workers, parents = paceline.run(
    train, on=ray, hosts=2, workers=4, plan="batch(size=24,micro=4)", run_dir="r", save_every=5
)
print("VALUE", steps, workers, len(parents))
"""
FAILS = """\
def fails(worker):
    if worker.rank == 3:
        raise ValueError("a mistake in the cell")
    worker.wait()

try:
    paceline.run(fails, on=ray, hosts=2, workers=4, run_dir="failed")
except paceline.WorkerError as error:
    print("ERROR", error.worker, "a mistake in the cell" in error.traceback)
try:
    paceline.run(fails, on=ray, hosts=2, workers=4, plan="replicas=3", run_dir="wrong")
except paceline.PlanError as error:
    print("REFUSED", error)
"""


@pytest.mark.timeout(400)
def test_a_notebooks_function_runs_on_the_nodes_and_its_value_and_its_error_come_back(
    site: RayCluster, tmp_path: Path
) -> None:
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(f"ADDRESS = {site.address!r}\n{NOTEBOOK}"),
        nbformat.v4.new_code_cell(FAILS),
    ]
    client = NotebookClient(book, timeout=LIMIT_S, resources={"metadata": {"path": str(tmp_path)}})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        client.execute()
    printed = "".join(each["text"] for cell in book.cells for each in cell.outputs if each.output_type == "stream")
    assert "VALUE 20 4 2" in printed, printed
    assert printed.count("ERROR 3 True") == 1, printed
    assert "REFUSED" in printed, printed
    assert (tmp_path / "r" / "engine.json").exists()
    program = write_program(tmp_path / "script", sleep_s=0.0)
    assert losses(tmp_path / "r") == pytest.approx(one_machine(program, tmp_path / "one", *FIXED), rel=1e-6)


TUNE = """\
import json, os, sys, time
from pathlib import Path
import ray, torch
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from torch import nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import paceline

def train(worker, config):
    x = torch.randn(480, 6, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.abs().sum(dim=1).long() % 3)
    torch.manual_seed(3)
    model = worker.prepare(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=config["lr"]))
    optim.param_groups[0]["lr"] = config["lr"]
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data, epochs=config.get("epochs", 1)):
        loss = step(batch)
        with torch.no_grad():
            worker.report(loss=loss, over_all=F.cross_entropy(model(data.tensors[0]), data.tensors[1]))
        time.sleep(config.get("sleep_s", 0.0))
        if config.get("fails") and worker.step == 12 and worker.is_first and not os.path.exists(config["fails"]):
            Path(config["fails"]).touch()
            raise RuntimeError("once")
    return {"score": config["lr"], "workers": worker.workers}

if __name__ == "__main__":
    ray.init(address=sys.argv[1], log_to_driver=False)
    what, folder = sys.argv[2], sys.argv[3]
    trainable = paceline.tune_trainable(
        train, workers=2, hosts=2, plan=lambda config: f"batch(size={config['batch']},micro=4)", save_every=5
    )
    space = {"lr": tune.grid_search([0.01, 0.1]), "batch": 24}
    config, run = tune.TuneConfig(), {"storage_path": folder, "name": what, "verbose": 0}
    if what == "stopped":
        run["stop"] = {"step": 7}
    if what == "failing":
        space = {"lr": 0.1, "batch": 24, "fails": folder + "/failed"}
        run["failure_config"] = tune.FailureConfig(max_failures=1)
    if what == "population":
        space |= {"lr": tune.grid_search([0.0001, 0.3]), "epochs": 4, "sleep_s": 0.3}
        config = tune.TuneConfig(
            metric="over_all", mode="min", scheduler=PopulationBasedTraining(
                time_attr="step", perturbation_interval=15, quantile_fraction=0.5, resample_probability=0.0,
                hyperparam_mutations={"lr": [0.0001, 0.3]})
        )
    results = tune.Tuner(trainable, param_space=space, tune_config=config, run_config=tune.RunConfig(**run)).fit()
    for result in results:
        rows, checkpoint = result.metrics_dataframe, None
        if result.checkpoint:
            checkpoint = json.loads((Path(result.checkpoint.path) / "checkpoint.json").read_text())["step"]
        print("RESULT", json.dumps({
            "lr": result.config["lr"], "steps": [int(step) for step in rows["step"]],
            "losses": list(rows["loss"]), "over_all": list(rows["over_all"]),
            "score": result.metrics.get("score"), "workers": result.metrics.get("workers"), "checkpoint": checkpoint,
            "error": str(result.error or ""), "path": result.path,
        }))
"""


def tune(site: RayCluster, folder: Path, what: str, *, limit_s: float = LIMIT_S) -> list[dict[str, Any]]:
    """Run the program above; what it says of each trial."""
    (folder / "tune.py").write_text(TUNE)
    done = subprocess.run(
        [sys.executable, "tune.py", site.address, what, str(folder)],
        cwd=folder,
        env=os.environ | {"RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    found = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    assert done.returncode == 0 and found, done.stdout + done.stderr
    return found


@pytest.mark.timeout(400)
def test_trials_of_tune_are_runs_on_their_own_hosts(site: RayCluster, tmp_path: Path) -> None:
    found = tune(site, tmp_path, "whole")
    assert [one["lr"] for one in found] == [0.01, 0.1]
    for one in found:
        assert one["steps"][:20] == list(range(1, 21))
        assert (one["score"], one["workers"], one["checkpoint"], one["error"]) == (one["lr"], 2, 20, "")
        assert losses(Path(one["path"]) / "run") == pytest.approx(dict(enumerate(one["losses"][:20], start=1)))
    assert found[0]["losses"] != found[1]["losses"]


@pytest.mark.timeout(400)
def test_a_trial_that_tune_stops_ends_and_leaves_no_process(site: RayCluster, tmp_path: Path) -> None:
    for one in tune(site, tmp_path, "stopped"):
        assert one["steps"] == list(range(1, 8))
    until(lambda: not processes_with(str(tmp_path)), "its hosts and workers have ended")


@pytest.mark.timeout(400)
def test_a_trial_that_fails_goes_on_from_its_checkpoint(site: RayCluster, tmp_path: Path) -> None:
    (one,) = tune(site, tmp_path, "failing")
    assert (tmp_path / "failed").exists()
    assert one["error"] == "" and one["steps"][-1] == 20
    events = (Path(one["path"]) / "run" / "attempt_2" / "worker_0" / "events.jsonl").read_text().splitlines()
    started = [event for line in events if (event := json.loads(line))["event"] == "WorkerStarted"]
    assert [event["resumed_from_step"] for event in started] in ([5], [10]), "behind a checkpoint, not at the beginning"


@pytest.mark.timeout(600)
def test_a_trial_takes_over_the_state_of_a_better_one(site: RayCluster, tmp_path: Path) -> None:
    found = tune(site, tmp_path, "population", limit_s=2 * LIMIT_S)  # its trials begin again several times
    left = [path for one in found for path in Path(one["path"]).glob("run-*")]
    assert left, "population based training has exploited no trial"
    for one in found:
        assert one["error"] == "" and one["steps"][-1] == 80
    worse = next(one for one in found if list(Path(one["path"]).glob("run-*")))
    assert worse["over_all"][-1] < worse["over_all"][0] - 0.005, "its own rate would have gained less than 0.0001"


def processes_with(text: str) -> list[str]:
    """The command lines of processes in which a text is."""
    found = list[str]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if text in line and int(path.parent.name) != os.getpid():
                found.append(line)
    return found
