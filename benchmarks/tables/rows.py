"""A published row as a case of the cost model.

Read are its model, cluster, layout, batch, precision, recompute, and the title of its source; nothing that was
measured. What a row leaves out is assumed, and `Reading.assumed` says so.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.planner.axes import Axes, Schedule
from paceline.planner.case import Case, Recompute
from paceline.planner.cluster import Cluster, Device, catalogue
from paceline.planner.model_costs import ModelCosts, transformer
from paceline.planner.software import EAGER, FUSED, MEGATRON, UNFUSED_ATTENTION, Software

__all__ = ["Reading", "load_rows", "measured_gb", "measured_s", "read_row"]

Row = Mapping[str, Any]

# A word of the source's title -> what is known of its software. llm-foundry's tables count attention over all pairs,
# and its times at long sequences are those of FlashAttention-2 over all pairs.
SOFTWARE: tuple[tuple[str, Software], ...] = (
    (
        "llm-foundry",
        dataclasses.replace(EAGER, name="llm-foundry", skips_pairs=False),
    ),
    ("BigScience", dataclasses.replace(UNFUSED_ATTENTION, name="Megatron-DeepSpeed", dropout=True, gradient_bytes=6.0)),
    ("Korthikanti", dataclasses.replace(UNFUSED_ATTENTION, dropout=True)),
    ("Zero Bubble", dataclasses.replace(UNFUSED_ATTENTION, name="zero-bubble", dropout=True)),
    ("DGX Cloud", MEGATRON),
    ("NeMo", MEGATRON),
    ("torchtitan", dataclasses.replace(FUSED, name="torchtitan", keeps_gathered=True)),
    ("TorchTitan", dataclasses.replace(FUSED, name="torchtitan", keeps_gathered=True)),
    ("fms-fsdp", FUSED),
)
BLACKWELL = ("GB200", "GB300")
GRAVE = ("batch.", "cluster.gpu=", "cluster.n_gpus", "layout.dp=", "model", "precision", "recompute")
MOST_MICRO = 16  # samples that one device is presumed to take at once
NVL_DOMAIN = 72  # devices of one NVLink domain of GB200 and GB300 NVL72


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A row as a case, with what was assumed."""

    id: str
    title: str
    case: Case
    assumed: tuple[str, ...]

    @property
    def is_incomplete(self) -> bool:
        """Whether something was assumed that moves the figures by more than a few per cent."""
        return any(said.startswith(GRAVE) for said in self.assumed)

    @property
    def is_special(self) -> bool:
        """Whether it has a table of its own: a mixture of experts, or a device of the Blackwell generation."""
        name = self.case.cluster.device.name
        return self.case.model.is_routed or name.startswith(("b200", "b300", "gb"))


def load_rows(path: Path) -> list[Row]:
    """Read rows: a JSON list, or JSON lines."""
    text = path.read_text()
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


