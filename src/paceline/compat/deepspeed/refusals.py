"""Names of DeepSpeed's package that are not here, each with the way here. No torch here."""

from __future__ import annotations

__all__ = ["OF_ENGINE", "SUBMODULES", "is_refused", "refusal"]

DOCS = "docs/how-to/bring-your-deepspeed-program.md"

# Modules of DeepSpeed, and the module of this package that has their names.
SUBMODULES: dict[str, str] = {
    "accelerator": "accelerator",
    "checkpointing": "checkpointing",
    "runtime.activation_checkpointing.checkpointing": "checkpointing",
    "runtime.activation_checkpointing": "checkpointing",
    "comm": "comm",
    "comm.comm": "comm",
    "ops": "optimizers",
    "ops.adam": "optimizers",
    "pipe": "pipeline",
    "runtime": "runtime",
    "runtime.dataloader": "data",
    "runtime.engine": "engine",
    "runtime.lr_schedules": "schedules",
    "runtime.pipe": "pipeline",
    "runtime.pipe.engine": "pipeline",
    "runtime.pipe.module": "pipeline",
    "runtime.utils": "utils",
    "runtime.zero": "zero",
    "runtime.zero.partition_parameters": "zero",
    "utils": "utils",
    "utils.logging": "utils",
    "utils.zero_to_fp32": "utils",
    "zero": "zero",
}

_EXPERTS = "experts are spread by the plan of a training function: experts=N, for models with lists of experts"
_MODEL = "models are PyTorch's own here"

REFUSED: dict[str, str] = {
    "InferenceEngine": "inference is not here",
    "init_inference": "inference is not here: call the model itself",
    "tp_model_init": "layers are split by the plan of a training function: tensor=N",
    "set_autotp_mode": "layers are split by the plan of a training function: tensor=N",
    "DeepSpeedHybridEngine": "generation in the engine is not here: engine.module.generate(...)",
    "DeepSpeedConfig": "`paceline plan --from FILE` reads a configuration, and shows it",
    "DeepSpeedTransformerLayer": _MODEL,
    "DeepSpeedTransformerConfig": _MODEL,
    "replace_transformer_layer": _MODEL,
    "revert_transformer_layer": _MODEL,
    "OnDevice": "torch.device as a context does it: with torch.device('meta'): ...",
    "DualPipeVEngine": "the plan's schedule is 1f1b, gpipe, interleaved or zero-bubble",
    "DualPipeVModule": "the plan's schedule is 1f1b, gpipe, interleaved or zero-bubble",
    "moe": _EXPERTS,
    "autotuning": "`paceline run --plan auto` tries plans",
    "compression": "compression of models is not here",
    "inference": "inference is not here",
    "linear": _MODEL,
    "model_implementations": _MODEL,
    "module_inject": _MODEL,
    "monitor": "engine.monitor.write_events(...) goes to the run's metrics",
    "profiling": "`paceline report RUN` says where the time went, torch.profiler what each operation took",
    "sequence": "sequences are split by the plan of a training function: context=N",
    "launcher": "`paceline run` starts the workers",
    "checkpoint": "`paceline import` reads DeepSpeed's checkpoints",
    "nvme": "compute(offload=optimizer,offload_path=/disk) of the plan",
    "io": "compute(offload=optimizer,offload_path=/disk) of the plan",
    "compile": "compute(compile=true) of the plan",
    "ops.transformer": _MODEL,
    "ops.sparse_attention": "sparse attention is not here",
    "ops.lamb": "torch has no LAMB: pass an optimizer of your own, initialize(optimizer=...)",
    "ops.lion": "torch has no Lion: pass an optimizer of your own, initialize(optimizer=...)",
    "runtime.fp16": "compute(precision=fp16) of the plan",
    "runtime.bf16_optimizer": "compute(precision=bf16) of the plan",
    "utils.groups": "the plan says which workers belong together",
}


# Names of the engine.
OF_ENGINE: dict[str, str] = {
    "no_sync": "gradients are averaged once, at the step: gradient_accumulation_steps says after how many backwards",
    "set_gradient_accumulation_boundary": "gradient_accumulation_steps of the configuration says where a step ends",
    "allreduce_gradients": "engine.step() averages gradients",
    "set_train_batch_size": "the batch of a run stays: start again with another configuration, from a checkpoint",
    "set_train_micro_batch_size": "the batch of a run stays: start again with another configuration",
    "offload_states": "compute(offload=optimizer) of the plan keeps optimizer state elsewhere",
    "reload_states": "compute(offload=optimizer) of the plan keeps optimizer state elsewhere",
    "flops_profiler": "`paceline plan train.py --cluster NAME` counts the operations of a step",
    "eigenvalue": "it belongs to quantized training, which is not here",
    "hybrid_engine": "call the model itself: engine.module.generate(...)",
}


def is_refused(name: str) -> bool:
    """Whether a name with dots, or one above it, has a sentence of its own."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in REFUSED for count in range(1, len(parts) + 1))


def refusal(name: str) -> str:
    """Why a name of DeepSpeed's package, with dots below it, is not here, and what is in its place."""
    why, above = "", name
    while above and not why:
        why, above = REFUSED.get(above, ""), above.rpartition(".")[0]
    return f"deepspeed.{name} is not here{f': {why}' if why else f'. What is here is in {DOCS}'}"
