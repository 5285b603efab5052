"""Checkpoints that DeepSpeed has written: whole tensors come out of its files, and no code of theirs runs."""

from __future__ import annotations

import collections
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline.compat
from paceline.compat.config_file import convert_config_file
from paceline.compat.deepspeed_files.checkpoint_reading import read_deepspeed_checkpoint
from paceline.compat.deepspeed_files.safe_pickles import Inert, load_safely
from paceline.compat.imports.readers import read_foreign
from paceline.errors import CheckpointError

SHAPES = {"a.weight": (3, 5), "a.bias": (3,), "b.weight": (2, 3)}
WORKERS = 2


@pytest.fixture
def stage_class() -> Iterator[type]:
    """DeepSpeed's own enumeration, as far as a pickle of it goes: a class in a module that no reader has."""
    module = types.ModuleType("deepspeed_of_strangers")

    class Stage(int):
        pass

    Stage.__module__, Stage.__qualname__ = module.__name__, "Stage"
    module.Stage = Stage  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    yield Stage
    sys.modules.pop(module.__name__, None)


def tensors(seed: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=made) for name, shape in SHAPES.items()}


def model_state(**more: Any) -> dict[str, Any]:
    return {
        "module": {"norm.mean": torch.arange(3.0), **{name: one.bfloat16() for name, one in tensors(1).items()}},
        "buffer_names": ["norm.mean"],
        "param_shapes": [collections.OrderedDict((name, torch.Size(shape)) for name, shape in SHAPES.items())],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {"head.weight": "b.weight"},
        "global_steps": 7,
        "ds_version": "0.19",
        "epoch": 2,
        **more,
    }


def flat(values: dict[str, Tensor], parts: int, *, padded_to: int) -> list[Tensor]:
    vector = torch.cat([one.flatten() for one in values.values()])
    vector = torch.cat([vector, torch.zeros(-len(vector) % padded_to)])
    return list(vector.chunk(parts))


def write_stage_2(folder: Path, stage: Any) -> None:
    folder.mkdir(parents=True)
    torch.save(model_state(), folder / "mp_rank_00_model_states.pt")
    weights, means = (flat(tensors(seed), WORKERS, padded_to=2 * WORKERS) for seed in (1, 2))
    for worker in range(WORKERS):
        inner = {"state": {0: {"exp_avg": means[worker], "step": torch.tensor(7.0)}}, "param_groups": [{"lr": 0.1}]}
        state = {
            "zero_stage": stage,
            "partition_count": WORKERS,
            "single_partition_of_fp32_groups": [weights[worker]],
            "base_optimizer_state": inner,
        }
        path = folder / f"zero_pp_rank_{worker}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, path)


def write_stage_3(folder: Path) -> None:
    folder.mkdir(parents=True)

    def parts(values: dict[str, Tensor], worker: int) -> Tensor:
        cut = [
            torch.cat([one.flatten(), torch.zeros(-one.numel() % WORKERS)]).chunk(WORKERS) for one in values.values()
        ]
        return torch.cat([one[worker] for one in cut])

    for worker in range(WORKERS):
        torch.save(model_state(), folder / f"zero_pp_rank_{worker}_mp_rank_00_model_states.pt")
        inner = {"state": {0: {"exp_avg": parts(tensors(2), worker), "step": 7}}, "param_groups": [{"lr": 0.1}]}
        state = {
            "zero_stage": 3,
            "partition_count": WORKERS,
            "fp32_flat_groups": [parts(tensors(1), worker)],
            "optimizer_state_dict": inner,
        }
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{worker}_mp_rank_00_optim_states.pt")


def write_universal(folder: Path) -> None:
    for name, value in tensors(1).items():
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": value.flatten()}, folder / "zero" / name / "fp32.pt")  # as those that were ZeRO 3
        torch.save({"param": tensors(2)[name]}, folder / "zero" / name / "exp_avg.pt")
        torch.save(torch.tensor(7.0), folder / "zero" / name / "step.pt")
    torch.save(model_state(), folder / "mp_rank_00_model_states.pt")


