"""Codecs without processes: one driver that stands for all replicas, and answers what each of them yields."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.codec.base import Codec, CodecContext, GatherPayload, Payload, ScatterPayload

__all__ = ["exchanged", "telescoped"]


def exchanged(codecs: Sequence[Codec], flats: Sequence[Tensor], *, seed: int = 0) -> tuple[list[Tensor], int]:
    """Drive one codec per replica to its end; returns what each holds afterwards, and the bytes of one's payloads."""
    flats = list(flats)
    count = len(flats)
    running = [codecs[k].exchange(flats[k], CodecContext(index=k, count=count, seed=seed + k)) for k in range(count)]
    payloads = [next(rounds) for rounds in running]
    num_bytes = 0
    while True:
        num_bytes += payloads[0].tensor.nbytes
        assert len({(type(one), one.tensor.shape, one.tensor.dtype) for one in payloads}) == 1, "not the same rounds"
        stacked = torch.stack([payload.tensor for payload in payloads])
        answers = [_answer(payload, stacked, k) for k, payload in enumerate(payloads)]
        ended = 0
        for place, rounds in enumerate(running):
            try:
                payloads[place] = rounds.send(answers[place])
            except StopIteration:
                ended += 1
        if ended:
            assert ended == len(running), "replicas must make the same rounds"
            return flats, num_bytes


def _answer(payload: Payload, stacked: Tensor, index: int) -> Tensor:
    if isinstance(payload, ScatterPayload):
        return stacked[:, index].clone()
    if isinstance(payload, GatherPayload):
        assert payload.tensor.dim() == 1
        return stacked.clone()
    return payload.tensor.copy_(stacked.sum(0))  # in place, as all_reduce does


def telescoped(
    codecs: Sequence[Codec], steps: Sequence[Sequence[Tensor]], *, num_parameters: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Take steps that count; returns the sums of what was given, of what came, and of what is held back, in fp64."""
    given = came = torch.zeros_like(steps[0][0], dtype=torch.float64)
    for seed, flats in enumerate(steps):
        given = given + torch.stack(list(flats)).double().sum(0)
        results, _ = exchanged(codecs, [flat.clone() for flat in flats], seed=100 * seed)
        assert all(torch.equal(result, results[0]) for result in results)
        came = came + results[0].double()
        for codec in codecs:
            codec.settle([True] * num_parameters)
    held = torch.zeros_like(given)
    for codec in codecs:
        held += torch.cat([part.double() for part in codec.own().values()])
    return given, came, held
