"""`paceline plan SCRIPT --cluster NAME`: what a step costs, other plans, and what is said where that is not known."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.cli.main import main
from paceline.cli.plan_costs import verify
from paceline.events import EventLog, WorkerFinished, WorkerStarted
from paceline.plan import Plan
from paceline.planner.search import is_exact

SCRIPT = """
import paceline, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


def forward(model, micro):
    return F.mse_loss(model(micro[0]), micro[1])


def train(worker):
    {make}
    model = worker.prepare(model)
    optim = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optim, {stepper})
    for batch in worker.batches(TensorDataset(torch.zeros(64, 48, 512), torch.zeros(64, 48, 512))):
        step(batch)


if __name__ == "__main__":
    paceline.run(train, plan="shard=4+batch(size=32,micro=4)")
"""
SMALL = """
[devices.small]
memory_gb = 1.0
memory_gb_s = 500.0
tflops = { bf16 = 50.0 }
best_matmul = { bf16 = 0.8 }
attention = { flash = 20.0, vendor = 25.0 }
units = 40
watts = 200
link_gb_s = 10.0
network_gb_s = 1.0
source = "made up"

[clusters.lab]
device = "small"
hosts = 2
devices_per_host = 2
network_gb_s = 1.25
source = "made up"
"""
ENCODER = "model = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True), 6)"
SHORT = ENCODER.replace("6)", "2)")  # a third of the time to look at it, where no figure of it is told


def metrics(steps: int, seconds: dict[str, float]) -> str:
    rows = ({"step": step, "attempt": 1, "time": 1.7e9 + step, "seconds": seconds} for step in range(1, steps + 1))
    return "".join(json.dumps(row) + "\n" for row in rows)


def told(
    capsys: pytest.CaptureFixture[str], folder: Path, *words: str, make: str = SHORT, stepper: str = "forward=forward"
) -> tuple[int, str, str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(make=make, stepper=stepper))
    status = main(["plan", str(script), *words])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.mark.parametrize("stepper", ["forward=forward", pytest.param("F.mse_loss", marks=pytest.mark.thorough)])
def test_a_step_is_predicted_from_the_scripts_own_data(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, stepper: str
) -> None:
    status, out, _ = told(capsys, tmp_path, "--workers", "4", "--cluster", "h100x8-ib", make=ENCODER, stepper=stepper)
    assert status == 0
    assert "cluster  h100x8-ib: 1 x 8 h100, 80 GB each" in out
    # 6 blocks of 12 h^2, 48 tokens, 6 operations each, and attention: 0.0054 + 0.00004
    assert re.search(
        r"model +model: 18\.9 M parameters, 6 blocks, 5\.45 G operations a sample \(forward and backward\)\n", out
    ), out
    assert re.search(r"step +[\d.]+ m?s \(80 % band: .* samples/s, \d+ % of the devices' peak in bf16", out), out
    assert "matrix products of the blocks" in out
    assert re.search(r"memory +[\d.]+ of 80 GB: it fits", out), out
    ranked = out.split("the fastest first\n")[1].split("the first, to copy: --plan")[0].splitlines()
    assert ranked[0].split() == ["a", "step", "samples/s", "GB", "fits", "plan"]
    rows = [line for line in ranked[1:] if line[:40].strip()]
    times = [float(line.split()[0]) for line in rows]
    assert {line.split()[1] for line in rows} == {"ms"}
    assert len(times) > 2
    assert times == pytest.approx(sorted(times), rel=5e-3)
    assert "counted on" not in out


@pytest.mark.thorough
def test_time_and_money_for_so_much_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--samples", "1e9", "--price", "2.5")
    _, out, _ = told(capsys, tmp_path, *words)
    step = re.search(r"step +([\d.]+) ms", out)
    money = re.search(r"total    1\.00 G samples: .*, ([\d.,]+) at 2\.5 a device and hour", out)
    assert step is not None and money is not None, out
    hours = 1e9 / 32 * float(step[1]) / 1e3 / 3600
    assert float(money[1].replace(",", "")) == pytest.approx(hours * 4 * 2.5, rel=0.01)


@pytest.mark.thorough
def test_what_does_not_fit_is_said_and_fails(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    words = ("--workers", "1", "--plan", "batch(size=32,micro=4)", "--cluster", str(tmp_path / "small.toml"))
    status, out, _ = told(capsys, tmp_path, *words, make=ENCODER)
    assert status == 2
    assert "of 1 GB: it does not fit" in out
    assert "No plan fits these devices. Least memory:" in out


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "stepper", "why"),
    [
        ("worker.prepare(model, sample=(torch.zeros(2, 16, 512),))\n    return", "", "the loop has no worker.stepper"),
        ("", "forward=lambda model, micro: model(micro['x'])", "TypeError"),
    ],
)
def test_what_was_not_counted_on_the_data_is_said_and_has_no_total(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, make: str, stepper: str, why: str
) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--samples", "1000")
    status, out, _ = told(capsys, tmp_path, *words, make=f"{SHORT}\n    {make}", stepper=stepper)
    assert status == 0
    assert f"counted on a small input or the sample, not on the script's data: {why}" in out
    assert "total    not known" in out


@pytest.mark.thorough
def test_of_several_models_the_largest_is_priced_and_that_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make = f"worker.prepare(nn.Linear(4, 4), name='critic')\n    {ENCODER}"
    _, out, _ = told(capsys, tmp_path, "--workers", "4", "--cluster", "h100x8-ib", make=make)
    assert re.search(r"model +\w+: 18\.9 M parameters", out), out
    assert "only this model is priced, the largest one; not critic" in out


@pytest.mark.thorough
def test_a_cluster_of_ones_own_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    status, out, _ = told(
        capsys, tmp_path, "--workers", "4", "--cluster", f"{tmp_path / 'small.toml'}:lab", make=ENCODER
    )
    assert status == 2
    assert "cluster  lab: 2 x 2 small, 1 GB each, 1.25 GB/s between hosts" in out


def test_a_cluster_of_ones_own_file_does_not_grow(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    status, _, err = told(capsys, tmp_path, "--workers", "8", "--cluster", str(tmp_path / "small.toml"))
    assert status == 2
    assert "2 hosts of 2 devices, too few for 8 workers: give it hosts = 4" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cluster", "h100x8-lb"), r"No cluster is called 'h100x8-lb'\. Did you mean 'h100x8-ib'"),
        (("--cluster", "nowhere.toml"), "Cannot read nowhere.toml"),
        (
            ("--cluster", "h100x8-ib", "--samples", "5", "--price", "-1"),
            "--price -1: a device and hour cost -1; it must",
        ),
        (
            ("--cluster", "h100x8-ib", "--cluster", "a100x8-ib", "--samples", "5", "--price", "h100x8-ib=1"),
            "a100x8-ib has no price, so it cannot be compared: add --price a100x8-ib=X",
        ),
        (("--cluster", "h100x8-ib", "--growth", "nowhere/g.svg"), "--growth nowhere/g.svg: there is no folder nowhere"),
        (("--cluster", "h100x8-ib", "--trace", "nowhere/t.json"), "--trace nowhere/t.json: there is no folder nowhere"),
        (("--cluster", "h100x8-ib", "--price", "1"), "--price goes with --samples"),
        (("--samples", "5"), "--samples goes with --cluster"),
        (("--cluster", "h100x8-ib", "--set", "plan.sync=parameterserver", "--plan", "replicas=4"), "built for the CPU"),
        (("--cluster", "h100x8-ib", "--set", "plan.compute.precision=fp64"), "no rates for precision=fp64"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    status, _, err = told(capsys, tmp_path, "--workers", "4", *words)
    assert status == 2
    assert re.search(says, err), err


@pytest.mark.thorough
@pytest.mark.parametrize("called", ["lab.toml", "lab"])
def test_a_file_may_be_priced_by_its_path_and_by_its_clusters_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, called: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab.toml").write_text(SMALL.replace("memory_gb = 1.0", "memory_gb = 80.0"))
    words = ("--workers", "4", "--cluster", "lab.toml", "--samples", "1e9", "--price", f"{called}=2.5")
    status, out, err = told(capsys, tmp_path, *words)
    assert status == 0, err
    assert " at 2.5 a device and hour" in out


@pytest.mark.thorough
def test_where_half_precision_would_be_faster_that_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--samples", "5")
    _, out, _ = told(capsys, tmp_path, *words)
    said = "These compute in fp32, as the plan says. With compute(precision=bf16) the best plan takes\n"
    step, half = re.search(r"first\n.*\n +([\d.]+) ms", out), re.search(r"  ([\d.]+) ms a step on h100x8-ib: ", out)
    assert said in out and step is not None and half is not None, out
    assert float(half[1]) < float(step[1])
    _, out, _ = told(capsys, tmp_path, *words, "--set", "plan.compute.precision=bf16")
    assert said not in out


@pytest.mark.thorough
def test_workers_that_nobody_has_named_are_one_and_that_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        re.sub(r"paceline\.run\(.*\)", "paceline.run(train)", SCRIPT).format(make=SHORT, stepper="F.mse_loss")
    )

    def workers(*words: str) -> str:
        main(["plan", str(script), "--cluster", "h100x8-ib", "--fits", *words])
        return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("workers"))

    assert workers() == "workers  1, because neither the command nor the script says how many: --workers N"
    assert workers("--plan", "replicas=2") == "workers  2"
    assert workers("--workers", "1") == "workers  1"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        ("model = (", "train.py cannot be read: '(' was never closed (train.py, line"),
        ("open('/no/such/data')", "fails before its model is there, with FileNotFoundError: [Errno 2] No such file"),
    ],
)
def test_a_script_that_fails_is_told_without_our_own_frames(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.format(make=make, stepper="F.mse_loss"))
    assert main(["plan", "train.py", "--cluster", "h100x8-ib"]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and "src/paceline" not in err
    assert "train.py" in err.splitlines()[-1] or "model = (" in err.splitlines()[-1]


def test_a_cluster_needs_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "replicas=2", "--cluster", "h100x8-ib"]) == 2
    assert "--cluster goes with a script" in capsys.readouterr().err


@pytest.mark.thorough
def test_what_is_faster_with_other_losses_stands_apart(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("memory_gb = 1.0", "memory_gb = 80.0"))
    words = ("--workers", "4", "--cluster", str(tmp_path / "small.toml"), "--plan", "replicas=4")
    status, out, _ = told(capsys, tmp_path, *words, make=ENCODER)
    assert status == 0
    exact, lossy = out.split("The best plan of each layout")[1].split("Faster, with other losses than one process")
    assert "localsgd" not in exact and "int8" not in exact
    steps = re.findall(r"^ +([\d.]+) ms", exact, re.MULTILINE)
    found = re.findall(r"^ +([\d.]+) ms .*\n(?: {42}\S.*\n)* {41}(\w.*)$", lossy, re.MULTILINE)
    assert 1 <= len(found) <= 3
    assert all(float(step) < float(steps[0]) for step, _ in found)
    assert any("replicas average only every 8 steps" in changes for _, changes in found), lossy
    assert all(len(line) <= 100 or "--plan" in line for line in out.split("cluster  ")[1].splitlines()[1:])


@pytest.mark.thorough
def test_what_is_offloaded_is_said_with_what_the_host_has(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("memory_gb = 1.0", "memory_gb = 80.0") + "host_memory_gb = 64\n")
    plan = "replicas=4+compute(offload=optimizer)"
    words = ("--workers", "4", "--cluster", str(tmp_path / "small.toml"), "--plan", plan)
    _, out, _ = told(capsys, tmp_path, *words, make=ENCODER)
    # Adam's 8 bytes for each of 18.9 M parameters; two workers on a host
    assert "host     0.151 GB for each worker, 0.303 GB for those of a host, of 64 GB" in out
    assert re.search(r"\d+ %  moving what is offloaded to the device and back", out), out


@pytest.mark.thorough
def test_of_a_script_with_other_losses_that_is_said_and_its_own_kind_is_ranked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ethernet", "--plan", "replicas=4+int8")
    _, out, _ = told(capsys, tmp_path, *words, make=ENCODER)
    assert "The script's plan has other losses than one process: gradients are rounded to 8 bits." in out
    ranked = out.split("The best plan of each layout")[1].split("the first, to copy")[0]
    assert "replicas=2+stages=2+schedule=zero-bubble+int8" in ranked and "replicas=4 micro" in ranked
    assert re.search(r"each worker sends [\d.]+ MiB a step to other replicas", out), out


@pytest.mark.thorough
def test_two_clusters_are_compared_and_the_choice_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--cluster", "h100x8-ib", "--cluster", "a100x8-ib", "--samples", "1e9", "--workers", "8")
    prices = ("--price", "h100x8-ib=4", "--price", "1", "--plan", "batch(size=32,micro=4)")
    status, out, _ = told(capsys, tmp_path, *words, *prices)
    assert status == 0
    table = out.split("\ncase ")[1].split("\n\n")[0].splitlines()
    assert table[0].split() == ["a", "step", "samples/s", "1.00", "G", "samples", "cost", "GB", "fits", "plan"]
    assert [line.split()[0] for line in table[1:] if line[0] != " "] == ["h100x8-ib", "a100x8-ib"]
    assert sum("<- the script's" in line for line in table) == 2
    fastest = re.search(r"The fastest that fits: h100x8-ib: .*\n  (\S+)\n", out)
    cheapest = re.search(r"The cheapest that fits: a100x8-ib: (.*), ([\d,.]+)\n  (\S+)\n", out)
    assert fastest is not None and cheapest is not None, out
    costs = [float(line.split()[-5].replace(",", "")) for line in table[1:] if "<-" not in line]
    assert float(cheapest[2].replace(",", "")) == min(costs)


@pytest.mark.thorough
def test_what_if_has_a_row_for_each_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--what-if", "workers=4,64", "batch=32,7", "link=25Gbit")
    status, out, _ = told(capsys, tmp_path, *words)
    assert status == 0
    table = out.split("\ncase ")[1].split("\n\n")[0].splitlines()[1:]
    cases = [line.split(" link=25Gbit")[0] for line in table if line[0] != " "]
    assert cases == ["workers=4 batch=32", "workers=4 batch=7", "workers=64 batch=32", "workers=64 batch=7"]
    assert "no plan shares the batch evenly" in table[-1]
    assert "shard=4 micro=4   <- the script's" in table[0]


@pytest.mark.thorough
def test_a_slow_network_is_slower(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "16", "--cluster", "h100x8-ib", "--what-if", "link=1Gbit,400GB", "--check")
    _, out, _ = told(capsys, tmp_path, *words)
    slow, fast = (re.search(rf"link={link} +([\d.]+) (m?s)", out) for link in ("1Gbit", "400GB"))
    assert slow is not None and fast is not None, out
    seconds = [float(one[1]) / (1000 if one[2] == "ms" else 1) for one in (slow, fast)]
    assert seconds[0] > 3 * seconds[1]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("memory_gb", "remedy"),
    [
        ("0.9", r"remedy   0\.\d+ GB with replicas=1\+"),
        ("0.6", r"remedy   it needs at least \d+ workers of 0.6 GB: 0\.\d+ GB with "),
        ("0.3", "remedy   none with devices of 0.3 GB"),
    ],
)
def test_fits_says_no_and_what_would(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, memory_gb: str, remedy: str
) -> None:
    text = SMALL.replace("memory_gb = 1.0", f"memory_gb = {memory_gb}\nruntime_gb = 0.25")
    (tmp_path / "small.toml").write_text(text)
    words = ("--workers", "1", "--plan", "batch(size=32,micro=32)", "--cluster", str(tmp_path / "small.toml"), "--fits")
    status, out, _ = told(capsys, tmp_path, *words, make=ENCODER)
    assert status == 2
    assert re.search(rf"memory   [\d.]+ of {memory_gb} GB: it does not fit", out), out
    assert re.search(remedy, out), out
    assert "The best plan of each layout" not in out


@pytest.mark.thorough
def test_fits_says_yes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = told(capsys, tmp_path, "--workers", "4", "--cluster", "h100x8-ib", "--fits")
    assert status == 0
    assert "of 80 GB: it fits" in out
    assert "remedy" not in out


@pytest.mark.thorough
def test_failures_take_their_share_of_time_and_money(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--samples", "1e12", "--price", "1")
    _, plain, _ = told(capsys, tmp_path, *words)
    _, out, _ = told(capsys, tmp_path, *words, "--mtbf", "24", "--replace-s", "3600")
    share = re.search(r"goodput  ([\d.]+) % of the time goes into steps that count, with 1 failures a day", out)
    assert share is not None, out
    money = [re.search(r"([\d.,]+) at 1 a device and hour", text) for text in (plain, out)]
    assert money[0] is not None and money[1] is not None
    before, after = (float(one[1].replace(",", "")) for one in money if one is not None)
    assert after == pytest.approx(before / float(share[1]) * 100, rel=2e-3)


@pytest.mark.thorough
def test_growth_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--growth", str(tmp_path / "growth.svg"))
    status, out, _ = told(capsys, tmp_path, *words)
    assert status == 0
    assert "samples per second on up to 32 workers" in out
    root = ElementTree.parse(tmp_path / "growth.svg").getroot()
    shown = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}title")]
    assert [text.split(":")[0] for text in shown] == [f"{1 << power} workers" for power in range(6)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--what-if", "workers=3"), "--what-if goes with --cluster"),
        (("--mtbf", "3"), "--mtbf goes with --cluster"),
        (("--fits",), "--fits goes with --cluster"),
        (("--cluster", "h100x8-ib", "--replace-s", "3"), "--replace-s goes with --mtbf"),
        (("--cluster", "h100x8-ib", "--growth", "a.png"), "ends in .svg"),
        (("--cluster", "h100x8-ib", "--cluster", "a100x8-ib", "--mtbf", "3"), "--mtbf is about one cluster"),
        (("--cluster", "h100x8-ib", "--samples", "1", "--price", "b=3"), "names no cluster of this question"),
        (("--cluster", "h100x8-ib", "--what-if", "wrokers=3"), "Did you mean 'workers'"),
    ],
)
def test_options_that_lack_what_they_need(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    status, _, err = told(capsys, tmp_path, *words)
    assert status == 2
    assert says in err


@pytest.mark.thorough
def test_a_run_that_was_done_makes_a_receipt_and_the_next_prediction_follows_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("memory_gb = 1.0", "memory_gb = 80.0"))
    folder = tmp_path / "run" / "attempt_1" / "worker_0"
    folder.mkdir(parents=True)
    seconds = {"compute": 0.1, "communication": 0.02, "optimizer": 0.01, "data": 0.0, "total": 0.14}
    (tmp_path / "run" / "metrics.jsonl").write_text(metrics(8, seconds) + '{"step": 9, "sec')
    log = EventLog(folder / "events.jsonl", worker=0)
    log.emit(WorkerFinished(rank=0, step=8, peak_memory_bytes=3 * 10**9))
    log.close()
    words = ("--workers", "4", "--cluster", str(tmp_path / "small.toml"))
    status, out, _ = told(capsys, tmp_path, *words, "--receipt", str(tmp_path / "run"))
    assert status == 0
    assert re.search(r"receipt +predicted +measured\n +step +\S+ \S+ +140 ms  [+-]\d+ %\n", out), out
    assert re.search(r"memory +\S+ GB +3 GB  [+-]\d+ %", out), out
    assert (tmp_path / "small.receipts.jsonl").exists()
    _, out, _ = told(capsys, tmp_path, *words)
    assert "corrected by 1 receipt of this model on 4 workers on this cluster" in out
    assert re.search(r"step +140 ms \(80 % band", out), out
    _, out, _ = told(capsys, tmp_path, *words[:1], "2", *words[2:], "--plan", "shard=2+batch(size=32,micro=4)")
    assert "corrected by 1 receipt of this model on this cluster" in out


@pytest.mark.thorough
def test_a_receipt_is_of_the_plan_that_the_run_had(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    folder = run_dir / "attempt_1" / "worker_0"
    folder.mkdir(parents=True)
    seconds = {"compute": 0.1, "communication": 0.02, "optimizer": 0.01, "data": 0.0, "total": 0.14}
    (run_dir / "metrics.jsonl").write_text(metrics(8, seconds))
    log = EventLog(folder / "events.jsonl", worker=0)
    about: dict[str, Any] = {"rank": 0, "host": "a", "pid": 1, "device": "cpu", "startup_s": 1.0}
    plan = "replicas=1+shard=2+batch(size=32,micro=16)"
    log.emit(WorkerStarted(**about, workers=2, plan=plan, resumed_from_step=0))
    log.close()
    _, out, _ = told(capsys, tmp_path, "--workers", "4", "--cluster", "h100x8-ib", "--receipt", str(run_dir))
    assert f"run      {run_dir}: replicas=1+shard=2+batch(micro=16), 6 steps on 2 workers" in out


@pytest.mark.thorough
def test_frozen_layers_are_told_and_not_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib")
    frozen = f"{ENCODER}; model.requires_grad_(False).layers[-1].requires_grad_(True)"
    status, out, _ = told(capsys, tmp_path, *words, make=frozen)
    assert status == 0
    assert re.search(r"18\.9 M parameters \(3\.15 M trained\), 6 blocks, 2\.38 G operations a sample", out), out


@pytest.mark.thorough
def test_a_run_without_steps_makes_no_receipt(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--receipt", str(tmp_path))
    status, _, err = told(capsys, tmp_path, *words)
    assert status == 2
    assert "has no metrics.jsonl of at least 5 steps" in err


@pytest.mark.thorough
def test_plans_are_run_and_ranked_by_what_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.toml").write_text(SMALL.replace("memory_gb = 1.0", "memory_gb = 80.0"))
    ran: list[str] = []
    trials: list[str] = []

    def run(command: Sequence[str], trial: str, *, steps: int) -> str:
        assert command[command.index("--max-steps") + 1] == str(steps)
        plan = command[command.index("--plan") + 1].removesuffix("+guard(on_out_of_memory=stop)")
        ran.append(plan)
        trials.append(trial)
        if "stages" in plan:
            return "the pipeline cannot be cut so"
        folder = Path(command[command.index("--run-dir") + 1])
        folder.mkdir()
        total = 0.5 if "shard=4" in plan else 0.3
        parts = {"compute": total - 0.1, "communication": 0.05, "optimizer": 0.05, "data": 0.0, "total": total}
        last = int(command[command.index("--max-steps") + 1])
        (folder / "metrics.jsonl").write_text(metrics(last, parts))
        return ""

    monkeypatch.setattr(verify, "_problem_of", run)
    words = ("--workers", "4", "--cluster", str(tmp_path / "small.toml"), "--verify", "100")
    status, out, _ = told(capsys, tmp_path, *words, make=ENCODER)
    assert status == 0
    assert ran[0] == "replicas=1+shard=4+batch(micro=4)", "the script's plan is run first: the others learn from it"
    assert len(ran) == len(set(ran)) > 3
    assert trials[0] == "4:20,1:6,2:6,8:6", "the first one in other micro-batches, too"
    assert not any(trials[1:])
    table = out.split("the fastest first\n")[-1].split("\n\n")[0].splitlines()[1:]
    assert table[0].split()[:2] == ["300", "ms"]
    assert "stages" in table[-1]
    assert table[-1].endswith("the pipeline cannot be cut so")
    assert sum("<- the script's" in line for line in table) == 1
    assert all(is_exact(Plan.parse(one)) for one in ran), "what learns otherwise is not tried, however fast it is"
    assert len((tmp_path / "small.receipts.jsonl").read_text().splitlines()) == 3 + sum(
        "stages" not in one for one in ran
    )


def test_fast_steps_are_measured_after_the_processes_have_started() -> None:
    def trial(*step_s: float) -> str:
        plans: list[Any] = [
            SimpleNamespace(
                step=SimpleNamespace(step_s=one), plan=SimpleNamespace(batch=SimpleNamespace(resolved_micro=n))
            )
            for n, one in enumerate(step_s)
        ]
        return verify.trial_of(plans)

    assert trial(10.0, 10.0) == "0:20,1:6", "so many at least, however long they take"
    assert trial(0.02, 0.01) == "0:125,1:20", "two seconds to settle, half a one to measure, a fifth for another size"
    assert trial(1e-6) == "0:300", "a prediction may be far off: not more"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--cluster", "h100x8-ib", "--verify", "2"), "name it as --cluster here"),
        (("--cluster", "here", "--verify", "0"), "--verify is 0"),
        (("--cluster", "here", "--cluster", "h100x8-ib", "--verify", "1"), "name only that"),
        (("--verify", "1"), "--verify goes with --cluster"),
    ],
)
def test_verifying_is_of_this_machine_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    status, _, err = told(capsys, tmp_path, *words)
    assert status == 2
    assert says in err


@pytest.mark.thorough
def test_the_predicted_step_is_written_as_a_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("--workers", "4", "--cluster", "h100x8-ib", "--trace", str(tmp_path / "step.json"))
    status, out, _ = told(capsys, tmp_path, *words)
    assert status == 0
    assert "step.json: the predicted step; open it in ui.perfetto.dev" in out
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    assert {"forward 0", "backward 0", "optimizer"} <= {one["name"] for one in events}
