"""A small input with which a model can be run to see what it does: given by the user, or guessed and tried.

Random numbers that the runs draw, gradients and buffers leave no trace.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import PlanError, Reason
from paceline.parallel.part_dtype import in_one_type
from paceline.parallel.spared_products import USER_ERRORS, sparing_products

__all__ = ["SampleInput", "as_sample", "guess_sample", "undisturbed"]

BATCH = 2
LEAST_TOKENS = (12, 4)  # tried in this order: tables of positions may be short


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleInput:
    """Arguments for one forward."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def run(self, model: nn.Module) -> Any:
        """Return what the model returns for it; the model and random generators stay as they were."""
        with undisturbed(model), in_one_type(model):
            return model(*copy.deepcopy(self.args), **copy.deepcopy(dict(self.kwargs)))

    def __str__(self) -> str:
        given = [_shown(one) for one in self.args] + [f"{key}={_shown(one)}" for key, one in self.kwargs.items()]
        return ", ".join(given)


def as_sample(given: Any) -> SampleInput:
    """Return a sample from what users give: a tensor, a tuple of arguments, a dictionary of named ones, a Sample."""
    if isinstance(given, SampleInput):
        return given
    if isinstance(given, Mapping):
        return SampleInput(kwargs={str(key): value for key, value in given.items()})
    return SampleInput(args=tuple(given) if isinstance(given, (tuple, list)) else (given,))


def guess_sample(model: nn.Module, *, size: int) -> SampleInput:
    """Return an input that the model takes, whose tokens divide among `size` workers where their number is free.

    Raises PlanError, with what was tried, where none is found.
    """
    tried: list[str] = []
    lengths = dict.fromkeys(-(-least // size) * size for least in LEAST_TOKENS)
    for sample in (sample for length in lengths for sample in _candidates(model, length)):
        try:
            sparing_products(model, functools.partial(sample.run, model))
        except USER_ERRORS as error:
            first = str(error).strip().splitlines()
            tried.append(f"  {sample}: {type(error).__name__}: {first[0] if first else ''}")
        else:
            return sample
    name = type(model).__name__
    remedy = (
        "Give a batch of two: sample=(x,) or sample={'name': x}, as in worker.prepare(model, "
        "sample=(torch.zeros(2, 3, 224, 224),))."
    )
    what = f"Cutting the layers of {name} needs one forward of it on a small input, and none of these guesses is one:"
    listed = "\n".join([what, *tried])
    raise PlanError(f"{listed}\n{remedy}", reasons=[Reason(module=name, what=listed, remedy=remedy)])


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put random generators and buffers back afterwards; dropout is off within, as far as modules know."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    training = [module for module in model.modules() if module.training]
    cuda = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=cuda):
        torch.random.default_generator.manual_seed(0)  # torch.manual_seed takes milliseconds, also for absent devices
        if cuda:
            torch.cuda.manual_seed(0)
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            with torch.no_grad():
                for buffer, value in buffers:
                    if buffer.shape == value.shape:
                        buffer.copy_(value)


def _candidates(model: nn.Module, num_tokens: int) -> Iterator[SampleInput]:
    device = next((one.device for one in model.parameters()), torch.device("cpu"))
    dtype = next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.get_default_dtype())
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is not None and isinstance(name, str):
        yield from _transformers(config, name, num_tokens, device, dtype)
        yield from _by_names(model, config, num_tokens, device, dtype)
    embedding = next((one for one in model.modules() if isinstance(one, nn.Embedding)), None)
    vocabulary = max((one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)), default=0)
    num_inputs = _num_inputs(model)
    for parts in range(1, min(num_inputs, 2) + 1):
        if embedding is not None:
            yield SampleInput(args=(_tokens(vocabulary, num_tokens, device),) * parts)
        for module in model.modules():
            shape = _input_shape(module, num_tokens)
            if shape:
                for one in shape:
                    yield SampleInput(args=(_noise(one, device, dtype),) * parts)
                break
    yield from _told_by_library(model, device, dtype)


