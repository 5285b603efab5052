"""Fully sharded data parallelism (ZeRO, FSDP): parameters, gradients and optimizer state are split by rows within a
replica.

`sharded_model.py` applies torch's `fully_shard` to the units of `sharded_units.py`; `collectives.py` provides its
all-gather and reduce-scatter. May import torch, `comm`, `parallel.model_units` and the loose files below it; no other
axis.
"""
