"""Small models in quantised files, as they are published: FP8 with scales of blocks, MXFP4, and bitsandbytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP8 = torch.float8_e4m3fn
CODES = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def rewritten(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], about: dict[str, Any]) -> Path:
    """Write a folder's tensors anew, each as several ones, and say in its configuration how they are quantised."""
    path, config = folder / "model.safetensors", folder / "config.json"
    made = {name: one for given, tensor in load_file(path).items() for name, one in change(given, tensor).items()}
    save_file(made, path, {"format": "pt"})
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": about}))
    return folder


def in_blocks(scales: Tensor, block: int, shape: tuple[int, ...]) -> Tensor:
    """The scale of each number of a weight. The last blocks may be cut short."""
    return scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[: shape[0], : shape[1]]


def as_fp8(folder: Path, *, block: int) -> Path:
    """Quantise a folder's projections to 8 bits with a scale for each block, as DeepSeek and Qwen publish them."""

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        if weight.dim() != 2 or "_proj" not in name:
            return {name: weight}
        rows, columns = (-(-size // block) for size in weight.shape)
        whole = torch.zeros(rows * block, columns * block)
        whole[: weight.shape[0], : weight.shape[1]] = weight
        scales = whole.view(rows, block, columns, block).abs().amax((1, 3)).clamp(min=1e-9) / 448
        codes = (weight.float() / in_blocks(scales, block, tuple(weight.shape))).to(FP8)
        return {name: codes, f"{name}_scale_inv": scales}

    return rewritten(folder, change, {**CODES, "weight_block_size": [block, block]})


def as_mxfp4(folder: Path) -> Path:
    """Put random 4-bit codes in the place of stacked experts, as gpt-oss is published."""
    draws = torch.Generator().manual_seed(4)

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: weight}
        experts, inputs, outputs = weight.shape
        return {
            f"{name}_blocks": torch.randint(
                0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=draws
            ),
            f"{name}_scales": torch.randint(
                117, 121, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=draws
            ),
        }

    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    return rewritten(folder, change, {"quant_method": "mxfp4", "modules_to_not_convert": kept})
