"""Recompute activations in backward instead of keeping them.

It is done to each of a model's repeated blocks: the members of a ModuleList or Sequential of two or more modules of one
class; or to the modules that the user names. Random state is kept, also Python's and numpy's, so dropout repeats
exactly.

    blocks       a block keeps only its inputs (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016)
    selective    also the results of operations that are costly: matrix products, convolutions, attention, collectives
                 (after Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
                 Norms, activation functions, dropout and casts run again.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from paceline.errors import PlanError
from paceline.parallel.repeated_draws import RepeatedDraws

__all__ = ["is_costly", "recompute_blocks", "repeated_blocks"]

# Names of ATen's operations, in all their overloads; what this build of torch does not have is just not met.
COSTLY = frozenset(
    {
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "_scaled_mm",
        "_grouped_mm",
        "linear",
        "convolution",
        "_convolution",
        "_fft_r2c",
        "_fft_c2c",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "mkldnn_rnn_layer",
        "flex_attention",
    }
)
COLLECTIVES = frozenset({"_c10d_functional", "c10d_functional"})  # namespaces: to send again costs most of all


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the outermost repeated blocks, with their names."""
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for name, parent in model.named_modules():
        if parent in inside or not isinstance(parent, (nn.ModuleList, nn.Sequential)):
            continue
        children = list(parent.named_children())
        kinds = {type(child) for _, child in children}
        has_parameters = all(any(True for _ in child.parameters()) for _, child in children)
        if len(children) > 1 and len(kinds) == 1 and has_parameters:
            for child_name, child in children:
                found.append((f"{name}.{child_name}" if name else child_name, child))
                inside.update(child.modules())
    return found


def recompute_blocks(
    model: nn.Module,
    *,
    keep: Literal["inputs", "costly"] = "inputs",
    blocks: Sequence[tuple[str, nn.Module]] | None = None,
) -> None:
    """Make every repeated block recompute in backward, in place; raises PlanError where there is none.

    `blocks`: others in their place, with their names. `keep`: what of a block is kept from its forward to its backward:
    its inputs, or also what is costly to compute.
    """
    blocks = repeated_blocks(model) if blocks is None else blocks
    if not blocks:
        word = "blocks" if keep == "inputs" else "selective"
        raise PlanError(
            f"Compute(recompute='{word}') found no repeated blocks in {type(model).__name__}: it looks for a "
            "ModuleList or Sequential "
            "of two or more modules of one class. Use recompute='none', put the model's layers into a ModuleList, or "
            "name them: worker.prepare(model, units=[...])."
        )
    for _, block in blocks:
        block.forward = _recomputed(block, keep)


def is_costly(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the result of one of torch's operations is worth keeping.

    Attention that drops out itself is not: it would not draw its random numbers again when the block is recomputed, and
    whatever drops out after it in the block would draw others than before.
    """
    schema = getattr(operation, "_schema", None)
    if schema is None:  # an operation of higher order
        return getattr(operation, "__name__", "") in COSTLY
    namespace, _, name = schema.name.partition("::")
    if namespace in COLLECTIVES:
        return True
    return name in COSTLY and not _drops_out(schema, args, kwargs)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_costly(operation, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _drops_out(schema: torch.FunctionSchema, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return False


def _recomputed(block: nn.Module, keep: Literal["inputs", "costly"]) -> Callable[..., Any]:
    """The block's forward with recomputation, as a method: `copy.deepcopy` binds a method to the copy."""
    forward: Any = block.forward
    if not isinstance(forward, types.MethodType) or forward.__self__ is not block:
        function = functools.partial(_call_unbound, forward)  # the user's own replacement, which copies share anyway
    else:
        function = forward.__func__
    options: dict[str, Any] = {"use_reentrant": False}
    if keep == "costly":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
        function = functools.partial(_call_casting_anew, function)

    @functools.wraps(forward)
    def run(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not block.training:
            return function(block, *args, **kwargs)
        return checkpoint(RepeatedDraws(function), block, *args, **options, **kwargs)

    return types.MethodType(run, block)


def _call_unbound(forward: Callable[..., Any], _: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _call_casting_anew(forward: Callable[..., Any], block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a forward without autocast's cache of weights in 16 bits.

    Kept results are found again by counting operations, so a forward must run the same ones each time; with the cache a
    block that runs twice in one forward casts its weights the first time only.
    """
    device_type = next((parameter.device.type for parameter in block.parameters()), "cpu")
    if not torch.is_autocast_enabled(device_type):
        return forward(block, *args, **kwargs)
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False):
        return forward(block, *args, **kwargs)
