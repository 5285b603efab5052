"""bf16, fp16 and FP8 beside fp32: the losses stay close, and what a step takes."""

from __future__ import annotations

import typing

from device_checks.bench import Bench, Refused
from device_checks.gpt_steps import Size, Trained, trained
from paceline.errors import PlanError
from paceline.plan import Compute, Plan

NEAR = 0.02
KNOWN = typing.get_args(typing.get_type_hints(Compute)["precision"])
PRECISIONS = ("bf16", "fp16", *([name for name in KNOWN if name.startswith("fp8")] or ["fp8"]))


def check(bench: Bench) -> None:
    size, steps = (Size(1024, 12, 16, 32), 20) if bench.on_gpu else (Size(64, 2, 4, 8), 5)
    reference: Trained | None = None
    with bench.row("fp32, to compare with", asked="to run"):
        reference = bench.forked(lambda worker: trained(worker, size, steps), size.plan("fp32"))[0]
        bench.tell(
            "fp32, to compare with", asked="to run", measured=f"{reference.step_ms:.2f} ms a step", verdict="measured"
        )
    for precision in PRECISIONS if reference is not None else ():
        asked = f"losses within {100 * NEAR:.0f} % of fp32's"
        with bench.row(precision, asked=asked):
            try:
                Plan.parse(size.plan(precision))
            except PlanError as error:
                raise Refused(f"not in this version ({str(error).splitlines()[0][:120]})") from None
            found = bench.forked(lambda worker: trained(worker, size, steps), size.plan(precision))[0]
            worst = max(abs(a / b - 1) for a, b in zip(found.losses, reference.losses, strict=True))
            said = f"{100 * worst:.2f} % off; {found.step_ms:.2f} ms a step, fp32 {reference.step_ms:.2f} ms"
            bench.tell(precision, asked=asked, measured=said, verdict=worst <= NEAR)
