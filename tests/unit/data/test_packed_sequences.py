"""Packed sequences: nothing lost, nothing twice, no token that would be predicted from another sequence."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.data.packed_sequences import PackedSequences, block_diagonal_mask
from paceline.schedule.sequence_packing import pack_sequences

IGNORED = -100


@pytest.mark.parametrize("seed", range(20))
def test_every_sequence_is_in_one_pack_with_room_for_it(seed: int) -> None:
    draws = random.Random(seed)
    size = draws.randint(1, 40)
    lengths = [draws.randint(1, size) for _ in range(draws.randint(1, 300))]
    packs = pack_sequences(lengths, size)
    assert sorted(number for pack in packs for number in pack) == list(range(len(lengths)))
    rooms = [size - sum(lengths[number] for number in pack) for pack in packs]
    assert min(rooms) >= 0
    assert len(packs) <= 11 / 9 * -(-sum(lengths) // size) + 1 + sum(2 * one > size for one in lengths)
    for number, pack in enumerate(packs):  # nothing that stands alone would fit elsewhere
        others = [room for other, room in enumerate(rooms) if other != number]
        assert len(pack) > 1 or not any(room >= lengths[pack[0]] for room in others)
    assert packs == pack_sequences(tuple(lengths), size)


@pytest.mark.parametrize("length", [0, 5])
def test_a_length_that_no_pack_takes_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"sequence 1 has {length} tokens: a pack takes 1 to 4"):
        pack_sequences([4, length], 4)


def test_rows_restart_positions_and_leave_first_tokens_out() -> None:
    rows = PackedSequences([[1, 2, 3], [4, 5], [6], [7, 8, 9]], 6, pad_token=99)
    assert (len(rows), rows.packs, rows.filled) == (2, [[0, 3], [1, 2]], 0.75)
    assert rows[0]["input_ids"].tolist() == [1, 2, 3, 7, 8, 9]
    assert rows[0]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert rows[0]["labels"].tolist() == [IGNORED, 2, 3, IGNORED, 8, 9]
    assert rows[1]["input_ids"].tolist() == [4, 5, 6, 99, 99, 99]
    assert rows[1]["position_ids"].tolist() == [0, 1, 0, 0, 1, 2]
    assert rows[1]["labels"].tolist() == [IGNORED, 5, *[IGNORED] * 4]
    with pytest.raises(IndexError):
        rows[2]


@pytest.mark.parametrize("mask", ["completion_mask", "assistant_masks"])
def test_only_completions_count(mask: str) -> None:
    items = [{"input_ids": [1, 2, 3, 4], mask: [0, 0, 1, 1]}, {"input_ids": torch.tensor([5, 6]), "labels": [5, -7]}]
    rows = PackedSequences(items, 6, ignore_index=-7)
    assert rows[0]["labels"].tolist() == [-7, -7, 3, 4, -7, -7]


@pytest.mark.parametrize(
    ("overlong", "texts"), [("truncate", ["01234", "ab"]), ("split", ["01234", "56789", "ab", "X"])], ids=str
)
def test_what_is_longer_than_a_row(overlong: Any, texts: list[str]) -> None:
    items = [list(b"0123456789X"), list(b"ab"), []]
    rows = PackedSequences(items, 5, overlong=overlong, pad_token=0)
    found = [
        bytes(row["input_ids"][row["input_ids"] > 0].tolist()).decode()
        for row in (rows[one] for one in range(len(rows)))
    ]
    assert "".join(found) == "".join(texts)
    assert sum(int((rows[one]["labels"] != IGNORED).sum()) for one in range(len(rows))) == sum(
        len(text) - 1 for text in texts
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: PackedSequences([[1] * 9, [1], [1] * 7], 5), r"2 of 3 sequences are longer: 0 \(9 tokens\), 2 \(7"),
        (lambda: PackedSequences([[1]], 0), "at least 1"),
        (lambda: PackedSequences([[1]], 4, lengths=[1, 1]), "2 lengths for 1 sequences"),
        (lambda: PackedSequences([[1, 2]], 4, lengths=[3])[0], "sequence 0 has tokens of shape"),
        (lambda: PackedSequences([{"input_ids": [1, 2], "labels": [1]}], 4)[0], r"labels \(or a mask\) of shape \[1\]"),
        (lambda: PackedSequences([{"input_ids": [1, 2], "completion_mask": [1]}], 4)[0], "they must agree"),
        (lambda: PackedSequences([{"tokens": [1]}], 4), "give its tokens as 'input_ids'"),
        (lambda: PackedSequences([[]], 4), "none of the 1 sequences has a token"),
        (lambda: PackedSequences([[1]], 4, overlong="drop"), "give 'refuse'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_packed_is_refused(make: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_stream_is_refused() -> None:
    with pytest.raises(TypeError, match=r"has no len\(\) and \[\]"):
        PackedSequences(iter([[1]]), 4)


def test_the_mask_is_in_blocks() -> None:
    rows = PackedSequences([[1, 2, 3], [4, 5]], 6)
    positions = torch.stack([rows[0]["position_ids"], torch.arange(6)])
    mask, both = block_diagonal_mask(positions), block_diagonal_mask(positions, causal=False)
    assert mask.shape == (2, 1, 6, 6)
    sizes = [3, 2, 1]
    assert torch.equal(both[0, 0], torch.block_diag(*[torch.ones(one, one) for one in sizes]).bool())
    assert torch.equal(mask[0, 0], both[0, 0].tril())
    with pytest.raises(ValueError, match=r"of shape \[6\]: give \[batch, length\]"):
        block_diagonal_mask(torch.arange(6))
    assert torch.equal(mask[1, 0], torch.ones(6, 6).tril().bool())
