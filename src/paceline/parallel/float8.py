"""Which linear layers of a model compute in FP8, and how they are changed, in place.

FP8 is bf16 with the matrix products of linear layers in 8 bits: inputs, weights and gradients of outputs are multiplied
by a scale, rounded to 8 bits, and multiplied with each other (Micikevicius et al. 2022, "FP8 formats for deep
learning"). torchao does the arithmetic. Here is decided which layers do so, before anything is split, since what is
chosen depends on the whole model; and they are changed after layers were split, on which copies are tried in fp64.

Weights stay what they were: parameters of 32 bits under the same names. So checkpoints know nothing of FP8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from paceline.errors import PlanError
from paceline.parallel.class_name import class_name
from paceline.parallel.model_units import blocks_of
from paceline.plan import Compute

__all__ = ["Float8Choice", "choose_linears", "require_float8"]

LEAST_TORCHAO = (0, 18)
MULTIPLE = 16  # of both dims of a weight: what products in 8 bits ask for
LEAST_CAPABILITY = (8, 9)  # of NVIDIA's: Ada, then Hopper
BASE = "base_layer"  # where peft keeps the layer that it adapts
MOST_NAMED = 4  # layers in a sentence
# What torchao's import always says on standard error, by logger: of libraries for other GPUs, and of a function that
# newer versions of torch do not need. FP8 does without both.
IMPORT_NOTES = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "is an Enum subclass and is now natively supported",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Float8Choice:
    """The linear layers of a model that compute in FP8, and why the others do not."""

    recipe: str
    is_emulated: bool
    names: tuple[str, ...]
    left: dict[str, list[str]]  # reason -> names

    def apply(self, model: nn.Module) -> None:
        """Have the chosen layers compute in FP8, in place: they stay the same modules, with the same parameters."""
        with _without_notes_of_the_import():
            from paceline.parallel.float8_linear import use_float8
        for name in self.names:
            use_float8(model.get_submodule(name), recipe=self.recipe, emulates=self.is_emulated)

    def sentence(self, model: nn.Module) -> str:
        """What is converted, and what is not."""
        count, how = len(self.names), ", emulated" if self.is_emulated else ""
        total = count + sum(map(len, self.left.values()))
        text = f"FP8 ({self.recipe}{how}): {count} of {total} linear layers of {class_name(model)}"
        left = [f"{why}: {_listed(names)}" for why, names in self.left.items()]
        return f"{text}; the others compute in bf16 ({'; '.join(left)})" if left else text


def require_float8(compute: Compute, device: torch.device) -> None:
    """Raise PlanError where this worker cannot compute in FP8: torchao is missing or old, or the device has none."""
    if compute.precision != "fp8":
        return
    need = "Compute(precision='fp8') computes with torchao"
    if importlib.util.find_spec("torchao") is None:
        raise PlanError(f"{need}, which is not installed: pip install 'paceline[fp8]', or use precision='bf16'.")
    version = importlib.metadata.version("torchao")
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit()) < LEAST_TORCHAO:
        raise PlanError(
            f"{need} 0.18 or newer, and {version} is installed: pip install -U 'paceline[fp8]', or use "
            "precision='bf16'."
        )
    if not compute.fp8_emulate and (lacks := _lacks_float8(device)):
        raise PlanError(
            f"Compute(precision='fp8'): {lacks}. Use precision='bf16'; or fp8_emulate=True, which rounds to 8 bits and "
            "multiplies in 32: the numbers of FP8, slower than bf16."
        )


def choose_linears(model: nn.Module, compute: Compute, *, units: Sequence[str] = ()) -> Float8Choice:
    """Return which layers of a whole model compute in FP8; raises PlanError where there is none.

    `units`: names of modules that the user made units, in place of repeated blocks. `Compute.fp8_layers` "blocks"
    leaves out what is outside of them, as an output head is; in a model without blocks, its last linear layer.
    """
    linears = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.Linear)]
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    adapters = _adapters(model)
    inside = _inside_blocks(model, units, [name for name, _ in linears])
    skipped = [pattern for pattern in (compute.fp8_skip or "").split("|") if pattern]
    if idle := [one for one in skipped if not any(fnmatchcase(name, one) for name, _ in linears)]:
        raise PlanError(
            f"Compute(fp8_skip={compute.fp8_skip!r}): {', '.join(map(repr, idle))} matches no linear layer of "
            f"{class_name(model)}, which has {_listed([name for name, _ in linears]) or 'none'}. Write patterns of "
            "names as model.named_modules() has them, with | between them: 'layers.0.*|*.gate'."
        )
    names, left = list[str](), dict[str, list[str]]()
    for name, linear in linears:
        why = "adapters of peft" if name.startswith(adapters) else _why_not(linear, uses)
        if any(fnmatchcase(name, pattern) for pattern in skipped):
            why = "fp8_skip names them"
        elif not why and compute.fp8_layers == "blocks" and name not in inside:
            why = "outside of the repeated blocks" if blocks_of(model, units) else "the last one"
        if why:
            left.setdefault(why, []).append(name or class_name(model))
        else:
            names.append(name)
    if not names:
        reasons = "; ".join(f"{why}: {_listed(found)}" for why, found in left.items()) or "it has none"
        raise PlanError(
            f"Compute(precision='fp8') found no linear layer of {class_name(model)} to compute in FP8 ({reasons}). Use "
            "precision='bf16', layers whose sizes are multiples of 16, or fp8_layers='all'."
        )
    return Float8Choice(recipe=compute.fp8_recipe, is_emulated=compute.fp8_emulate, names=tuple(names), left=left)


def _why_not(linear: nn.Linear, uses: Mapping[int, int]) -> str:
    """Why a layer is not converted, or "". `uses`: how many modules have a parameter, by its id."""
    computed = "weights are computed anew for each forward"
    if parametrize.is_parametrized(linear):
        return computed  # reading them would compute them, and may change buffers, as spectral_norm does
    if type(linear) is not nn.Linear or "forward" in vars(linear):
        return "of a class of their own"
    if not isinstance(linear.weight, nn.Parameter):
        return computed  # by a hook, as prune and the older weight_norm and spectral_norm do
    rows, columns = linear.weight.shape if linear.weight.dim() == 2 else (0, 0)
    if rows % MULTIPLE or columns % MULTIPLE or not rows * columns:
        return f"sizes are no multiples of {MULTIPLE}"
    if not linear.weight.is_floating_point():
        return "weights are packed"
    return "weights are shared with another module" if uses[id(linear.weight)] > 1 else ""


def _adapters(model: nn.Module) -> tuple[str, ...]:
    """How the names begin of what peft put beside the layers that it adapts: small, and all that is trained there."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return ()
    found = [pair for pair in model.named_modules() if isinstance(pair[1], tuners.BaseTunerLayer)]
    return tuple(
        f"{name}.{key}.".removeprefix(".") for name, one in found for key, _ in one.named_children() if key != BASE
    )


