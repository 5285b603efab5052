"""`deepspeed.initialize`: reads the configuration, joins the run with its plan, and makes the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.compat.deepspeed.comm import leave_early_group, world_here
from paceline.compat.deepspeed.engine import DeepSpeedEngine
from paceline.compat.deepspeed.optimizers import make_optimizer, make_schedule
from paceline.compat.deepspeed.pipeline import PipelineEngine, PipelineModule
from paceline.compat.deepspeed.sharing import has_engines, name_of_next, note_originals, require_shareable
from paceline.compat.deepspeed_files.config import DeepSpeedConfig, read_config
from paceline.errors import PlanError
from paceline.events import Note
from paceline.plan import AllReduce, Guard, Plan
from paceline.runs.open_worker import open_worker
from paceline.worker.data.random_state import PreservedRandomState
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["initialize"]

Made = tuple[DeepSpeedEngine, Optimizer | None, Any, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[list[Any]], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Made:
    """Join the run with the configuration's plan; returns (engine, optimizer, loader of `training_data`, schedule).

    The configuration is a dict or the path of a JSON file, in `config` or in `args.deepspeed_config`. The model is
    placed as the plan says: whole (stage 0), or sharded (1 to 3). What the command says, `--plan` or `--set`, wins over
    the configuration, but the batch is the configuration's. An operation of all workers.

    Raises PlanError for keys that are refused, each by name, batch sizes that do not fit, a further engine that cannot
    train beside the first, `--balance`, and a plan whose steps a loop of a program's own cannot take.
    """
    if model is None:
        raise PlanError(
            "initialize() needs a model: initialize(model=net, model_parameters=net.parameters(), config=...)"
        )
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise PlanError(
                f"initialize({name}=...) is not here: the plan says which workers share what, --plan tensor=4."
            )
    source = _source(args, config if config is not None else config_params)
    pipeline = model if isinstance(model, PipelineModule) else None
    _, workers, _, local_workers = world_here()
    on_cpu = not torch.cuda.is_available() or torch.cuda.device_count() < local_workers
    stages = pipeline.count_stages(workers) if pipeline is not None else 1
    settings = read_config(source, workers=workers, stages=stages, on_cpu=on_cpu)
    names = {id(one): name for name, one in model.named_parameters(remove_duplicate=False)}
    groups = _named_groups(model_parameters, optimizer, model, names)
    trains = optimizer is not None or settings.optimizer is not None
    trains_beside = trains and has_engines()
    if trains_beside:
        require_shareable(model, settings, is_pipeline=pipeline is not None)
    with PreservedRandomState():  # what the program draws after this call is what it would have drawn
        leave_early_group()
        worker = _join(settings, has_own_batch=trains_beside)
        if trains:
            note_originals(model)
        if pipeline is not None:
            pipeline.prepare(worker, training_data, collate_fn)
        else:
            worker.prepare(model)
        chosen = _optimizer(settings, optimizer, groups, model)
        if chosen is not None:
            worker.prepare(chosen)
        schedule = _schedule(settings, lr_scheduler, chosen)
        if schedule is not None and hasattr(schedule, "state_dict") and hasattr(schedule, "load_state_dict"):
            worker.prepare(schedule, name=name_of_next("lr_scheduler"))
        terms: dict[str, Any] = {"optimizer": chosen, "schedule": schedule, "collate": collate_fn}
        engine = (
            DeepSpeedEngine(worker, model, settings, **terms)
            if pipeline is None
            else PipelineEngine(worker, pipeline, settings, **terms)
        )
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    _tell(worker, settings)
    return engine, chosen, engine.training_dataloader, schedule


def _source(args: Any, config: Any) -> Any:
    """The configuration, which is in one of two places."""
    named = getattr(args, "deepspeed_config", None)
    if config is None and named is None:
        raise PlanError(
            "initialize() needs a configuration: config={...}, config='ds_config.json', or args with deepspeed_config."
        )
    if config is not None and named is not None:
        raise PlanError(
            f"initialize() has two configurations: config=..., and --deepspeed_config {named}. Give one of them."
        )
    return named if config is None else config


def _join(settings: DeepSpeedConfig, *, has_own_batch: bool) -> Worker:
    """Join the run, and look whether the program's steps can be taken under its plan, which other engines may have
    settled: then the engine `has_own_batch`."""
    plan = dataclasses.replace(settings.plan, guard=Guard(on_out_of_memory="stop"))
    job = cast("dict[str, Any]", {"log": ("wandb",)} if settings.conversion.job.get("log") == "wandb" else {})
    worker = open_worker(plan=plan, **job)
    if not has_own_batch:
        _require(worker.plan, plan)
    if parts_of(worker).files.balances:
        raise PlanError(
            "--balance gives a slower worker fewer micro-batches, and a DeepSpeed loop has gradient_accumulation_steps "
            "of them on every worker: leave it out. A training function with worker.batches(...) is balanced."
        )
    return worker


def _require(plan: Plan, wanted: Plan) -> None:
    batch, layout = wanted.batch, plan.layout
    if (plan.batch.size, plan.batch.resolved_micro) != (batch.size, batch.resolved_micro):
        raise PlanError(
            f"The run's batch is {plan.batch}, and the DeepSpeed configuration's is {batch}: a program's own loop "
            f"takes the steps of its configuration. Add it to the command's plan: --plan '...+{Plan(batch=batch)}', or "
            "set single values: --set plan.layout.shard=2."
        )
    if layout.is_elastic:
        raise PlanError(
            f"The plan {plan} is elastic, and a DeepSpeed loop reads its own data, for a fixed number of workers: use "
            "--plan replicas=2. A training function with worker.batches(...) is elastic."
        )
    if layout.tensor > 1 or layout.context > 1 or layout.experts > 1:
        raise PlanError(
            f"The plan {plan} has workers that share each sample, and a DeepSpeed loop gives each worker its own: use "
            "replicas, shard and stages. A training function with worker.batches(...) takes every layout."
        )
    if not isinstance(plan.sync, AllReduce):
        raise PlanError(
            f"The plan {plan} has replicas that step by themselves, or on servers: a DeepSpeed loop takes synchronous "
            "steps. A training function with worker.stepper(...) takes every sync."
        )


def _tell(worker: Worker, settings: DeepSpeedConfig) -> None:
    ignored = [key for key, _ in settings.conversion.ignored]
    if worker.is_first and ignored:
        text = f"of the DeepSpeed configuration these do nothing here: {', '.join(ignored)}"
        parts_of(worker).files.emit(Note(text=f"{text}. `paceline plan --from FILE` says why"))


# Parameters: a layout may replace them, so groups are kept by names.


def _named_groups(
    given: Iterable[Any] | None, optimizer: object, model: nn.Module, names: Mapping[int, str]
) -> list[dict[str, Any]]:
    """The optimizer's parameter groups, with names in place of parameters."""
    if isinstance(optimizer, Optimizer):
        if optimizer.state:
            raise PlanError(
                f"initialize(optimizer={type(optimizer).__name__}(...)): it has stepped already. Pass it before its "
                "first step."
            )
        found: list[Any] = [dict(group) for group in optimizer.param_groups]
    elif given is None:
        found = [{"params": [one for one in model.parameters() if one.requires_grad]}]
    else:
        listed = list(given)
        found = [dict(one) for one in listed] if listed and isinstance(listed[0], dict) else [{"params": listed}]
    for group in found:
        held = group["params"]
        held = [held] if isinstance(held, torch.Tensor) else list(held)
        strangers = sum(id(one) not in names for one in held)
        if strangers:
            raise PlanError(
                f"initialize(): {strangers} of the optimizer's parameters are not of the model, so their gradients "
                "would not be averaged. Make them parameters of the model."
            )
        group["params"] = list(dict.fromkeys(names[id(one)] for one in held))
    return found


