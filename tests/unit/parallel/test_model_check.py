"""A look at what a script prepares tells all that stands against its plan at once, and what workers would hold."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from expert_models import WIDTH, ListedExperts, StackedExperts
from paceline.cli.main import main
from paceline.cli.plan import table
from paceline.errors import PlanError
from paceline.parallel.check.memory_estimate import estimate_memory
from paceline.parallel.check.model_check import check_model
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.meta.fake_weights import fake_weights, filled_weights
from paceline.parallel.offload.optimizer_state import PIECE_BYTES, brought_bytes
from paceline.plan import CommandPlan, Layout, Plan
from paceline.worker.script_inspection import InspectionReport, InspectionWorker, inspect_script
from paceline.worker.worker import Worker

CPU = torch.device("cpu")

MODELS = """
import sys
import paceline, torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        samples, length, width = x.shape
        q, k, v = (p.view(samples, length, self.heads, -1).transpose(1, 2) for p in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class Gated(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.mix, self.up, self.down = Attention(heads), nn.Linear(24, 5), nn.Linear(5, 24)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.mix(x))))


class Net(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.embed, self.norm = nn.Embedding(40, 24), nn.LayerNorm(24)
        self.a = nn.ModuleList([Attention(heads) for _ in range(2)])
        self.b = nn.ModuleList([Gated(heads) for _ in range(2)])
        self.head, self.idle = nn.Linear(24, 40, bias=False), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        self.head.weight = self.embed.weight

    def forward(self, x):
        h = self.embed(x)
        for block in [*self.a, *self.b]:
            h = h + block(self.norm(h))
        return self.head(h)
"""

TRAIN = """
def train(worker):
    model = worker.prepare(Net(heads=6))
    optim = worker.prepare(torch.optim.AdamW(model.parameters()))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches([0] * 8):
        raise SystemError("it trains")


print("said by the script", sys.argv[1:])
paceline.run(train, workers=4, plan="shard=4")
raise SystemError("the script goes on")
"""


def look(tmp_path: Path, text: str, plan: str | None = None, *, workers: int | None = None) -> InspectionReport:
    script = tmp_path / "train.py"
    script.write_text(MODELS + text)
    parsed = None if plan is None else Plan.parse(plan)
    return inspect_script(script, args=(), plan=CommandPlan(whole=parsed), workers=workers)


def told(found: InspectionReport) -> dict[str, str]:
    return {one.module: str(one) for one in found.refusals}


def remarked(found: InspectionReport, module: str) -> str:
    return " ".join(one.what for one in found.remarks if one.module == module)


def test_sizes_that_do_not_divide_and_a_broken_rule_come_in_one_list_with_the_sizes_that_would(tmp_path: Path) -> None:
    refused = told(look(tmp_path, TRAIN, "tensor=4", workers=6))
    assert list(refused) == ["plan", "a.*.qkv", "b.*.mix.qkv", "b.*.up"]
    assert "Layout needs a multiple of 4 workers (tensor) but the job has 6." in refused["plan"]
    for name in ("a.*.qkv", "b.*.mix.qkv"):
        assert f"the 6 heads of {name} do not divide among 4 workers. Use tensor=1 or 2 or 3 or 6," in refused[name]
    assert "the 5 features of b.*.up leave the last of 4 workers without any." in refused["b.*.up"]


def test_a_plan_that_works_is_told_with_what_is_cut_tied_and_unused_and_runs_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = look(tmp_path, TRAIN, "stages=2", workers=2)
    assert found.refusals == []
    assert "stages 0, 1 each hold it, and their gradients are summed on stage 0" in remarked(found, "embed.weight")
    assert "the sample does not use it" in remarked(found, "idle")
    assert remarked(found, "idle.0") == ""  # told once, of the whole
    assert "embed" in remarked(found, "stage 0") and "b.1 to" in remarked(found, "stage 1")
    out, err = capsys.readouterr()
    assert (out, err) == ("", "said by the script []\n"), "a table that is piped has nothing else in it"


def test_tensors_of_every_kind_that_cannot_be_split_come_with_too_many_stages(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        """
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.zeros(3, 4).t())
        self.wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.table = nn.Embedding(4, 3, sparse=True)
        self.line = nn.Linear(3, 3)

    def forward(self, x):
        return self.line(self.table(x))


