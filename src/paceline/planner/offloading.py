"""What `Compute(offload=...)` moves, and what that takes.

"optimizer" (`parallel/offload/optimizer_state.py`): after backward, one parameter after the other, its state comes to
the device, the optimizer steps there, and the state goes back. All of it is queued on one stream, so nothing is hidden,
and the two directions do not overlap. "all" (torch's CPUOffloadPolicy): this worker's rows cross the link behind each
forward and each backward, and gradients come back behind backward; the optimizer steps on the host's processor. Files
are read and written once a step.
"""

from __future__ import annotations

import dataclasses

from paceline.planner.case import Case

__all__ = ["PIECES", "Offloading", "offloading_of", "optimizer_bytes"]

PIECES = 2 * 16e6 * 1.048576  # of Adam's two tensors of state, in pieces of 16 MiB: what is on the device at a time
ROW_BYTES = 4.0  # a parameter or a gradient, in fp32 on the host
# torch's Adam on a processor reads and writes tensors one operation at a time, per parameter: weight decay 8, lerp of
# the mean 12, the square's mul and addcmul 20, sqrt 8, its division and eps 16, addcdiv 16. Counted in torch/optim.
HOST_OPTIMIZER_BYTES = 80.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    """Seconds of moving, in a step behind nothing, and in a micro-batch behind forward and backward; seconds of an
    optimizer on the host; and the bytes that a worker has elsewhere.
    """

    optimizer_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    on_host_s: float = 0.0
    elsewhere: float = 0.0


def optimizer_bytes(case: Case) -> float:
    """Return the bytes of a worker's part of the optimizer's state."""
    return case.state_bytes * case.trained_split


def offloading_of(case: Case) -> Offloading:
    """Return what a case's offload moves, and where to."""
    if case.offload == "none":
        return Offloading()
    cluster, device = case.cluster, case.cluster.device
    sharing = case.on_host  # devices of a host share its memory and its disk
    rate = min(device.host_link, cluster.host_memory_bandwidth / sharing)
    state = optimizer_bytes(case)
    files_s = 2 * state * sharing / cluster.disk if case.on_disk else 0.0
    if case.offload == "optimizer":
        crossing_s = 0.0 if device.is_synchronous else 2 * state / rate  # a CPU's memory is the host's
        return Offloading(optimizer_s=max(crossing_s, files_s), elsewhere=state)
    rows = ROW_BYTES * case.held_split
    host_s = case.trained_split * HOST_OPTIMIZER_BYTES * sharing / cluster.host_memory_bandwidth
    return Offloading(
        optimizer_s=files_s,
        forward_s=rows / rate,
        backward_s=rows / rate,  # parameters in one direction, gradients in the other
        on_host_s=host_s,
        elsewhere=state + 2 * rows,
    )
