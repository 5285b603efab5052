"""The keys of DeepSpeed's configuration that no plan holds: those that do nothing here, and those that are refused.

Keys are written with dots for their sections. A key stands for all keys below it. What is refused is refused where it
is switched on: a value of `OFF`, or a section whose `enabled` is false, changes nothing.
"""

from __future__ import annotations

__all__ = ["IGNORED", "OFF", "REFUSED", "TAKEN"]

OFF: tuple[object, ...] = (False, None, 0, "", "none", "None")

# What `config.py` reads: each has its own sentence there.
TAKEN: frozenset[str] = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer.type",
        "optimizer.params",
        "scheduler.type",
        "scheduler.params",
        "bf16.enabled",
        "bfloat16.enabled",
        "fp16.enabled",
        "fp16.loss_scale",
        "fp16.initial_scale_power",
        "fp16.loss_scale_window",
        "fp16.hysteresis",
        "fp16.min_loss_scale",
        "torch_autocast.enabled",
        "torch_autocast.dtype",
        "zero_optimization.stage",
        "zero_optimization.mics_shard_size",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_param.device",
        "zero_optimization.cpu_offload",
        "zero_optimization.cpu_offload_param",
        "communication_data_type",
        "sparse_gradients",
        "tensor_parallel.autotp_size",
        "sequence_parallel_size",
        "compile.deepcompile",
        "compile.enabled",
        "dataloader_drop_last",
        "steps_per_print",
        "tensorboard.enabled",
        "wandb.enabled",
        "pipeline.stages",
    }
)

_SIZES = "sizes of messages are the plan's bucket_bytes, which its default suits"
_PASS = "gradients are summed in fp32 while backward runs, and divided once"
_OFFLOAD = "how state moves is chosen here"
_SEEN = "`paceline status`, `paceline report` and the live page show it for every run"
_CHECKPOINTS = "a checkpoint is read on any number of workers, under any layout"
_MODEL_SAVE = "save_16bit_model() always gathers whole weights"

IGNORED: dict[str, str] = {
    "wall_clock_breakdown": _SEEN,
    "memory_breakdown": _SEEN,
    "dump_state": _SEEN,
    "log_level": _SEEN,
    "comms_logger": _SEEN,
    "flops_profiler": f"{_SEEN}; `paceline plan train.py --cluster NAME` counts the operations of a step",
    "timers": _SEEN,
    "csv_monitor": "each run writes metrics.jsonl",
    "tensorboard.output_path": "the run directory has its TensorBoard files",
    "tensorboard.job_name": "a run is named by its directory",
    "wandb.group": "the run's own name is used",
    "wandb.team": "the tracker's own environment variables say it",
    "wandb.project": "the tracker's own environment variables say it",
    "autotuning": "`paceline run --plan auto` tries plans",
    "aio": "offloaded state lies in files that are mapped into memory: there is no queue to tune",
    "checkpoint": _CHECKPOINTS,
    "nebula": "checkpoints are written in the background, in the run directory",
    "datastates": "checkpoints are written in the background, in the run directory",
    "activation_checkpointing": "torch.utils.checkpoint works as it is; compute(recompute=blocks) does it for a model",
    "prescale_gradients": _PASS,
    "gradient_predivide_factor": _PASS,
    "disable_allgather": _PASS,
    "fp32_allreduce": _PASS,
    "data_types": "weights, gradients and optimizer state are fp32, whatever the precision of the forward",
    "seq_parallel_communication_data_type": "activations travel as they are",
    "zero_allow_untested_optimizer": "every elementwise optimizer of torch works with every ZeRO stage",
    "zero_force_ds_cpu_optimizer": "torch's own optimizers are used",
    "disable_python_gc": "Python's garbage collection stays as the program sets it",
    "use_data_before_expert_parallelism": "the layout says which workers share experts",
    "managed_gradient_accumulation": "the accumulation boundary is counted here",
    "optimizer.legacy_fusion": "torch chooses its own fused optimizers",
    "bf16.immediate_grad_update": _PASS,
    "bf16.check_grad_overflow": "a step whose gradients are not finite is taken by no worker",
    "bf16.bf16_master_weights_and_grads": "weights and gradients stay fp32",
    "bf16.bf16_optimizer_states": "optimizer state stays fp32",
    "bfloat16": "weights and gradients stay fp32",
    "fp16.auto_cast": "inputs are cast where an operation needs it",
    "fp16.consecutive_hysteresis": "hysteresis is counted since the scale was last doubled",
    "fp16.fp16_master_weights_and_grads": "weights and gradients stay fp32",
    "fp16.opt_level": "weights and optimizer state stay fp32",
    "torch_autocast.lower_precision_safe_modules": "torch's autocast decides for each operation",
    "pipeline": "the plan says it: stages=N, schedule=1f1b",
    "zero_optimization.contiguous_gradients": _SIZES,
    "zero_optimization.reduce_scatter": _SIZES,
    "zero_optimization.reduce_bucket_size": _SIZES,
    "zero_optimization.allgather_bucket_size": _SIZES,
    "zero_optimization.allgather_partitions": _SIZES,
    "zero_optimization.use_multi_rank_bucket_allreduce": _SIZES,
    "zero_optimization.overlap_comm": "gradients always travel while backward runs",
    "zero_optimization.compute_grad_norm": "the norm of the gradients is known after each step",
    "zero_optimization.load_from_fp32_weights": _CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": _CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINTS,
    "zero_optimization.sub_group_size": _OFFLOAD,
    "zero_optimization.cpu_offload_use_pin_memory": _OFFLOAD,
    "zero_optimization.offload_optimizer": _OFFLOAD,
    "zero_optimization.offload_param": _OFFLOAD,
    "zero_optimization.prefetch_bucket_size": _SIZES,
    "zero_optimization.stage3_prefetch_bucket_size": _SIZES,
    "zero_optimization.param_persistence_threshold": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.stage3_param_persistence_threshold": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.model_persistence_threshold": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.stage3_model_persistence_threshold": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.max_live_parameters": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.stage3_max_live_parameters": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.max_reuse_distance": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.stage3_max_reuse_distance": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.stage3_module_granularity_threshold": "torch's fully_shard gathers by blocks of the model",
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": _SIZES,
    "zero_optimization.stage3_allgather_sequential": _SIZES,
    "zero_optimization.gather_16bit_weights_on_model_save": _MODEL_SAVE,
    "zero_optimization.gather_fp16_weights_on_model_save": _MODEL_SAVE,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _MODEL_SAVE,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _MODEL_SAVE,
    "zero_optimization.ignore_unused_parameters": "a parameter without a gradient stays as it is, and is named once",
    "zero_optimization.legacy_stage1": "there is one ZeRO stage 1 here",
    "zero_optimization.round_robin_gradients": _SIZES,
    "zero_optimization.parameter_alignment": _SIZES,
    "zero_optimization.memory_efficient_linear": "torch's own linear layers are used",
    "zero_optimization.override_module_apply": "a model is whole until initialize() has it",
    "zero_optimization.log_trace_cache_warnings": _SEEN,
    "zero_optimization.enable_sanity_checks": "parameters are compared with Guard(check_every=n) of the plan",
    "zero_optimization.leaf_module": "prepare(units=...) of a worker names what is gathered as a whole",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "optimizer state lies where the plan says",
    "compile.passes": "torch.compile has its own",
    "compile.free_activation": "torch.compile has its own passes",
    "compile.debug_log": "torch's own TORCH_LOGS says it",
    "compile": "torch.compile has its own passes",
    "cuda_visible_devices": "the environment variable CUDA_VISIBLE_DEVICES says it",
    "vocabulary_size": "nothing here depends on it",
}

