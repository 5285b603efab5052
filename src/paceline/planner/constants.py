"""The numbers of the cost model that are neither the model's, nor the device's, nor the cluster's: twelve constants.

They hold for every device and every training software. `benchmarks/published.py --fit` finds them from published
measurements; a file of them is TOML, with a table for each constant and one for what is known of single softwares.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config import load_toml
from paceline.errors import PlanError

BUILT_IN = Path(__file__).with_name("constants.toml")
TABLES = ("factors", "memory_factors", "spreads", "baseline")

__all__ = ["CONSTANTS", "Calibration", "Constant", "Constants", "built_in", "load_calibration", "write_calibration"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """What one constant means, where it may lie, and where its first guess comes from."""

    name: str
    unit: str
    meaning: str
    guess: float
    low: float
    high: float
    source: str


CONSTANTS = (
    Constant(
        name="matmul",
        unit="share",
        meaning="rate of large matrix products in training, over the best rate that was measured on the device",
        guess=0.92,
        low=0.6,
        high=1.0,
        source="random instead of constant data takes 257 of 295 TFLOPS on an A100 (H. He, thonking.ai, 2024)",
    ),
    Constant(
        name="depth",
        unit="elements",
        meaning="inner dimension of a matrix product at which filling and emptying its pipeline costs as much as the "
        "product itself",
        guess=300.0,
        low=20.0,
        high=1000.0,
        source="fitted; a tile's pipeline is a few steps of 32 to 64 elements deep (NVIDIA CUTLASS, efficient GEMM)",
    ),
    Constant(
        name="throttle",
        unit="exponent",
        meaning="how the sustained rate of matrix products falls with the device's peak per watt, relative to an A100",
        guess=0.15,
        low=1e-4,
        high=0.6,
        source="fitted; devices with more arithmetic per watt lower their clock further under load (H. He, 2024)",
    ),
    Constant(
        name="attention",
        unit="share",
        meaning="rate of fused attention in training, over the rate that its authors published for the device",
        guess=0.95,
        low=0.6,
        high=1.1,
        source="FlashAttention-2 and 3 papers (Dao 2023; Shah et al. 2024) measure the kernel alone",
    ),
    Constant(
        name="passes",
        unit="ratio",
        meaning="bytes that fused element-wise kernels move, over each tensor read and written once at full bandwidth",
        guess=1.6,
        low=1.0,
        high=3.0,
        source="at least 1 by definition; saved copies, casts and reductions come on top",
    ),
    Constant(
        name="unfused",
        unit="ratio",
        meaning="bytes that kernels of one operation each move, over those of fused ones",
        guess=1.5,
        low=1.0,
        high=4.0,
        source="torch.compile's published gains are mostly fewer such passes",
    ),
    Constant(
        name="link",
        unit="share",
        meaning="bus bandwidth of collectives within a host, over the link's rate in one direction",
        guess=0.75,
        low=0.6,
        high=1.0,
        source="nccl-tests on A100 and H100 hosts: 0.75 to 0.85 from 1 GB, less at tens of MB",
    ),
    Constant(
        name="network",
        unit="share",
        meaning="bus bandwidth of collectives between hosts, over the host's network rate",
        guess=0.85,
        low=0.3,
        high=1.0,
        source="nccl-tests over 4 hosts: 0.73 at 4 GiB (stas00/ml-engineering)",
    ),
    Constant(
        name="latency",
        unit="s",
        meaning="time of a collective beyond that of its bytes, for each doubling of its members: launch, and waiting "
        "for those that come late",
        guess=5e-5,
        low=1e-6,
        high=8e-5,
        source="nccl-tests at small sizes take 20 to 50 us within a host, where all members start at once",
    ),
    Constant(
        name="overlap",
        unit="exponent",
        meaning="how communication and compute that may overlap add up: (a^q + b^q)^(1/q). 1: one after the other; "
        "large: the longer one alone",
        guess=1.5,
        low=1.0,
        high=8.0,
        source="fitted; communication that is hidden slows compute, so the ideal is not reached",
    ),
    Constant(
        name="exposed",
        unit="share",
        meaning="tensor-parallel communication that is not hidden, by software that overlaps it with products",
        guess=0.25,
        low=0.05,
        high=1.0,
        source="Megatron-Core's tensor-parallel overlap; 1 where the software has none",
    ),
    Constant(
        name="straggle",
        unit="share",
        meaning="longer steps for each doubling of the hosts: the slowest one sets the pace",
        guess=0.01,
        low=1e-4,
        high=0.03,
        source="fitted; MegaScale (Jiang et al. 2024) and Llama 3 report single slow hosts",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """Values of `CONSTANTS`; without a word, their first guesses."""

    matmul: float = CONSTANTS[0].guess
    depth: float = CONSTANTS[1].guess
    throttle: float = CONSTANTS[2].guess
    attention: float = CONSTANTS[3].guess
    passes: float = CONSTANTS[4].guess
    unfused: float = CONSTANTS[5].guess
    link: float = CONSTANTS[6].guess
    network: float = CONSTANTS[7].guess
    latency: float = CONSTANTS[8].guess
    overlap: float = CONSTANTS[9].guess
    exposed: float = CONSTANTS[10].guess
    straggle: float = CONSTANTS[11].guess

    def __post_init__(self) -> None:
        for constant in CONSTANTS:
            value = getattr(self, constant.name)
            if not (math.isfinite(value) and constant.low <= value <= constant.high):
                raise PlanError(
                    f"The constant {constant.name} is {value}; it is a {constant.unit} between {constant.low:g} and "
                    f"{constant.high:g} ({constant.meaning})."
                )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Constants, and what measurements say beside them.

    `factors`: measured over predicted seconds, by software. `memory_factors`: the same of bytes. `spreads`: the half
    width of the 80 % band of the logarithm of measured over predicted, by what is known: "software" (its factor),
    "none", "receipt", "special" (experts, new devices, incomplete input), and the same of memory ("memory software",
    "memory none", "memory special"). `baseline`: one share of the peak by "device/precision", to compare with.
    """

    constants: Constants = Constants()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    memory_factors: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    spreads: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    baseline: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


