"""Names of Accelerate that are not here, each with the way that there is."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["refused_in_module", "way_for"]

PAGE = "docs/how-to/bring-your-accelerate-program.md"
LAYOUT = "the plan says how a model is split: --plan shard=4 (ZeRO, as FSDP and DeepSpeed), tensor=4, or context=4"
PRECISION = "the plan says it: --plan 'compute(precision=bf16)', or mixed_precision='bf16'"
LOGGERS = "trackers live beside the run, not in a worker: paceline run --log wandb, and accelerator.log(values)"
INFERENCE = "inference of large models is not there: worker.evaluate, or the framework itself"

WAYS = {
    "FullyShardedDataParallelPlugin": LAYOUT,
    "DeepSpeedPlugin": LAYOUT,
    "MegatronLMPlugin": LAYOUT,
    "TorchTensorParallelPlugin": LAYOUT,
    "ParallelismConfig": LAYOUT,
    "DummyOptim": f"the program's own optimizer takes its place; {LAYOUT}",
    "DummyScheduler": f"the program's own scheduler takes its place; {LAYOUT}",
    "torch_device_mesh": LAYOUT,
    "maybe_context_parallel": LAYOUT,
    "FP8RecipeKwargs": PRECISION,
    "AORecipeKwargs": PRECISION,
    "TERecipeKwargs": PRECISION,
    "MSAMPRecipeKwargs": PRECISION,
    "GradScalerKwargs": PRECISION,
    "unscale_gradients": "gradients are not scaled when accelerator.backward() has returned: leave it out",
    "clip_grad_value_": "accelerator.worker.clip_gradients(max_value=...)",
    "lomo_backward": "use another optimizer: LOMO steps inside of backward, and a step here is one transaction",
    "join_uneven_inputs": "leave it out: uneven ends need no care, since all workers make the same number of runs",
    "verify_device_map": LAYOUT,
    "trigger_sync_in_backward": "leave it out: the last micro-batch of a step is known",
    "GeneralTracker": LOGGERS,
    "PartialState": "Accelerator() has its attributes: process_index, num_processes, device, is_main_process",
    "AcceleratorState": "Accelerator() has its attributes: process_index, num_processes, device, is_main_process",
    "notebook_launcher": "paceline.run(train, workers=2) works in a notebook cell",
    "debug_launcher": "paceline run train.py --workers 2 --device cpu",
    "launch": "paceline run train.py --workers 2",
    "prepare_pippy": "the plan says it: --plan stages=4, with worker.stepper",
    "init_empty_weights": INFERENCE,
    "load_checkpoint_and_dispatch": INFERENCE,
    "load_checkpoint_in_model": INFERENCE,
    "dispatch_model": INFERENCE,
    "cpu_offload": INFERENCE,
    "disk_offload": INFERENCE,
    "infer_auto_device_map": INFERENCE,
}


def way_for(name: str) -> str:
    """What to do in place of a name of Accelerate that is not here."""
    return f"{WAYS[name]} ({PAGE})" if name in WAYS else f"{PAGE} lists what is here"


def refused_in_module(module: str, name: str) -> NoReturn:
    """Raise ImportError for a name of a module of Accelerate; AttributeError for those that Python looks for."""
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(f"{name} of {module} is not in Paceline: {way_for(name)}")
