"""The search over plans: what is priced, in which order, and that no case is without an answer."""

from __future__ import annotations

import dataclasses
import itertools
import time

import pytest

from paceline.errors import PlanError
from paceline.plan import AllReduce, Batch, Cast, Compute, Int8, Layout, LocalSGD, ParameterServer, Plan, Raw, Sparse
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.constants import built_in
from paceline.planner.correction import UNCORRECTED, Correction
from paceline.planner.lossy_plans import CLEARLY, MENU, lossy_plans, what_changes
from paceline.planner.model_costs import ModelCosts, transformer
from paceline.planner.plan_case import case_of, why_not_there
from paceline.planner.search import PricedPlan, candidates, is_exact, lack_text, least_workers, price, remedy, search

LLAMA = transformer(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, sequence=4096, vocabulary=128256
)
GPT = transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=32000)
HUGE = transformer(layers=128, hidden=25600, heads=160, sequence=2048, vocabulary=51200)  # a trillion parameters
PLAN = Plan(batch=Batch(size=512), compute=Compute(precision="bf16"))
FP16 = Compute(precision="fp16", loss_scale=1024)


def h100(hosts: int) -> Cluster:
    return catalogue().cluster("h100x8-ib", hosts=hosts)


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "workers"), [(LLAMA, 8), (LLAMA, 64), (LLAMA, 12)])
def test_candidates_are_plans_that_no_rule_forbids(model: ModelCosts, workers: int) -> None:
    plan = dataclasses.replace(PLAN, batch=Batch(size=workers * 8))
    found = list(candidates(plan, model, workers=workers, per_host=8))
    assert len(found) == len(set(map(str, found))) > 10
    for one in found:
        assert not one.check(workers=workers)
        assert one.layout.tensor <= 8
        assert (one.batch.size, one.compute.precision) == (plan.batch.size, "bf16")
        assert one.batch.num_micro % (workers // (one.layout.tensor * one.layout.stages)) == 0


@pytest.mark.thorough
def test_what_fits_comes_first_and_the_faster_one_before() -> None:
    found = search(PLAN, LLAMA, h100(8), built_in(), workers=64)
    order = [("fits", "unsure", "does not fit").index(one.fits) for one in found]
    assert order == sorted(order)
    assert found[0].fits == "fits"
    times = [one.step.step_s for one in found if one.fits == "fits"]
    assert times == pytest.approx(sorted(times), rel=2e-3)
    layouts = [dataclasses.replace(one.plan.layout, schedule="1f1b", sequence=False) for one in found]
    assert len(layouts) == len(set(layouts))
    assert found == search(PLAN, LLAMA, h100(8), built_in(), workers=64)


def test_where_nothing_fits_the_least_memory_comes_first() -> None:
    found = search(dataclasses.replace(PLAN, batch=Batch(size=8)), HUGE, h100(1), built_in(), workers=8)
    assert found
    assert {one.fits for one in found} == {"does not fit"}
    lacking = [one.lacking_bytes for one in found]
    assert lacking == pytest.approx(sorted(lacking), rel=2e-3)
    assert {one.plan.compute.offload for one in found} == {"optimizer"}, "it is tried where nothing fits without"


@pytest.mark.thorough
def test_a_trillion_parameters_on_many_devices_take_seconds() -> None:
    began = time.process_time()
    found = search(dataclasses.replace(PLAN, batch=Batch(size=4096)), HUGE, h100(256), built_in(), workers=2048)
    assert time.process_time() - began < 10
    assert found[0].fits == "fits"
    assert found[0].plan.layout.shard * found[0].plan.layout.stages * found[0].plan.layout.tensor >= 64


def test_a_plan_becomes_a_case() -> None:
    plan = Plan(layout=Layout(shard=4, tensor=2), batch=Batch(size=64, micro=4), wire=Cast(dtype="bf16"))
    case = case_of(plan, LLAMA, h100(1), workers=8)
    assert (case.axes.data, case.micro_batch, case.micro_batches) == (4, 4, 4)
    assert (case.precision, case.value_bytes, case.wire) == ("fp32", 4, Cast(dtype="bf16"))
    assert case.software.kernels == "single"
    compiled = dataclasses.replace(plan, compute=Compute(precision="bf16", recompute="blocks", compile=True))
    case = case_of(dataclasses.replace(compiled, layout=Layout(shard=8)), LLAMA, h100(1), workers=8)
    assert (case.precision, case.recompute, case.software.kernels) == ("bf16", "full", "fused")


def test_fp16_takes_the_time_and_the_memory_of_bf16() -> None:
    half, plan = price(PLAN, LLAMA, h100(1), built_in(), workers=8), dataclasses.replace(PLAN, compute=FP16)
    scaled = price(plan, LLAMA, h100(1), built_in(), workers=8)
    assert (scaled.step, scaled.memory) == (half.step, half.memory)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (Plan(compute=Compute(precision="fp64")), "fp64"),
        (Plan(sync=ParameterServer()), "built for the CPU so far, not for h100"),
        (Plan(layout=Layout(tensor=3)), "does not take 8 workers"),
    ],
)
def test_what_the_cost_model_does_not_know_is_refused(plan: Plan, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        case_of(plan, LLAMA, h100(1), workers=8)


def test_more_workers_than_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="16 workers, and the cluster has 8"):
        case_of(Plan(), LLAMA, h100(1), workers=16)


