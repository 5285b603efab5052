"""DeepSpeed's configuration as a plan: each key has an answer, and what does not fit is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import quick
from paceline.compat.deepspeed_files.batch_sizes import settle_batch
from paceline.compat.deepspeed_files.config import convert_config, fp16_options, read_config
from paceline.compat.deepspeed_files.config_keys import IGNORED, OFF, REFUSED, TAKEN
from paceline.compat.deepspeed_files.config_table import load_config
from paceline.errors import PlanError
from paceline.plan import Plan

ADAM = {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "weight_decay": 3e-7}}


def answers(table: dict[str, Any], workers: int | None = None) -> dict[str, dict[str, str]]:
    found = convert_config(table, workers=workers)
    return {"taken": dict(found.taken), "ignored": dict(found.ignored), "refused": dict(found.refused)}


def leaves(table: dict[str, Any], above: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in table.items():
        key = f"{above}{name}"
        found |= leaves(value, f"{key}.") if isinstance(value, dict) else {key}
    return found


@pytest.mark.parametrize(
    ("zero", "workers", "plan"),
    [
        ({"stage": 0}, 4, "replicas=4+batch(size=64,micro=16)"),
        ({"stage": 1}, 4, "shard=4+zero=1+batch(size=64,micro=16)"),
        ({"stage": 2}, 2, "shard=2+zero=2+batch(size=64,micro=32)"),
        ({"stage": 3}, 2, "shard=2+batch(size=64,micro=32)"),
        ({"stage": 3}, 1, "batch(size=64,micro=64)"),
        ({"stage": 3, "mics_shard_size": 2}, 4, "replicas=2+shard=2+batch(size=64,micro=16)"),
    ],
)
def test_the_stage_is_the_layout(zero: dict[str, Any], workers: int, plan: str) -> None:
    assert convert_config({"train_batch_size": 64, "zero_optimization": zero}, workers=workers).plan == plan


@pytest.mark.parametrize(
    ("table", "sizes"),
    [
        ({"train_batch_size": 64}, (64, 16, 1)),
        ({"train_micro_batch_size_per_gpu": 8}, (32, 8, 1)),
        ({"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 3}, (96, 8, 3)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, (64, 8, 2)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, (64, 4, 4)),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}, (64, 4, 4)),
    ],
)
def test_batch_sizes_complete_each_other(table: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    found = settle_batch(table, 4)
    assert (found.train, found.micro, found.accumulation) == sizes


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({}, "has no batch size"),
        ({"train_batch_size": 10}, "train_batch_size is 10, which 1 accumulation steps x 4 workers = 4 do not divide"),
        ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 2}, "2 samples a micro-batch x 4 workers = 8"),
        (
            {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3},
            "4 samples a micro-batch x 3 accumulation steps x 4 workers are 48",
        ),
        ({"train_batch_size": 0}, "train_batch_size is 0; it must be a whole number of at least 1"),
        ({"train_batch_size": 6.5}, "train_batch_size is 6.5"),
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(table: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        settle_batch(table, 4)


def test_the_number_of_workers_is_what_all_three_batch_sizes_tell() -> None:
    table = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert convert_config({**table, "zero_optimization": {"stage": 2}}).plan.startswith("shard=8+zero=2")


@pytest.mark.parametrize(
    ("said", "norm"), [({}, 1.0), ({"gradient_clipping": 0}, None), ({"gradient_clipping": 3}, 3.0)]
)
def test_gradients_are_clipped_where_a_configuration_does_not_say_it(said: dict[str, Any], norm: float | None) -> None:
    table = {"train_batch_size": 4, "optimizer": ADAM, **said}
    assert read_config(table, workers=2, on_cpu=True).clipping == norm
    assert ("clip_norm=1.0" in answers(table, 2)["taken"]["gradient_clipping"]) == (norm == 1.0)


def test_each_key_has_one_answer() -> None:
    table: dict[str, Any] = {
        "train_batch_size": 16,
        "steps_per_print": 2000,
        "optimizer": ADAM,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 1000}},
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 15, "opt_level": "O2"},
        "wall_clock_breakdown": False,
        "zero_optimization": {
            "stage": 2,
            "allgather_bucket_size": 50000000,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/fast", "pin_memory": True},
            "stage3_prefetch_bucket_size": "auto",
        },
        "tensorboard": {"enabled": True, "output_path": "runs"},
        "wandb": {"enabled": True, "project": "mine"},
        "data_efficiency": {"enabled": True, "data_sampling": {"num_epochs": 3}},
        "communication_data_type": "bf16",
        "zero_optimisation": {"stage": 1},
    }
    found = answers(table, 2)
    given = [key for kind in found.values() for key in kind]
    assert len(given) == len(set(given))
    known = leaves(table) - {"data_efficiency.enabled", "data_efficiency.data_sampling.num_epochs"}
    known -= {key for key in known if key.startswith(("optimizer.params.", "scheduler.params.", "zero_optimisation."))}
    assert known <= set(given)
    assert set(found["refused"]) == {"data_efficiency", "zero_optimisation"}
    assert "did you mean zero_optimization?" in found["refused"]["zero_optimisation"]
    conversion = convert_config(table, workers=2)
    assert conversion.plan == (
        "shard=2+zero=2+batch(size=16,micro=8)+compute(precision=bf16,offload=optimizer,offload_path=%2Ffast)"
    )
    assert conversion.job == {"log": "wandb"}
    assert found["taken"]["optimizer.type"].startswith("torch.optim.AdamW(lr=0.001, betas=(0.8, 0.999)")
    assert found["ignored"]["communication_data_type"].startswith("a sharded replica")


@pytest.mark.parametrize("key", quick.some(sorted(TAKEN | IGNORED.keys() | REFUSED.keys()), step=6))
def test_a_known_key_is_known(key: str) -> None:
    value: Any = {"zero_optimization.stage": 1, "optimizer.type": "Adam", "scheduler.type": "StepLR"}.get(key, 0)
    for name in reversed(key.split(".")):
        value = {name: value}
    try:
        found = answers({"train_batch_size": 8, **value}, 2)
    except PlanError as error:  # a value that is no value of this key
        assert key.rpartition(".")[2] in str(error)
        return
    assert not any("no such key" in why for why in found["refused"].values())


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_what_is_not_here_is_refused_where_it_is_on(key: str) -> None:
    def nested(value: Any) -> dict[str, Any]:
        for name in reversed(key.split(".")):
            value = {name: value}
        return {"train_batch_size": 8, **value}

    assert key in answers(nested({"enabled": True}))["refused"]
    assert key in answers(nested({"some": "thing"}))["refused"]
    for off in [*OFF, {"enabled": False}]:
        assert answers(nested(off))["ignored"][key] == "it is switched off"


def test_compression_is_on_where_one_of_its_parts_is() -> None:
    parts = {"row_pruning": {"shared_parameters": {"enabled": False}}, "layer_reduction": {"enabled": True}}
    assert "compression_training" in answers({"train_batch_size": 8, "compression_training": parts})["refused"]
    parts["layer_reduction"]["enabled"] = False
    assert "compression_training" in answers({"train_batch_size": 8, "compression_training": parts})["ignored"]


@pytest.mark.parametrize(
    ("kind", "params", "text"),
    [
        ("OneBitAdam", {}, "compressed, by the plan"),
        ("ZeroOneAdam", {}, "onebit"),
        ("Lamb", {}, "initialize(optimizer=...)"),
        ("Adma", {}, "it must be one of Adam, AdamW"),
        ("Adam", {"bias_correction": False}, "bias_correction"),
        ("AdamW", {"max_grad_norm": 1.0}, "gradient_clipping"),
    ],
)
def test_optimizers_that_nothing_stands_for_are_refused(kind: str, params: dict[str, Any], text: str) -> None:
    table = {"train_batch_size": 8, "optimizer": {"type": kind, "params": params}}
    assert text in answers(table)["refused"]["optimizer.type"]
    with pytest.raises(PlanError, match=r"asks for what there is not:\n  optimizer.type: "):
        read_config(table, workers=1, on_cpu=True)


@pytest.mark.parametrize(
    ("optimizer", "stands"),
    [
        (ADAM, "torch.optim.AdamW(lr=0.001, betas=(0.8, 0.999), weight_decay=3e-07)"),
        ({"type": "Adam", "params": {"lr": 0.1}}, "torch.optim.AdamW(lr=0.1, weight_decay=0.0)"),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "torch.optim.Adam(weight_decay=0.0)"),
        ({"type": "AdamW", "params": {"torch_adam": True}}, "torch.optim.AdamW()"),
        ({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "torch.optim.SGD(lr=0.1, momentum=0.9)"),
    ],
)
def test_the_optimizer_that_stands_for_it(optimizer: dict[str, Any], stands: str) -> None:
    found = read_config({"train_batch_size": 8, "optimizer": optimizer}, workers=1, on_cpu=True)
    assert str(found.optimizer) == stands


def test_fp16_has_deepspeeds_defaults_and_names() -> None:
    assert fp16_options({"enabled": True}) == {
        "precision": "fp16",
        "loss_scale_start": 65536.0,
        "loss_scale_window": 1000,
        "loss_scale_hysteresis": 2,
    }
    given = {"enabled": True, "initial_scale_power": 15, "loss_scale_window": 500, "hysteresis": 1, "loss_scale": 0}
    assert fp16_options(given)["loss_scale_start"] == 32768.0
    assert fp16_options({"enabled": True, "loss_scale": 128}) == {"precision": "fp16", "loss_scale": 128.0}
    with pytest.raises(PlanError, match=r"fp16.hysteresis is 'two'; it must be a number"):
        fp16_options({"enabled": True, "hysteresis": "two"})


def test_what_the_trainer_fills_in_is_said_to_be_open() -> None:
    table = {
        "train_batch_size": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "fp16": {"enabled": "auto"},
    }
    found = answers(table, 2)
    assert "Hugging Face" in found["ignored"]["train_batch_size"]
    assert not found["refused"]
    with pytest.raises(PlanError, match=r"optimizer.params.lr is 'auto'"):
        read_config({**table, "train_batch_size": 8}, workers=1, on_cpu=True)


def test_offloading_to_the_memory_in_which_workers_compute_is_left_out() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    table = {"train_batch_size": 8, "zero_optimization": zero}
    assert read_config(table, workers=2, on_cpu=True).plan.compute.offload == "none"
    assert read_config(table, workers=2, on_cpu=False).plan.compute.offload == "optimizer"


def test_a_plan_is_one_that_can_be_parsed() -> None:
    table = {"train_batch_size": 8, "communication_data_type": "fp16", "compile": {"deepcompile": True}}
    plan = Plan.parse(convert_config(table, workers=2).plan)
    assert (plan.compute.compile, str(plan.wire)) == (True, str(Plan.parse("cast(dtype=fp16)").wire))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"train_batch_size": 1, "train_batch_size": 2}', "the key 'train_batch_size' is written twice"),
        ("[1]", "holds a list, and no JSON object"),
        ("{", "is no JSON"),
    ],
)
def test_files_that_are_no_configuration_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=said):
        load_config(path)


def test_a_configuration_is_a_dict_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 8}))
    assert load_config(str(path)) == load_config({"train_batch_size": 8})
    with pytest.raises(PlanError, match="cannot be read"):
        load_config(tmp_path / "none.json")
    with pytest.raises(PlanError, match="is a int; it must be a dict"):
        load_config(3)


@pytest.mark.parametrize(
    "table",
    [
        {"zero_optimization": {"stage": 4}},
        {"zero_optimization": {"stage": True}},
        {"zero_optimization": True},
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        {"communication_data_type": "int8"},
        {"gradient_clipping": -1},
        {"zero_optimization": {"offload_optimizer": {"device": "gpu"}}},
        {"zero_optimization": {"stage": 3, "mics_shard_size": 3}},
    ],
)
def test_values_that_have_no_meaning_are_refused(table: dict[str, Any]) -> None:
    with pytest.raises(PlanError):
        convert_config({"train_batch_size": 8, **table}, workers=4)


def test_workers_that_share_samples_are_not_for_a_programs_own_loop() -> None:
    table = {"train_batch_size": 8, "tensor_parallel": {"autotp_size": 2}}
    assert convert_config(table, workers=4).plan.startswith("replicas=2+tensor=2")
    with pytest.raises(PlanError, match="a loop of the program's own cannot split layers"):
        read_config(table, workers=4, on_cpu=True)