def test_reading_leaves_deepspeed_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stage_3(tmp_path / "global_step7")
    (tmp_path / "ds_config.json").write_text('{"train_batch_size": 4}')
    for name in [one for one in sys.modules if one.startswith("paceline.compat.deepspeed")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("deepspeed", "deepspeed_files"):
        monkeypatch.setattr(paceline.compat, name, None, raising=False)  # put back after the imports of this test
    itself, finders = types.ModuleType("deepspeed"), list(sys.meta_path)
    monkeypatch.setitem(sys.modules, "deepspeed", itself)
    require_equal(
        {name: one.read() for name, one in read_foreign(tmp_path / "global_step7").tensors.items()}, tensors(1)
    )
    assert "batch(size=4" in convert_config_file(tmp_path / "ds_config.json").plan
    assert sys.modules["deepspeed"] is itself
    assert sys.meta_path == finders


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert {name: found[name].tolist() for name in expected} == {name: one.tolist() for name, one in expected.items()}


@pytest.mark.parametrize("kind", ["stage 2", "stage 3", "universal"])
def test_whole_tensors_by_name(tmp_path: Path, stage_class: type, kind: str) -> None:
    folder = tmp_path / "out" / "global_step7"
    if kind == "stage 2":
        write_stage_2(folder, stage_class(2))
        sys.modules.pop(stage_class.__module__)
    elif kind == "stage 3":
        write_stage_3(folder)
    else:
        write_universal(folder)
    (tmp_path / "out" / "latest").write_text("global_step7")
    for path in (tmp_path / "out", folder):
        found = read_deepspeed_checkpoint(path)
        require_equal(found.weights, tensors(1))
        assert torch.equal(found.weights["head.weight"], tensors(1)["b.weight"])
        assert found.weights["norm.mean"].tolist() == [0, 1, 2]
        require_equal({name: one["exp_avg"] for name, one in found.optimizer.items()}, tensors(2))
        assert {float(one["step"]) for one in found.optimizer.values()} == {7.0}
        assert (found.step, found.client_state) == (7, {"epoch": 2})
        if kind != "universal":
            assert found.groups == [{"lr": 0.1, "params": list(SHAPES)}]


def test_whole_replicas_have_their_optimizer_by_the_order_of_parameters(tmp_path: Path) -> None:
    module = {"norm.mean": torch.arange(3.0), **tensors(1)}
    state = {number: {"exp_avg": one} for number, one in enumerate(tensors(2).values())}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2]}]}
    torch.save(model_state(module=module, optimizer=optimizer), tmp_path / "mp_rank_00_model_states.pt")
    found = read_deepspeed_checkpoint(tmp_path)
    require_equal(found.weights, tensors(1))
    require_equal({name: one["exp_avg"] for name, one in found.optimizer.items()}, tensors(2))
    assert found.groups[0]["params"] == list(SHAPES)


def test_frozen_parameters_are_found_by_what_the_optimizer_keeps(tmp_path: Path) -> None:
    def read(module: dict[str, Tensor], kept: list[Tensor]) -> dict[str, Any]:
        state = {number: {"exp_avg": one} for number, one in enumerate(kept)}
        optimizer = {"state": state, "param_groups": [{"params": list(range(len(kept)))}]}
        torch.save(model_state(module=module, optimizer=optimizer), tmp_path / "mp_rank_00_model_states.pt")
        return read_deepspeed_checkpoint(tmp_path).optimizer

    frozen = {"first.weight": torch.ones(4, 4), **tensors(1)}
    found = read(frozen, list(tensors(2).values()))
    require_equal({name: one["exp_avg"] for name, one in found.items()}, tensors(2))
    assert read({"a": torch.ones(2), "b": torch.ones(2)}, [torch.ones(2)]) == {}  # either of the two may be frozen


def test_groups_of_an_optimizer_are_told_apart_by_the_shapes_of_what_it_keeps(tmp_path: Path) -> None:
    groups = [["a.weight", "b.weight"], ["a.bias"]]
    kept = [tensors(2)[name] for names in groups for name in names]
    optimizer = {
        "state": {number: {"exp_avg": one} for number, one in enumerate(kept)},
        "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
    }
    torch.save(model_state(module=tensors(1), optimizer=optimizer), tmp_path / "mp_rank_00_model_states.pt")
    found = read_deepspeed_checkpoint(tmp_path)
    require_equal({name: one["exp_avg"] for name, one in found.optimizer.items()}, tensors(2))
    assert found.groups == [{"lr": rate, "params": names} for rate, names in zip((0.1, 0.2), groups, strict=True)]


@pytest.mark.parametrize("is_flat", [False, True])
def test_fp32_copies_of_half_weights_are_told_apart_by_their_values(tmp_path: Path, is_flat: bool) -> None:
    exact, means, names = tensors(1), tensors(2), ["b.weight", "a.weight", "a.bias"]
    module = {"frozen": torch.ones(3).bfloat16(), **{name: one.bfloat16() for name, one in exact.items()}}
    names = list(SHAPES) if is_flat else names
    state: dict[str, Any] = {"fp32_groups": [[exact[name] for name in names]]}
    kept = {number: {"exp_avg": means[name], "step": 7} for number, name in enumerate(names)}
    if is_flat:
        state = {"fp32_groups_flat": flat(exact, 1, padded_to=1)}
        kept = {0: {"exp_avg": flat(means, 1, padded_to=1)[0], "step": 7}}
    inner = {"state": kept, "param_groups": [{"lr": 0.1, "params": list(kept)}]}
    optimizer = {"optimizer_state_dict": inner, **state}
    torch.save(model_state(module=module, optimizer=optimizer), tmp_path / "mp_rank_00_model_states.pt")
    found = read_deepspeed_checkpoint(tmp_path)
    require_equal(found.weights, {**exact, "frozen": torch.ones(3)})
    require_equal({name: one["exp_avg"] for name, one in found.optimizer.items()}, means)
    assert found.groups == [{"lr": 0.1, "params": names}]


