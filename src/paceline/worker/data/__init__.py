"""Data loading: the samples that this worker reads in each step, by stream and position; random state of each
micro-batch, load balancing; imports `membership` and `topology`.
"""
