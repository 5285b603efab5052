"""Files of `accelerate launch`: what becomes a plan and a job, and what of them is ignored or refused, key by key."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.compat.accelerate.launch_config import read_launch_config
from paceline.compat.conversion import ConfigConversion
from paceline.errors import PlanError
from paceline.plan import Plan


def read(folder: Path, text: str, *, name: str = "config.yaml") -> ConfigConversion:
    (folder / name).write_text(text)
    return read_launch_config(folder / name)


@pytest.mark.parametrize(
    ("text", "plan", "job"),
    [
        ("distributed_type: 'NO'\nmixed_precision: 'no'", "", {}),
        (
            "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4",
            "compute(precision=bf16)",
            {"workers": "4"},
        ),
        ("distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2", "", {"workers": "2", "device": "cpu"}),
        (
            "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n"
            "  fsdp_activation_checkpointing: true\n  fsdp_offload_params: true",
            "shard=8+compute(recompute=blocks,offload=all)",
            {"workers": "8"},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_sharding_strategy: 2}",
            "shard=8+zero=2",
            {"workers": "8"},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\n"
            "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}",
            "shard=8+zero=2",
            {"workers": "8"},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 2\nmain_process_ip: 10.0.0.1\n"
            "main_process_port: 9999\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}",
            "replicas=2+shard=4",
            {"workers": "8", "hosts": "2", "head": "10.0.0.1:9999"},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  parallelism_config_dp_replicate_size: 2\n"
            "  parallelism_config_dp_shard_size: 2\n  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 1",
            "replicas=2+shard=2+tensor=2",
            {"workers": "8"},
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 3\n"
            "  offload_optimizer_device: cpu\n  offload_param_device: none",
            "shard=4+compute(offload=optimizer)",
            {"workers": "4"},
        ),
        ("distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}", "compute(compile=true)", {}),
    ],
)
def test_a_file_becomes_a_plan_and_a_job(tmp_path: Path, text: str, plan: str, job: dict[str, str]) -> None:
    found = read(tmp_path, text)
    assert (found.plan, found.job, found.refused) == (plan, job, [])
    Plan.parse(found.plan or "default").require(workers=int(job.get("workers", 1)))


def test_every_key_is_in_one_list(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MEGATRON_LM\nnum_processes: 4\nmixed_precision: fp8\n"
        "rdzv_backend: static\ntpu_env: []\ntpu_name: pod\nmegatron_lm_config: {megatron_lm_tp_degree: 2}\n"
        "colour: red\n",
    )
    listed = [text.partition(":")[0] for part in (found.taken, found.ignored, found.refused) for text, _ in part]
    assert sorted(listed) == sorted(
        [
            *("compute_environment", "distributed_type", "num_processes", "mixed_precision", "rdzv_backend", "tpu_env"),
            *("tpu_name", "megatron_lm_config.megatron_lm_tp_degree", "colour"),
        ]
    )
    refused = {text.partition(":")[0]: why for text, why in found.refused}
    assert refused.keys() == {
        "distributed_type",
        "tpu_name",
        "megatron_lm_config.megatron_lm_tp_degree",
        "colour",
    }
    assert ("mixed_precision", "compute(precision=fp8)") in [(text.partition(":")[0], why) for text, why in found.taken]
    assert "tensor=" in refused["distributed_type"]
    assert "no such key" in refused["colour"]


def test_json_is_read_too(tmp_path: Path) -> None:
    found = read(tmp_path, '{"distributed_type": "MULTI_GPU", "num_processes": 2}', name="config.json")
    assert found.job == {"workers": "2"}


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.yaml", "- one\n- two", "must be a table"),
        ("config.yaml", "a: [", "is no YAML"),
        ("config.json", "{", "is no JSON"),
        ("config.yaml", "num_processes: many", "num_processes is 'many'"),
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        read(tmp_path, text, name=name)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        read_launch_config(tmp_path / "none.yaml")