def write_pipeline(folder: Path, *, frozen: bool) -> None:
    """Two stages, each with an optimizer of whole parameters."""
    parts = [["a.weight", "a.bias"], ["b.weight"]]
    for number, names in enumerate(parts):
        layer = {name.partition(".")[2]: tensors(1)[name] for name in names}
        torch.save(layer, folder / f"layer_{2 * number:02d}-model_states.pt")
        kept = {place: {"exp_avg": tensors(2)[name], "step": 7} for place, name in enumerate(names)}
        optimizer = {"state": kept, "param_groups": [{"lr": 0.1, "params": list(kept)}]}
        state = model_state(module=None, optimizer=optimizer, param_shapes=None, buffer_names=[], shared_params={})
        torch.save(state, folder / f"mp_rank_{number:02d}_model_states.pt")
    if frozen:
        torch.save({"weight": torch.ones(3, 5)}, folder / "layer_05-model_states.pt")


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pipeline_has_its_layers_and_the_optimizers_of_its_stages(tmp_path: Path, frozen: bool) -> None:
    write_pipeline(tmp_path, frozen=frozen)
    found = read_deepspeed_checkpoint(tmp_path)
    names = {"a.weight": "0.weight", "a.bias": "0.bias", "b.weight": "2.weight"}
    require_equal(found.weights, {names[name]: one for name, one in tensors(1).items()})
    if frozen:  # which one is, cannot be told
        assert (found.optimizer, found.groups) == ({}, [])
        return
    require_equal(
        {name: one["exp_avg"] for name, one in found.optimizer.items()},
        {names[name]: one for name, one in tensors(2).items()},
    )
    assert found.groups == [{"lr": 0.1, "params": list(names.values())}]


def test_files_that_do_not_fit_each_other_are_refused(tmp_path: Path) -> None:
    write_stage_2(tmp_path / "a", 2)
    (tmp_path / "a" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match="has 1 files of optimizer state, but 2 workers wrote it"):
        read_deepspeed_checkpoint(tmp_path / "a")
    write_stage_2(tmp_path / "b", 2)
    shapes = [collections.OrderedDict({"a.weight": torch.Size((30, 50))})]
    torch.save(model_state(param_shapes=shapes), tmp_path / "b" / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=r"too few for a.weight of shape \[30, 50\]"):
        read_deepspeed_checkpoint(tmp_path / "b")


def test_folders_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder"):
        read_deepspeed_checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match="neither"):
        read_deepspeed_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("../outside")
    with pytest.raises(CheckpointError, match="must be the name of a folder"):
        read_deepspeed_checkpoint(tmp_path)
    (tmp_path / "latest").write_text("gone")
    with pytest.raises(CheckpointError, match="has no folder 'gone'"):
        read_deepspeed_checkpoint(tmp_path)
    torch.save(model_state(), tmp_path / "mp_rank_01_model_states.pt")
    with pytest.raises(CheckpointError, match="tensor parallel engine"):
        read_deepspeed_checkpoint(tmp_path)


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_file_runs_no_code(tmp_path: Path) -> None:
    mark, path = tmp_path / "ran", tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"module": {"w": torch.ones(2)}, "evil": Evil(mark), "ok": [1]}, path)
    found = load_safely(path)
    assert not mark.exists()
    assert isinstance(found["evil"], Inert)
    assert found["module"]["w"].tolist() == [1, 1]
    assert "evil" not in read_deepspeed_checkpoint(tmp_path).client_state


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "builtins.getattr", "torch.load", "torch.hub.load"])
def test_no_function_that_a_file_names_is_found(tmp_path: Path, name: str) -> None:
    module, _, function = name.rpartition(".")
    code = f"c{module}\n{function}\n(Vtouch {tmp_path}/ran\ntR.".encode()
    path = tmp_path / "a.pt"
    torch.save({"x": 1}, path)
    _replace_pickle(path, code)
    assert isinstance(load_safely(path), Inert)
    assert not (tmp_path / "ran").exists()


def _replace_pickle(path: Path, code: bytes) -> None:
    import zipfile

    with zipfile.ZipFile(path) as archive:
        held = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, code if name.endswith("/data.pkl") else data)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    path.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointError, match=r"no file of torch.save"):
        load_safely(path)
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(tmp_path / "jit.pt"))
    with pytest.raises(CheckpointError, match="TorchScript"):
        load_safely(tmp_path / "jit.pt")
    torch.save({"a": torch.ones(4)}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[:-60])
    with pytest.raises(CheckpointError):
        load_safely(tmp_path / "cut.pt")
