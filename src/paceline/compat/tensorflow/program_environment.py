"""The environment variables of a task's program: its place in the cluster, its GPUs and its threads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline import environment
from paceline.compat.tensorflow.cluster import TaskPlace, tasks_on, tf_config, visible_gpus_of
from paceline.compat.tensorflow.reserved_port import REUSE_PORT
from paceline.errors import PlanError
from paceline.plan.job import Assignment

__all__ = ["device_text", "host_gpus", "program_environment"]

GPUS = "CUDA_VISIBLE_DEVICES"
NO_GPU = "-1"  # as TensorFlow's own guides write it
THREADS = "TF_NUM_INTRAOP_THREADS"
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"


def program_environment(
    assignment: Assignment, places: Sequence[TaskPlace], told: Mapping[int, Mapping[str, Any]]
) -> dict[str, str]:
    """Return the variables of the program: those of this process, and its own. `told`: what all tasks have said, by
    rank. Raises PlanError where device="cuda" and this host has too few GPUs.

    What the user has set stays: threads, log level. TF_CONFIG is replaced, or removed where the task is alone.
    """
    job, rank = assignment.job, assignment.rank
    variables = environment.child_environment()
    config = tf_config(rank, places, [str(told[other]["address"]) for other in range(len(places))])
    variables.pop("TF_CONFIG", None)
    if config is not None:
        variables |= {"TF_CONFIG": config, REUSE_PORT: "true"}
    here = tasks_on(told, assignment.host_index)
    gpus = [] if job.device == "cpu" else host_gpus()
    num_computing = sum(places[other].computes for other in here)
    if job.device == "cuda" and len(gpus) < num_computing:
        raise PlanError(
            f"device='cuda' needs a GPU for each of the {num_computing} workers on this host, which has {len(gpus)}. "
            f"Use fewer workers here, or --device cpu."
        )
    seen = visible_gpus_of(rank, places, here=here, gpus=gpus, device=job.device)
    if seen is not None or job.device == "cpu":
        variables[GPUS] = ",".join(seen or ()) or NO_GPU
    if job.threads is not None:
        variables[THREADS] = variables["OMP_NUM_THREADS"] = str(job.threads)
    elif len(here) > 1:
        variables.setdefault(THREADS, str(environment.default_threads(len(here))))
    variables.setdefault(LOG_LEVEL, "1")  # its informational lines differ in their times alone
    return variables


def host_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that processes of this host see, as CUDA_VISIBLE_DEVICES names them: NVIDIA's device files, as
    far as that variable does not choose among them."""
    count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))
    names = environment.visible_gpus()
    return [str(number) for number in range(count)] if names is None else list(names[:count])


def device_text(variables: Mapping[str, str]) -> str:
    """Return "gpu 0,1", or "cpu": where the program of these variables computes."""
    gpus = variables.get(GPUS, ",".join(host_gpus()))
    return "cpu" if gpus in ("", NO_GPU) else f"gpu {gpus}"
