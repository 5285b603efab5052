"""Which samples this worker reads in each step: streams, positions, loaders, per-micro-batch random state, load
balancing; imports `membership` and `topology`.
"""
