"""Small functions that programs import from Horovod's `common.util` and `runner.util.threads`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from paceline.compat.horovod import basics

__all__ = [
    "check_extension",
    "extension_available",
    "gloo_built",
    "gpu_available",
    "in_thread",
    "is_iterable",
    "mpi_built",
    "nccl_built",
    "num_rank_is_power_2",
    "split_list",
]

T = TypeVar("T")

gloo_built, mpi_built, nccl_built = basics.gloo_built, basics.mpi_built, basics.nccl_built


def check_extension(ext_name: str, ext_env_var: str = "", pkg_path: str = "", *args: str) -> None:
    """Raise ImportError for an extension other than the one for torch."""
    if ext_name != "horovod.torch":
        raise ImportError(f"Extension {ext_name} is not provided: Paceline stands in for horovod.torch.")


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether a framework is supported: torch."""
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether there is a GPU."""
    return torch.cuda.is_available()


def is_iterable(x: object) -> bool:
    """Return whether one can iterate over `x`."""
    return isinstance(x, Iterable)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether a number is a power of two."""
    return num_rank > 0 and not num_rank & (num_rank - 1)


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741  # Horovod's name
    """Return `n` parts of a list, about equally long."""
    each, more = divmod(len(l), n)
    bounds = [place * each + min(place, more) for place in range(n + 1)]
    return [l[a:b] for a, b in itertools.pairwise(bounds)]


def in_thread(
    target: Callable[..., Any],
    args: Sequence[Any] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Run a function in a thread, and return the thread."""
    thread = threading.Thread(target=target, args=tuple(args), name=name, daemon=daemon)
    thread.start()
    return thread
