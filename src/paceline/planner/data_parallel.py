"""Seconds of what replicas and shards exchange in a step, of the optimizer, and of what is offloaded.

Shards are gathered and summed within a replica's group, in every step. Then replicas agree, as the plan's sync says, on
the parts that they have: in each step, once in several, or through servers. What is sent is the wire's.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from paceline.plan import AllReduce, Gossip, LocalSGD, ParameterServer, PowerSGD
from paceline.planner.case import Case
from paceline.planner.collectives import Parted, exchange_s, gather_s, latency_s, sum_s
from paceline.planner.constants import Constants
from paceline.planner.offloading import offloading_of
from paceline.planner.owner_steps import owner_steps_s
from paceline.planner.wire_costs import NUMBER_BYTES, WireTraffic, coding, traffic

__all__ = ["Passes", "data_parallel_s", "sent_bytes", "served_apart"]

# Bytes of a trained parameter in the optimizer's step: state and master weight are read and written, beside gradient
# and weight.
MASTER_BYTES, STEP_BYTES = 4.0, 8.0
# Local SGD's, per parameter: the move is formed, compared and scaled, then subtracted from the anchors, or Nesterov's
# momentum takes it (Douillard et al. 2023), and the weights follow. Counted in sync/local/local_sgd.py.
OUTER_BYTES, NESTEROV_BYTES = 48.0, 80.0
MIX_BYTES = 8.0  # gossip's, per parameter: weights are copied, and the mix is installed
PEER_BYTES = 20.0  # and scaled and added up, of each peer and of itself


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """Seconds of compute behind which communication may hide: of a micro-batch's forward and backward, and of both with
    what a pipeline adds.
    """

    forward_s: float
    backward_s: float
    slot_s: float


def data_parallel_s(case: Case, constants: Constants, passes: Passes) -> dict[str, float]:
    """Return the seconds of the parts "data", "packing", "coding", "offload" and "optimizer"."""
    # A device that computes in its own program communicates there, too: nothing is hidden within a step.
    q = 1.0 if case.cluster.device.is_synchronous else constants.overlap
    exposed = functools.partial(_exposed, q=q)

    inside = _within_replicas(case, constants)
    data = case.micro_batches * (
        exposed(passes.forward_s, inside.forward_s) + exposed(passes.backward_s, inside.backward_s)
    )
    behind_last, numbers = inside.behind_last_s, case.trained_parameters / inside.group
    between = _Between.of(case, numbers, inside.group)
    match case.sync:
        case AllReduce():
            data += exposed(passes.slot_s, behind_last + between.sum_s(constants))
            coded = between.coding_s
        case LocalSGD() as sync:
            data += exposed(passes.slot_s, behind_last)
            whole = between.sum_s(constants)
            if sync.overlap:  # a fragment travels behind the steps that follow
                compute = sync.overlap * case.micro_batches * passes.slot_s
                whole = sync.fragments * _exposed(compute, whole / sync.fragments, q=constants.overlap)
            data += whole / sync.every
            moved = numbers * (OUTER_BYTES if sync.outer is None else NESTEROV_BYTES)
            coded = (between.coding_s + moved / case.cluster.device.memory_bandwidth) / sync.every
        case Gossip() as sync:
            data += exposed(passes.slot_s, behind_last) + between.sum_s(constants) / sync.average_every
            data += between.peers_s(constants) * _mixes(sync)
            mixed = numbers * (MIX_BYTES + PEER_BYTES * (1 + between.peers)) * _mixes(sync)
            mixed += numbers * OUTER_BYTES / sync.average_every
            coded = mixed / case.cluster.device.memory_bandwidth
        case ParameterServer() as sync:
            replicas = 1 if case.at_once > 1 else between.members
            mirrored = replicas + sync.mirrored  # a mirror gets each sum, too
            data += exposed(passes.slot_s, between.push_s(constants, replicas=mirrored))
            data += between.pull_s(constants, replicas=replicas)
            coded = between.coding_s
    data += owner_steps_s(case, constants)
    moving = offloading_of(case)
    offload = moving.optimizer_s
    offload += case.micro_batches * (
        exposed(passes.forward_s, moving.forward_s) + exposed(passes.backward_s, moving.backward_s)
    )
    found = {"data": data, "packing": inside.packing_s, "coding": coded, "offload": offload}
    return found | {"optimizer": _optimizer_s(case)}


def _exposed(compute: float, communication: float, *, q: float) -> float:
    """Seconds of communication that compute does not hide."""
    return max(0.0, (compute**q + communication**q) ** (1 / q) - compute)  # rounding may give less


def sent_bytes(case: Case) -> float:
    """Return the bytes that a worker sends to other replicas in a step, on average, as a run counts them in its
    metrics: without weights that servers send back.
    """
    group = _group_of(case)
    between = _Between.of(case, case.trained_parameters / group, group)
    summed = between.traffic.sent_bytes(between.members)
    match case.sync:
        case LocalSGD(every=every):
            return summed / every
        case Gossip() as sync:
            mixed = between.mean_peers * NUMBER_BYTES * between.numbers
            return mixed * _mixes(sync) + summed / sync.average_every
        case ParameterServer():
            return between.traffic.summed / case.at_once
        case AllReduce():
            return summed


def _mixes(sync: Gossip) -> float:
    """How often weights are mixed in a step: where all take the average, nothing is mixed before."""
    return 1 / sync.every - 1 / math.lcm(sync.every, sync.average_every)


def served_apart(case: Case, constants: Constants, parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts of one update, where replicas take batches of their own: as many updates are under way, and the
    servers' own work may be the limit. Nobody waits for the slowest host.
    """
    found = {name: value / case.at_once for name, value in parts.items()} | {"straggle": 0.0}
    least = _Between.of(case, case.trained_parameters, 1).served_s(constants)
    found["data"] += max(0.0, least - sum(found.values()))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Within:
    """Seconds of what a replica's own workers exchange, by what may hide it; `group` of them split the parameters.
    `packing_s`: of a step, for copies that nothing hides (CPUs).
    """

    forward_s: float = 0.0
    backward_s: float = 0.0
    behind_last_s: float = 0.0
    group: int = 1
    packing_s: float = 0.0


