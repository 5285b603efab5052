"""One step: gradient accumulation over micro-batches, pipeline stages, buffers, loss spikes, gradient noise scale,
evaluation; imports `data` and `topology`, never `record`.
"""
