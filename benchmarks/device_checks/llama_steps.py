"""A Llama's steps under Paceline, and in a bare loop with the same settings."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from device_checks.gpt_steps import LR, Compared, autocasting, timed

__all__ = ["Shape", "compared_llama"]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    words: int
    length: int
    samples: int

    def plan(self) -> str:
        return f"replicas=1+batch(size={self.samples},micro={self.samples})+compute(precision=bf16)"

    def of_transformers(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        settings: dict[str, Any] = {"attn_implementation": "sdpa", "use_cache": False}
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=self.words,
                hidden_size=self.width,
                intermediate_size=self.hidden,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                max_position_embeddings=self.length,
                **settings,
            )
        )

    def of_torchtitan(self) -> nn.Module:
        """By the names of its releases of 2025; another release raises, which the row tells."""
        from torchtitan.models.llama3 import (  # pyright: ignore[reportMissingImports]  # not installed where types are checked
            Transformer,
            TransformerModelArgs,
        )

        args = TransformerModelArgs(
            dim=self.width,
            n_layers=self.layers,
            n_heads=self.heads,
            n_kv_heads=self.kv_heads,
            vocab_size=self.words,
            max_seq_len=self.length,
        )
        model = Transformer(args)
        model.init_weights()
        return model


def compared_llama(worker: paceline.Worker, package: str, shape: Shape, turns: int, steps: int) -> Compared:
    """Blocks of steps of both, in turn."""
    device = worker.device
    make: Callable[[], nn.Module] = shape.of_transformers if package == "transformers" else shape.of_torchtitan
    words = torch.randint(
        shape.words, ((turns + 2) * steps * shape.samples, shape.length + 1), generator=torch.Generator().manual_seed(0)
    )
    data = TensorDataset(words[:, :-1], words[:, 1:])

    def loss_of(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
        output = model(micro[0])
        logits = output if isinstance(output, Tensor) else output.logits
        return F.cross_entropy(logits.flatten(0, -2).float(), micro[1].flatten())

    torch.manual_seed(1)
    net = worker.prepare(make())
    optim = worker.prepare(torch.optim.AdamW(net.parameters(), lr=LR, fused=True))
    step = worker.stepper(net, optim, forward=loss_of, clip_norm=1.0)
    batches = worker.batches(data)
    torch.manual_seed(1)
    bare = make().to(device)
    bare_optim = torch.optim.AdamW(bare.parameters(), lr=LR, fused=True)
    loader = iter(DataLoader(data, batch_size=shape.samples, shuffle=True, pin_memory=device.type == "cuda"))

    def ours() -> None:
        for batch in itertools.islice(batches, steps):
            worker.report(loss=step(batch))

    def theirs() -> None:
        for x, y in itertools.islice(loader, steps):
            with autocasting(device, "bf16"):
                loss = loss_of(bare, (x.to(device, non_blocking=True), y.to(device, non_blocking=True)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            bare_optim.step()
            bare_optim.zero_grad()
            loss.item()

    for warm in (ours, theirs):
        timed(warm, device)
    pairs = []
    for turn in range(turns):
        order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
        took = {one: timed(one, device) for one in order}
        pairs.append((took[ours], took[theirs]))
    low, middle, high = statistics.quantiles([bare_s / our_s for our_s, bare_s in pairs])
    ours_ms, bare_ms = (1000 * statistics.median(one) / steps for one in zip(*pairs, strict=True))
    return Compared(ratio=middle, low=low, high=high, ours_ms=ours_ms, bare_ms=bare_ms)
