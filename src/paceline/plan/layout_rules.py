"""Rules of the layout: workers, micro-batches, and what the compiler and offloading do with split models."""

from __future__ import annotations

from paceline.plan.rules import PlanFacts, Rule, count_text, streams_parameters

__all__ = ["LAYOUT_RULES"]

SEEN = {  # by axis: what a product sees there
    "tensor": "each worker has a slice of the features",
    "context": "each worker has a slice of the tokens",
    "experts": "an expert gets tokens of several workers at once",
}
AXES = ("shard", "experts", "stages", "context", "tensor")  # of a replica, as fields of Layout


def _layout_does_not_fit(facts: PlanFacts) -> bool:
    return facts.workers is not None and not facts.plan.layout.takes(facts.workers)


def _layout_says(facts: PlanFacts) -> str:
    layout = facts.plan.layout
    split = [(axis, size) for axis in AXES if (size := getattr(layout, axis)) > 1]
    replicas, each = layout.replicas, "".join(f" x {name} {size}" for name, size in split)
    if isinstance(replicas, tuple):
        count = count_text(facts.workers, "worker")
        return f"Layout needs {replicas[0]} to {replicas[1]} replicas{each} but the job has {count}."
    if replicas is None:
        why = " x ".join(name for name, _ in split)
        return f"Layout needs a multiple of {layout.workers_each} workers ({why}) but the job has {facts.workers}."
    needed = count_text(layout.workers, "worker")
    return f"Layout needs {needed} ({count_text(replicas, 'replica')}{each}) but the job has {facts.workers}."


