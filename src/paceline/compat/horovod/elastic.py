"""`hvd.elastic`: a training function that goes on from its last commit after a failure."""

from paceline.compat.horovod.elastic_run import run, run_fn
from paceline.compat.horovod.elastic_sampler import ElasticSampler
from paceline.compat.horovod.elastic_state import ObjectState, State, TorchState

__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run", "run_fn"]
