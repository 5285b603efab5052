"""What is predicted: a model's step under a layout, a sync and a wire, on a cluster."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from paceline.errors import PlanError
from paceline.plan import AllReduce, ParameterServer, Sync, Wire
from paceline.planner.axes import Axes
from paceline.planner.cluster import Cluster
from paceline.planner.model_costs import ModelCosts
from paceline.planner.software import Software

__all__ = ["VALUE", "Case", "Offload", "Recompute"]

Recompute = Literal["none", "full", "half", "selective"]

Offload = Literal["none", "optimizer", "all"]

VALUE = 2  # bytes of a value in 16 bit


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is predicted. `micro_batch` is in samples of one data-parallel worker, of which it runs `micro_batches`.

    `precision` is that of products and of what is kept: "fp32" has values of 4 bytes, all others of 2. `wire`: what
    Paceline's replicas send; None: `wire_bytes` of each parameter or gradient, between all data-parallel workers.
    """

    model: ModelCosts
    cluster: Cluster
    axes: Axes
    micro_batch: float
    micro_batches: float
    software: Software
    precision: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    recompute: Recompute = "none"
    wire_bytes: float = 2.0
    sync: Sync = dataclasses.field(default_factory=AllReduce)
    wire: Wire | None = None
    offload: Offload = "none"
    on_disk: bool = False  # what is offloaded lies in files
    state: Literal["fp32", "bf16"] = "fp32"  # of the optimizer

    def __post_init__(self) -> None:
        if self.micro_batch <= 0 or self.micro_batches < 1:
            raise PlanError(
                f"A worker runs {self.micro_batches:g} micro-batches of {self.micro_batch:g} samples; give at least 1 "
                "of more than 0."
            )

    @property
    def state_bytes(self) -> float:
        """Bytes of optimizer state of a trained parameter."""
        return self.model.optimizer_bytes / (2 if self.state == "bf16" else 1)

    @property
    def value_bytes(self) -> float:
        """Bytes of a value between two operations."""
        return 2 * VALUE if self.precision == "fp32" else VALUE

    @property
    def at_once(self) -> int:
        """How many steps are under way: replicas that push updates of their own each take a whole batch."""
        return self.axes.replicas if isinstance(self.sync, ParameterServer) and self.sync.staleness != 0 else 1

    @property
    def on_host(self) -> int:
        """Workers of one host."""
        return min(self.cluster.devices_per_host, self.axes.workers)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of a parameter that ZeRO gathers."""
        return self.wire_bytes if self.wire is None else self.value_bytes

    @property
    def reduced_bytes(self) -> float:
        """Bytes of a gradient that ZeRO sums."""
        return self.wire_bytes if self.wire is None else 4.0

    @property
    def held_split(self) -> float:
        """Parameters that one worker holds of those that shards split."""
        return self._split(self.held_dense, self.held_experts)

    @property
    def trained_split(self) -> float:
        """Parameters of which one worker keeps the optimizer's state."""
        return self._split(self.held_dense - self.frozen_dense, self.held_experts - self.frozen_experts)

    def _split(self, dense: float, experts: float) -> float:
        axes = self.axes
        return (dense / axes.experts + experts) / (axes.shard * axes.context) if axes.zero else dense + experts

    @property
    def samples(self) -> float:
        """Samples of a step, of all workers."""
        return self.micro_batch * self.micro_batches * self.axes.data / self.at_once

    @property
    def tokens(self) -> float:
        return self.samples * self.model.sequence

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch on one worker."""
        return self.micro_batch * self.model.sequence / self.axes.context

    @property
    def has_short_ends(self) -> bool:
        """Whether the first and the last stage have a block less than the others, for the embedding and the head: how
        many blocks there are shows it."""
        count, stages = self.model.count, self.axes.stages
        return stages > 2 and count % stages != 0 and (count + 2) % stages == 0

    @property
    def unevenness(self) -> float:
        """Blocks of the fullest stage over those of the average one."""
        return math.ceil(self.model.count / self.axes.stages) * self.axes.stages / self.model.count

    @property
    def held_dense(self) -> float:
        """Parameters of the fullest worker but its experts, if nothing but tensor and stages divides them."""
        axes, model = self.axes, self.model
        total = sum(block.count * (block.parameters - block.expert_parameters) for block in model.blocks)
        ends = model.vocabulary * model.hidden * (1 if axes.stages > 1 or model.tied else 2)
        ends += model.rest.parameters if model.rest is not None else 0
        return (total / axes.stages + ends) / axes.tensor

    @property
    def frozen_dense(self) -> float:
        """Those of `held_dense` that are not trained."""
        axes, model = self.axes, self.model
        total = sum(block.count * (block.frozen - block.frozen_experts) for block in model.blocks)
        return (total / axes.stages + (model.rest.frozen if model.rest is not None else 0)) / axes.tensor

    @property
    def held_experts(self) -> float:
        """Parameters of one worker's experts, if nothing but tensor, experts and stages divides them."""
        axes = self.axes
        total = sum(block.count * block.expert_parameters for block in self.model.blocks)
        return total / (axes.stages * axes.tensor * axes.experts)

    @property
    def frozen_experts(self) -> float:
        """Those of `held_experts` that are not trained."""
        axes = self.axes
        total = sum(block.count * block.frozen_experts for block in self.model.blocks)
        return total / (axes.stages * axes.tensor * axes.experts)

    @property
    def held_parameters(self) -> float:
        return self.held_dense + self.held_experts

    @property
    def trained_parameters(self) -> float:
        """Those of `held_parameters` that have a gradient."""
        return self.held_parameters - self.frozen_dense - self.frozen_experts
