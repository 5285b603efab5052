"""What transformers can dequantise here, and how: while it loads, or module by module afterwards.

Of most methods its configuration has an option `dequantize`, and each weight is made of its stored tensors while they
are read. Of bitsandbytes and torchao the codes are loaded as they are; then each module gets its weights as numbers.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError

__all__ = ["CPU", "has_own_way", "load_dequantised"]

CPU = {"": "cpu"}  # some methods would else load to the first GPU
AFTERWARDS = ("bitsandbytes", "torchao")  # these are dequantised when they are loaded


def has_own_way(method: str, about: Mapping[str, Any]) -> bool:
    """Whether transformers, or the method's package, can make numbers of codes."""
    if method in AFTERWARDS:
        return True
    try:
        return hasattr(_configuration(about), "dequantize")
    except ImportError:
        return True  # what is missing is said when it is needed
    except (ValueError, TypeError):
        return False


def load_dequantised(
    load: Callable[[Mapping[str, Any]], Any],
    method: str,
    about: Mapping[str, Any],
    types_of: Callable[[Any], Mapping[str, torch.dtype]],
    folder: Path,
) -> Any:
    """Have transformers make a model of ordinary weights. `load`: does so with more options, and returns what it made.
    `types_of`: gives the types of a model's weights, by names.

    Raises PlanError where the method cannot be dequantised, or its package is absent.
    """
    if not has_own_way(method, about):
        raise PlanError(
            f"the weights of {folder} are quantised ({method}), which transformers cannot dequantise: take the folder "
            "with weights of 16 bits"
        )
    more: dict[str, Any] = {"device_map": CPU}
    try:
        if method not in AFTERWARDS:
            more["quantization_config"] = _configuration({**about, "dequantize": True})
        with _blocks_at_edges(about), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")  # it is what the folder says
            found = load(more)
    except ImportError as error:
        raise PlanError(
            f"the weights of {folder} are quantised ({method}), and this Python lacks what dequantises them: {error}"
        ) from error
    _replace_codes(found.model)
    _convert(found.model, types_of(found.model))
    return found


def _configuration(about: Mapping[str, Any]) -> Any:
    return importlib.import_module("transformers.quantizers.auto").AutoQuantizationConfig.from_dict(dict(about))


@contextlib.contextmanager
def _blocks_at_edges(about: Mapping[str, Any]) -> Iterator[None]:
    """Within it, transformers dequantises FP8 weights whose last blocks are cut short by the weight's edge.

    It takes the shape of blocks to be that of the weight divided by that of its scales. That is not so for 576 rows in
    blocks of 128, of which DeepSeek-V3 has some: transformers 5.23 raises there, and 192 rows get wrong scales. So
    each row and column of such a weight gets a scale of its own, until transformers goes by the block size.
    """
    blocks: Any = about.get("weight_block_size")
    if not blocks:
        yield
        return
    operation: Any = importlib.import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize
    own = operation._dequantize_one

    def dequantize_one(self: Any, quantized: Tensor, scales: Tensor, *more: Any, **options: Any) -> Tensor:
        shape = quantized.shape[-2:]
        if scales.dim() >= 2 and tuple(scales.shape[-2:]) == tuple(map(_num_blocks, shape, blocks)):
            for dim, size, block in zip((-2, -1), shape, blocks, strict=True):
                if size % block and size > block:
                    scales = scales.repeat_interleave(block, dim).narrow(dim, 0, size)
        return own(self, quantized, scales, *more, **options)

    operation._dequantize_one = dequantize_one
    try:
        yield
    finally:
        operation._dequantize_one = own


def _num_blocks(size: int, block: int) -> int:
    return -(-size // block)


@torch.no_grad()
def _replace_codes(model: nn.Module) -> None:
    """Give each module numbers instead of codes, one tensor at a time."""
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if type(parameter).__name__ in ("Params4bit", "Int8Params"):  # of bitsandbytes
                model.set_submodule(name, _plain(module))
                break
            if type(parameter) is not nn.Parameter and callable(getattr(parameter, "dequantize", None)):  # of torchao
                numbers: Any = parameter
                setattr(module, key, nn.Parameter(numbers.dequantize(), requires_grad=False))


def _plain(layer: Any) -> nn.Module:
    """A module that has the weights of a layer of bitsandbytes as numbers, for their names alone."""
    integration: Any = importlib.import_module("transformers.integrations.bitsandbytes")
    numbers: Tensor = integration.dequantize_bnb_weight(layer.weight, getattr(layer, "state", None))
    if getattr(getattr(layer, "source_cls", None), "__name__", "") == "Conv1D":  # which has its weight transposed
        numbers = numbers.T.contiguous()
    found = nn.Module()
    found.register_parameter("weight", nn.Parameter(numbers, requires_grad=False))
    if layer.bias is not None:
        found.register_parameter("bias", layer.bias)
    return found


@torch.no_grad()
def _convert(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    """Give what has another type its own: of some methods transformers leaves unquantised weights as the files have
    them."""
    done: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        dtype = types.get(name, parameter.dtype)
        if dtype != parameter.dtype:
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(parameter.to(dtype), requires_grad=False)
            path, _, key = name.rpartition(".")
            module = model.get_submodule(path)
            setattr(module, key, done[id(parameter)])
            done[id(parameter)] = getattr(module, key)  # as it was put into a file