class _Assumptions:
    """Values of a row; those that it lacks are noted."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def take(self, name: str, value: Any, otherwise: Any, why: str) -> Any:
        if value is not None:
            return value
        shown = f"{otherwise:.4g}" if isinstance(otherwise, float) else otherwise
        self.said.append(f"{name}={shown} ({why})")
        return otherwise


def read_row(row: Row) -> Reading:
    """Return the row as a case; every row has one. Numbers of 0 and below count as missing."""
    notes = _Assumptions()
    row = {**row, **{part: _positive(row.get(part) or {}) for part in ("model", "cluster", "layout", "batch")}}
    title = str(row["source"]["title"])
    device = _device(row, notes)
    devices = int(notes.take("cluster.n_gpus", row["cluster"].get("n_gpus"), 8, "one host"))
    software = _software(row, title, device, notes)
    model = _model(row["model"], notes, dropout=software.dropout)
    axes = _axes(row, devices, model, software, notes)
    cluster = _cluster(row, device, devices, notes)
    micro, micros = _batch(row, axes, notes)
    precision = _precision(row, notes)
    return Reading(
        id=str(row.get("id", "")),
        title=title,
        case=Case(
            model=model,
            cluster=cluster,
            axes=axes,
            micro_batch=micro,
            micro_batches=micros,
            software=software,
            precision=precision,
            recompute=_recompute(row, software, notes),
        ),
        assumed=tuple(notes.said),
    )


def _positive(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: None if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0 else value
        for key, value in part.items()
    }


def _device(row: Row, notes: _Assumptions) -> Device:
    cluster, known = row["cluster"], catalogue()
    name = str(notes.take("cluster.gpu", cluster.get("gpu"), "H100", "most common"))
    memory = cluster.get("gpu_mem_gb")
    if memory and f"{name} {memory:g}gb".lower() in known.aliases:
        return known.device(f"{name} {memory:g}GB")
    best = max((alias for alias in known.aliases if alias in name.lower()), key=len, default=None)
    if best is None and "ampere" in name.lower():
        best = "a100"
    if best is None:
        notes.said.append(f"cluster.gpu=H100 ({name} is in no catalogue)")
        best = "h100"
    return known.device(best)


def _cluster(row: Row, device: Device, devices: int, notes: _Assumptions) -> Cluster:
    cluster = row["cluster"]
    per_host = int(notes.take("cluster.gpus_per_node", cluster.get("gpus_per_node"), min(8, devices), "usual"))
    network = cluster.get("inter_GBps_per_node")
    if device.name.upper() in BLACKWELL:
        network = (network or device.network / 1e9) * NVL_DOMAIN / per_host
        per_host = NVL_DOMAIN
    if devices > per_host:
        network = notes.take("cluster.inter_GBps_per_node", network, device.network / 1e9, "usual for the device")
    rate = None if network is None else float(network) * 1e9
    return Cluster.of(device, devices, devices_per_host=per_host, network=rate)


def _software(row: Row, title: str, device: Device, notes: _Assumptions) -> Software:
    """What the title names; otherwise what such a layout and precision usually come from."""
    for word, software in SOFTWARE:
        if word.lower() in title.lower():
            return software
    guess, why = _usual_software(row, title, device)
    notes.said.append(f"software={guess.name}: {guess.kernels} kernels, {guess.attention} attention ({why})")
    return guess


def _usual_software(row: Row, title: str, device: Device) -> tuple[Software, str]:
    layout, precision = row["layout"], str(row.get("precision") or "").lower()
    is_old = device.name.startswith(("v100", "a100"))
    if "fp16" in precision or device.name == "v100":
        return dataclasses.replace(UNFUSED_ATTENTION, dropout=True), "fp16 is of the time before FlashAttention"
    if "megatron" in title.lower() and is_old:
        return dataclasses.replace(UNFUSED_ATTENTION, dropout=True), "Megatron on this device was before FlashAttention"
    if "megatron" in title.lower() or "nvidia" in title.lower():
        return MEGATRON, "named in the title"
    if layout.get("zero_stage") == 3:
        return (EAGER if is_old else FUSED), "fully sharded"
    if "8" in precision or (layout.get("interleave_v") or 1) > 1:
        return MEGATRON, "8 bit without full sharding" if "8" in precision else "interleaved stages"
    if (layout.get("tp") or 1) > 1 or not is_old:
        return FUSED, "tensor parallel, or a newer device"
    return EAGER, "data parallel"


def _model(model: Mapping[str, Any], notes: _Assumptions, *, dropout: bool) -> ModelCosts:
    sequence = int(notes.take("model.seq_len", model.get("seq_len"), 2048, "usual"))
    vocabulary = int(notes.take("vocabulary", model.get("vocab"), 50304, "GPT-2's, padded"))
    layers, hidden, parameters = model.get("layers"), model.get("hidden"), model.get("params")
    if not layers or not hidden:
        parameters = float(notes.take("model.params", parameters, 1e9, "unknown"))
        layers = layers or max(1, round((parameters / (12 * 128**2)) ** (1 / 3)))
        hidden = hidden or max(128, 128 * round(math.sqrt(parameters / (12 * layers)) / 128))
        notes.said.append(f"model: {layers} layers of {hidden} (width 128 times depth, from its parameters)")
    ffn = int(notes.take("ffn", model.get("ffn"), 4 * hidden, "4 x hidden"))
    heads = int(notes.take("heads", model.get("heads"), max(1, hidden // 128), "of 128"))
    kv_heads = int(model.get("kv_heads") or heads)
    kv_heads = kv_heads if heads % kv_heads == 0 else heads
    experts = int(model.get("experts") or 1)
    routed = 1
    if experts > 1:
        routed = 2 if experts <= 64 else 8
        notes.said.append(f"model.routed={routed} (of {experts} experts)")
    shape = {"layers": int(layers), "hidden": int(hidden), "heads": heads, "kv_heads": kv_heads, "ffn": ffn}
    others: dict[str, Any] = {"sequence": sequence, "vocabulary": vocabulary, "experts": experts, "routed": routed}
    choices = [
        transformer(**shape, **others, gated=gated, tied=tied, dropout=dropout)
        for gated in ((False,) if ffn == 4 * hidden else (True, False))
        for tied in (True, False)
    ]
    if parameters:  # three matrices or two, one embedding or two: what its parameters fit best
        return min(choices, key=lambda one: abs(math.log(one.parameters / float(parameters))))
    return choices[0]


def _axes(row: Row, devices: int, model: ModelCosts, software: Software, notes: _Assumptions) -> Axes:
    layout = row["layout"]
    tensor, stages = int(layout.get("tp") or 1), int(layout.get("pp") or 1)
    context, experts = int(layout.get("cp") or 1), int(layout.get("ep") or 1)
    rest = max(1, devices // (tensor * stages * context))
    data = int(notes.take("layout.dp", layout.get("dp"), rest, "devices over the other axes"))
    if data * tensor * stages * context != devices and rest * tensor * stages * context == devices:
        notes.said.append(f"layout.dp={rest} (not {data}: the axes have to multiply to {devices} devices)")
        data = rest
    experts = experts if model.is_routed else 1
    zero = layout.get("zero_stage")
    name = str(layout.get("schedule") or "").lower()
    chunks = int(layout.get("interleave_v") or 1)
    if "1f1b-i" in name and chunks == 1:
        chunks = max(1, model.count // stages)
    schedule: Schedule = "1f1b"
    if "zb-2p" in name or "zb2p" in name:
        schedule = "zero-bubble-2p"
    elif "zb" in name or "zero" in name or "v-half" in name:
        schedule = "zero-bubble"
    elif chunks > 1:
        schedule = "interleaved"
    inside = experts if data % experts == 0 else 1  # experts are spread over data-parallel workers
    sequence = layout.get("sequence_parallel")
    if sequence is None and tensor > 1:
        usual = software.attention != "unfused"
        sequence = notes.take("layout.sequence_parallel", None, usual, "usual for its software")
    return Axes(
        replicas=1 if zero else data // inside,
        shard=data // inside if zero else 1,
        zero=zero or 0,
        tensor=tensor,
        sequence=bool(sequence) and tensor > 1,
        stages=stages,
        chunks=chunks if stages > 1 else 1,
        schedule=schedule,
        context=context,
        experts=inside,
    )


def _batch(row: Row, axes: Axes, notes: _Assumptions) -> tuple[float, float]:
    batch = row["batch"]
    micro, total, accumulated = batch.get("micro_batch"), batch.get("global_batch"), batch.get("grad_accum")
    if micro is None and total and accumulated:
        micro = total / (accumulated * axes.data)
    if micro is None and total and axes.stages == 1 and total / axes.data <= MOST_MICRO:
        micro = notes.take("batch.micro_batch", None, total / axes.data, "no accumulation")
    micro = float(notes.take("batch.micro_batch", micro, 1.0, "least"))
    if total is None:
        many = accumulated or (4 * axes.stages if axes.stages > 1 else 1)
        total = notes.take("batch.global_batch", None, float(micro * axes.data * many), "micro-batches of each worker")
    micro = min(micro, float(total) / axes.data)
    return micro, max(1.0, float(total) / (micro * axes.data))


def _precision(row: Row, notes: _Assumptions) -> Any:
    said = str(row.get("precision") or "").lower()
    if any(word in said for word in ("fp8", "float8", "fp4")):
        return "fp8"
    if "fp16" in said:
        return "fp16"
    if "bf16" in said:
        return "bf16"
    if "fp32" in said or "tf32" in said:
        return "fp32"
    notes.said.append("precision=bf16 (usual)")
    return "bf16"


def _recompute(row: Row, software: Software, notes: _Assumptions) -> Recompute:
    said = row.get("recompute")
    if said is None:
        notes.said.append("recompute=none (not printed)")
        return "none"
    said = str(said).lower()
    if "selective" in said and "layer" in said:
        return "half"
    if "selective" in said or "op" in said.split():
        return "selective"
    return "none" if said in ("none", "false", "no") else "full"


def measured_s(row: Row, case: Case) -> float | None:
    """Seconds of a step, as measured; None if the row has no figure for it."""
    measured, workers = row["measured"], case.axes.workers
    workers = row["cluster"].get("n_gpus") or workers
    if measured.get("step_time_s"):
        return float(measured["step_time_s"])
    if measured.get("tokens_per_s_per_gpu"):
        return case.tokens / (float(measured["tokens_per_s_per_gpu"]) * workers)
    if measured.get("tokens_per_s"):
        return case.tokens / float(measured["tokens_per_s"])
    if measured.get("samples_per_s"):
        return case.samples / float(measured["samples_per_s"])
    return None


def measured_gb(row: Row) -> float | None:
    """Decimal GB of the fullest device, as measured."""
    value = row["measured"].get("memory_gb")
    return None if value is None else float(value)
