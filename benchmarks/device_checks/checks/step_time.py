"""A step of one worker beside the bare loop, in the same process, in turns: throughput relative to the loop."""

from __future__ import annotations

import functools

from device_checks.bench import Bench
from device_checks.gpt_steps import Size, compared

SIZES = {  # width, layers, heads, samples of a step
    "1.0 B parameters": Size(2048, 20, 16, 32),
    "57 M parameters": Size(768, 8, 12, 32),
}
SMALL = {"0.8 M parameters": Size(128, 4, 4, 8)}
ASKED = 0.99


def check(bench: Bench) -> None:
    for name, size in (SIZES if bench.on_gpu else SMALL).items():
        for precision in ("bf16", "fp32"):
            asked = f"at least {ASKED}x of the bare loop's throughput"
            check_name = f"step of a GPT with {name}, {precision}"
            with bench.row(check_name, asked=asked):
                turns, steps = (12, 5) if bench.on_gpu else (4, 3)
                train = functools.partial(compared, size=size, turns=turns, steps=steps)
                found = bench.forked(train, size.plan(precision))[0]
                verdict = found.ratio >= ASKED if bench.on_gpu else "measured"
                bench.tell(check_name, asked=asked, measured=str(found), verdict=verdict)