def _layout_fix(facts: PlanFacts) -> str:
    layout, workers = facts.plan.layout, facts.workers or 0
    replicas, each = layout.replicas, layout.workers_each
    if isinstance(replicas, tuple):
        return f"Use workers={replicas[0] * each} to {replicas[1] * each}, or another range of replicas."
    needed = layout.workers or max(1, workers // each) * each
    if each == 1:
        return f"Use workers={needed}, or Layout(replicas={workers})."
    split = [axis for axis in AXES if getattr(layout, axis) > 1]
    if len(split) > 1:
        return f"Use workers={needed}, or other sizes whose product is {workers}."
    axis = split[0]
    size = max(one for one in range(1, each + 1) if workers % one == 0)
    other = f"replicas={workers // size}, {axis}={size}" if size > 1 else f"replicas={workers}"
    return f"Use workers={needed}, or Layout({other})."


def _slices_are_compiled(facts: PlanFacts) -> bool:
    return _slices(facts) != "" and facts.plan.compute.compile


def _slices(facts: PlanFacts) -> str:
    """The axis along which workers have slices of tensors, as a field of Layout; "" where there is none."""
    layout = facts.plan.layout
    return next((f"{axis}={size}" for axis in ("tensor", "context") if (size := getattr(layout, axis)) > 1), "")


def _micro_exceeds_size(facts: PlanFacts) -> bool:
    return facts.plan.batch.resolved_micro > facts.plan.batch.size


def _micro_says(facts: PlanFacts) -> str:
    batch = facts.plan.batch
    return f"Batch(size={batch.size}, micro={batch.micro}) wants micro-batches larger than the whole batch."


def _micro_fix(facts: PlanFacts) -> str:
    batch = facts.plan.batch
    return f"Use micro={batch.size} or less, or size={batch.micro} or more."


def _workers_would_idle(facts: PlanFacts) -> bool:
    shares = _num_work_shares(facts)
    if facts.plan.is_asynchronous and not facts.plan.has_backup_workers:  # each replica takes a whole batch
        return False
    return shares is not None and not _micro_exceeds_size(facts) and facts.plan.batch.num_micro < shares


def _num_work_shares(facts: PlanFacts) -> int | None:
    """Into how many shares a step's micro-batches are divided: workers that run them together count as one."""
    return None if facts.workers is None else facts.workers // _workers_per_share(facts)


def _workers_per_share(facts: PlanFacts) -> int:
    """How many workers run the same micro-batches."""
    layout = facts.plan.layout
    return layout.stages * layout.context * layout.tensor


def _idle_says(facts: PlanFacts) -> str:
    batch, shares, each = facts.plan.batch, _num_work_shares(facts) or 0, _workers_per_share(facts)
    axis = next((axis for axis in ("tensor", "context") if getattr(facts.plan.layout, axis) > 1), "stages")
    groups = f"{shares} workers" if each == 1 else f"{shares} groups of {each} workers ({axis})"
    return (
        f"A batch of {count_text(batch.size, 'sample')} in micro-batches of {batch.resolved_micro} makes "
        f"{count_text(batch.num_micro, 'micro-batch')} a step, but the job has {groups}: "
        f"{shares - batch.num_micro} of them would have nothing to do in every step."
    )


def _idle_fix(facts: PlanFacts) -> str:
    batch, shares = facts.plan.batch, _num_work_shares(facts) or 0
    fewer = f"workers={batch.num_micro * _workers_per_share(facts)} or fewer"
    if batch.size < shares:  # even micro=1 does not give each worker something to do
        return f"Use {fewer}, or Batch(size={shares}, micro=1) or larger."
    # The largest micro with ceil(size / micro) >= shares: micro < size / (shares - 1).
    micro = -(-batch.size // (shares - 1)) - 1
    return f"Use micro={micro}, or {fewer}."


def _tokens_are_split_twice(facts: PlanFacts) -> bool:
    return facts.plan.layout.context > 1 and facts.plan.layout.sequence


def _context_is_changed(facts: PlanFacts) -> bool:
    compute = facts.plan.compute
    return facts.plan.layout.context > 1 and compute.offload == "all"


def _experts_are_changed(facts: PlanFacts) -> bool:
    compute = facts.plan.compute
    return facts.plan.layout.experts > 1 and compute.offload == "all"


def _scales_apart(facts: PlanFacts) -> str:
    """The axis under which a product sees other numbers than in one process, as a field of Layout; "" for none."""
    layout = facts.plan.layout
    return next((f"{axis}={size}" for axis in SEEN if (size := getattr(layout, axis)) > 1), "")


def _has_stages(facts: PlanFacts) -> bool:
    return facts.plan.layout.stages > 1


LAYOUT_RULES = (
    Rule(name="layout-fits-workers", broken_when=_layout_does_not_fit, says=_layout_says, fix=_layout_fix),
    Rule(
        name="slices-are-not-compiled",
        broken_when=_slices_are_compiled,
        says=lambda facts: (
            f"Compute(compile=True) with Layout({_slices(facts)}): each worker has slices of tensors that show the "
            "size of the whole to the model's code, and torch.compile refuses tensors that have another size than "
            'they show ("Guard failed on the same frame it was created").'
        ),
        fix=lambda facts: f"Use compile=False, or shard, stages or experts in place of {_slices(facts)}.",
    ),
    Rule(
        name="compiled-backward-is-one-call",
        broken_when=lambda facts: facts.plan.compute.compile and facts.plan.layout.schedule == "zero-bubble",
        says=lambda facts: (
            "Compute(compile=True) with Layout(schedule='zero-bubble'): the schedule asks for gradients of inputs "
            "first and for those of weights later, and the backward of a region that torch.compile has compiled is "
            "one function, which makes both at once."
        ),
        fix=lambda facts: "Use schedule='1f1b' or 'interleaved', or compile=False.",
    ),
    Rule(
        name="tokens-are-split-once",
        broken_when=_tokens_are_split_twice,
        says=lambda facts: (
            f"Layout(context={facts.plan.layout.context}) with sequence=True: each worker has a slice of the tokens "
            "already, and would split it again between layers."
        ),
        fix=lambda facts: "Use sequence=False, or context=1.",
    ),
    Rule(
        name="context-parallel-runs-as-written",
        broken_when=_context_is_changed,
        says=lambda facts: (
            f"Layout(context={facts.plan.layout.context}) with {facts.plan.compute!r}: context parallel does not work "
            "with parameters that are brought to the device unit by unit yet."
        ),
        fix=lambda facts: "Use offload='none' or 'optimizer', or context=1.",
    ),
    Rule(
        name="expert-parallel-runs-as-written",
        broken_when=_experts_are_changed,
        says=lambda facts: (
            f"Layout(experts={facts.plan.layout.experts}) with {facts.plan.compute!r}: parameters of experts are not "
            "brought to the device unit by unit yet."
        ),
        fix=lambda facts: "Use offload='none' or 'optimizer', or experts=1.",
    ),
    Rule(
        name="stages-stay-on-the-device",
        broken_when=lambda facts: _has_stages(facts) and streams_parameters(facts),
        says=lambda facts: (
            f"Compute(offload='all') with Layout(stages={facts.plan.layout.stages}): each micro-batch would bring all "
            "parameters of a stage to the device twice, one after the other, while the other stages wait."
        ),
        fix=lambda facts: (
            f"Use offload='optimizer', more stages, or shard={facts.plan.layout.stages} in place of stages."
        ),
    ),
    Rule(
        name="streaming-needs-fixed-replicas",
        broken_when=lambda facts: streams_parameters(facts) and facts.plan.layout.is_elastic,
        says=lambda facts: (
            f"Compute(offload='all') brings parameters to the device unit by unit, and {facts.plan.layout!r} lets "
            "replicas come and go, which is not supported together yet."
        ),
        fix=lambda facts: "Use offload='optimizer', or replicas=n in place of the pair.",
    ),
    Rule(
        name="streaming-keeps-nothing-gathered",
        broken_when=lambda facts: streams_parameters(facts) and facts.plan.layout.zero != 3,
        says=lambda facts: (
            f"Compute(offload='all') brings parameters to the device unit by unit, and Layout(zero="
            f"{facts.plan.layout.zero}) keeps all of them there during a step."
        ),
        fix=lambda facts: "Use zero=3, or offload='optimizer'.",
    ),
    Rule(
        name="streaming-needs-whole-layers",
        broken_when=lambda facts: streams_parameters(facts) and facts.plan.layout.tensor > 1,
        says=lambda facts: (
            f"Compute(offload='all') with Layout(tensor={facts.plan.layout.tensor}): tensor parallel layers are not "
            "brought to the device unit by unit yet."
        ),
        fix=lambda facts: f"Use offload='optimizer', or shard={facts.plan.layout.tensor} in place of tensor.",
    ),
    Rule(
        name="fp8-scales-are-those-of-one-process",
        broken_when=lambda facts: facts.plan.compute.precision == "fp8" and _scales_apart(facts) != "",
        says=lambda facts: (
            f"Compute(precision='fp8') with Layout({_scales_apart(facts)}): the scales of FP8 follow the largest of "
            f"the numbers that meet in a product, and {SEEN[_scales_apart(facts).partition('=')[0]]}, so its numbers "
            "would be others than those of one process."
        ),
        fix=lambda facts: f"Use precision='bf16', or shard or stages in place of {_scales_apart(facts)}.",
    ),
    Rule(name="micro-fits-size", broken_when=_micro_exceeds_size, says=_micro_says, fix=_micro_fix),
    Rule(name="work-for-every-worker", broken_when=_workers_would_idle, says=_idle_says, fix=_idle_fix),
)
