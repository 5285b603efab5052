"""A Llama in the settings that torchtitan trains with, beside a bare loop; and torchtitan's own model where it is."""

from __future__ import annotations

import functools
import importlib.util

from device_checks.bench import Bench, Refused
from device_checks.llama_steps import Shape, compared_llama

ASKED = 0.95
SETTINGS = "bf16 autocast, fused AdamW, clipped to norm 1"


def check(bench: Bench) -> None:
    shape = Shape(2048, 16, 16, 8, 5632, 32000, 2048, 4) if bench.on_gpu else Shape(32, 1, 4, 2, 64, 97, 16, 4)
    asked = f"at least {ASKED}x of the bare loop's throughput"
    for source, package in (("transformers' Llama", "transformers"), ("torchtitan's Llama", "torchtitan")):
        name = f"{source}, {SETTINGS}"
        with bench.row(name, asked=asked):
            if importlib.util.find_spec(package) is None:
                raise Refused(f"{package} is not installed here; nothing is fetched")
            turns, steps = (6, 4) if bench.on_gpu else (2, 2)
            train = functools.partial(compared_llama, package=package, shape=shape, turns=turns, steps=steps)
            found = bench.forked(train, shape.plan())[0]
            tokens = shape.samples * shape.length / found.ours_ms * 1000
            verdict = found.ratio >= ASKED if bench.on_gpu else "measured"
            bench.tell(name, asked=asked, measured=f"{found}; {tokens:,.0f} tokens/s", verdict=verdict)