def test_known_state_replaces_the_estimated_one() -> None:
    plan = dataclasses.replace(PLAN, layout=Layout(shard=8), batch=Batch(size=64, micro=1))
    usual = price(plan, LLAMA, h100(1), built_in(), workers=8)
    known = price(plan, LLAMA, h100(1), built_in(), workers=8, state=10e9)
    assert known.memory.parts["state"] == 10e9 != usual.memory.parts["state"]
    assert known.step == usual.step


@pytest.mark.thorough
@pytest.mark.parametrize(("memory_gb", "least", "most"), [(80, 2, 8), (24, 8, 32)])
def test_the_least_workers_hold_the_model_and_fewer_do_not(memory_gb: float, least: int, most: int) -> None:
    cluster = h100(1)
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=memory_gb * 1e9))
    found = least_workers(PLAN, LLAMA, cluster, built_in())
    assert found is not None
    assert found.fits == "fits"
    assert least <= found.case.axes.workers <= most
    fewer = found.case.axes.workers // 2
    others = [one for one in search(PLAN, LLAMA, cluster, built_in(), workers=fewer) if one.fits == "fits"]
    assert all(one.plan.compute.offload != "none" for one in others)
    said = remedy(PLAN, LLAMA, cluster, built_in(), workers=fewer)
    assert said.startswith(f"it needs at least {found.case.axes.workers} workers of {memory_gb} GB: ")
    assert str(found.plan) in said
    assert ("GB of the host's with" in said) == bool(others)


@pytest.mark.thorough
@pytest.mark.parametrize("own", [Plan(), Plan(wire=Int8()), Plan(sync=LocalSGD(every=4)), Plan(wire=Sparse())], ids=str)
def test_the_search_has_exact_plans_and_those_of_the_plans_own_kind(own: Plan) -> None:
    plan = dataclasses.replace(own, batch=Batch(size=64), compute=PLAN.compute)
    found = search(plan, GPT, catalogue().cluster("h100x8-ethernet", hosts=1), built_in(), workers=8)
    kinds = {(one.plan.sync, one.plan.wire) for one in found}
    assert kinds == {(own.sync, own.wire), (AllReduce(), Raw())}
    alone = [one.plan.layout for one in found if one.case.axes.replicas == 1]
    cuts = [dataclasses.replace(layout, schedule="1f1b", sequence=False) for layout in alone]
    assert len(cuts) == len(set(cuts)) > 0, "one replica agrees with nobody: its layout stands there once"
    assert is_exact(own) == (own.wire in (Raw(), Sparse()) and own.sync == AllReduce())


@pytest.mark.thorough
def test_offload_is_tried_only_where_a_layout_does_not_surely_fit_without() -> None:
    cluster = catalogue().cluster("rtx4090x8-pcie", hosts=1)
    assert all(one.compute.offload == "none" for one in candidates(PLAN, GPT, workers=8, per_host=8))
    found = search(dataclasses.replace(PLAN, batch=Batch(size=64)), GPT, cluster, built_in(), workers=8)
    tried = [one for one in found if one.plan.compute.offload != "none"]
    assert 0 < len(tried) < len(found)
    for one in tried:
        resident = dataclasses.replace(one.plan, compute=dataclasses.replace(one.plan.compute, offload="none"))
        for micro in (1, one.plan.batch.micro):
            other = dataclasses.replace(resident, batch=dataclasses.replace(resident.batch, micro=micro))
            assert price(other, GPT, cluster, built_in(), workers=8).fits != "fits"
    on_cpu = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, is_synchronous=True, memory=8e9))
    lean = search(dataclasses.replace(PLAN, batch=Batch(size=64)), GPT, on_cpu, built_in(), workers=8)
    assert {one.plan.compute.offload for one in lean} == {"none"}, "the host's memory is the device's there"


def test_what_is_lacking_is_said() -> None:
    cluster = catalogue().cluster("rtx4090x8-pcie", hosts=1)
    plan = dataclasses.replace(PLAN, layout=Layout(shard=8), batch=Batch(size=64, micro=1))
    one = price(plan, LLAMA, cluster, built_in(), workers=8)
    state = one.memory.parts["state"] / 1e9
    assert one.lacking_bytes == pytest.approx(one.memory.peak - 24e9)
    assert lack_text(one).startswith(f"lacks {one.lacking_bytes / 1e9:.3g} GB: ")
    assert f"state {state:.3g} GB" in lack_text(one)
    small = dataclasses.replace(cluster, host_memory=1e9)
    offloaded = dataclasses.replace(PLAN, layout=Layout(shard=8), compute=Compute(offload="optimizer"))
    offloaded = dataclasses.replace(offloaded, batch=Batch(size=64, micro=1))
    one = price(offloaded, GPT, small, built_in(), workers=8)
    assert one.fits == "does not fit"
    assert lack_text(one) == f"needs {one.memory.elsewhere * 8 / 1e9:.3g} GB of each host's memory, of 1 GB"


