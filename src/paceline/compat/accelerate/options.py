"""What an `Accelerator` is constructed with: the plan that it asks for, its handlers, and what is not there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from paceline.compat.accelerate.refused_names import way_for
from paceline.compat.accelerate.utils import (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from paceline.errors import PlanError
from paceline.plan import Compute, Plan

__all__ = ["Handlers", "plan_of", "refuse_options"]

PLUGINS = {
    "fsdp_plugin": "FullyShardedDataParallelPlugin",
    "deepspeed_plugin": "DeepSpeedPlugin",
    "deepspeed_plugins": "DeepSpeedPlugin",
    "megatron_lm_plugin": "MegatronLMPlugin",
    "torch_tp_plugin": "TorchTensorParallelPlugin",
    "parallelism_config": "ParallelismConfig",
}


@dataclasses.dataclass
class Handlers:
    """What `kwargs_handlers` say."""

    profile: ProfileKwargs = dataclasses.field(default_factory=ProfileKwargs)
    autocast: AutocastKwargs = dataclasses.field(default_factory=AutocastKwargs)

    def take(self, handlers: Iterable[Any], tell: Callable[[str], None]) -> None:
        """Keep what has a meaning here; `tell` notes what has none. Raises PlanError for others."""
        for one in handlers:
            if isinstance(one, ProfileKwargs):
                self.profile = one
            elif isinstance(one, AutocastKwargs):
                self.autocast = one
            elif isinstance(one, InitProcessGroupKwargs):
                if one.timeout is not None:
                    seconds = int(one.timeout.total_seconds())
                    tell(f"InitProcessGroupKwargs(timeout=...) is not used: paceline run --timeout-s {seconds}")
            elif not isinstance(one, DistributedDataParallelKwargs):
                name = type(one).__name__
                raise PlanError(f"Accelerator(kwargs_handlers=[{name}(...)]) is not in Paceline: {way_for(name)}")


def plan_of(mixed_precision: str | None) -> Plan | None:
    """The plan that a program's own word asks for. Raises PlanError for a precision that is not there."""
    if mixed_precision is None or str(mixed_precision) == "no":
        return None
    try:
        return Plan(compute=Compute(precision=str(mixed_precision)))  # pyright: ignore[reportArgumentType]  # it refuses others
    except PlanError as error:
        raise PlanError(f"Accelerator(mixed_precision={mixed_precision!r}): {error}") from None


def refuse_options(options: Mapping[str, Any]) -> None:
    """Raise PlanError for options of `Accelerator` that are not there, with the way that there is."""
    for name, value in options.items():
        if value is not None:
            raise PlanError(f"Accelerator({name}={value!r}) is not in Paceline: {_way_for_option(name)}")


def _way_for_option(name: str) -> str:
    if name in ("dynamo_backend", "dynamo_plugin"):
        return "the plan says it: --plan 'compute(compile=true)'"
    return way_for(PLUGINS.get(name, name))