def _within_replicas(case: Case, constants: Constants) -> _Within:
    axes, per_host = case.axes, case.cluster.devices_per_host
    # Frozen ones are gathered, and have no gradient.
    gathered, reduced = case.held_parameters * case.gathered_bytes, case.trained_parameters * case.reduced_bytes

    def one_way(num_bytes: float, size: int, of: Parted = "sum") -> float:
        return gather_s(num_bytes, size, axes.inside(size, axes.tensor, per_host), case.cluster, constants, of=of)

    if not axes.zero:
        inside = axes.context * axes.experts
        apart = inside > 1 and not isinstance(case.sync, AllReduce)  # otherwise all workers sum at once
        return _Within(behind_last_s=2 * one_way(reduced, inside) if apart else 0.0)
    group, micros = _group_of(case), case.micro_batches
    units = max(1.0, case.model.count / axes.stages)
    pieces = units if axes.zero == 3 else 1.0
    gather = pieces * one_way(gathered / pieces, group, "gather")
    summed = pieces * one_way(reduced / pieces, group, "scatter")
    packing = 0.0
    if (own := case.cluster.device.sharding) is not None and group > 1:
        units += case.model.rest is not None
        for of_step in (
            (2 * micros if axes.zero == 3 else 1) * (units * own.gather_s + gathered / own.gather - gather),
            (1 if axes.zero == 1 else micros) * (units * own.sum_s + reduced / own.sum - summed),
        ):
            packing += max(0.0, of_step)
    found = _Within(group=group, packing_s=packing)
    if axes.zero == 3:
        return dataclasses.replace(found, forward_s=gather, backward_s=gather + summed)
    if axes.zero == 2:  # gradients are summed after each micro-batch
        return dataclasses.replace(found, backward_s=summed, behind_last_s=gather)
    return dataclasses.replace(found, behind_last_s=gather + summed)