def _inside_blocks(model: nn.Module, units: Sequence[str], names: Sequence[str]) -> set[str]:
    """Names of linear layers that are in blocks; where there are no blocks, all but the last."""
    blocks = [name for name, _ in blocks_of(model, units)]
    if not blocks:
        return set(names[:-1] or names)
    return {name for name in names if any(name == block or name.startswith(f"{block}.") for block in blocks)}


def _lacks_float8(device: torch.device) -> str:
    if device.type != "cuda":
        return f"this worker computes on the {device.type.upper()}, which has no products in FP8"
    if torch.version.hip:
        name = torch.cuda.get_device_properties(device).gcnArchName
        return "" if name.startswith(("gfx94", "gfx95")) else f"{name} has no products in FP8 (MI300 and newer have)"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no products in FP8 (Ada, Hopper and newer have)"
    return ""


def _listed(names: Iterable[str]) -> str:
    found = list(names)
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


@contextlib.contextmanager
def _without_notes_of_the_import() -> Iterator[None]:
    """Import torchao without what it always says; all else stays. Programs without FP8 do not come here."""

    def is_other(record: logging.LogRecord) -> bool:
        return IMPORT_NOTES[record.name] not in record.getMessage()

    loggers = [logging.getLogger(name) for name in IMPORT_NOTES]
    for logger in loggers:
        logger.addFilter(is_other)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_other)
