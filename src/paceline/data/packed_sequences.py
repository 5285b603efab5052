"""`PackedSequences`: sequences of tokens of different lengths as rows of one length, without padding in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from paceline.schedule.sequence_packing import pack_sequences

__all__ = ["PackedSequences", "block_diagonal_mask"]

MASKS = ("completion_mask", "assistant_masks")  # of TRL, and of transformers' `apply_chat_template`
NUM_LISTED = 5


class PackedSequences:
    """A dataset whose rows have `length` tokens each, of several sequences one after the other.

    `sequences` has `len()` and `[]`. An item is a row of tokens, or a mapping with `input_ids` and, as libraries name
    them, `labels` (as long as the tokens, `ignore_index` where a token does not count), or a `completion_mask` or
    `assistant_masks` of 0 and 1 for the tokens that count. Without either all tokens count.

    An item of the dataset is a dict of int64 tensors of shape `[length]`, which stack to `[batch, length]`:

    - `input_ids`: the tokens, and `pad_token` at the end.
    - `position_ids`: from 0 in each sequence. Models of transformers make the mask of attention of them, so no sequence
      sees another one: pass them without an `attention_mask`, and to a model that `worker.prepare` has not had with
      `use_cache=False`. For a model of your own there is `block_diagonal_mask`.
    - `labels`: `ignore_index` for a sequence's first token (which nothing in the row predicts), where the item says so,
      and for padding. Not shifted: models of transformers shift them.

    So the sum of the losses of a row's tokens is that of its sequences by themselves. Return that sum and the number of
    tokens that count from `forward=`: rows have different numbers of them, and a mean of means is another loss.

    `lengths`: the number of tokens of each sequence, if known; else all are read once. `overlong`: what happens to
    sequences of more than `length` tokens: "refuse" raises ValueError, "truncate" keeps the first tokens, "split" makes
    several sequences of them.

    Rows depend on the lengths alone (best fit, the longest first), so they are the same on all workers and after a
    resume; epochs differ in the order of rows. `packs` has the sequences of each row, `filled` the share of tokens that
    is no padding.

    Example::

        rows = paceline.PackedSequences([[1, 2, 3], [4, 5], [6]], length=4)
        assert rows[0]["input_ids"].tolist() == [1, 2, 3, 6]
        assert rows[0]["position_ids"].tolist() == [0, 1, 2, 0]
        assert rows[0]["labels"].tolist() == [-100, 2, 3, -100]
    """

    def __init__(
        self,
        sequences: Any,
        length: int,
        *,
        lengths: Sequence[int] | None = None,
        overlong: Literal["refuse", "truncate", "split"] = "refuse",
        pad_token: int = 0,
        ignore_index: int = -100,
    ) -> None:
        if not (hasattr(sequences, "__len__") and hasattr(sequences, "__getitem__")):
            raise TypeError(
                f"PackedSequences: a {type(sequences).__name__} has no len() and []: rows take sequences by "
                "their numbers"
            )
        if length < 1:
            raise ValueError(f"PackedSequences(length={length}): give the tokens of a row, at least 1")
        if overlong not in ("refuse", "truncate", "split"):
            raise ValueError(f"PackedSequences(overlong={overlong!r}): give 'refuse', 'truncate' or 'split'")
        self.sequences, self.length, self.pad_token, self.ignore_index = sequences, length, pad_token, ignore_index
        known = (
            [len(_tokens(sequences[one])) for one in range(len(sequences))]
            if lengths is None
            else [int(one) for one in lengths]
        )
        if len(known) != len(sequences):
            raise ValueError(f"PackedSequences: {len(known)} lengths for {len(sequences)} sequences: give one for each")
        if overlong == "refuse" and (wrong := [one for one, size in enumerate(known) if size > length]):
            shown = ", ".join(f"{one} ({known[one]} tokens)" for one in wrong[:NUM_LISTED])
            raise ValueError(
                f"PackedSequences(length={length}): {len(wrong)} of {len(known)} sequences are longer: {shown}"
                f"{', ...' if len(wrong) > NUM_LISTED else ''}. Take longer rows, or overlong='truncate' or 'split'"
            )
        # Of each piece: its sequence, and its first token. One without tokens is in no row.
        splits = overlong == "split"
        self._pieces = [
            (number, first)
            for number, size in enumerate(known)
            for first in range(0, size if splits else min(size, 1), length)
        ]
        self._lengths = known
        sizes = [self._size(number, first) for number, first in self._pieces]
        self._packs = pack_sequences(sizes, length)
        if not self._packs:
            raise ValueError(f"PackedSequences: none of the {len(known)} sequences has a token")
        self.filled = sum(sizes) / (len(self._packs) * length)

    @property
    def packs(self) -> list[list[int]]:
        """The numbers of the sequences in each row; one that was split is in several."""
        return [[self._pieces[piece][0] for piece in pack] for pack in self._packs]

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {
            "input_ids": torch.full((self.length,), self.pad_token),
            "position_ids": torch.zeros(self.length, dtype=torch.long),
            "labels": torch.full((self.length,), self.ignore_index),
        }
        begin = 0
        for piece in self._packs[index]:
            number, first = self._pieces[piece]
            size = self._size(number, first)
            tokens, labels = self._read(number)
            place, part = slice(begin, begin + size), slice(first, first + size)
            row["input_ids"][place] = tokens[part]
            row["position_ids"][place] = torch.arange(size)
            row["labels"][place] = labels[part]
            row["labels"][begin] = self.ignore_index
            begin += size
        row["position_ids"][begin:] = torch.arange(self.length - begin)
        return row

    def _size(self, number: int, first: int) -> int:
        return min(self._lengths[number] - first, self.length)

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        """A sequence's tokens and labels; ValueError where they are not as long as was said."""
        item = self.sequences[number]
        tokens = torch.as_tensor(_tokens(item), dtype=torch.long)
        labels = tokens
        if isinstance(item, Mapping):
            found: Mapping[str, Any] = item
            mask = next((found[name] for name in MASKS if name in found), None)
            if "labels" in found:
                labels = torch.as_tensor(found["labels"], dtype=torch.long)
            elif mask is not None:
                counts = torch.as_tensor(mask, dtype=torch.bool)
                labels = torch.where(counts, tokens, self.ignore_index) if counts.shape == tokens.shape else counts
        if tokens.shape != (self._lengths[number],) or labels.shape != tokens.shape:
            raise ValueError(
                f"PackedSequences: sequence {number} has tokens of shape {list(tokens.shape)} and labels (or a mask) "
                f"of shape {list(labels.shape)}, and its length is {self._lengths[number]}: they must agree"
            )
        return tokens, labels


