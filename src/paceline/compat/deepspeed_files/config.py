"""DeepSpeed's configuration: what it says as a plan, and an answer to each of its keys. No torch here."""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Mapping
from typing import Any, Literal, cast

from paceline.compat.conversion import ConfigConversion
from paceline.compat.deepspeed_files.batch_sizes import BatchSizes, settle_batch, workers_of
from paceline.compat.deepspeed_files.config_keys import IGNORED, OFF, REFUSED, TAKEN
from paceline.compat.deepspeed_files.config_table import (
    AUTO,
    count_of,
    leaves_of,
    load_config,
    lookup,
    mapping_of,
    number_of,
    without_auto,
)
from paceline.compat.deepspeed_files.optimizer_names import OptimizerChoice, choose_optimizer
from paceline.compat.deepspeed_files.schedule_names import ScheduleChoice, choose_schedule
from paceline.errors import PlanError
from paceline.plan import Batch, Cast, Compute, Layout, Plan, Sparse

__all__ = ["DeepSpeedConfig", "convert_config", "fp16_options", "read_config"]

CLIPPING = 1.0  # where a configuration does not say gradient_clipping: DeepSpeed clips then, too
_OFF_VALUES = {"gradient_allreduce_op": "mean", "zero_optimization.zero_hpz_partition_size": 1}
_WIRES = {"fp16": "fp16", "half": "fp16", "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedConfig:
    """A configuration for a number of workers, with nothing left open."""

    table: Mapping[str, Any]  # as it was written
    plan: Plan
    batch: BatchSizes
    clipping: float | None  # the largest norm of a step's gradients
    optimizer: OptimizerChoice | None
    schedule: ScheduleChoice | None
    steps_per_print: int | None
    drop_last: bool
    conversion: ConfigConversion


def convert_config(source: object, *, workers: int | None = None) -> ConfigConversion:
    """Return what a configuration is here, for so many workers; None: as many as its batch sizes tell, or one.

    Raises PlanError where it cannot be read, and where its batch sizes do not fit each other.
    """
    table = load_config(source)
    shared = math.prod(
        size
        for key in ("tensor_parallel.autotp_size", "sequence_parallel_size")
        if isinstance(size := lookup(table, key), int) and size > 1
    )
    return _Reading(table, workers or (workers_of(table) or 1) * shared).conversion()


def read_config(source: object, *, workers: int, stages: int = 1, on_cpu: bool) -> DeepSpeedConfig:
    """Read a configuration for a program's engine on so many workers.

    `stages`: of a pipeline, whose workers run the same micro-batches. `on_cpu`: state is in the host's memory already,
    and is not offloaded to it. Raises PlanError with all keys that are refused.
    """
    table = load_config(source)
    reading = _Reading(table, workers, stages=stages, on_cpu=on_cpu, is_open=True)
    conversion = reading.conversion()
    if reading.plan.layout.tensor > 1 or reading.plan.layout.context > 1:
        refused = "a loop of the program's own cannot split layers or tokens. A training function with stepper() can"
        conversion.refused.append(("tensor_parallel.autotp_size", f"{refused}: `paceline run --plan tensor=4`"))
    if conversion.refused:
        listed = "\n".join(f"  {key}: {why}" for key, why in conversion.refused)
        raise PlanError(f"The DeepSpeed configuration asks for what there is not:\n{listed}")
    sizes = settle_batch(table, workers // stages)
    for key, value in leaves_of(table):
        if value == AUTO and key.startswith(("optimizer.", "scheduler.", "gradient_clipping")):
            raise PlanError(f"{key} is 'auto', which the Hugging Face Trainer fills in: say the value itself.")
    clipping = number_of(table, "gradient_clipping") if "gradient_clipping" in table else CLIPPING
    return DeepSpeedConfig(
        table=table,
        plan=reading.plan,
        batch=sizes,
        clipping=clipping or None,
        optimizer=reading.optimizer,
        schedule=reading.schedule,
        steps_per_print=count_of(table, "steps_per_print"),
        drop_last=bool(table.get("dataloader_drop_last", False)),
        conversion=conversion,
    )


class _Reading:
    """One pass over a configuration: the plan, and an answer to each key."""

    def __init__(
        self,
        table: Mapping[str, Any],
        workers: int,
        *,
        stages: int = 1,
        on_cpu: bool = False,
        is_open: bool = False,
    ) -> None:
        """`is_open`: leave the number of replicas to the run, so that the command can change the other axes."""
        self.optimizer: OptimizerChoice | None = None
        self.schedule: ScheduleChoice | None = None
        self._table, self._workers, self._stages, self._on_cpu = table, workers, stages, on_cpu
        self._is_open, self._replicas = is_open, 1
        self._taken: list[tuple[str, str]] = []
        self._ignored: list[tuple[str, str]] = []
        self._refused: list[tuple[str, str]] = []
        self._job: dict[str, str] = {}
        self._answer(table, "")
        layout = self._layout()
        self.plan = Plan(layout=layout, wire=self._wire(), batch=self._batch(layout), compute=self._compute())
        self._read_training()
        self._read_job()

    def conversion(self) -> ConfigConversion:
        """What was found."""
        return ConfigConversion(
            plan=str(self.plan),
            job=self._job,
            taken=sorted(self._taken),
            ignored=sorted(self._ignored),
            refused=sorted(self._refused),
        )

    # Keys that no plan holds.

    def _answer(self, table: Mapping[str, Any], above: str) -> None:
        for name, value in table.items():
            key = f"{above}.{name}" if above else str(name)
            if value == AUTO:
                self._ignored.append(
                    (key, "'auto' is filled in by the Hugging Face Trainer: here say the value itself")
                )
            elif key in TAKEN:
                continue
            elif key in REFUSED:
                self._refuse_if_on(key, value)
            elif isinstance(value, Mapping) and _has_keys_below(key):
                self._answer(cast("Mapping[str, Any]", value), key)
            elif (why := _longest(IGNORED, key)) is not None:
                self._ignored.append((key, why))
            else:
                self._refused.append((key, _unknown(key)))

    def _refuse_if_on(self, key: str, value: Any) -> None:
        if value in OFF or value == _OFF_VALUES.get(key) or (isinstance(value, Mapping) and not _is_on(value)):
            self._ignored.append((key, "it is switched off"))
        else:
            self._refused.append((key, REFUSED[key]))

    # The plan.

    def _layout(self) -> Layout:
        zero = self._section("zero_optimization")
        stage = zero.get("stage", 0)
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise PlanError(f"zero_optimization.stage is {stage!r}; it must be 0, 1, 2 or 3.")
        tensor, context = (
            self._split("tensor_parallel.autotp_size", "tensor"),
            self._split("sequence_parallel_size", "context"),
        )
        together = tensor * context * self._stages
        if self._workers % together:
            raise PlanError(
                f"{together} workers share each sample (tensor {tensor} x context {context} x stages {self._stages}), "
                f"which do not divide {self._workers} workers."
            )
        apart = self._workers // together
        shard = apart if stage else 1
        island = zero.get("mics_shard_size", -1)
        if isinstance(island, int) and island > 0 and stage == 3:
            if apart % island:
                raise PlanError(
                    f"zero_optimization.mics_shard_size is {island}, which does not divide {apart} workers."
                )
            shard = island
            self._took("zero_optimization.mics_shard_size", f"shard={island}, replicas={apart // island}")
        elif "mics_shard_size" in zero:
            self._ignored.append(("zero_optimization.mics_shard_size", "it is switched off"))
        self._replicas = apart // shard
        layout = Layout(
            replicas=self._replicas if self._replicas > 1 and not self._is_open else None,
            shard=shard,
            zero=cast("Literal[1, 2, 3]", stage if shard > 1 else 3),
            tensor=tensor,
            context=context,
            stages=self._stages,
        )
        if "stage" in zero:
            one = "on one worker there is nothing to shard" if stage and shard == 1 else f"whole replicas: {apart}"
            self._took("zero_optimization.stage", str(Plan(layout=layout)) if shard > 1 else one)
        return layout

    def _split(self, key: str, axis: str) -> int:
        size = lookup(self._table, key)
        if size in (None, AUTO, 0, 1):
            return 1
        if not isinstance(size, int):
            raise PlanError(f"{key} is {size!r}; it must be a number of workers.")
        self._took(key, f"{axis}={size}")
        return size

    def _wire(self) -> Any:
        kind, is_sparse = self._table.get("communication_data_type"), self._table.get("sparse_gradients")
        several = self._replicas > 1
        if is_sparse:
            self._took("sparse_gradients", "sparse" if several else "there is one replica, which sends no gradients")
        elif "sparse_gradients" in self._table:
            self._ignored.append(("sparse_gradients", "it is switched off"))
        if kind in (None, AUTO, "fp32", "float32"):
            if kind not in (None, AUTO):
                self._took("communication_data_type", "gradients travel in fp32")
        elif kind not in _WIRES:
            raise PlanError(f"communication_data_type is {kind!r}; it must be fp32, fp16 or bf16.")
        elif several and not is_sparse:
            self._took("communication_data_type", f"cast(dtype={_WIRES[kind]})")
            return Cast(dtype=cast("Any", _WIRES[kind]))
        else:
            self._ignored.append(("communication_data_type", "a sharded replica sums gradients as they are"))
        return Sparse() if is_sparse and several else Plan().wire

    def _batch(self, layout: Layout) -> Batch:
        names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        given = [name for name in names if count_of(self._table, name) is not None]
        drop_last = bool(self._table.get("dataloader_drop_last", False))
        if drop_last:
            self._took("dataloader_drop_last", "batch(drop_last=true)")
        elif "dataloader_drop_last" in self._table:
            self._took("dataloader_drop_last", "the last batch of an epoch may be short")
        if not set(given) & set(names[:2]):
            for name in given:
                self._ignored.append((name, "without a batch size it has no meaning"))
            return Batch(drop_last=drop_last)
        sizes = settle_batch(self._table, self._workers // (layout.tensor * layout.context * layout.stages))
        counts = {
            names[0]: f"batch(size={sizes.train})",
            names[1]: f"batch(micro={sizes.micro})",
            names[2]: f"{sizes.train} samples a step in micro-batches of {sizes.micro}, on {self._workers} worker(s)",
        }
        for name in given:
            self._took(name, counts[name])
        return Batch(size=sizes.train, micro=sizes.micro, drop_last=drop_last)

    def _compute(self) -> Compute:
        options: dict[str, Any] = {}
        fp16, autocast = self._section("fp16"), self._section("torch_autocast")
        bf16_key = "bfloat16" if "bfloat16" in self._table else "bf16"
        wants_bf16 = self._section(bf16_key).get("enabled") is True
        if wants_bf16 and fp16.get("enabled") is True:
            raise PlanError(f"{bf16_key}.enabled and fp16.enabled are both true: choose one of them.")
        if "enabled" in self._section(bf16_key) and self._section(bf16_key)["enabled"] != AUTO:
            self._took(f"{bf16_key}.enabled", "compute(precision=bf16)" if wants_bf16 else "it is off")
        if "enabled" in autocast and autocast["enabled"] != AUTO:
            kind = "fp16" if "float16" in str(autocast.get("dtype", "bfloat16")).replace("bfloat16", "") else "bf16"
            is_on = autocast["enabled"] is True
            wants_bf16 = wants_bf16 or (is_on and kind == "bf16")
            fp16 = {**fp16, "enabled": True} if is_on and kind == "fp16" else fp16
            self._took("torch_autocast.enabled", f"compute(precision={kind})" if is_on else "it is off")
        if "dtype" in autocast:
            self._took("torch_autocast.dtype", "the precision of the forward")
        if wants_bf16:
            options["precision"] = "bf16"
        options |= self._fp16(fp16)
        options |= self._offload()
        compiled = self._section("compile")
        if compiled.get("deepcompile") is True or compiled.get("enabled") is True:
            options["compile"] = True
        for name in ("deepcompile", "enabled"):
            if name in compiled and compiled[name] != AUTO:
                self._took(f"compile.{name}", "compute(compile=true)" if compiled[name] else "it is off")
        return Compute(**options)

    def _fp16(self, section: Mapping[str, Any]) -> dict[str, Any]:
        names = ("loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale")
        given = [name for name in names if section.get(name, AUTO) != AUTO]
        if section.get("enabled") is not True:
            if "fp16.enabled" in dict(leaves_of(self._table)) and section.get("enabled") != AUTO:
                self._took("fp16.enabled", "it is off")
            self._ignored += [(f"fp16.{name}", "fp16 is off") for name in given]
            return {}
        if "fp16" not in typing.get_args(typing.get_type_hints(Compute)["precision"]):
            self._refused.append(("fp16.enabled", "computing in fp16 is not here. Write bf16 in place of it"))
            return {}
        options = fp16_options(section)
        self._took("fp16.enabled", "compute(precision=fp16)")
        for name in given:
            if name == "min_loss_scale":
                self._ignored.append((f"fp16.{name}", "the least scale is 1"))
            else:
                self._took(
                    f"fp16.{name}", ", ".join(f"{key}={value}" for key, value in options.items() if key != "precision")
                )
        return options

    def _offload(self) -> dict[str, Any]:
        zero = self._section("zero_optimization")
        optimizer, params = mapping_of(zero.get("offload_optimizer")), mapping_of(zero.get("offload_param"))
        prefix = "zero_optimization"
        devices = {
            f"{prefix}.offload_optimizer.device": optimizer.get("device"),
            f"{prefix}.offload_param.device": params.get("device"),
            f"{prefix}.cpu_offload": "cpu" if zero.get("cpu_offload") else zero.get("cpu_offload"),
            f"{prefix}.cpu_offload_param": "cpu" if zero.get("cpu_offload_param") else zero.get("cpu_offload_param"),
        }
        options: dict[str, Any] = {}
        for key, device in devices.items():
            if device is None or device == AUTO:
                continue
            what = "all" if "param" in key else "optimizer"
            if device in OFF:
                self._took(key, "nothing leaves the device's memory")
            elif device not in ("cpu", "nvme"):
                raise PlanError(f"{key} is {device!r}; it must be none, cpu or nvme.")
            elif device == "nvme" and what == "all":
                self._refused.append((key, "weights stay in memory: cpu, or nvme for offload_optimizer alone"))
            elif self._on_cpu and not (device == "nvme" and optimizer.get("nvme_path")):
                self._ignored.append((key, "the workers compute on the CPU, in the memory that it would leave to"))
            else:
                options["offload"] = "all" if "all" in (what, options.get("offload")) else what
                self._took(key, f"compute(offload={options['offload']})")
        path = optimizer.get("nvme_path")
        if path is not None and optimizer.get("device") == "nvme" and "offload" in options:
            options["offload_path"] = str(path)
            self._took(f"{prefix}.offload_optimizer.nvme_path", f"compute(offload_path={path})")
        elif path is not None:
            self._ignored.append((f"{prefix}.offload_optimizer.nvme_path", "no device of it is nvme"))
        return options

    # What the program itself takes, and the job.

    def _read_training(self) -> None:
        clipping = number_of(self._table, "gradient_clipping")
        if "gradient_clipping" not in self._table:
            self._took(
                "gradient_clipping", f"worker.stepper(clip_norm={CLIPPING}): where it is not said, it is {CLIPPING}"
            )
        if clipping is not None:
            self._took(
                "gradient_clipping", f"worker.stepper(clip_norm={clipping})" if clipping else "nothing is clipped"
            )
        if (kind := lookup(self._table, "optimizer.type")) is not None and kind != AUTO:
            params = without_auto(self._section("optimizer").get("params"))
            try:
                self.optimizer = choose_optimizer(str(kind), params)
                self._took("optimizer.type", str(self.optimizer))
            except PlanError as error:
                self._refused.append(("optimizer.type", str(error).removeprefix("optimizer.type is ").rstrip(".")))
            if "params" in self._section("optimizer"):
                self._took("optimizer.params", "options of the optimizer")
        if (kind := lookup(self._table, "scheduler.type")) is not None and kind != AUTO:
            params = without_auto(self._section("scheduler").get("params"))
            try:
                self.schedule = choose_schedule(str(kind), params)
                self._took("scheduler.type", f"paceline.compat.deepspeed.schedules.{kind}")
            except PlanError as error:
                self._refused.append(("scheduler.type", str(error).removeprefix("scheduler.type is ").rstrip(".")))
            if "params" in self._section("scheduler"):
                self._took("scheduler.params", "options of the schedule")

    def _read_job(self) -> None:
        if count_of(self._table, "steps_per_print") is not None:
            self._took("steps_per_print", "steps between two lines of the engine; the console shows each step")
        tensorboard, wandb = self._section("tensorboard"), self._section("wandb")
        if tensorboard.get("enabled", AUTO) != AUTO:
            self._took("tensorboard.enabled", "each run writes TensorBoard files, unless --no-tensorboard")
        if wandb.get("enabled", AUTO) != AUTO:
            self._took("wandb.enabled", "--log wandb" if wandb["enabled"] else "it is off")
        if wandb.get("enabled") is True:
            self._job["log"] = "wandb"
        if (stages := lookup(self._table, "pipeline.stages")) not in (None, AUTO):
            self._took("pipeline.stages", f"PipelineModule(num_stages={stages}) says it")

    def _took(self, key: str, what: str) -> None:
        self._taken.append((key, what))

    def _section(self, name: str) -> Mapping[str, Any]:
        found = self._table.get(name)
        if found is not None and not isinstance(found, Mapping):
            raise PlanError(f"{name} of the DeepSpeed configuration is {found!r}; it must be a section: {{...}}.")
        return mapping_of(found)


def fp16_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """The options of Compute for a section fp16 that is on, by DeepSpeed's defaults."""

    def value(name: str, default: float) -> float:
        found = section.get(name, default)
        found = default if found == AUTO else found
        if isinstance(found, bool) or not isinstance(found, (int, float)):
            raise PlanError(f"fp16.{name} is {found!r}; it must be a number.")
        return found

    options: dict[str, Any] = {"precision": "fp16"}
    if scale := value("loss_scale", 0):
        return {**options, "loss_scale": float(scale)}
    options["loss_scale_start"] = 2.0 ** value("initial_scale_power", 16)
    options["loss_scale_window"] = int(value("loss_scale_window", 1000))
    options["loss_scale_hysteresis"] = int(value("hysteresis", 2))
    return options


def _has_keys_below(key: str) -> bool:
    return any(one.startswith(f"{key}.") for known in (TAKEN, IGNORED, REFUSED) for one in known)


def _longest(answers: Mapping[str, str], key: str) -> str | None:
    while key:
        if key in answers:
            return answers[key]
        key = key.rpartition(".")[0]
    return None


def _is_on(section: Mapping[Any, Any]) -> bool:
    """Whether a section that has switches has one that is on; one without switches is."""
    switches = [value for key, value in leaves_of(section) if key.rpartition(".")[2] == "enabled"]
    return not switches or any(value not in OFF for value in switches)


def _unknown(key: str) -> str:
    above = key.rpartition(".")[0]
    names = {one for known in (TAKEN, IGNORED, REFUSED) for one in known}
    beside = {
        ".".join(one.split(".")[: key.count(".") + 1]) for one in names if one.startswith(f"{above}." if above else "")
    }
    near = difflib.get_close_matches(key, sorted(beside), n=1)
    return f"DeepSpeed has no such key{f': did you mean {near[0]}?' if near else ''}"