def _optimizer(
    settings: DeepSpeedConfig, given: object, groups: list[dict[str, Any]], model: nn.Module
) -> Optimizer | None:
    """The optimizer over the parameters that the model has now."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    present = [{**group, "params": [parameters[name] for name in group["params"]]} for group in groups]
    if isinstance(given, Optimizer):
        for group, now in zip(given.param_groups, present, strict=True):
            group["params"] = now["params"]
        return given
    if callable(given):
        made = given(present if len(present) > 1 or set(present[0]) > {"params"} else present[0]["params"])
        if not isinstance(made, Optimizer):
            raise PlanError(
                f"initialize(optimizer=...) made a {type(made).__name__}; it must be a torch.optim.Optimizer."
            )
        return made
    if given is not None:
        raise PlanError(f"initialize(optimizer=...) is a {type(given).__name__}; it must be a torch.optim.Optimizer.")
    if settings.optimizer is None:
        return None
    return make_optimizer(settings.optimizer, present)


def _schedule(settings: DeepSpeedConfig, given: Any, optimizer: Optimizer | None) -> Any:
    """The schedule of the learning rate: the program's comes first."""
    if given is not None:
        return given(optimizer) if callable(given) and not hasattr(given, "step") else given
    if settings.schedule is None or optimizer is None:
        return None
    return make_schedule(settings.schedule, optimizer)