_LESS = "takes other samples, layers or weights than the program says; what the program does itself works"

REFUSED: dict[str, str] = {
    "amp": "Apex's mixed precision is not used here. Write bf16 or fp16 in place of it",
    "gradient_allreduce_op": "gradients are averaged. Multiply the learning rate instead",
    "elasticity": "a DeepSpeed loop reads its own data, for a fixed number of workers. A training function with "
    "worker.batches(...) is elastic: --plan replicas=2-8",
    "curriculum_learning": f"curriculum learning {_LESS}",
    "data_efficiency": f"data efficiency {_LESS}",
    "progressive_layer_drop": f"progressive layer drop {_LESS}",
    "eigenvalue": "it belongs to quantize_training, which is not here",
    "quantize_training": "training with quantized weights is not here. compute(precision=bf16) halves the work",
    "weight_quantization": "quantized weights are not here",
    "compression_training": "compression and pruning of models are not here. Apply torch.ao.quantization or "
    "torch.nn.utils.prune in the program, before initialize()",
    "sparse_attention": "sparse attention is not here. Use the model's own, such as "
    "torch.nn.functional.scaled_dot_product_attention with a mask",
    "hybrid_engine": "generation in the engine is not here. Call the model itself: engine.module.generate(...)",
    "expert_parallel": "experts in a DeepSpeed loop are not here. A training function with experts=N in its plan has "
    "them",
    "comet": "this tracker is not here: --log wandb or --log mlflow",
    "graph_harvesting": "CUDA graphs are torch's own matter: compute(compile=true)",
    "zero_optimization.zenflow": "asynchronous updates of the optimizer are not here. Leave it out: "
    "offload_optimizer works without it",
    "zero_optimization.mics_hierarchical_params_gather": "parameters are gathered within a replica: leave it out",
    "zero_optimization.zero_hpz_partition_size": "a second partition of the weights is not here. "
    "mics_shard_size=N, the plan shard=N with several replicas, keeps weights within a host",
    "zero_optimization.zero_quantized_weights": "weights travel as they are. Gradients between replicas are quantized "
    "by the plan's int8",
    "zero_optimization.zero_quantized_nontrainable_weights": "weights travel as they are",
    "zero_optimization.zero_quantized_gradients": "gradients between replicas are quantized by the plan's int8, which "
    "has error feedback",
    "zero_optimization.zeropp_loco_param": "gradients between replicas are quantized by the plan's int8, which has "
    "error feedback",
}
