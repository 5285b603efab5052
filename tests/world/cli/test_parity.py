"""`paceline parity` holds where the script is right, and fails where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quick
import warm
from paceline.cli import main as cli

HEAD = """
import sys
import torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.data import TensorDataset
import paceline

def data(count):
    x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :4].argmax(1))
"""

EVERYTHING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.tied.weight
        self.head = nn.Linear(12, 4)

    def forward(self, x):
        x = self.drop(torch.relu(self.norm(self.first(x))))
        return self.head(torch.tanh(self.again(torch.relu(self.tied(x)))))

def train(worker):
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, 2, 0.5))
    step = worker.stepper(model, optim, F.cross_entropy, clip_norm=0.5)
    for batch in worker.batches(data(90), epochs=3, weights=[1.0 + row % 3 for row in range(90)]):
        worker.report(loss=step(batch))
        scheduler.step()

if __name__ == "__main__":  # the script's own numbers of replicas and workers give way to the command's
    plan = paceline.Plan(layout=paceline.Layout(replicas=4), batch=paceline.Batch(size=20, micro=3))
    paceline.run(train, plan=plan, workers=4, save_every=1)
"""

CONTRAST = """
def contrast(model, micro):
    a, b = (F.normalize(model(x), dim=1) for x in (micro[0], micro[0] + 0.1 * torch.randn_like(micro[0])))
    return F.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

def train(worker):
    model = worker.prepare(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    step = worker.stepper(model, optim, forward=contrast)
    for batch in worker.batches(data(64), epochs=5):
        step(batch)

if __name__ == "__main__":
    paceline.run(train, plan="batch(size=16,micro=4)")
"""

GAN = """
def train(worker):
    gen = worker.prepare(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 6)), name="generator")
    dis = worker.prepare(nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)), name="discriminator")
    g_optim, d_optim = (worker.prepare(torch.optim.Adam(model.parameters(), lr=1e-2)) for model in (gen, dis))

    def noise(x):
        return torch.randn(len(x), 2, dtype=x.dtype)

    def d_loss(model, micro):
        with torch.no_grad():
            fake = gen(noise(micro[0]))
        return F.softplus(-model(micro[0])).mean() + F.softplus(model(fake)).mean()

    d_step = worker.stepper(dis, d_optim, forward=d_loss)
    g_step = worker.stepper(gen, g_optim, forward=lambda model, micro: F.softplus(-dis(model(noise(micro[0])))).mean())
    for batch in worker.batches(data(64), epochs=5):
        worker.report(d_loss=d_step(batch), g_loss=g_step(batch))

if __name__ == "__main__":
    paceline.run(train, plan="batch(size=16)")
"""

LOOP = """
def train(worker):
    model = worker.prepare(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in worker.batches(data(50), epochs=5):
        for x, y in batch:
            worker.backward({loss})
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        optim.zero_grad()

if __name__ == "__main__":
    paceline.run(train, plan="batch(size=12,micro=3)", workers=3)
"""
QUEUES = """
class Moco(nn.Module):
    def __init__(self, K=24, dim=5):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, dim))
        self.k = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, dim))
        self.k.load_state_dict(self.q.state_dict()); self.k.requires_grad_(False)
        rows = torch.randn(dim, K, generator=torch.Generator().manual_seed(3))
        self.register_buffer("queue", F.normalize(rows, dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))
        self.register_buffer("labels", torch.zeros(K, dtype=torch.long))
        self.register_buffer("shift", torch.randn(7, 3, generator=torch.Generator().manual_seed(4)))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.tensor(0.0))
        self.register_buffer("ema", torch.zeros(6))
        self.register_buffer("hist", torch.zeros(4, dtype=torch.long))
        self.register_buffer("flag", torch.tensor(0, dtype=torch.uint8))
    def forward(self, x, y):
        q = F.normalize(self.q(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.k(x + 0.1 * torch.randn_like(x)), dim=1)
        neg = q @ self.queue.clone().detach()
        logits = torch.cat([(q * k).sum(1, keepdim=True), neg], 1) / 0.2
        with torch.no_grad():
            n, K, p = len(k), self.queue.shape[1], int(self.queue_ptr)
            idx = (p + torch.arange(n)) % K
            self.queue[:, idx] = k.T
            self.labels[idx] = y
            self.queue_ptr[0] = (p + n) % K
            if n < 7:
                self.shift.copy_(torch.cat([self.shift[n:], k[:, :3]]))
            self.calls += 1
            self.seen += n
            self.ema.mul_(0.9).add_(0.1 * x.mean(0))
            self.hist += torch.bincount(y, minlength=4)
            self.flag.fill_(1)
        return F.cross_entropy(logits, torch.zeros(n, dtype=torch.long))

def train(worker):
    torch.manual_seed(1)
    model = worker.prepare(Moco())
    optim = worker.prepare(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
    step = worker.stepper(model, optim, forward=lambda m, b: m(*b))
    for batch in worker.batches(data(50), epochs=6):
        worker.report(loss=step(batch))


if __name__ == "__main__":
    paceline.run(train, plan="batch(size=16,micro=5)")
"""
DROPPED = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(12, 12), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(torch.relu(self.inner(x)))

