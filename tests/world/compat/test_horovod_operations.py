"""Horovod's operations on 2 and 3 workers, compared with numbers of one process."""

from __future__ import annotations

import itertools
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import horovod_workers
import paceline.compat.horovod as hvd
from paceline.worker import program_worker

SIZES = [2, 3]
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8]


def own(rank: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """A worker's numbers: whole, and small enough that sums and products of three are exact in each type."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def each(size: int, dtype: torch.dtype, *shape: int) -> list[Tensor]:
    return [own(rank, dtype, *shape) for rank in range(size)]


def reductions(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {}
    for dtype, shape in itertools.product(TYPES, [(7,), (3, 5), ()]):
        mine = own(rank, dtype, *shape)
        for name in ("Sum", "Average", "Min", "Max", "Product"):
            found[f"{name} {dtype} {shape}"] = hvd.allreduce(mine, op=getattr(hvd, name))
        assert torch.equal(mine, own(rank, dtype, *shape)), "the input has changed"
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        found[f"in place {dtype} {shape}"] = mine
    large = own(rank, torch.float32, 700, 1000)  # more than what is copied into one buffer
    found["large"] = hvd.allreduce(large, op=hvd.Average)
    found["scaled"] = hvd.allreduce(torch.full((3,), 8.0), op=hvd.Sum, prescale_factor=0.5, postscale_factor=0.25)
    found["holes"] = hvd.allreduce(own(rank, torch.float32, 4, 6).t(), op=hvd.Sum)
    found["none"] = hvd.allreduce(torch.empty(0, 3), op=hvd.Sum)
    found["half way"] = hvd.allreduce(torch.full((3,), 1.5), compression=hvd.Compression.fp16)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_reductions_have_the_numbers_of_one_process(tmp_path: Path, size: int) -> None:
    values = horovod_workers.start(tmp_path, size, reductions).values()
    for dtype, shape in itertools.product(TYPES, [(7,), (3, 5), ()]):
        stacked = torch.stack(each(size, dtype, *shape)).double()
        sums = stacked.sum(0)
        wanted = {
            "Sum": sums,
            "Average": sums / size if dtype.is_floating_point else (sums / size).trunc(),
            "Min": stacked.amin(0),
            "Max": stacked.amax(0),
            "Product": stacked.prod(0),
            "in place": sums,
        }
        for (name, numbers), value in itertools.product(wanted.items(), values):
            found = value[f"{name} {dtype} {shape}"]
            assert found.dtype == dtype
            torch.testing.assert_close(found, numbers.to(dtype), rtol=0, atol=0, msg=f"{name} of {dtype} {shape}")
    for value in values:
        torch.testing.assert_close(value["large"], torch.stack(each(size, torch.float32, 700, 1000)).sum(0) / size)
        assert value["scaled"].tolist() == [size * 8.0 * 0.5 * 0.25] * 3
        assert torch.equal(value["holes"], torch.stack(each(size, torch.float32, 4, 6)).sum(0).t())
        assert value["none"].shape == (0, 3)
        assert value["half way"].tolist() == [1.5] * 3


def movements(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {}
    for dtype in [*TYPES, torch.bool, torch.int16]:
        mine = own(rank, dtype, rank + 1, 2)  # another number of rows on each worker
        found[f"gather {dtype}"] = hvd.allgather(mine)
        found[f"broadcast {dtype}"] = hvd.broadcast(own(rank, dtype, 3, 2), root_rank=size - 1)
        splits = torch.tensor([rank + 1] * size, dtype=torch.int32)
        found[f"exchange {dtype}"] = hvd.alltoall(own(rank, dtype, size * (rank + 1), 2), splits)
    found["scatter"] = hvd.reducescatter(own(rank, torch.float32, 2 * size + 1, 3), op=hvd.Sum)
    found["scatter mean"] = hvd.reducescatter(own(rank, torch.float32, size), op=hvd.Average)
    found["even exchange"] = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    found["group"] = hvd.grouped_allgather([own(rank, torch.int64, rank, 2), own(rank, torch.float32, 2)])
    found["empty"] = hvd.allgather(torch.empty(0, 4))
    found["objects"] = hvd.allgather_object({"rank": rank, "long": "x" * rank})
    found["object"] = hvd.broadcast_object({"rank": rank}, root_rank=1)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_what_moves_tensors_has_the_numbers_of_one_process(tmp_path: Path, size: int) -> None:
    values = horovod_workers.start(tmp_path, size, movements).values()
    scattered = torch.stack(each(size, torch.float32, 2 * size + 1, 3)).sum(0)
    parts = scattered.split([3] + [2] * (size - 1))  # the first have one row more
    for rank, value in enumerate(values):
        for dtype in [*TYPES, torch.bool, torch.int16]:
            rows = [own(other, dtype, other + 1, 2) for other in range(size)]
            assert torch.equal(value[f"gather {dtype}"], torch.cat(rows))
            assert torch.equal(value[f"broadcast {dtype}"], own(size - 1, dtype, 3, 2))
            sent = [own(other, dtype, size * (other + 1), 2).split(other + 1)[rank] for other in range(size)]
            exchanged, received = value[f"exchange {dtype}"]
            assert torch.equal(exchanged, torch.cat(sent))
            assert received.tolist() == [other + 1 for other in range(size)]
        assert torch.equal(value["scatter"], parts[rank])
        assert torch.equal(value["scatter mean"], torch.stack(each(size, torch.float32, size)).mean(0)[rank : rank + 1])
        assert value["even exchange"].tolist() == [
            100 * other + 2 * rank + place for other in range(size) for place in range(2)
        ]
        assert torch.equal(value["group"][0], torch.cat([own(other, torch.int64, other, 2) for other in range(size)]))
        assert torch.equal(value["group"][1], torch.cat(each(size, torch.float32, 2)))
        assert value["empty"].shape == (0, 4)
        assert value["objects"] == [{"rank": other, "long": "x" * other} for other in range(size)]
        assert value["object"] == {"rank": 1}


def own_orders(rank: int, size: int) -> list[float]:
    hvd.init()
    names = [f"tensor {number}" for number in range(40)]
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(rank)).tolist()
    tensors = {name: torch.full((number + 1,), float(number + rank)) for number, name in enumerate(names)}
    handles: dict[str, int] = {}

    def submit(numbers: list[int]) -> None:
        for number in numbers:
            handles[names[number]] = hvd.allreduce_async_(tensors[names[number]], name=names[number], op=hvd.Sum)

    threads = [threading.Thread(target=submit, args=(order[part::3],)) for part in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in reversed(names):
        hvd.synchronize(handles[name])
    return [float(tensors[name].mean()) for name in names]


@pytest.mark.parametrize("size", SIZES)
def test_names_are_matched_whatever_the_order_and_the_thread_of_the_calls(tmp_path: Path, size: int) -> None:
    values = horovod_workers.start(tmp_path, size, own_orders).values()
    for value in values:
        assert value == [float(size * number + sum(range(size))) for number in range(40)]


def errors(rank: int, size: int) -> dict[str, str]:
    hvd.init()
    found: dict[str, str] = {}

    def refused(name: str, kind: type[BaseException], call: Any) -> None:
        with pytest.raises(kind) as error:
            call()
        found[name] = str(error.value)

    kinds = hvd.Sum, hvd.Min, hvd.Max
    refused("shapes", hvd.HorovodInternalError, lambda: hvd.allreduce(torch.zeros(3 + rank), name="shapes"))
    refused("types", hvd.HorovodInternalError, lambda: hvd.allgather(torch.zeros(3, dtype=TYPES[rank]), name="types"))
    refused("roots", hvd.HorovodInternalError, lambda: hvd.broadcast(torch.zeros(3), rank, name="roots"))
    refused("reductions", hvd.HorovodInternalError, lambda: hvd.allreduce(torch.zeros(3), op=kinds[rank], name="r"))
    if rank == 0:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
        refused("twice", ValueError, lambda: hvd.allreduce_async(torch.ones(2), name="twice"))
    else:
        first = hvd.allreduce_async(torch.ones(2), name="twice")
    found["after"] = str(hvd.synchronize(first).tolist())  # the operation that was there first goes on
    return found


@pytest.mark.parametrize("size", SIZES)
def test_what_does_not_fit_is_an_error_on_all_ranks_and_the_session_goes_on(tmp_path: Path, size: int) -> None:
    for value in horovod_workers.start(tmp_path, size, errors).values():
        assert "tensor shapes" in value["shapes"]
        assert "data types" in value["types"]
        assert "root" in value["roots"]
        assert "reduction operation" in value["reductions"]
        assert value["after"] == "[1.0, 1.0]"
        assert "under way" in value.get("twice", "under way")


def joining(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    sums = [hvd.allreduce(torch.ones(2), name=f"step {step}").tolist() for step in range(rank + 1)]
    refused = ""
    if rank == size - 1:
        sums.append(hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Sum, name="last").tolist())
        try:
            hvd.allgather(torch.ones(2))
        except hvd.HorovodInternalError as error:
            refused = str(error)
    last = hvd.join()
    # Those without a name are matched again, though not all ranks have made the same calls before.
    return {"sums": sums, "last": last, "after": hvd.allgather(torch.tensor([rank])).tolist(), "refused": refused}


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_has_joined_gives_zeros_until_all_have(tmp_path: Path, size: int) -> None:
    values = horovod_workers.start(tmp_path, size, joining).values()
    for rank, value in enumerate(values):
        assert value["last"] == size - 1
        assert value["after"] == list(range(size))
        means = torch.tensor([[(size - step) / size] * 2 for step in range(rank + 1)])
        torch.testing.assert_close(torch.tensor(value["sums"][: rank + 1]), means)
    assert values[-1]["sums"][-1] == [1, 1]
    assert "Join" in values[-1]["refused"]


def sets(rank: int, size: int) -> dict[str, Any]:
    one = hvd.ProcessSet([0, size - 1])
    hvd.init(process_sets=[one])
    found: dict[str, Any] = {"included": one.included(), "size": one.size()}
    if one.included():
        found["rank"] = one.rank()
        found["sum"] = hvd.allreduce(torch.tensor([float(rank + 1)]), op=hvd.Sum, process_set=one).item()
        found["sent"] = hvd.broadcast(torch.tensor([rank]), size - 1, process_set=one).item()
    else:
        with pytest.raises(ValueError, match="not part"):
            hvd.allreduce(torch.zeros(1), process_set=one)
    with pytest.raises(ValueError, match="duplicate"):
        hvd.add_process_set([size - 1, 0])
    other = hvd.add_process_set([0])
    found["alone"] = hvd.allreduce(torch.tensor([5.0]), process_set=other).item() if rank == 0 else None
    found["removed"] = hvd.remove_process_set(other), hvd.remove_process_set(other), other.process_set_id
    hvd.barrier()
    return found


@pytest.mark.parametrize("size", [3])
def test_process_sets_run_operations_among_themselves(tmp_path: Path, size: int) -> None:
    values = horovod_workers.start(tmp_path, size, sets).values()
    assert [value["included"] for value in values] == [True, False, True]
    assert [value.get("rank") for value in values] == [0, None, 1]
    assert [value.get("sum") for value in values] == [4.0, None, 4.0]
    assert [value.get("sent") for value in values] == [2, None, 2]
    assert values[0]["alone"] == 5.0
    assert all(value["removed"] == (True, False, None) for value in values)


def again(rank: int, size: int) -> list[float]:
    found: list[float] = []
    for number in range(3):
        assert not hvd.is_initialized()
        hvd.init()
        found.append(hvd.allreduce(torch.tensor([float(rank + number)]), op=hvd.Sum).item())
        hvd.shutdown()
    with pytest.raises(ValueError, match=r"hvd\.init"):
        hvd.rank()
    return found


@pytest.mark.parametrize("size", SIZES)
def test_a_second_init_works_after_shutdown(tmp_path: Path, size: int) -> None:
    for value in horovod_workers.start(tmp_path, size, again).values():
        assert value == [float(sum(range(size)) + number * size) for number in range(3)]


def ends(rank: int, size: int, timeline: Path, error: BaseException | None) -> bool:
    os.environ["HOROVOD_TIMELINE"] = str(timeline)
    hvd.init()
    hvd.allreduce(torch.ones(1), name="waited")
    hvd.allreduce_async(torch.ones(1), name="not waited")
    program_worker._end(None if error is None else type(error), error, None)
    return hvd.is_initialized()


@pytest.mark.parametrize("error", [None, ValueError("the program has failed")])
def test_a_program_that_ends_finishes_its_timeline(tmp_path: Path, error: BaseException | None) -> None:
    timeline = tmp_path / "timeline.json"
    (is_open,) = horovod_workers.start(tmp_path, 1, lambda rank, size: ends(rank, size, timeline, error)).values()
    rows = {event.get("args", {}).get("name") for event in json.loads(timeline.read_text())}
    assert {"allreduce.waited", "allreduce.not waited"} <= rows
    assert is_open == (error is not None)  # after an error it waits for no other worker


def begins_badly(rank: int, size: int) -> bool:
    with pytest.raises(ValueError, match="duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([0]), hvd.ProcessSet(reversed(range(size)))])  # all: the global set
    assert not hvd.is_initialized()
    hvd.init(process_sets=[one := hvd.ProcessSet([0])])
    return hvd.allreduce(torch.ones(1)).item() == 1.0 and one.process_set_id == 1


def test_an_init_that_fails_may_be_repeated(tmp_path: Path) -> None:
    assert horovod_workers.start(tmp_path, 2, begins_badly).values() == [True, True]


def differentiated(rank: int, size: int) -> dict[str, Any]:
    hvd.init()
    found: dict[str, Any] = {}

    def gradient(name: str, call: Any, *shape: int) -> None:
        given = torch.ones(*shape, requires_grad=True)
        call(given).mul(rank + 1.0).sum().backward()
        found[name] = given.grad

    gradient("sum", lambda x: hvd.allreduce(x, op=hvd.Sum), 3)
    gradient("gather", lambda x: hvd.allgather(x), rank + 1, 2)
    gradient("broadcast", lambda x: hvd.broadcast(x, 1), 2)
    gradient("exchange", lambda x: hvd.alltoall(x), size)
    gradient("scatter", lambda x: hvd.reducescatter(x, op=hvd.Sum), size)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_gradients_flow_through_operations(tmp_path: Path, size: int) -> None:
    total = sum(range(1, size + 1))
    for rank, value in enumerate(horovod_workers.start(tmp_path, size, differentiated).values()):
        assert value["sum"].tolist() == [total] * 3
        torch.testing.assert_close(value["gather"], torch.full((rank + 1, 2), total / size))
        torch.testing.assert_close(value["broadcast"], torch.full((2,), total / size if rank == 1 else 0.0))
        assert value["exchange"].tolist() == [other + 1.0 for other in range(size)]
        assert value["scatter"].tolist() == [size * (other + 1.0) for other in range(size)]


def normalized(rank: int, size: int) -> dict[str, Tensor]:
    hvd.init()
    torch.manual_seed(0)
    whole = torch.randn(6, 4, 5)
    layer = hvd.SyncBatchNorm(4)
    given = whole.tensor_split(size)[rank].clone().requires_grad_()
    layer(given).square().sum().backward()
    assert layer.running_mean is not None and layer.running_var is not None
    return {
        "input": given.grad if given.grad is not None else torch.empty(0),
        "mean": layer.running_mean,
        "variance": layer.running_var,
    }


@pytest.mark.parametrize("size", [3])
def test_batch_normalization_sees_the_batches_of_all_workers(tmp_path: Path, size: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(6, 4, 5, requires_grad=True)
    layer = nn.BatchNorm1d(4)
    layer(whole).square().sum().backward()
    assert whole.grad is not None and layer.running_mean is not None and layer.running_var is not None
    for rank, value in enumerate(horovod_workers.start(tmp_path, size, normalized).values()):
        torch.testing.assert_close(value["mean"], layer.running_mean)
        torch.testing.assert_close(value["variance"], layer.running_var)
        torch.testing.assert_close(value["input"], whole.grad.tensor_split(size)[rank], rtol=1e-4, atol=1e-5)