def test_where_only_offload_fits_the_remedy_has_it_beside_more_workers() -> None:
    cluster = catalogue().cluster("rtx4090x8-pcie", hosts=1)
    said = remedy(dataclasses.replace(PLAN, batch=Batch(size=64)), GPT, cluster, built_in(), workers=1)
    more, offloaded = said.split(", or ")
    assert more.startswith("it needs at least 2 workers of 24 GB: ")
    assert offloaded.startswith("on 1 worker ")
    assert "offload=" in offloaded and "offload=" not in more


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["h100x8-ethernet", "rtx4090x8-pcie"])
def test_a_hundred_blocks_on_64_workers_take_a_second_with_everything(name: str) -> None:
    deep = transformer(
        layers=100, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, sequence=4096, vocabulary=128256
    )
    cluster = catalogue().cluster(name, hosts=8)

    def all_of_it() -> tuple[list[str], list[str]]:
        found = search(PLAN, deep, cluster, built_in(), workers=64)
        others = lossy_plans(found, lambda plan: reprice(plan, deep, cluster, 64))
        return [str(one.plan) for one in found], [str(one.priced.plan) for one in others]

    began = time.process_time()
    first = all_of_it()
    assert time.process_time() - began < 5
    assert first == all_of_it()


# Plans with other losses.


def reprice(plan: Plan, model: ModelCosts, cluster: Cluster, workers: int) -> PricedPlan | None:
    if plan.check(workers=workers) or why_not_there(plan, cluster):
        return None
    return price(plan, model, cluster, built_in(), workers=workers)


@pytest.mark.thorough
def test_lossy_plans_are_faster_than_all_exact_ones_and_each_than_the_gentler_before() -> None:
    cluster = catalogue().cluster("h100x8-ethernet", hosts=2)
    found = search(dataclasses.replace(PLAN, batch=Batch(size=256)), GPT, cluster, built_in(), workers=16)
    assert all(is_exact(one.plan) for one in found)
    lossy = lossy_plans(found, lambda plan: reprice(plan, GPT, cluster, 16))
    fastest = min(one.step.step_s for one in found if one.fits == "fits")
    times = [fastest, *(one.priced.step.step_s for one in lossy)]
    assert len(times) > 2
    assert all(after < CLEARLY * before for before, after in itertools.pairwise(times))
    order = [MENU.index((one.priced.plan.sync, one.priced.plan.wire)) for one in lossy]
    assert order == sorted(set(order))
    for one in lossy:
        assert not is_exact(one.priced.plan)
        assert one.priced.fits == "fits"
        assert one.changes == what_changes(one.priced.plan) != ""


def test_on_one_host_nothing_is_gained_by_other_losses() -> None:
    cluster = h100(1)
    found = search(dataclasses.replace(PLAN, batch=Batch(size=64)), GPT, cluster, built_in(), workers=8)
    assert lossy_plans(found, lambda plan: reprice(plan, GPT, cluster, 8)) == []


def test_every_way_of_the_menu_says_what_it_changes_and_exact_ones_nothing() -> None:
    assert all(what_changes(Plan(sync=sync, wire=wire)) for sync, wire in MENU)
    assert not any(is_exact(Plan(sync=sync, wire=wire)) for sync, wire in MENU)
    exact = [Plan(), Plan(wire=Sparse()), Plan(sync=ParameterServer(servers=2)), Plan(sync=AllReduce(algorithm="ring"))]
    for plan in exact:
        assert is_exact(plan)
        assert what_changes(plan) == ""


def test_where_no_number_of_workers_is_enough_that_is_said() -> None:
    cluster = h100(1)
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=4.1e9))
    plan = dataclasses.replace(PLAN, batch=Batch(size=2))
    assert least_workers(plan, HUGE, cluster, built_in()) is None
    assert "a smaller model, or devices of more memory" in remedy(plan, HUGE, cluster, built_in(), workers=2)


def test_the_band_is_that_of_what_is_known() -> None:
    plan, here = Plan(batch=Batch(size=64, micro=8)).resolve(8), catalogue().cluster("h100x8-ib")
    processor = dataclasses.replace(here, device=dataclasses.replace(here.device, is_synchronous=True))
    learned = Correction(receipts=2, is_same=True)
    others = Correction(receipts=2)

    def width(cluster: Cluster, correction: Correction = UNCORRECTED) -> float:
        return price(plan, GPT, cluster, built_in(), workers=8, correction=correction).half_width

    spreads = built_in().spreads
    assert (width(here), width(here, others), width(here, learned)) == (
        spreads["none"],
        spreads["none"],
        spreads["receipt"],
    )
    assert width(processor) > width(processor, learned) > width(here, learned), "a processor is known less well"
