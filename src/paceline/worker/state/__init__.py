"""The state of a run (models, optimizers, codecs) and what carries it: checkpoints, snapshots, memory checkpoints,
peers; imports `step`, `record` and the rooms below.
"""
