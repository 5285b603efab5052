"""`deepspeed.accelerator`: the device that this worker computes on, by DeepSpeed's names."""

from __future__ import annotations

from typing import Any

import torch

from paceline.compat.deepspeed.comm import world_here
from paceline.worker.program_worker import program_worker

__all__ = ["get_accelerator"]


class _Accelerator:
    """Answers for a GPU where each worker of the host has one, and else for the CPU."""

    @property
    def _is_gpu(self) -> bool:
        worker = program_worker()
        if worker is not None:
            return worker.device.type == "cuda"
        return torch.cuda.is_available() and torch.cuda.device_count() >= world_here()[3]

    @property
    def _module(self) -> Any:
        return torch.cuda if self._is_gpu else torch.cpu

    def device_name(self, device_index: int | None = None) -> str:
        """The name of a device, for `tensor.to(...)`."""
        if not self._is_gpu:
            return "cpu"
        return "cuda" if device_index is None else f"cuda:{device_index}"

    def current_device(self) -> int:
        """The number of this worker's device."""
        return torch.cuda.current_device() if self._is_gpu else world_here()[2]

    def current_device_name(self) -> str:
        """The name of this worker's device."""
        return f"cuda:{torch.cuda.current_device()}" if self._is_gpu else "cpu"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which new tensors are on a device."""
        return torch.device(self.device_name(device_index))

    def set_device(self, device_index: int) -> None:
        """Choose the GPU; on the CPU there is nothing to choose."""
        if self._is_gpu:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """The host's devices; on the CPU one for each worker."""
        return torch.cuda.device_count() if self._is_gpu else world_here()[3]

    def is_available(self) -> bool:
        """There is always a device."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return torch.cuda.is_bf16_supported() if self._is_gpu else True

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def communication_backend_name(self) -> str:
        """The back end of torch.distributed that suits it."""
        return "nccl" if self._is_gpu else "gloo"

    def manual_seed(self, seed: int) -> None:
        """Seed torch's random numbers."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's random numbers on all devices."""
        torch.manual_seed(seed)

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._is_gpu:
            torch.cuda.synchronize(device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors on a GPU; 0 on the CPU."""
        return torch.cuda.memory_allocated(device_index) if self._is_gpu else 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes of tensors on a GPU; 0 on the CPU."""
        return torch.cuda.max_memory_allocated(device_index) if self._is_gpu else 0

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Count the most bytes anew."""
        if self._is_gpu:
            torch.cuda.reset_peak_memory_stats(device_index)

    def empty_cache(self) -> None:
        """Give cached memory back."""
        if self._is_gpu:
            torch.cuda.empty_cache()

    def range_push(self, text: str) -> None:
        """Ranges of a profiler are torch's own: torch.profiler.record_function."""

    def range_pop(self) -> None:
        """See `range_push`."""

    def __getattr__(self, name: str) -> Any:
        """All else is of torch.cuda, or torch.cpu."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._module, name)


_accelerator = _Accelerator()


def get_accelerator() -> _Accelerator:
    """The accelerator of this process."""
    return _accelerator