def _told_by_library(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Iterator[SampleInput]:
    """The input that the model's own library says it takes: the picture's size of timm, dummy inputs of transformers
    and diffusers."""
    settings = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = settings.get("input_size") if isinstance(settings, Mapping) else None
    if isinstance(size, (tuple, list)):
        yield SampleInput(args=(_noise((BATCH, *size), device, dtype),))
    try:
        dummy: Any = getattr(model, "dummy_inputs", None)
    except USER_ERRORS:  # a property
        return
    if isinstance(dummy, Mapping) and dummy:
        rows = {
            str(key): one[:BATCH].to(device) if isinstance(one, Tensor) and one.dim() else one
            for key, one in dummy.items()
        }
        yield SampleInput(kwargs=rows)


def _by_names(
    model: nn.Module, config: Any, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[SampleInput]:
    """All inputs of a model of the transformers package that its forward names: text, pictures, and sound."""
    text, vision = getattr(config, "text_config", config), getattr(config, "vision_config", config)
    vocabulary, size = getattr(text, "vocab_size", None), getattr(vision, "image_size", None)
    bins, positions = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    tokens = _tokens(vocabulary, num_tokens, device) if isinstance(vocabulary, int) else None
    known: dict[str, Tensor | None] = {
        "input_ids": tokens,
        "decoder_input_ids": tokens,
        "pixel_values": None,
        "input_features": None,
        "input_values": _noise((BATCH, 4000), device, dtype),
    }
    if isinstance(size, int):
        known["pixel_values"] = _noise((BATCH, getattr(vision, "num_channels", 3), size, size), device, dtype)
    if isinstance(bins, int) and isinstance(positions, int):  # a first layer of stride two makes the positions
        known["input_features"] = _noise((BATCH, bins, 2 * positions), device, dtype)
    taken = inspect.signature(model.forward).parameters
    found = {name: one.clone() for name, one in known.items() if one is not None and name in taken}
    if "decoder_input_ids" in found and not getattr(config, "is_encoder_decoder", False):
        del found["decoder_input_ids"]
    if found:
        yield SampleInput(kwargs=found)


def _transformers(
    config: Any, name: str, num_tokens: int, device: torch.device, dtype: torch.dtype
) -> Iterator[SampleInput]:
    """The main input of a model of the transformers package, by the sizes in its configuration."""
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = _noise((BATCH, getattr(config, "num_channels", 3), height, width), device, dtype)
        yield SampleInput(kwargs={name: pixels})
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int):
        tokens = _tokens(vocabulary, num_tokens, device)
        if getattr(config, "is_encoder_decoder", False):
            yield SampleInput(kwargs={name: tokens, "decoder_input_ids": tokens.clone()})
        yield SampleInput(kwargs={name: tokens})


def _input_shape(module: nn.Module, num_tokens: int) -> list[tuple[int, ...]]:
    """Shapes that a first layer of this kind would take."""
    if isinstance(module, nn.Linear):
        return [(BATCH, module.in_features), (BATCH, num_tokens, module.in_features)]
    if isinstance(module, nn.LayerNorm):
        return [(BATCH, num_tokens, *module.normalized_shape)]
    if isinstance(module, nn.MultiheadAttention):
        return [(BATCH, num_tokens, module.embed_dim)]
    if isinstance(module, nn.Conv2d):
        return [(BATCH, module.in_channels, size, size) for size in (32, 64, 224)]
    if isinstance(module, nn.Conv1d):
        return [(BATCH, module.in_channels, 32)]
    return []


def _num_inputs(model: nn.Module) -> int:
    """How many inputs without a default its forward has."""
    parameters = inspect.signature(model.forward).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(1, sum(one.default is one.empty and one.kind in positional for one in parameters))


def _tokens(vocabulary: int, num_tokens: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocabulary, (BATCH, num_tokens), generator=generator).to(device)


def _noise(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