def _group_of(case: Case) -> int:
    """How many workers of a replica split its parameters by rows."""
    axes = case.axes
    return axes.shard * axes.experts * axes.context if axes.zero else 1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Between:
    """What replicas exchange: `members` of a group, `inside` of them on a host, have the same `numbers`."""

    case: Case
    numbers: float
    members: int
    inside: int

    @classmethod
    def of(cls, case: Case, numbers: float, group: int) -> _Between:
        axes, per_host = case.axes, case.cluster.devices_per_host
        if axes.zero:
            members, stride = axes.replicas, axes.tensor * group
        elif isinstance(case.sync, AllReduce):
            members, stride = axes.data * axes.context, axes.tensor
        else:
            members, stride = axes.replicas, axes.tensor * axes.context * axes.experts
        return cls(case=case, numbers=numbers, members=members, inside=axes.inside(members, stride, per_host))

    @property
    def traffic(self) -> WireTraffic:
        """What a replica's payloads are."""
        case = self.case
        if case.wire is None:
            return WireTraffic(summed=self.numbers * case.wire_bytes)
        replicas, bucket_bytes = self.members, case.sync.bucket_bytes
        return traffic(case.wire, self.numbers, self._shapes, replicas=replicas, bucket_bytes=bucket_bytes)

    @property
    def _shapes(self) -> list[tuple[int, int, int]]:
        """The parameters' shapes, where the wire looks at them."""
        return self.case.model.shapes if isinstance(self.case.wire, PowerSGD) else []

    @property
    def coding_s(self) -> float:
        """Seconds of coding, which the device does between kernels of backward: nothing of it is hidden."""
        case, device = self.case, self.case.cluster.device
        if case.wire is None or self.members == 1:
            return 0.0
        replicas, bucket_bytes = self.members, case.sync.bucket_bytes
        found = coding(case.wire, self.numbers, self._shapes, replicas=replicas, bucket_bytes=bucket_bytes)
        moving, launching = found.moved / device.memory_bandwidth, found.launches * device.launch_s
        return moving + launching if device.is_synchronous else max(moving, launching)

    def sum_s(self, constants: Constants) -> float:
        """Seconds until all have the sum, by the algorithm of the plan; nothing is coded while parts travel."""
        case, members, inside = self.case, self.members, self.inside
        if members == 1:
            return 0.0
        sent = self.traffic
        seconds = 0.0
        if sent.summed:
            algorithm = getattr(case.sync, "algorithm", "auto")
            seconds += sum_s(sent.summed, members, inside, case.cluster, constants, algorithm=algorithm)
        if sent.scattered:
            seconds += exchange_s(sent.scattered, members, inside, case.cluster, constants)
        if sent.gathered:
            seconds += gather_s(sent.gathered * members, members, inside, case.cluster, constants)
        return seconds

    # Gossip.

    @property
    def in_ring(self) -> bool:
        """Whether peers are neighbors in a ring; otherwise they are drawn."""
        return isinstance(self.case.sync, Gossip) and self.case.sync.peers == "ring"

    @property
    def peers(self) -> int:
        """To how many others a replica sends its weights."""
        return min(self.members - 1, 2 if self.in_ring else 1)

    @property
    def mean_peers(self) -> float:
        """As `peers`, on average: of an odd number of drawn replicas one has no partner."""
        return self.peers if self.in_ring or self.members % 2 == 0 else self.peers * (1 - 1 / self.members)

    def peers_s(self, constants: Constants) -> float:
        """Seconds until weights of peers are there: neighbors in a ring mostly share a host, drawn ones do not."""
        case, members, inside = self.case, self.members, self.inside
        if members == 1:
            return 0.0
        num_bytes, cluster = NUMBER_BYTES * self.numbers, case.cluster
        crossing = 0.0
        if members > inside:
            drawn = self.peers * inside * (members - inside) / (members - 1)
            crossing = self.peers if self.in_ring and inside > 1 else drawn
        groups = cluster.devices_per_host / inside
        local = self.peers * num_bytes / (cluster.device.link * constants.link) if inside > 1 else 0.0
        remote = crossing * num_bytes * groups / (cluster.network * constants.network)
        return max(local, remote) + latency_s(cluster, constants)

    # Parameter servers: one beside worker 0, the next on another host, and so on in turn.

    def push_s(self, constants: Constants, *, replicas: int) -> float:
        """Seconds until the servers have the gradients of so many replicas that push at once."""
        return self._through_servers_s(self.traffic.summed, constants, replicas)

    def pull_s(self, constants: Constants, *, replicas: int) -> float:
        """Seconds until so many replicas have the new weights."""
        return self._through_servers_s(NUMBER_BYTES * self.numbers, constants, replicas)

    def served_s(self, constants: Constants) -> float:
        """Seconds that the servers' links and optimizers need for one update, where many replicas send updates."""
        members = self.members
        both = self.push_s(constants, replicas=members) + self.pull_s(constants, replicas=members)
        return both / members + _optimizer_s(self.case)

    def _through_servers_s(self, num_bytes: float, constants: Constants, replicas: int) -> float:
        """Seconds in which so many replicas send so many bytes each to the servers, or get them from these: through the
        links of the busiest server's host, or of the replicas' own, whichever takes longer.
        """
        cluster, hosts = self.case.cluster, max(1, -(-self.members // self.inside))
        servers = self.case.sync.servers if isinstance(self.case.sync, ParameterServer) else 1
        on_busiest = -(-servers // min(hosts, servers)) / servers  # share of the parameters
        here = min(replicas, self.inside)  # replicas of one host
        network = cluster.network * constants.network
        local = here * num_bytes * on_busiest / (cluster.device.link * constants.link)
        remote = max((replicas - here) * on_busiest, here if hosts > 1 else 0.0) * num_bytes / network
        return max(local, remote) + latency_s(cluster, constants)


def _optimizer_s(case: Case) -> float:
    """Seconds of the optimizer where its state is, or comes to: on the device, the servers, or the host's processor."""
    if case.offload == "all":
        return offloading_of(case).on_host_s
    held = case.trained_split / (case.sync.servers if isinstance(case.sync, ParameterServer) else 1)
    each = 2 * (case.state_bytes + MASTER_BYTES) + STEP_BYTES
    return held * each / case.cluster.device.memory_bandwidth
