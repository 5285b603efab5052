"""The inside of one step: forward and backward over micro-batches, pipeline stages, buffers, loss spikes, gradient
noise scale, evaluation; imports `data` and `topology`, never `record`.
"""