def block_diagonal_mask(position_ids: Tensor, *, causal: bool = True) -> Tensor:
    """Return which tokens of packed rows attend to which: those of the same sequence, as
    `torch.nn.functional.scaled_dot_product_attention` takes it.

    `position_ids` has the shape `[batch, length]`, and begins at 0 in each sequence. The result is bool, of shape
    `[batch, 1, length, length]`. With `causal` no token sees a later one.
    Raises ValueError for positions of another shape.

    Example::

        mask = paceline.block_diagonal_mask(torch.tensor([[0, 1, 0]]))
        assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    if position_ids.dim() != 2:
        raise ValueError(
            f"block_diagonal_mask: position_ids of shape {list(position_ids.shape)}: give [batch, length]; of one row, "
            "position_ids[None]"
        )
    sequence = (position_ids == 0).cumsum(-1)
    mask = sequence[:, None, :, None] == sequence[:, None, None, :]
    return mask.tril() if causal else mask


def _tokens(item: Any) -> Any:
    """The tokens of an item; ValueError where it has none."""
    if not isinstance(item, Mapping):
        return item
    found: Mapping[str, Any] = item
    if "input_ids" not in found:
        raise ValueError(f"PackedSequences: an item has {sorted(found)}: give its tokens as 'input_ids'")
    return found["input_ids"]
