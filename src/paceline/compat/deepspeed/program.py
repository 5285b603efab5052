"""`paceline run --as deepspeed`: an unmodified program of DeepSpeed. Its `import deepspeed` is of this package."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from paceline.compat.deepspeed.comm import init_distributed
from paceline.compat.deepspeed.module_names import answer_imports
from paceline.plan.job import Assignment

__all__ = ["prepare_program"]

LOCAL_RANK = "--local_rank"  # which DeepSpeed's launcher adds to a program's arguments


def prepare_program(assignment: Assignment) -> None:
    """Before the program of this worker begins: have it import this package, and give it what its launcher would."""
    answer_imports()
    text = Path(assignment.job.program).read_text(encoding="utf-8", errors="replace")
    if LOCAL_RANK in text and not any(word.startswith(LOCAL_RANK) for word in sys.argv):
        sys.argv.insert(1, f"{LOCAL_RANK}={assignment.local_rank}")
    dist.init_process_group = _joining(dist.init_process_group)


def _joining(make: Callable[..., None]) -> Callable[..., None]:
    """Have a program's own `torch.distributed.init_process_group()` be `deepspeed.init_distributed()`, and Paceline's
    own be torch's."""

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")  # pyright: ignore[reportPrivateUsage]  # documented, and named so for what it costs in other Pythons
        if caller.startswith("paceline."):
            inspect.unwrap(make)(*args, **kwargs)
        else:
            init_distributed()

    return init_process_group
