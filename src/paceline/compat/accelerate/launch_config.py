"""Reads a configuration file of `accelerate launch` (YAML or JSON, as `accelerate config` makes it)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from paceline.compat.conversion import ConfigConversion
from paceline.errors import PlanError
from paceline.plan import Compute, Layout, Plan

__all__ = ["read_launch_config"]

SAME = "all hosts run the same command"
FOUND = "units are found in the model; prepare(model, units=...) corrects them"
IGNORED = {
    "machine_rank": SAME,
    "rdzv_backend": "the hosts meet at --head",
    "same_network": "the hosts meet at --head",
    "main_training_function": "a script is run from its first line",
    "enable_cpu_affinity": "each worker gets an even share of the host's cores: --threads",
    "debug": "a worker that calls another operation than the others is named anyway",
    "downcast_bf16": "about TPUs",
    "fsdp_config.fsdp_version": "there is one kind of sharding",
    "fsdp_config.fsdp_auto_wrap_policy": FOUND,
    "fsdp_config.fsdp_transformer_layer_cls_to_wrap": FOUND,
    "fsdp_config.fsdp_min_num_params": FOUND,
    "fsdp_config.fsdp_backward_prefetch": "the next unit is gathered ahead anyway",
    "fsdp_config.fsdp_backward_prefetch_policy": "the next unit is gathered ahead anyway",
    "fsdp_config.fsdp_forward_prefetch": "the next unit is gathered ahead anyway",
    "fsdp_config.fsdp_use_orig_params": "parameters are the model's own",
    "fsdp_config.fsdp_sync_module_states": "every worker gets the first one's weights",
    "fsdp_config.fsdp_cpu_ram_efficient_loading": "each worker builds the model, and keeps its part",
    "fsdp_config.fsdp_state_dict_type": "checkpoints have one format, which any layout reads",
    "deepspeed_config.zero3_init_flag": "each worker builds the model, and keeps its part",
    "deepspeed_config.zero3_save_16bit_model": "accelerator.save_model writes whole weights",
    "deepspeed_config.deepspeed_multinode_launcher": "paceline run --on ssh, slurm or kubernetes",
    "deepspeed_config.gradient_accumulation_steps": "the program says it: Accelerator(gradient_accumulation_steps=...)",
    "deepspeed_config.gradient_clipping": "the program says it: accelerator.clip_grad_norm_(...)",
    "dynamo_config.dynamo_mode": "torch's default mode is used",
    "dynamo_config.dynamo_use_fullgraph": "each unit is compiled by itself",
    "dynamo_config.dynamo_use_dynamic": "each unit is compiled by itself",
    "dynamo_config.dynamo_use_regional_compilation": "each unit is compiled by itself",
}
ABSENT = {
    "tpu_name": "there are no TPUs",
    "tpu_zone": "there are no TPUs",
    "tpu_use_cluster": "there are no TPUs",
    "tpu_use_sudo": "there are no TPUs",
    "tpu_vm": "there are no TPUs",
    "tpu_env": "there are no TPUs",
    "command_file": "there are no TPUs",
    "commands": "there are no TPUs",
    "fp8_config": "torchao's recipes are the plan's: compute(precision=fp8,fp8_recipe=rowwise)",
    "mpirun_config": "mpirun starts workers by itself: mpirun -n 8 python train.py",
    "megatron_lm_config": "write the plan: tensor=, stages= (with worker.stepper), context=",
}
STRATEGIES = {  # of FSDP: shard within a host, and the stage of ZeRO
    "FULL_SHARD": (False, 3),
    "SHARD_GRAD_OP": (False, 2),
    "NO_SHARD": (False, 0),
    "HYBRID_SHARD": (True, 3),
    "HYBRID_SHARD_ZERO2": (True, 2),
}
NUMBERED = dict(enumerate(STRATEGIES, start=1))
AXES = {
    "parallelism_config_dp_replicate_size": "replicas",
    "parallelism_config_dp_shard_size": "shard",
    "parallelism_config_tp_size": "tensor",
    "parallelism_config_cp_size": "context",
    "parallelism_config_sp_size": "context",
}
NOTHING = (None, "", "no", "NO", "none", "None", False, 0, [], {})


def read_launch_config(path: str | Path) -> ConfigConversion:
    """Read a configuration file, and say of each of its keys what became of it.

    Raises PlanError for a file that cannot be read, or is no such configuration.
    """
    return _LaunchFile(_table_of(Path(path))).read()


class _LaunchFile:
    """One configuration, key by key."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        self._left = {key: value for name, one in table.items() for key, value in _flat(name, one)}
        self._found = ConfigConversion()
        self._job = self._found.job
        self._layout: dict[str, Any] = {}
        self._compute: dict[str, Any] = {}

    def read(self) -> ConfigConversion:
        """Take what there is a word for, and sort the rest."""
        processes = self._number("num_processes")
        machines = self._number("num_machines") or 1
        if processes is not None and processes > 0:
            self._job["workers"] = str(processes)
            self._took("num_processes", f"--workers {processes}")
        self._read_hosts(machines)
        self._read_kind(processes, machines)
        self._read_precision()
        self._read_device()
        self._sort_rest()
        plan = self._plan()
        return ConfigConversion(
            plan=plan,
            job=self._job,
            taken=self._found.taken,
            ignored=self._found.ignored,
            refused=self._found.refused,
        )

    def _plan(self) -> str:
        kinds: tuple[tuple[str, Callable[..., Any], dict[str, Any]], ...] = (
            ("layout", Layout, self._layout),
            ("compute", Compute, self._compute),
        )
        parts: dict[str, Any] = {}
        for name, kind, values in kinds:
            try:
                parts[name] = kind(**values)
            except PlanError as error:
                self._found.refused.append((name, str(error)))
        plan = Plan(**parts)
        return "" if plan == Plan() else str(plan)

    # What becomes of a key.

    def _took(self, key: str, into: str) -> None:
        if key in self._left:
            self._found.taken.append((f"{key}: {_shown(self._left.pop(key))}", into))

    def _ignore(self, key: str, why: str) -> None:
        self._found.ignored.append((f"{key}: {_shown(self._left.pop(key))}", why))

    def _refuse(self, key: str, why: str) -> None:
        self._found.refused.append((f"{key}: {_shown(self._left.pop(key))}", why))

    def _number(self, key: str) -> int | None:
        value = self._left.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, str)) or not str(value).lstrip("-").isdecimal():
            raise PlanError(f"{key} is {value!r} in the configuration; it must be a whole number.")
        return int(value)

    # The parts of a configuration.

    def _read_hosts(self, machines: int) -> None:
        if machines > 1:
            self._job["hosts"] = str(machines)
            self._took("num_machines", f"--hosts {machines}")
        elif "num_machines" in self._left:
            self._ignore("num_machines", "one host is the default")
        address, port = self._left.get("main_process_ip"), self._number("main_process_port")
        if address and machines > 1:
            self._job["head"] = f"{address}:{port or 29500}"
            for key in ("main_process_ip", "main_process_port"):
                self._took(key, f"--head {self._job['head']}")
            return
        for key in ("main_process_ip", "main_process_port"):
            if key in self._left:
                self._ignore(key, "a free port is chosen on one host")

    def _read_kind(self, processes: int | None, machines: int) -> None:
        kind = str(self._left.get("distributed_type", "NO"))
        if kind == "FSDP":
            self._took("distributed_type", "the plan's shard")
            self._read_fsdp(processes, machines)
        elif kind == "DEEPSPEED":
            self._took("distributed_type", "the plan's shard and zero")
            self._read_deepspeed(processes)
        elif kind in ("NO", "MULTI_CPU", "MULTI_GPU"):
            self._took("distributed_type", "the plan's replicas: one for each worker")
        elif "distributed_type" in self._left:
            is_megatron = kind == "MEGATRON_LM"
            why = ABSENT["megatron_lm_config"] if is_megatron else "workers run on CPUs and on CUDA devices"
            self._refuse("distributed_type", why)
        self._read_axes()

    def _read_axes(self) -> None:
        prefix = "parallelism_config."
        for name, axis in AXES.items():
            size = self._number(prefix + name)
            if size is None:
                continue
            if size > 1 or axis in self._layout:
                self._layout[axis] = size
            self._took(prefix + name, f"the plan's {axis}={size}")
        if any(prefix in text for text, _ in self._found.taken):
            self._layout = {axis: size for axis, size in self._layout.items() if size != 1 or axis == "replicas"}

    def _read_fsdp(self, processes: int | None, machines: int) -> None:
        key = "fsdp_config.fsdp_sharding_strategy"
        value = self._left.get(key)
        reshard_key = "fsdp_config.fsdp_reshard_after_forward"
        reshard = self._left.get(reshard_key, True)
        if value is None and isinstance(reshard, str) and reshard.upper() in STRATEGIES:
            key, value = reshard_key, reshard
        name = str(NUMBERED.get(value, value)) if isinstance(value, int) else str(value or "FULL_SHARD").upper()
        name = NUMBERED.get(int(name), name) if name.isdecimal() else name
        if name not in STRATEGIES:
            self._refuse(key, f"it must be one of {', '.join(STRATEGIES)}")
            return
        is_hybrid, stage = STRATEGIES[name]
        if value is None and reshard in (False, "false"):
            stage = 2
        self._shard(processes, stage=stage, hosts=machines if is_hybrid else 1)
        self._took(key, f"the plan's {self._layout_text()}")
        self._took(reshard_key, f"the plan's {self._layout_text()}")
        self._switch("fsdp_config.fsdp_activation_checkpointing", "recompute", "blocks")
        self._switch("fsdp_config.fsdp_offload_params", "offload", "all")

    def _read_deepspeed(self, processes: int | None) -> None:
        file_key = "deepspeed_config.deepspeed_config_file"
        if self._left.get(file_key):
            self._refuse(file_key, "it is a configuration of its own: paceline plan --from that file")
            return
        stage = self._number("deepspeed_config.zero_stage")
        self._shard(processes, stage=2 if stage is None else stage, hosts=1)
        self._took("deepspeed_config.zero_stage", f"the plan's {self._layout_text()}")
        for key, kept in (("offload_param_device", "all"), ("offload_optimizer_device", "optimizer")):
            full, device = f"deepspeed_config.{key}", self._left.get(f"deepspeed_config.{key}")
            if device == "cpu" and self._compute.get("offload") != "all":
                self._compute["offload"] = kept
            if device == "nvme":
                self._refuse(full, "offload to a disk needs its folder: compute(offload=optimizer,offload_path=/...)")
            elif full in self._left:
                self._took(full, f"compute(offload={self._compute.get('offload', 'none')})")

    def _shard(self, processes: int | None, *, stage: int, hosts: int) -> None:
        """Split the state over all workers, or over those of each host."""
        if stage == 0 or processes is None or processes < 1:
            if stage:
                self._found.refused.append(("num_processes", "shard needs a number of workers: write it into the plan"))
            return
        self._layout["shard"] = max(1, processes // hosts)
        if hosts > 1:
            self._layout["replicas"] = hosts
        if stage in (1, 2):
            self._layout["zero"] = stage
        if self._layout["shard"] == 1:
            self._layout.pop("shard")
            self._layout.pop("zero", None)

    def _layout_text(self) -> str:
        return "+".join(f"{axis}={size}" for axis, size in self._layout.items()) or "replicas"

    def _switch(self, key: str, name: str, value: str) -> None:
        if key not in self._left:
            return
        if self._left[key] in NOTHING or str(self._left[key]).lower() == "false":
            self._ignore(key, "it is off")
            return
        self._compute[name] = value
        self._took(key, f"compute({name}={value})")

    def _read_precision(self) -> None:
        value = self._left.get("mixed_precision")
        text = str(value).lower() if value not in NOTHING else "no"
        if text == "no":
            if "mixed_precision" in self._left:
                self._took("mixed_precision", "the default: compute(precision=fp32)")
            return
        try:
            Compute(precision=text)  # pyright: ignore[reportArgumentType]  # it says which there are
        except PlanError as error:
            self._refuse("mixed_precision", str(error))
            return
        self._compute["precision"] = text
        self._took("mixed_precision", f"compute(precision={text})")

    def _read_device(self) -> None:
        if self._left.get("use_cpu") is True:
            self._job["device"] = "cpu"
            self._took("use_cpu", "--device cpu")
        elif "use_cpu" in self._left:
            self._ignore("use_cpu", "a GPU for each worker is the default, where the host has enough")
        if self._left.get("gpu_ids") not in (None, "all", ""):
            self._refuse("gpu_ids", "CUDA_VISIBLE_DEVICES says which devices a run may use")
        elif "gpu_ids" in self._left:
            self._ignore("gpu_ids", "all devices are the default")
        key = "dynamo_config.dynamo_backend" if "dynamo_config.dynamo_backend" in self._left else "dynamo_backend"
        backend = str(self._left.get(key, "NO")).upper()
        if backend == "INDUCTOR":
            self._compute["compile"] = True
            self._took(key, "compute(compile=true)")
        elif backend not in ("NO", "NONE", ""):
            self._refuse(key, "torch.compile has its own backend here: compute(compile=true)")

    def _sort_rest(self) -> None:
        environment = self._left.get("compute_environment", "LOCAL_MACHINE")
        if environment == "LOCAL_MACHINE":
            self._took("compute_environment", "paceline run")
        for key in list(self._left):
            section = key.partition(".")[0]
            if key in IGNORED:
                self._ignore(key, IGNORED[key])
            elif self._left[key] in NOTHING:
                self._ignore(key, "it is empty")
            elif key in ABSENT or section in ABSENT:
                self._refuse(key, ABSENT.get(key, ABSENT.get(section, "")))
            elif key == "compute_environment":
                self._refuse(key, "runs are started here, over SSH, by Slurm, Kubernetes or Ray: paceline run --on")
            elif section in ("fsdp_config", "deepspeed_config", "parallelism_config", "dynamo_config"):
                self._refuse(key, "there is no word for it in a plan")
            else:
                self._refuse(key, "accelerate launch has no such key")


def _table_of(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read: {error}.") from error
    try:
        found = json.loads(text) if path.suffix == ".json" else _yaml(text, path)
    except ValueError as error:
        raise PlanError(f"{path} is no JSON: {error}.") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in cast("dict[Any, Any]", found)):
        raise PlanError(f"{path} is no configuration of accelerate launch: it must be a table of keys and values.")
    return cast("dict[str, Any]", found)


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise PlanError(f"{path} is YAML, which needs the package pyyaml: pip install pyyaml.") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise PlanError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """A section's keys by dotted names."""
    if isinstance(value, dict) and value:
        return [(f"{name}.{key}", one) for key, one in cast("dict[str, Any]", value).items()]
    return [(name, value)]


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)
