"""Chooses a worker's device, the torch.distributed back end and the way of its tensors, and measures peak memory."""

from __future__ import annotations

import resource
from typing import Literal

import torch

from paceline.comm.peer_sockets.process_group import register_peer_backend
from paceline.errors import PlanError

__all__ = [
    "SHARED",
    "TensorWay",
    "backend_for",
    "choose_device",
    "peak_memory_bytes",
    "tensor_way",
    "why_gpus_are_idle",
]

SHARED = "cuda-shared"  # Job.device: several workers may have the same GPU

TensorWay = Literal["host", "staged", "device"]
"""How a worker's tensors travel: they are the host's anyway; copied to the host and back; or from device to device."""


def choose_device(wanted: str, *, local_rank: int, local_workers: int) -> torch.device:
    """Return this worker's device: "auto" takes a GPU for each worker where the host has enough of them, else the CPU.

    "cuda-shared" gives the host's GPUs to the workers in turn, however many there are. Raises PlanError when "cuda"
    is asked for and the host has fewer GPUs than workers, or "cuda-shared" and it has none.
    """
    num_devices = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if wanted == SHARED and num_devices == 0:
        raise PlanError(
            f"device={SHARED!r} lets the workers of a host share its GPUs, and torch finds none on this host. Use "
            "device='cpu', or 'auto'"
        )
    if wanted == SHARED:
        torch.cuda.set_device(local_rank % num_devices)
        return torch.device("cuda", local_rank % num_devices)
    if wanted == "cuda" and num_devices < local_workers:
        raise PlanError(
            f"device='cuda' needs a GPU for each of the {local_workers} workers on this host, which has {num_devices}. "
            f"Use workers={max(1, num_devices)}, or device='cpu'"
            + (f". To try a layout, device={SHARED!r} lets workers share a GPU" if num_devices else "")
        )
    if num_devices >= local_workers:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def why_gpus_are_idle(wanted: str, *, local_workers: int) -> str | None:
    """Why "auto" leaves the GPUs of this host idle: there are fewer of them than workers; None where it does not."""
    num_devices = torch.cuda.device_count() if wanted == "auto" and torch.cuda.is_available() else 0
    if not 0 < num_devices < local_workers:
        return None
    gpus = "its GPU is" if num_devices == 1 else f"its {num_devices} GPUs are"
    return (
        f"all {local_workers} workers of this host compute on the CPU: {gpus} not enough for one each. "
        f"Use workers={num_devices} on this host, or set device='cpu' (--device cpu)"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this worker had: on a GPU what torch allocated there, elsewhere the process's resident
    memory.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tensor_way(device: torch.device, wanted: str) -> TensorWay:
    """How tensors on `device` travel between workers, where `wanted` is the job's device."""
    if device.type == "cpu":
        return "host"
    return "staged" if wanted == SHARED else "device"


def backend_for(device: torch.device, *, way: TensorWay = "device", over_gloo: bool = False) -> str:
    """The name of torch.distributed's back end: sockets that admit no stranger for CPU tensors, NCCL for CUDA tensors.

    `over_gloo`: gloo for CPU tensors. It stands beside NCCL in any case. `way`: where workers share a device, which
    NCCL refuses, gloo takes what torch itself sends of CUDA tensors.
    """
    if device.type == "cuda":
        return "cpu:gloo,cuda:gloo" if way == "staged" else "cpu:gloo,cuda:nccl"
    return "gloo" if over_gloo else register_peer_backend()
