"""Weights that have not come: nothing reads them, questions and views ask for nothing, all else for what it spans."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import io
import mmap
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel import absent_files
from paceline.parallel.absent_files import bring_pieces, file_of, is_absent, map_absent
from paceline.parallel.absent_tensors import AbsentParameter, AbsentTensor, as_absent, bring, come
from paceline.parallel.stand_in_weights import stand_in_weights

PIECE = mmap.PAGESIZE
ROWS, WIDTH = 16, PIECE // 8  # half a piece is a row of fp32


class Source:
    """Brings pieces by writing them into the file, and notes which."""

    identity, piece_bytes = "version 1", PIECE

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.asked = path, data, list[list[int]]()
        with open(path, "wb") as file:
            file.truncate(len(data))

    def bring(self, pieces: Mapping[str, Collection[int]]) -> None:
        numbers = sorted(pieces["weights"])
        self.asked.append(numbers)
        with open(self.path, "r+b") as file:
            for one in numbers:
                os.pwrite(file.fileno(), self.data[one * PIECE : (one + 1) * PIECE], one * PIECE)


class Stored:
    """A parameter whose bytes come when they are asked for, and what they are."""

    def __init__(self, folder: Path) -> None:
        self.numbers = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
        self.source = Source(folder / "weights", self.numbers.numpy().tobytes())
        mapped = map_absent(self.source.path, len(self.source.data), name="weights", source=self.source)
        self.parameter: Any = as_absent(nn.Parameter(torch.frombuffer(mapped, dtype=torch.float32).view(ROWS, WIDTH)))

    @property
    def asked(self) -> list[list[int]]:
        return self.source.asked


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    return Stored(tmp_path)


def read_by_the_kernel(address: int) -> bytes:
    """A byte of memory, as a system call reads it: it returns an error where a process would be killed."""
    reader, writer = os.pipe()
    try:
        os.write(writer, (ctypes.c_char * 1).from_address(address))
        return os.read(reader, 1)
    finally:
        os.close(reader)
        os.close(writer)


def test_what_has_not_come_cannot_be_read_by_anybody(stored: Stored) -> None:
    address = stored.parameter.data_ptr()
    for place in (0, PIECE - 1, PIECE, ROWS * WIDTH * 4 - 1):
        with pytest.raises(OSError) as error:
            read_by_the_kernel(address + place)
        assert error.value.errno == errno.EFAULT
    bring([stored.parameter[2:4]])
    assert stored.asked == [[1]]
    assert read_by_the_kernel(address + PIECE + 1) == stored.source.data[PIECE + 1 : PIECE + 2]
    for place in (PIECE - 1, 2 * PIECE):
        with pytest.raises(OSError):
            read_by_the_kernel(address + place)


QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "shape": lambda p: (p.shape, p.size(0), p.dtype, p.device, p.numel(), p.nbytes, p.stride(), len(p), p.is_meta),
    "gradient": lambda p: (p.requires_grad, p.grad, p.is_leaf, p.requires_grad_(False), p.requires_grad_()),
    "another": lambda p: (torch.empty_like(p).shape, p.new_zeros(2), hash(p)),
    "views": lambda p: (
        p.data[3:],
        p.detach().chunk(4)[1],
        p.view(-1),
        p.t(),
        p[..., 1:],
        p.narrow(1, 0, 2),
        p.reshape(-1),
    ),
    "the same": lambda p: (
        p.to(torch.float32),
        p.to("cpu"),
        p.cpu(),
        p.float(),
        p.contiguous(),
        p.to(p.device, None, False),
    ),
    "modules": lambda p: module(p).to("cpu").requires_grad_(False).train().state_dict(),
}


def module(parameter: Any) -> nn.Module:
    made = nn.Linear(WIDTH, ROWS, bias=False)
    made.weight = parameter
    return made


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_and_views_ask_for_no_byte(stored: Stored, name: str) -> None:
    QUESTIONS[name](stored.parameter)
    assert stored.asked == []
    assert type(stored.parameter) is AbsentParameter and isinstance(stored.parameter, nn.Parameter)


USES: dict[str, Callable[[Any], Any]] = {
    "operator": lambda p: p * 2,
    "item": lambda p: p[3, 5].item(),
    "list": lambda p: p[2].tolist(),
    "numpy": lambda p: torch.from_numpy(p.detach().numpy()),
    "reduce": lambda p: p.norm(),
    "list of tensors": lambda p: torch.cat([p, p]),
    "foreach": lambda p: torch._foreach_norm([p.detach()])[0],
    "by numbers": lambda p: p[torch.tensor([0, 9])],
    "by a mask": lambda p: p[p > 0],
    "layer": lambda p: nn.functional.linear(torch.ones(2, WIDTH), p),
    "module": lambda p: module(p)(torch.ones(2, WIDTH)),
    "float64": lambda p: module(p).double().weight,
    "another type": lambda p: p.to(torch.bfloat16),
    "clone": lambda p: p.clone(),
    "deepcopy": copy.deepcopy,
    "deepcopy of a module": lambda p: copy.deepcopy(module(p)).weight,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "save": lambda p: saved(module(p).state_dict())["weight"],
    "text": lambda p: repr(p).replace("Parameter containing:\n", "")[:30],
    "copied into": lambda p: torch.zeros(ROWS, WIDTH).copy_(p),
    "in place, of data": lambda p: p.data.mul_(2),
    "in place, of rows": lambda p: p.detach()[1:3].zero_(),
    "a sparse view": lambda p: p.t().reshape(-1),
    "gradient": lambda p: torch.autograd.grad((p**2).sum(), p)[0],
}


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", USES)
def test_every_use_finds_the_numbers(stored: Stored, name: str) -> None:
    expected = USES[name](nn.Parameter(stored.numbers.clone()))
    found = USES[name](stored.parameter)
    assert stored.asked
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected) and found.dtype == expected.dtype
        assert type(copy.copy(found.detach())) in (Tensor, AbsentTensor)
    else:
        assert found == expected
    come([stored.parameter])
    assert type(stored.parameter) is nn.Parameter
    if not name.startswith(("in place", "float64")):
        assert torch.equal(stored.parameter, stored.numbers)


def test_a_use_of_a_part_asks_for_the_pieces_that_it_spans(stored: Stored) -> None:
    whole = stored.parameter
    part = whole.detach()[4:7]
    assert torch.equal(part.clone(), stored.numbers[4:7])
    assert stored.asked == [[2, 3]] and type(part) is Tensor and type(whole) is AbsentParameter
    assert torch.equal(whole[6:9].sum(), stored.numbers[6:9].sum())
    assert stored.asked == [[2, 3], [4]], "a piece that is here is not asked for again"
    bring([whole[0:2], whole[14:16], whole[0:1]])
    assert stored.asked[2:] == [[0, 7]], "at once"


def test_a_written_tensor_keeps_what_was_written(stored: Stored) -> None:
    with torch.no_grad():
        stored.parameter[0, 0] = 7
    stored.parameter.sum()
    assert stored.parameter[0, 0].item() == 7
    assert torch.equal(stored.parameter[1:], stored.numbers[1:])


def test_other_data_ask_for_nothing(stored: Stored) -> None:
    stored.parameter.data = torch.ones(2)
    assert stored.asked == [] and type(stored.parameter) is nn.Parameter
    assert stored.parameter.sum().item() == 2


def test_a_source_that_fails_leaves_everything_to_be_asked_again(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> None:
        raise OSError("the store is away")

    with monkeypatch.context() as during:
        during.setattr(stored.source, "bring", away)
        with pytest.raises(OSError, match="is away"):
            stored.parameter.sum()
        with pytest.raises(OSError):
            read_by_the_kernel(stored.parameter.data_ptr())
    assert torch.equal(stored.parameter.sum(), stored.numbers.sum())


def test_a_model_runs_on_other_numbers_while_it_is_looked_at(stored: Stored) -> None:
    model = nn.Sequential(nn.Linear(4, WIDTH), module(stored.parameter), nn.Linear(ROWS, 1))
    model.add_module("again", module(stored.parameter))  # tied
    own = model[0].weight
    with stand_in_weights(model):
        tied: Any = model
        weight = tied[1].weight
        assert weight is tied.again.weight and type(weight) is nn.Parameter and tied[0].weight is own
        out = model[1](torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2)))
        assert 0.5 < float(out.detach().std()) < 2
        assert len(weight.unique()) > WIDTH, "no numbers that hide an error"
    assert stored.asked == [] and type(tied[1].weight) is AbsentParameter
    assert torch.equal(tied.again.weight, stored.numbers)


def test_memory_of_others_is_never_taken_for_a_file(tmp_path: Path) -> None:
    own = torch.ones(4)
    assert file_of(own) is None and not is_absent(own)
    bring_pieces([own, torch.empty(0), torch.empty(2, device="meta")])
    first = Stored(tmp_path)
    assert file_of(first.parameter) is not None
    assert file_of(own) is None
    address = first.parameter.data_ptr()
    del first
    gc.collect()
    assert all(not one.begin <= address < one.end for one in absent_files._files)
