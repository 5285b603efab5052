"""`paceline doctor` as a user starts it: a run that measures, its words, and a file that `paceline plan` reads."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from bridged_hosts import bridged_hosts
from engine_runs import until
from network_hosts import needs_network
from paceline.cli.doctor import BEGINS, ENDS, told_file
from paceline.cli.main import main
from paceline.doctor import doctor as program
from paceline.planner.cluster import load_catalogue
from paceline.testing.network_namespaces import run_tool

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
MPIRUN = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", "2", sys.executable]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SCRIPT = """
import argparse, time
import torch, paceline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--sleep-s", type=float, default=0.0)
parser.add_argument("--fails-on", type=int, default=-1)
options = parser.parse_args()


class Data(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, index):
        time.sleep(options.sleep_s)
        return torch.randn(8), index % 3


def train(worker):
    if worker.is_first:
        print("downloaded by worker", worker.rank)
    worker.wait()
    if worker.rank == options.fails_on:
        raise OSError("its file is not there")
    model = worker.prepare(nn.Linear(8, 3))
    optim = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(Data()):
        step(batch)


if __name__ == "__main__":
    paceline.run(train)
"""


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", *words], cwd=folder, capture_output=True, text=True, timeout=120
    )


def console(run_dir: Path) -> str:
    """What its workers have printed."""
    return "".join(path.read_text() for path in run_dir.glob("attempt_1/worker_*/std*.log"))


@pytest.mark.further  # the page on examining a cluster runs the command, too
def test_this_machine_is_examined_and_written_as_a_cluster(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--workers", "2", "--seconds", "0.01", "--name", "lab", "--out", "lab.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("examined 2 workers on", "of fp32 matrix products", "for an all-reduce of 64.0 MiB", "MB/s written"):
        assert word in done.stdout
    assert "cluster  lab.toml: paceline plan SCRIPT --cluster lab.toml" in done.stdout
    cluster = load_catalogue(tmp_path / "lab.toml").clusters["lab"]
    assert (cluster.hosts, cluster.devices_per_host) == (1, 2)
    assert cluster.device.is_synchronous
    (run_dir,) = (tmp_path / "runs").glob("doctor-*")
    assert not list(run_dir.rglob("doctor.disk"))


@pytest.mark.further
def test_a_scripts_data_is_measured_beside_what_its_steps_take(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--workers", "2", "--seconds", "0.05", "--run-dir", "r", "train.py", "--sleep-s", "0.01")
    done = doctor(tmp_path, *words, "--plan", "batch(size=16,micro=4)")
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads((tmp_path / "r" / "examination.json").read_text())
    appetite, rates = record["script"]["appetite"], record["script"]["rates"]
    assert record["script"]["plan"] == "replicas=2+batch(size=16,micro=4)"
    assert len(rates) == 2
    assert all(30 < one["samples_per_s"] <= 100 for one in rates), "a hundredth of a second each"
    assert appetite > 200, "a model of 27 weights"
    (finding,) = [one for one in record["findings"] if "waits for data" in one["what"]]
    assert finding["what"] in done.stdout
    assert finding["remedy"] in done.stdout
    assert "downloaded by worker 0" in done.stderr + done.stdout + console(tmp_path / "r"), "it may prepare its data"
    assert "downloaded by worker 1" not in console(tmp_path / "r")
    assert "train.py" not in (tmp_path / "r" / "cluster.toml").read_text()


@pytest.mark.further
def test_a_script_that_fails_on_one_worker_keeps_no_other_waiting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--workers", "2", "--seconds", "0.01", "--run-dir", "r", "train.py", "--fails-on", "1")
    done = doctor(tmp_path, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "could not be measured: on worker 1: OSError: its file is not there" in done.stdout
    assert (tmp_path / "r" / "cluster.toml").exists()


@pytest.mark.further
@pytest.mark.parametrize("words", [TORCHRUN, MPIRUN], ids=["torchrun", "mpirun"])
def test_other_launchers_start_the_program_itself(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    own = ["-m", "paceline.doctor.doctor", "--seconds", "0.01", "--name", "lab", "--script", "train.py"]
    done = subprocess.run(
        [*words, *own], cwd=tmp_path, env=os.environ | AS_ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "samples/s is what each worker's steps will take" in done.stdout
    (path,) = tmp_path.glob("runs/doctor-*/cluster.toml")
    cluster = load_catalogue(path).clusters["lab"]
    assert (cluster.hosts, cluster.devices_per_host) == (1, 2)
    assert main(["plan", str(tmp_path / "train.py"), "--workers", "2", "--cluster", str(path)]) == 0


@needs_network
@pytest.mark.further
def test_hosts_that_cannot_reach_each_other_and_a_slow_one_are_named_and_the_rest_is_measured(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t" * 32)
    (tmp_path / "token").chmod(0o600)
    with contextlib.ExitStack() as stack:
        _, b, c, d = hosts = stack.enter_context(bridged_hosts(tmp_path, ["a", "b", "c", "d"], subnet="10.101.0"))
        for one, other in ((c, d), (d, c)):
            run_tool("ip", "-n", one.namespace, "route", "add", "unreachable", f"{other.address}/32")
        limit = ["qdisc", "add", "dev", b.device, "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]
        run_tool("tc", "-n", b.namespace, *limit)
        consoles = {host.name: tmp_path / f"{host.name}.console" for host in hosts}
        runs: list[subprocess.Popen[bytes]] = []
        for host in hosts:  # in this order: the earlier one of a pair sends
            words = ["--workers", "4", "--hosts", "4", "--head", "a:29500", "--token-file", str(tmp_path / "token")]
            words += ["--seconds", "0.2", "--name", "lab", "--run-dir", f"r-{host.name}"]
            command = [*host.prefix, sys.executable, "-m", "paceline", "doctor", *words]
            log = stack.enter_context(consoles[host.name].open("wb"))
            runs.append(subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log))
            if host in (b, c):
                told = f"host {host.name} ("
                until(lambda told=told: told in consoles["a"].read_text(), f"{host.name} has come")
        codes = [run.wait(120) for run in runs]
    said = consoles["a"].read_text()
    assert codes == [0, 0, 0, 0], said
    assert "finding  c -> d: 10.101.0.4 cannot be reached over eth0: OSError: [Errno 113]" in said
    assert "Open all TCP ports from c to d" in said
    assert re.search(r"finding  b - [cd]: 0.01\d* GB/s, and the median pair", said), said
    assert not re.search(r"finding  a - \w: [\d.]+ GB/s, and the median pair", said), said
    cluster = load_catalogue(tmp_path / "r-a" / "cluster.toml").clusters["lab"]
    assert (cluster.hosts, cluster.devices_per_host) == (4, 1)
    contents = tomllib.loads((tmp_path / "r-a" / "cluster.toml").read_text())
    assert [pair["hosts"] for pair in contents["pairs"] if "error" in pair] == [["c", "d"]]
    assert len(contents["pairs"]) == 6


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--plan", "batch(size=4)"), "--plan is of a script's steps"),
        (("--set", "plan.batch.size=4"), "--set plan.batch.size=4 is of a script's steps"),
        (("--set", "kepe=5"), "kepe"),
        (("job.toml",), "job.toml is no Python script that is here"),
        (("none.py",), "none.py is no Python script that is here"),
        (("--seconds", "0"), "--seconds is 0; give 0.01 to 600 seconds"),
        (("--name", "a b"), "--name is 'a b'"),
        (("--out", "cluster.json"), "ends in .toml"),
        (("--out", "no/such/cluster.toml"), "in a folder that is there"),
    ],
)
def test_words_that_cannot_work_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_cluster_file_is_found_in_a_console_whole_or_not_at_all() -> None:
    assert program.ENDS == ENDS
    text = f"{BEGINS}; the slowest\n[devices.x]\n"
    assert told_file(f"examined\n{text}{ENDS}\nfinished\n") == text
    assert told_file(f"examined\n{text}") is None
    assert told_file("examined\n") is None
