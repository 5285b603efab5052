"""`paceline import`: what is read of other frameworks' checkpoints, what fits a script, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint.reader import find, open_checkpoint
from paceline.checkpoint.safetensors_file import write_safetensors
from paceline.cli.main import main
from paceline.compat.imports.files import read_safetensors
from paceline.compat.imports.fit import fit_checkpoint, fit_optimizer
from paceline.compat.imports.naming import Naming, likely_prefix
from paceline.compat.imports.readers import read_foreign
from paceline.errors import CheckpointError, PlanError


class Net(nn.Module):
    """Has a buffer, and a weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


SCRIPT = """\
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def train(worker):
    model = worker.prepare(Net())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, 2))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(TensorDataset(torch.randn(8, 4), torch.zeros(8).long())):
        step(batch)


if __name__ == "__main__":
    paceline.run(train, workers=1)
"""


def trained() -> tuple[Net, torch.optim.AdamW, torch.optim.lr_scheduler.StepLR]:
    torch.manual_seed(0)
    model = Net()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 2)
    for _ in range(3):
        model(torch.randn(8, 4)).sum().backward()
        optim.step()
        schedule.step()
    return model, optim, schedule


def written(folder: Path, kind: str) -> tuple[Path, Net, torch.optim.AdamW]:
    """A checkpoint of a kind, and what it holds."""
    model, optim, schedule = trained()
    weights = model.state_dict()
    path = folder / "state"
    match kind:
        case "torch":
            content: Any = {"model": weights, "optimizer": optim.state_dict(), "scheduler": schedule.state_dict()}
            path = folder / "state.pt"
            torch.save({**content, "step": 3, "epoch": 1, "loss": torch.tensor(0.5)}, path)
        case "ddp":
            path = folder / "state.pt"
            prefixed = {f"module.{name}": value for name, value in weights.items()}
            torch.save({"state_dict": prefixed, "optimizer_state_dict": optim.state_dict()}, path)
        case "lightning":
            path = folder / "last.ckpt"
            content = {"state_dict": weights, "optimizer_states": [optim.state_dict()], "loops": {"fit": 1}}
            content |= {"lr_schedulers": [schedule.state_dict()], "epoch": 1, "global_step": 3}
            torch.save({**content, "pytorch-lightning_version": "2.5.0"}, path)
        case "accelerate":
            path.mkdir()
            torch.save(weights, path / "pytorch_model.bin")
            torch.save(optim.state_dict(), path / "optimizer.bin")
            torch.save(schedule.state_dict(), path / "scheduler.bin")
            (path / "random_states_0.pkl").write_bytes(pickle.dumps({}))
        case "huggingface":
            path.mkdir()
            own = {name: one for name, one in weights.items() if name != "last.weight"}  # tied: stored once
            halves = [dict(list(own.items())[:3]), dict(list(own.items())[3:])]
            for number, half in enumerate(halves):
                infos = {name: (one.dtype, tuple(one.shape)) for name, one in half.items()}
                write_safetensors(path / f"part{number}.safetensors", infos, half.__getitem__, {})
            places = {name: f"part{number}.safetensors" for number, half in enumerate(halves) for name in half}
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
            torch.save(optim.state_dict(), path / "optimizer.pt")
            torch.save(schedule.state_dict(), path / "scheduler.pt")
            (path / "trainer_state.json").write_text(json.dumps({"global_step": 3, "epoch": 0.5}))
        case _:
            raise ValueError(kind)
    return path, model, optim