def train(worker):
    model = worker.prepare(nn.Sequential(nn.Linear(6, 12), *(Block() for _ in range(3)), nn.Linear(12, 4)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, lambda output, y: {factor} * F.cross_entropy(output, y))
    for batch in worker.batches(data(90), epochs=3):
        worker.report(loss=step(batch))

if __name__ == "__main__":
    paceline.run(train)
"""
PLAIN = LOOP.replace("{loss}", "F.cross_entropy(model(x), y)")
ASKS_RANK = LOOP.replace("{loss}", "F.cross_entropy(model(x) * (1 + 0.1 * worker.rank), y)")
SCALED_BY_HAND = LOOP.replace("{loss}", "F.cross_entropy(model(x), y) / worker.workers").replace(
    "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n", ""
)
SUMMED_BY_HAND = LOOP.replace("{loss}", "F.cross_entropy(model(x), y) * len(batch)")
UNSEEDED = PLAIN.replace("\ndef train", "\nown = torch.Generator()\nown.seed()\n\ndef train").replace(
    "model(x)", "model(x + 0.1 * torch.randn(x.shape, generator=own))"
)
RAISES = LOOP.replace("{loss}", "[][worker.rank]")


@pytest.fixture
def parity(tmp_path: Path) -> Any:
    """Runs the command; checks that it leaves no temporary files."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def run(script: str, *options: str) -> subprocess.CompletedProcess[str]:
        path = tmp_path / "train.py"
        path.write_text(HEAD + script)
        words = [sys.executable, "-m", "paceline", "parity", str(path), *options]
        done = warm.run(words, env=os.environ | {"TMPDIR": str(scratch)}, stderr=subprocess.PIPE, timeout=110)
        assert [path.name for path in scratch.iterdir() if path.name.startswith("paceline")] == []
        return done

    return run


def row(text: str, label: str) -> list[str]:
    """The figures of a configuration, from the table."""
    return next(line for line in text.splitlines() if line.startswith(f"{label}  ")).removeprefix(label).split()


# ---------------------------------------------------------------------------------------------------------- it holds


def test_dropout_batch_norm_tied_weights_clipping_and_accumulation_do_not_break_it(parity: Any) -> None:
    done = parity(EVERYTHING, "--workers", "1,2,3", "--bare")
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (0, "parity holds"), done.stdout + done.stderr
    assert row(done.stdout, "1 worker")[:7] == ["0"] * 7, "the same computation twice"
    bare = row(done.stdout, "1 worker, against a plain torch loop")
    assert max(map(float, bare[:2])) < 1e-6 and max(map(float, bare[3:7])) < 1e-5, "also without Paceline's steps"
    for label in ("2 workers", "3 workers"):
        loss, first, _, weights = map(float, row(done.stdout, label)[:4])
        assert loss < 1e-6
        assert 0 < first < 1e-6, "another order of sums: not exactly equal, and very close"
        assert weights < 1e-4
    assert "plan batch(size=20,micro=3), 12 steps, against one process in float32" in done.stdout


def test_in_float64_the_same_script_agrees_to_fourteen_digits(parity: Any) -> None:
    done = parity(EVERYTHING, "--workers", "2,3", "--float64", "--json", "--steps", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["holds"] is True
    assert [one["workers"] for one in told["configurations"]] == [2, 3]
    for one in told["configurations"]:
        assert one["plan"] == f"replicas={one['workers']}+batch(size=20,micro=3)+compute(precision=fp64)"
        assert (one["steps"], one["tolerance"]["numbers"]) == (3, 1e-9)
        assert one["loss"]["value"] < 1e-14
        assert one["first_gradients"]["value"] < 1e-14
        assert one["weights"]["value"] < 1e-12


@pytest.mark.thorough
def test_fp16_finds_its_loss_scale_in_the_same_steps_as_a_plain_torch_loop(parity: Any) -> None:
    scale = "compute(precision=fp16,loss_scale_start=268435456.0,loss_scale_window=3)"
    done = parity(EVERYTHING, "--workers", "2", "--bare", "--plan", f"batch(size=20,micro=3)+{scale}")
    assert (done.returncode, done.stdout.strip().splitlines()[-1]) == (0, "parity holds"), done.stdout + done.stderr
    assert "12 steps, against one process in float16" in done.stdout


@pytest.mark.parametrize("script", [CONTRAST, GAN, PLAIN], ids=["in_batch_loss", "two_steppers", "plain_loop"])
def test_it_holds_for(script: str, parity: Any) -> None:
    done = parity(script, "--workers", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    (one,) = json.loads(done.stdout)["configurations"]
    # The same order of sums may give the same bits: that they were compared is seen by the step.
    assert (one["first_gradients"]["step"], one["first_gradients"]["value"] < 1e-5) == (1, True), (
        "gradients were compared"
    )


def test_queues_counters_flags_and_running_means_are_as_in_a_plain_loop(parity: Any) -> None:
    """Their averages would agree on any number of workers, and be wrong on each."""
    plans = ["--plan", "batch(size=16,micro=5)", "--plan", "shard=2+batch(size=16,micro=5)"]
    done = parity(QUEUES, "--workers", "2", "--bare", "--json", "--steps", "5", *plans)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["configurations"]
    assert [one["against"] for one in rows] == ["a plain torch loop", "one process"] * 2
    assert max(one[kind]["value"] for one in rows for kind in ("loss", "buffers", "metrics")) < 1e-5


# -------------------------------------------------------------------------------------------------------- it does not


@pytest.mark.parametrize("factor", ["1.0", "(1 + 0.1 * (worker.workers > 1))"], ids=["right", "asks_workers"])
def test_dropout_under_stages_is_compared_with_a_process_that_draws_by_unit(factor: str, parity: Any) -> None:
    options = ("--plan", "stages=2+batch(size=20,micro=3)", "--steps", "2", "--json")
    done = parity(DROPPED.replace("{factor}", factor), "--workers", "2", *options)
    (one,) = json.loads(done.stdout)["configurations"]
    assert one["draws_by_unit"], done.stderr
    assert "running one process, random numbers as under stages (reference)" in done.stderr
    if factor == "1.0":
        assert one["holds"] and max(one[kind]["value"] for kind in ("loss", "gradients", "weights")) < 1e-6, done.stdout
    else:
        assert not one["holds"] and one["departs_first"]["module"] == "model", done.stdout


@pytest.mark.parametrize(
    ("script", "says"),
    [
        pytest.param(ASKS_RANK, "gradients differ most in model.", id="loss_asks_rank"),
        quick.further(SCALED_BY_HAND, "gradients differ most in model.", id="divided_by_workers"),
        pytest.param(SUMMED_BY_HAND, "the loss differs by", id="times_own_micro_batches"),
    ],
)
def test_a_script_that_depends_on_the_number_of_workers_is_found_out(script: str, says: str, parity: Any) -> None:
    is_located = script == ASKS_RANK  # that takes three more runs
    done = parity(script, "--workers", "2", *([] if is_located else ["--no-where"]))
    assert done.returncode == 1, done.stdout + done.stderr
    assert row(done.stdout, "2 workers")[-1] == "DIFFERS"
    assert ("first departs in model, loss of step 1: the mean of the losses, of right outputs" in done.stdout) == (
        is_located
    )
    assert says in done.stdout
    assert "Usual causes:" in done.stdout and "check with --float64" in done.stdout
    assert done.stdout.endswith("parity does not hold for 1 of 1 configurations\n")


def test_a_script_that_does_not_repeat_itself_is_told_so(parity: Any) -> None:
    done = parity(UNSEEDED, "--workers", "1")
    assert done.returncode == 1
    assert "the script does not repeat itself" in done.stdout


def test_a_wire_of_16_bits_is_seen_and_may_be_allowed_for(parity: Any, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    wires = ["--plan", "cast(dtype=bf16)+batch(size=12)", "--plan", "cast(dtype=fp16)+batch(size=12)"]
    done = parity(PLAIN, "--workers", "2", *wires, "--keep", str(kept))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Cast(dtype='bf16') rounds gradients to 16 bits: allow for it with --tolerance" in done.stdout
    bf16, fp16 = (float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("2 workers  "))
    assert 1e-3 < bf16 < 1e-2
    counted = [line.split()[1] for line in done.stderr.splitlines() if line.startswith("parity: ")]
    assert counted == ["1/3", "2/3", "3/3"]
    assert 1e-4 < fp16 < 2e-3, "fp16 keeps three bits more"
    names = ["plan_1_reference", "plan_1_workers_2", "plan_2_workers_2"]
    assert sorted(path.name for path in kept.iterdir()) == names, "both plans have the same reference"
    assert (kept / "plan_1_workers_2" / "captured" / "gradients_1.safetensors").exists()

    assert parity(PLAIN, "--workers", "2", *wires[:2], "--tolerance", "1e-2").returncode == 0


def test_a_plan_that_is_refused_or_fails_has_its_row_and_the_others_are_compared(parity: Any) -> None:
    raises = "    if worker.plan.batch.size == 9: raise ValueError('no')\n    for batch"
    plans = [text for size in (1, 9, 12) for text in ("--plan", f"batch(size={size},micro=3)")]
    done = parity(PLAIN.replace("    for batch", raises), "--workers", "2", "--steps", "1", *plans)
    assert done.returncode == 1, done.stdout + done.stderr
    assert row(done.stdout, "2 workers")[-1] == "holds"
    refused, failed = done.stdout.split(", not compared\n")[1:]
    assert row(refused, "all") == ["REFUSED"] and "wants micro-batches larger than the whole batch" in refused
    assert row(failed, "all") == ["FAILED"] and "ValueError: no" in failed
    assert done.stdout.endswith("parity holds for what was compared; 2 could not be compared\n")


def test_a_script_that_fails_shows_its_traceback(parity: Any) -> None:
    done = parity(RAISES, "--workers", "2")
    assert done.returncode == 1
    assert "the run with one process (reference) failed" in done.stderr
    assert "IndexError: list index out of range" in done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_a_number_of_workers_that_the_scripts_plan_cannot_feed_is_refused_after_the_reference(parity: Any) -> None:
    done = parity(PLAIN, "--workers", "2,5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "makes 4 micro-batches a step, but the job has 5 workers" in done.stderr
    assert "parity: 2/3" not in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tolerance", "-1"], "--tolerance is -1.0; it must be more than 0"),
        (["--tolerance", "much"], "--tolerance is 'much'"),
        (["--device", "tpu"], "--device is 'tpu'"),
        (["--steps", "0"], "must be at least 1 each"),
        (["--workers", ""], "--workers"),
        (["--plan", "cast(dtype=fp8)"], "fp8"),
        (["--workers", "2", "--plan", "batch(size=1)"], "the job has 2 workers"),
        (["--float64", "--plan", "cast(dtype=bf16)"], "rounds or leaves out"),
        (["--keep", "."], "is there already and not an empty directory"),
        (["--plans", "default"], "did you mean --plan?"),
    ],
)
def test_a_usage_mistake_is_refused_before_anything_starts(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(9)")
    assert cli.main(["parity", str(script), *options]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert says in told.err
