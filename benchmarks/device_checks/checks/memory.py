"""Recompute and offload: what torch has allocated at most, beside what the planner says before the run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from device_checks.bench import Bench, Refused
from device_checks.gpt_steps import Size

NEAR = 0.2
WAYS = ("none,none", "blocks,none", "selective,none", "none,optimizer", "blocks,all")
# Bytes alone matter here. What torch says that it has allocated leaves out what the device's runtime takes.
CLUSTER = """
[devices.here]
memory_gb = 141.0
memory_gb_s = 4800.0
tflops = { bf16 = 989.4, fp16 = 989.4, fp32 = 66.9 }
best_matmul = { bf16 = 0.8, fp16 = 0.8 }
attention = { flash = 326.0, vendor = 524.0 }
units = 132
watts = 700
link_gb_s = 450.0
network_gb_s = 50.0
host_link_gb_s = 50.0
runtime_gb = 0.001
source = "the rates of an H200"

[clusters.here]
device = "here"
hosts = 1
devices_per_host = 1
network_gb_s = 50.0
source = "one device"
"""
RECEIPT = re.compile(r"memory (\S+ [GM]B), predicted (\S+ [GM]B) \(([+-]\d+) %\)")


def check(bench: Bench) -> None:
    size = Size(2048, 12, 16, 32) if bench.on_gpu else Size(64, 2, 4, 4)
    for way in WAYS[:: 1 if bench.on_gpu else 3]:
        recompute, offload = way.split(",")
        name, asked = f"recompute={recompute},offload={offload}", f"memory within {100 * NEAR:.0f} % of the prediction"
        with bench.row(name, asked=asked):
            folder = bench.folder()
            (folder / "here.toml").write_text(CLUSTER)
            fields = {"recompute": recompute, "offload": offload}
            if offload == "optimizer" and not bench.on_gpu:  # whose memory is the host's
                fields["offload_path"] = str(folder)
            words = ["run", bench.program("gpt_steps_of.py"), "--workers", "1", "--device", bench.job_device(1)]
            words += ["--plan", size.plan("bf16", **fields), "--max-steps", "6", "--run-dir", str(folder / "run")]
            words += ["--cluster", str(folder / "here.toml"), "--no-tensorboard"]
            code, said = bench.paceline(
                *words, "--", *map(str, (size.width, size.layers, size.heads, size.samples, 6)), limit_s=60
            )
            _told(bench, name, asked, code, said, folder / "run")


def _told(bench: Bench, name: str, asked: str, code: int, said: str, run: Path) -> None:
    refused = re.search(r"PlanError: (.*)|paceline: (Compute.*)", said)
    if code == 2 and refused is not None:
        raise Refused(refused[0])
    if code != 0:
        raise RuntimeError(said.strip()[-300:])
    peak = json.loads((run / "summary.json").read_text())["peak_memory_bytes"]
    receipt = RECEIPT.search(said)
    if receipt is None:
        bench.tell(name, asked=asked, measured=f"{peak / 1e9:.2f} GB; nothing was predicted", verdict="measured")
        return
    verdict = abs(int(receipt[3])) <= 100 * NEAR if bench.on_gpu else "measured"
    bench.tell(name, asked=asked, measured=f"{receipt[1]}, predicted {receipt[2]} ({receipt[3]} %)", verdict=verdict)