paceline.run(lambda worker: worker.prepare(Odd()))
""",
        "shard=2+stages=4",
    )
    refused = [one for one in found.refusals if one.module != "plan"]
    assert [one.module for one in refused] == ["table", "scale", "turned", "wave", "what is in no block", "Odd"]
    assert "make it nn.Parameter(torch.ones(1))" in refused[1].remedy
    assert "Odd has 2 modules that could be on a stage of their own" in refused[-1].what
    assert found.sizes == {}
    few = find_stages_error(Layout(stages=2, schedule="interleaved", stages_per_worker=3))
    assert "and Layout(stages=2, stages_per_worker=3) makes 6 stages. Use fewer stages_per_worker, fewer stages" in few


def test_sparse_gradients_and_synchronized_norms_are_refused_beside_what_tensor_parallel_would_do(
    tmp_path: Path,
) -> None:
    found = look(
        tmp_path,
        """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(8, 8, sparse=True), nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.SyncBatchNorm(4)

    def forward(self, x):
        return self.norm(self.down(torch.tanh(self.up(self.table(x)))))


def train(worker):
    worker.prepare(Words(), sample=torch.zeros(2, dtype=torch.int64))


paceline.run(train)
""",
        "tensor=2",
    )
    refused = told(found)
    assert "makes sparse gradients" in refused["table"]
    assert "norm is a SyncBatchNorm" in refused["norm"] and "Use BatchNorm" in refused["norm"]


def find_stages_error(layout: Layout) -> str:
    error = check_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), Plan(layout=layout), device=CPU).error()
    return str(error)


ASKS = """
class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.one(x)
        if h.max() > 0:
            h = -h
        return self.two(h)


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.two(self.one(x["a"]))


def train(worker):
    worker.prepare(Asks()), worker.prepare(Picky())


paceline.run(train, plan="stages=2", workers=2)
"""


def test_code_that_stages_cannot_follow_is_told_with_its_line_beside_a_model_without_a_sample(tmp_path: Path) -> None:
    found = look(tmp_path, ASKS)
    line = (MODELS + ASKS).splitlines().index("        if h.max() > 0:") + 1
    asks, picky = found.refusals[-2:]
    assert asks.module == "one" and f"__bool__() at train.py:{line}, after one" in asks.what
    assert picky.module == "Picky" and picky.remedy.startswith("Give a batch of two: sample=(x,)")


ROUTED = """
import paceline, torch
from torch import nn

