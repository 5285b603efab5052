"""What a forward keeps for its backward, and what both take, under each `Compute(recompute=...)`.

    python benchmarks/recompute.py [--blocks 6] [--width 512] [--tokens 1024] [--precision bf16] [--rounds 5]

A stack of Transformer blocks on the CPU, or on a GPU where there is one, without anything else. *kept* is what the
forward has allocated and not freed; times are the fastest of some rounds, in which the ways take turns.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from driving.options import options_of
from paceline.parallel.recompute import recompute_blocks

MIB = 1 << 20
HEAD = 64  # width of one head
WAYS = {"none": None, "selective": "costly", "blocks": "inputs"}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm_up = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(attended))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_up(x)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--rounds", type=int, default=5)
    options = options_of(parser, takes="about 2 minutes", quick={"rounds": 1, "blocks": 2, "width": 128, "tokens": 256})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models: dict[str, nn.Module] = {}
    for name, keep in WAYS.items():
        models[name] = nn.Sequential(*(Block(options.width) for _ in range(options.blocks))).to(device)
        if keep is not None:
            recompute_blocks(models[name], keep="costly" if keep == "costly" else "inputs")
    x = torch.randn(1, options.tokens, options.width, device=device)
    half = options.precision == "bf16"
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.rounds + 1):  # the first one warms up
        for name, model in models.items():
            began = time.perf_counter()
            _loss(model, x, half=half).backward()
            if device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    print(f"{options.blocks} blocks of width {options.width}, {options.tokens} tokens, {options.precision}, {device}\n")
    print("| recompute | kept, MiB | of none | forward and backward, s | of none |\n|---|---|---|---|---|")
    kept = {name: _kept_bytes(model, x, half=half) for name, model in models.items()}
    fastest = {name: min(some[1:]) for name, some in times.items()}
    for name in models:
        print(
            f"| {name} | {kept[name] / MIB:.0f} | {kept[name] / kept['none']:.2f} | {fastest[name]:.3f} | "
            f"{fastest[name] / fastest['none']:.2f} |"
        )


def _loss(model: nn.Module, x: Tensor, *, half: bool) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=half):
        return model(x).float().square().mean()


def _kept_bytes(model: nn.Module, x: Tensor, *, half: bool) -> int:
    on_gpu = x.device.type == "cuda"
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        loss = _loss(model, x, half=half)
    loss.detach_()
    name = "self_device_memory_usage" if on_gpu else "self_cpu_memory_usage"
    return sum(getattr(event, name) for event in seen.key_averages())


if __name__ == "__main__":
    main()
