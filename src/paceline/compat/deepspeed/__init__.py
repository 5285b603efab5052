"""A program of DeepSpeed, over Paceline's own steps: `import paceline.compat.deepspeed as deepspeed`.

Its engine, configuration, schedules, pipelines, arguments and collectives are here under DeepSpeed's names. Every other
name is refused, with the way here. After this import `from deepspeed.pipe import PipelineModule`, and the like, are of
this package, too. What works is in docs/how-to/bring-your-deepspeed-program.md.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from paceline.compat.deepspeed.module_names import answer_imports
from paceline.compat.deepspeed.refusals import SUBMODULES, refusal

if TYPE_CHECKING:
    from paceline.compat.deepspeed.accelerator import get_accelerator
    from paceline.compat.deepspeed.arguments import add_config_arguments
    from paceline.compat.deepspeed.comm import init_distributed
    from paceline.compat.deepspeed.engine import DeepSpeedEngine
    from paceline.compat.deepspeed.initialization import initialize
    from paceline.compat.deepspeed.pipeline import LayerSpec, PipelineEngine, PipelineModule, TiedLayerSpec
    from paceline.compat.deepspeed.utils import log_dist, logger

__all__ = [
    "DeepSpeedEngine",
    "LayerSpec",
    "PipelineEngine",
    "PipelineModule",
    "TiedLayerSpec",
    "add_config_arguments",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
]

# The names of the package, and their modules: what is asked for is loaded.
_NAMES = {
    "DeepSpeedEngine": "engine",
    "LayerSpec": "pipeline",
    "PipelineEngine": "pipeline",
    "PipelineModule": "pipeline",
    "TiedLayerSpec": "pipeline",
    "add_config_arguments": "arguments",
    "get_accelerator": "accelerator",
    "init_distributed": "comm",
    "initialize": "initialization",
    "log_dist": "utils",
    "logger": "utils",
}


def __getattr__(name: str) -> Any:
    """The names and modules of DeepSpeed that are here. Raises AttributeError for others, with the way here."""
    if name.startswith("__"):
        raise AttributeError(name)
    if name == "DeepSpeedConfigError":
        from paceline.errors import PlanError

        return PlanError
    if name in _NAMES:
        return getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    if name in SUBMODULES:
        return importlib.import_module(f"{__name__}.{SUBMODULES[name]}")
    raise AttributeError(refusal(name))


answer_imports()