class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        best, out = self.router(x).argmax(1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, = torch.where(best == number)
            out = out.index_add(0, rows, expert(x[rows]))
        return x + out

def train(worker):
    model = nn.Sequential(nn.Linear(8, 8), Routed(), Routed(), nn.Linear(8, 2))
    worker.prepare(model, sample=(torch.randn(4, 8),), units=["1", "2"])
    for batch in worker.batches([0, 1]): ...

paceline.run(train, plan="stages=2", workers=2)
"""


def test_units_that_only_run_on_numbers_are_looked_at_without_weights_as_they_run_with_them(tmp_path: Path) -> None:
    assert not look(tmp_path, ROUTED, "stages=2", workers=2).refusals


def test_a_script_that_looks_into_its_weights_is_run_with_real_ones_and_that_is_said(tmp_path: Path) -> None:
    found = look(
        tmp_path,
        """
def train(worker):
    model = nn.Linear(4, 4)
    assert float(model.weight.sum()) == float(model.weight.sum())
    worker.prepare(model)


paceline.run(train)
""",
        "shard=2",
    )
    assert "its weights were made for this look" in remarked(found, "train.py")
    with pytest.raises(ZeroDivisionError):
        look(tmp_path, "\n1 / 0\n")
    with pytest.raises(PlanError, match=r"train\.py ended without calling paceline\.run"):
        look(tmp_path, "")


@pytest.mark.parametrize(
    ("plan", "parameters", "gradients", "optimizer", "peak"),
    [
        # 8 units of 8 x 16 and 16 numbers of 4 bytes: P = G = 4608, and Adam's O = 2 P and a count of 4 bytes for each
        # of 16 tensors. Split in two, P = 2304; the largest unit has 576.
        ("default", 4608, 4608, 9216 + 64, 4608 + 4608 + 9216 + 64),
        ("shard=2", 2304, 2304, 4608 + 64, 2304 + 2304 + 4608 + 64 + 3 * 576),
        ("shard=2+zero=2", 2304, 2304, 4608 + 64, 2304 + 2304 + 4608 + 64 + 4608 + 2 * 576),
        ("shard=2+zero=1", 2304, 2304, 4608 + 64, 2304 + 4608 + 64 + 4608 + 4608),
        # In bf16 there are two bytes of a number, and four of a count, as before.
        ("compute(state=bf16)", 4608, 4608, 4608 + 64, 4608 + 4608 + 4608 + 64),
        # Elsewhere is the optimizer's state but for that of one parameter, or all but what is gathered.
        ("compute(offload=optimizer)", 4608, 4608, 9216 + 64, 4608 + 4608 + 2 * 4 * 8 * 16 + 4),
        ("shard=2+compute(offload=optimizer,offload_path=/x)", 2304, 2304, 4608 + 64, 2 * 2304 + 3 * 576 + 512 + 4),
        ("compute(offload=all)", 4608, 4608, 9216 + 64, 3 * 576),
        ("shard=2+compute(offload=all)", 2304, 2304, 4608 + 64, 3 * 576),
    ],
)
def test_bytes_per_worker_follow_the_formulas(
    tmp_path: Path, plan: str, parameters: int, gradients: int, optimizer: int, peak: int
) -> None:
    found = look(
        tmp_path,
        """
def train(worker):
    model = worker.prepare(nn.Sequential(*[nn.Linear(8, 16) for _ in range(8)]))
    optim = worker.prepare(torch.optim.AdamW(model.parameters()))
    torch.optim.lr_scheduler.LambdaLR(optim, lambda step: 1.0)
    worker.batches([0])


paceline.run(train)
""",
        plan,
    )
    [sizes] = found.sizes["model"]
    assert (sizes.parameters, sizes.gradients, sizes.optimizer, sizes.peak) == (parameters, gradients, optimizer, peak)
    of_all = {"none": 0, "optimizer": optimizer, "all": parameters + gradients + optimizer}
    assert sizes.elsewhere == of_all[found.plan.compute.offload]


def test_state_that_is_offloaded_comes_in_pieces_where_the_optimizer_looks_at_each_element_alone() -> None:
    parameter = nn.Parameter(torch.empty(32 << 20, device="meta"))  # of 128 MiB, and so is each moment
    for kind, brought in ((torch.optim.AdamW, 2 * PIECE_BYTES), (torch.optim.Adafactor, 256 << 20)):
        assert brought_bytes(kind([parameter]), parameter, 256 << 20) == brought


def test_the_table_says_where_what_is_offloaded_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODELS + TRAIN)
    plan = "shard=2+compute(offload=optimizer,offload_path=/fast/disk)"
    assert main(["plan", str(script), "--check", "--workers", "2", "--plan", plan]) == 0
    *_, head, row, where = capsys.readouterr().out.splitlines()
    assert head.split()[3] == "elsewhere" and len(row.split("  ")) > 4
    assert where.startswith("Elsewhere is files in /fast/disk; ")


def test_units_that_the_script_names_are_what_is_gathered(tmp_path: Path) -> None:
    text = """
def train(worker):
    model = worker.prepare(nn.Sequential(*[nn.Linear(8, 16) for _ in range(8)]), units=["3"])
    optim = worker.prepare(torch.optim.SGD(model.parameters()))
    worker.batches([0])


paceline.run(train)
"""
    found = look(tmp_path, text, "shard=2")
    [sizes] = found.sizes["model"]
    assert sizes.peak == 2304 + 2304 + 3 * 7 * 576, "all others are one unit"
    assert "gathered by itself is 3 of 576 B." in remarked(found, "Sequential")
    wrong = look(tmp_path, text.replace('["3"]', '["layers.*"]'), "shard=2+stages=2").refusals
    assert ["names no module of Sequential" in str(one) for one in wrong] == [True, False], "all at once"
    with pytest.raises(TypeError, match=r"units='layers\.\*'\) takes a list of names: units=\['layers\.\*'\]"):
        ModelHints(units="layers.*")


def test_prepare_raises_what_all_axes_refuse_together() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    model[0].weight = nn.Parameter(torch.zeros(4, 6).t())
    found = check_model(model, Plan(layout=Layout(shard=2, tensor=4)), device=CPU)
    error = found.error()
    assert error is not None and error.reasons == found.refusals
    for part in ("0.weight is not contiguous in memory", "the 6 features of 0 leave the last of 4 workers without any"):
        assert part in str(error)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.listed, self.stacked = ListedExperts(), StackedExperts()


def test_beside_experts_the_rows_of_all_else_are_over_more_workers_and_experts_are_units() -> None:
    model, plan = Mixed(), Plan(layout=Layout(shard=2, experts=2))
    found = check_model(model, plan, device=CPU)
    (sizes,) = estimate_memory(model, found, plan, [torch.optim.SGD(model.parameters())])
    whole = sum(parameter.nbytes for parameter in model.parameters())
    assert sizes.parameters == sizes.gradients == whole // 4
    assert sizes.peak == 2 * sizes.parameters + 3 * sum(one.nbytes for one in model.listed.parameters()) // 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(64, 64))
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.a.weight = self.b.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_models_on_the_meta_device_keep_no_weights_stay_tied_and_can_be_run_while_they_are_filled() -> None:
    with fake_weights():
        model = Tied()
        assert all(one.is_meta for one in model.parameters()) and model.a.weight is model.b.weight
        with filled_weights(model):
            assert model(torch.ones(2, 64)).shape == (2, 64)
            assert model.a.weight is model.b.weight and model.a.weight.untyped_storage().nbytes() == 4
            assert not any(one.is_meta for one in nn.Linear(2, 2).parameters()), "what a proof copies is real"
        assert model.a.weight.is_meta
    assert not Tied().a.weight.is_meta


def test_who_looks_answers_to_every_public_name_of_a_worker() -> None:
    looker = InspectionWorker(InspectionReport(plan=Plan(), workers=1), fill=None)
    assert all(hasattr(looker, name) for name in dir(Worker) if not name.startswith("_"))
    hints = {field.name: field.default for field in dataclasses.fields(ModelHints)}
    taken = {one.name: one.default for one in inspect.signature(Worker.prepare).parameters.values()}
    assert {key: value for key, value in taken.items() if key not in ("self", "thing", "name", "buffers")} == hints
    model = torch.nn.BatchNorm1d(2)
    assert looker.prepare(model, buffers={"running_*": "mean"}) is model


@pytest.mark.parametrize(("rank", "told"), [(0, [True, 0]), (None, [False, 3])])
def test_a_look_beside_a_run_does_not_do_what_its_first_worker_does(
    tmp_path: Path, rank: int | None, told: list[object]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import json, paceline\n"
        "def train(worker):\n"
        f"    open({str(tmp_path / 'told')!r}, 'w').write(json.dumps([worker.is_first, worker.rank]))\n"
        "paceline.run(train, workers=4)\n"
    )
    inspect_script(script, args=(), plan=CommandPlan(), workers=None, rank=rank)
    assert json.loads((tmp_path / "told").read_text()) == told


def test_the_command_prints_a_table_of_100_columns_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(MODELS + TRAIN)
    assert main(["plan", str(script), "--check", "--plan", "tensor=4", "--lr", "1"]) == 2
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "3 things stand against replicas=1+tensor=4+batch(micro=4)"
    assert lines[1].split() == ["module", "what", "remedy"]
    assert max(map(len, lines)) <= 100
    assert "said by the script ['--lr', '1']" in err
    assert main(["plan", str(script), "--check"]) == 0
    assert capsys.readouterr().out.startswith("Nothing stands against replicas=1+shard=4+batch(micro=4).")


def test_cells_of_a_table_are_wrapped_side_by_side() -> None:
    assert table([("a b", "1 2 3"), ("c", "4")], (1, 3)) == "a  1 2\nb  3\nc  4"


def test_long_names_of_modules_go_on_from_a_dot() -> None:
    text = table([("model.embed_tokens.weight", "is one tensor with lm_head.weight")], (24, 18))
    assert text == "model.embed_tokens        is one tensor with\n.weight                   lm_head.weight"
    assert table([("a" * 30, "x")], (24, 3)) == "a" * 24 + "  x\n" + "a" * 6