@functools.cache
def built_in() -> Calibration:
    """What `benchmarks/published.py` found on published measurements."""
    return load_calibration(BUILT_IN)


def load_calibration(path: Path) -> Calibration:
    """Read what `write_calibration` wrote; PlanError where it is something else."""
    tables = load_toml(path)
    try:
        values = {name: float(table["value"]) for name, table in dict(tables["constants"]).items()}
        known = {constant.name for constant in CONSTANTS}
        if values.keys() != known:
            odd = ", ".join(sorted(values.keys() ^ known))
            raise PlanError(f"{path} must have exactly the constants of the cost model; {odd} is missing or unknown.")
        others = {
            name: {str(key): float(value) for key, value in dict(tables.get(name, {})).items()} for name in TABLES
        }
        return Calibration(constants=Constants(**values), **others)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} holds no constants of the cost model: {error!r}.") from error


def write_calibration(path: Path, calibration: Calibration, *, title: str) -> None:
    """Write constants with their meaning, bounds and sources, so that the file explains itself."""
    lines = [f"# {title}", ""]
    for constant in CONSTANTS:
        table: dict[str, Any] = {"value": getattr(calibration.constants, constant.name)}
        table |= {"unit": constant.unit, "meaning": constant.meaning}
        table |= {"low": constant.low, "high": constant.high, "source": constant.source}
        lines += [f"[constants.{constant.name}]", *(f"{key} = {_toml(value)}" for key, value in table.items()), ""]
    for name in TABLES:
        lines += [f"[{name}]", *(f"{_toml(key)} = {_toml(value)}" for key, value in getattr(calibration, name).items())]
        lines += [""]
    path.write_text("\n".join(lines))


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return f"{value:.6g}" if "." in f"{value:.6g}" or "e" in f"{value:.6g}" else f"{value:.6g}.0"
