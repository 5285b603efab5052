"""compile=true: the numbers of the eager step, and its time beside a compiled bare loop."""

from __future__ import annotations

from device_checks.bench import Bench
from device_checks.gpt_steps import Size, compared, trained

NEAR, ASKED = 1e-4, 0.99


def check(bench: Bench) -> None:
    size, steps = (Size(1024, 8, 16, 32), 8) if bench.on_gpu else (Size(32, 1, 2, 4), 4)
    asked = f"losses of the eager step, within {NEAR:g} in fp32"
    with bench.row("compile=true, losses", asked=asked):
        eager, found = (
            bench.forked(lambda worker: trained(worker, size, steps), size.plan("fp32", compile=flag))[0]
            for flag in ("false", "true")
        )
        worst = max(abs(a / b - 1) for a, b in zip(found.losses, eager.losses, strict=True))
        said = f"{worst:.1e} off; {found.step_ms:.2f} ms a step, eager {eager.step_ms:.2f} ms"
        bench.tell("compile=true, losses", asked=asked, measured=said, verdict=worst <= NEAR)
    asked = f"at least {ASKED}x of a compiled bare loop's throughput"
    with bench.row("compile=true, step in bf16", asked=asked):
        turns = 8 if bench.on_gpu else 2
        result = bench.forked(lambda worker: compared(worker, size, turns, 5), size.plan("bf16", compile="true"))[0]
        verdict = result.ratio >= ASKED if bench.on_gpu else "measured"
        bench.tell("compile=true, step in bf16", asked=asked, measured=str(result), verdict=verdict)
