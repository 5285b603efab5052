"""Fully sharded data parallel (ZeRO, FSDP): parameters, gradients and optimizer state split by rows within a replica;
may import parallel.model_units, nothing of another axis.
"""