@pytest.mark.parametrize("kind", ["torch", "ddp", "lightning", "accelerate", "huggingface"])
def test_each_kind_comes_in_whole_under_the_names_of_the_script(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, model, optim = written(tmp_path, kind)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["import", str(path), "--script", "train.py", "--run-dir", "run"]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    newest = find(Path("run/checkpoints"), verified=True).newest
    assert newest is not None
    checkpoint = open_checkpoint(newest, verified=True)
    step = {"ddp": 0, "accelerate": 0}.get(kind, 3)
    assert checkpoint.step == step
    assert f"step {step}" in said
    loaded = checkpoint.load()
    for name, value in model.state_dict().items():
        assert torch.equal(loaded[f"model.{name}"], value), name
    names = {id(one): name for name, one in model.named_parameters()}
    for parameter, state in optim.state.items():
        for entry, value in state.items():
            assert torch.equal(loaded[f"optimizer.state.model.{names[id(parameter)]}.{entry}"], value)
    assert checkpoint.state["run"]["optimizers"]["optimizer"]["groups"][0]["lr"] == optim.param_groups[0]["lr"]
    assert ("scheduler" in checkpoint.state["run"]["objects"]) == (kind != "ddp")
    assert "state of 4 parameters for optimizer" in said


def test_a_run_begins_with_a_file_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, _, _ = written(tmp_path, "torch")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["import", str(path), "--script", "train.py", "--run-dir", "run"]
    assert main([*words, "--dry-run"]) == 0
    assert not Path("run").exists()
    assert main([*words, "--weights-only", "--step", "7"]) == 0
    assert "anew" in capsys.readouterr().out
    assert main(words) == 2
    assert "run has checkpoints of its own" in capsys.readouterr().err


def test_what_does_not_fit_is_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights = {f"net.{name}": value for name, value in Net().state_dict().items()}
    torch.save(weights, "state.pt")
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["import", "state.pt", "--script", "train.py", "--run-dir", "run"]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert "missing     first.weight [4, 4]" in said
    assert "unexpected  net.first.weight [4, 4]" in said
    assert "try --prefix-strip net." in said
    assert not Path("run").exists()
    torch.save({**weights, "net.first.bias": torch.zeros(5), "net.more": torch.zeros(1)}, "state.pt")
    assert main([*words, "--prefix-strip", "net."]) == 1
    said = capsys.readouterr().out
    assert "other shape  first.bias: [5] in the file, [4] in the model" in said
    assert "unexpected   more [1]" in said
    torch.save({**weights, "net.more": torch.zeros(1)}, "state.pt")
    assert main([*words, "--rename", "net.="]) == 1
    assert main([*words, "--rename", "net.=", "--leave-unexpected"]) == 0


class Evil:
    """Makes a file if it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_files_with_code_are_refused_and_it_is_not_run(tmp_path: Path) -> None:
    torch.save({"model": Net().state_dict(), "more": Evil(tmp_path / "made")}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"would run code from the file.*save weights alone"):
        read_foreign(tmp_path / "evil.pt")
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="which no index of tensors needs"):
        read_foreign(folder)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "are not those of its shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [400, 408]}}, "beyond the end"),
        ({"a": {"dtype": "X9", "shape": [2], "data_offsets": [0, 8]}}, "of the type 'X9'"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, -8]}}, "are not those of its shape"),
        ({"a": 3}, "is no safetensors file"),
    ],
)
def test_damaged_safetensors_are_refused(header: Any, says: str, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=says):
        read_safetensors(tmp_path / "a.safetensors")


def test_things_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty").mkdir()
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"weights_of": 1}, tmp_path / "none.pt")
    for name, says in {
        "missing": "there is no",
        "a.txt": "is no file of torch.save",
        "empty": "none of what can be read",
        "list.pt": "no dictionary of tensors",
        "none.pt": "its keys are weights_of",
    }.items():
        with pytest.raises(CheckpointError, match=says):
            read_foreign(tmp_path / name)


def test_optimizer_state_of_another_order_or_grouping_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optim = torch.optim.AdamW(list(model.parameters())[::-1])
    model(torch.ones(1, 4)).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "optimizer": optim.state_dict()}, tmp_path / "a.pt")
    [state] = read_foreign(tmp_path / "a.pt").optimizers
    with pytest.raises(PlanError, match=r"exp_avg of model\.0\.weight has the shape \[2\], and the parameter \[3, 4\]"):
        fit_optimizer(state, torch.optim.AdamW(model.parameters()), {"model": model}, Naming((), ()))
    grouped = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    with pytest.raises(PlanError, match=r"groups of 4 parameters, and the script's optimizer holds groups of 2, 2"):
        fit_optimizer(state, grouped, {"model": model}, Naming((), ()))


def test_weights_of_another_type_are_converted_and_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    torch.save({name: one.bfloat16() for name, one in model.state_dict().items()}, tmp_path / "a.pt")
    fit = fit_checkpoint(read_foreign(tmp_path / "a.pt"), model, Naming((), ()))
    assert fit.converted == {"weight": torch.float32, "bias": torch.float32}
    assert torch.equal(fit.read("weight"), model.weight.bfloat16().float())
    torch.save({name: one.int() for name, one in model.state_dict().items()}, tmp_path / "b.pt")
    with pytest.raises(PlanError, match="do not hold the same kind of numbers"):
        fit_checkpoint(read_foreign(tmp_path / "b.pt"), model, Naming((), ()))


def test_names_lose_wrappers_unless_the_model_has_them() -> None:
    naming = Naming((), ())
    assert naming.apply("module._orig_mod.a.weight", {"a.weight"}) == "a.weight"
    assert naming.apply("module.a.weight", {"module.a.weight"}) == "module.a.weight"
    assert Naming(("net.",), ("a=b", "=top.")).apply("net.a.weight", ()) == "top.b.weight"
    assert likely_prefix(["net.a.w", "net.a.b", "x"], ["a.w", "a.b"]) == "net."
    with pytest.raises(PlanError, match="two names become one"):
        Naming(("net.",), ()).apply_all({"net.a": 1, "a": 2}, ())
    with pytest.raises(PlanError, match="renames nothing"):
        Naming((), ("a",))
