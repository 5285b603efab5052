"""Weights that are bytes of mapped files: which are, unchanged, and the same on all workers; memory is given back."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from file_memory import resident_kib
from paceline.comm.group import SingleWorkerGroup
from paceline.parallel import file_weights
from paceline.parallel.file_weights import PAGE, FileMappings, WeightFiles, keep_in_memory, without_same_files
from paceline.parallel.part_dtype import convert_parts, mark

ROWS = 4096  # of 256 numbers: 4 MiB


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(ROWS, 256, generator=generator) for name in ("a", "b")}, path)
    return path


def is_of_file(tensor: Tensor) -> bool:
    return FileMappings().place_of(tensor) is not None


class Members:
    """Two members of a group, as threads: what each gathers the other gets."""

    def __init__(self, hosts: tuple[int, ...] = (0, 0)) -> None:
        self._hosts, self._values, self._barrier = hosts, [None, None], threading.Barrier(2, timeout=20)

    def __call__(self, tensors: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[], []]

        def work(index: int) -> None:
            found[index] = without_same_files(tensors[index], self._group(index))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _group(self, index: int) -> Any:
        group: Any = SingleWorkerGroup()
        group.index, group.size, group.hosts = index, 2, self._hosts

        def gather(value: Any) -> list[Any]:
            self._values[index] = value
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
            return values

        group.gather_objects = gather
        return group


def test_what_is_mapped_and_unchanged_is_of_its_file(file: Path) -> None:
    weights = load_file(file)
    assert is_of_file(weights["a"]) and is_of_file(nn.Parameter(weights["b"])) and is_of_file(weights["a"][7:9])
    assert not is_of_file(weights["a"].clone()) and not is_of_file(weights["a"].t()) and not is_of_file(torch.empty(0))
    mappings = FileMappings()
    one, other = mappings.place_of(weights["a"][8:]), mappings.place_of(weights["a"])
    assert one is not None and other is not None
    assert (one.offset - other.offset, one.num_bytes) == (8 * 1024, (ROWS - 8) * 1024)


def test_one_number_that_was_written_is_seen_however_it_was_written(file: Path) -> None:
    weights = load_file(file)
    weights["a"].data[ROWS // 2, 3] = 1.0
    assert not is_of_file(weights["a"]) and is_of_file(weights["b"])
    assert not is_of_file(weights["a"][ROWS // 2 : ROWS // 2 + 1]) and is_of_file(weights["a"][:8])


def test_a_file_that_was_replaced_or_removed_is_not_taken_for_the_one_that_is_mapped(file: Path) -> None:
    weights = load_file(file)
    save_file({"a": torch.zeros(3)}, file.with_name("other"))
    os.replace(file.with_name("other"), file)
    assert not is_of_file(weights["a"])
    file.unlink()
    assert not is_of_file(weights["a"])


def test_the_same_bytes_of_a_file_need_not_be_sent(file: Path) -> None:
    ours, theirs = load_file(file), load_file(file)
    assert Members()([list(ours.values()), list(theirs.values())]) == [[], []]


def test_what_differs_on_any_worker_is_sent_from_all(file: Path) -> None:
    ours, theirs = load_file(file), load_file(file)
    theirs["b"][ROWS // 2, 0] += 1.0  # on one worker; the first page is also of "a"
    own = [torch.zeros(3), torch.zeros(3)]  # of no file
    found = Members()([[ours["a"], ours["b"], own[0]], [theirs["a"], theirs["b"], own[1]]])
    assert [[id(one) for one in sent] for sent in found] == [[id(ours["b"]), id(own[0])], [id(theirs["b"]), id(own[1])]]
    found = Members()([[ours["a"]], [theirs["b"]]])  # other places of the file
    assert [len(sent) for sent in found] == [1, 1]


def test_on_several_hosts_it_counts_what_is_in_the_files(file: Path) -> None:
    other = file.with_name("copy")
    other.write_bytes(file.read_bytes())
    ours, theirs = load_file(file), load_file(other)
    assert Members(hosts=(0, 1))([[ours["a"]], [theirs["a"]]]) == [[], []]
    assert [len(sent) for sent in Members()([[ours["a"]], [theirs["a"]]])] == [1, 1]
    save_file({name: weight * 2 for name, weight in ours.items()}, file.with_name("tuned"))
    theirs = load_file(file.with_name("tuned"))
    assert [len(sent) for sent in Members(hosts=(0, 1))([[ours["a"]], [theirs["a"]]])] == [1, 1]


def test_what_weights_were_converted_from_counts_once(file: Path) -> None:
    def converted() -> nn.Module:
        model = nn.Module()
        model.a = nn.Parameter(load_file(file)["a"])
        mark(model, {"a": torch.float64})
        convert_parts(model)
        return model

    ours, theirs = converted(), converted()
    assert Members()([list(ours.parameters()), list(theirs.parameters())]) == [[], []]
    assert [len(sent) for sent in Members()([list(ours.parameters()), list(theirs.parameters())])] == [1, 1]
    ours, theirs = converted(), converted()
    assert without_same_files(ours.parameters(), SingleWorkerGroup()) == [ours.a]  # which others may join
    assert [len(sent) for sent in Members()([list(ours.parameters()), list(theirs.parameters())])] == [1, 1]


def test_pages_that_were_read_are_given_back_and_those_that_were_written_stay(file: Path) -> None:
    weights = load_file(file)
    files = WeightFiles(weights.values())
    total = float(weights["a"].double().sum() + weights["b"].double().sum())
    assert resident_kib(file) > 6000
    weights["b"][ROWS // 2] = 5.0
    for one in weights.values():
        files.was_read(one)
    files.release()
    assert resident_kib(file) < 200
    assert bool((weights["b"][ROWS // 2] == 5.0).all())
    weights["b"][ROWS // 2] = load_file(file)["b"][ROWS // 2]
    assert float(weights["a"].double().sum() + weights["b"].double().sum()) == total


def test_what_is_read_in_order_takes_the_memory_of_some_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_weights, "ENOUGH_BYTES", 2 << 20)
    file = tmp_path / "large"
    save_file({"a": torch.arange(6 << 20, dtype=torch.int32)}, file)  # 24 MiB
    rows = list(load_file(file)["a"].split(1 << 18))
    peak, found = 0, list[Tensor]()
    for one in WeightFiles(rows).in_order(rows):
        found.append(one.clone())
        peak = max(peak, resident_kib(file))
    assert 0 < peak < 12000 and resident_kib(file) < 3000  # the kernel maps up to 2 MiB around what is looked at
    assert torch.equal(torch.cat(found), load_file(file)["a"])


def test_what_comes_next_is_fetched_but_not_all_at_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_weights, "AHEAD_BYTES", 600 << 10)
    fetched = list[int]()

    def advise(begin: int, end: int, advice: int) -> None:
        if advice == file_weights.MADV_WILLNEED:
            fetched.append((begin - rows[0].data_ptr() + PAGE - 1) // (256 << 10))
            assert end > begin

    rows = list(load_file(file)["a"].split(ROWS // 16))
    monkeypatch.setattr(file_weights, "_advise", advise)
    ahead = [len(fetched) for _ in WeightFiles(rows).in_order(rows)]
    assert ahead == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 16, 16]
    assert fetched == list(range(16))


def test_a_file_stays_mapped_until_its_pages_are_given_back_no_more(file: Path) -> None:
    weights = load_file(file)
    files = WeightFiles(weights.values())
    files.was_read(weights["a"])
    del weights
    assert str(file) in Path("/proc/self/maps").read_text()  # so nothing else can come to be in its place
    files.release()
    del files
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_parameters_that_share_memory_go_on_sharing_it(file: Path) -> None:
    weight = load_file(file)["a"]
    model = nn.Module()
    model.one, model.other = nn.Parameter(weight), nn.Parameter(weight)
    keep_in_memory(model)
    assert not is_of_file(model.one) and model.one.data_ptr() == model.other.data_ptr()
    assert torch.equal(model.other, load_file(file)["a"])


def test_trained_weights_are_copied_and_frozen_ones_stay_mapped(file: Path) -> None:
    weights = load_file(file)
    model = nn.Module()
    model.a, model.b = nn.Parameter(weights["a"]), nn.Parameter(weights["b"], requires_grad=False)
    a = model.a
    keep_in_memory(model)
    assert model.a is a and not is_of_file(model.a) and is_of_file(model.b)
    assert torch.equal(model.a, load_file(file)["a"])
    assert resident_kib(file) < 1000


def test_without_the_kernels_word_every_tensor_counts_as_changed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = load_file(file)
    files = WeightFiles(weights.values())

    def refused(*_: Any) -> bytes:
        raise PermissionError

    monkeypatch.setattr(os, "pread", refused)
    assert not is_of_file(weights["a"])
    files.was_read(weights["a"])
    files.release()
    assert [len(sent) for sent in Members()([[weights["a"]], [weights["a"]]])] == [1, 1]
