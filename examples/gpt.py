"""A byte-level GPT, trained by two workers on the source of Python's own standard library: `python examples/gpt.py`."""

import hashlib
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline
from paceline import Batch, Plan

STEPS, BATCH, CONTEXT = 1600, 8, 128  # a sample is CONTEXT bytes and the same bytes one further


def standard_library() -> tuple[Tensor, Tensor]:
    """All bytes of its modules, as two vectors: one file in 16 is held out of training, chosen by its hash."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {True: bytearray(), False: bytearray()}
    for path in sorted(root.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test", "tests"} & set(path.relative_to(root).parts):
            text = path.read_bytes()
            parts[hashlib.sha256(text).digest()[0] < 16] += text
    return torch.frombuffer(parts[False], dtype=torch.uint8), torch.frombuffer(parts[True], dtype=torch.uint8)


def windows(text: Tensor, count: int) -> TensorDataset:
    """`count` windows, evenly spread over the text, each with the bytes that come next."""
    starts = torch.arange(count) * (len(text) - CONTEXT - 1) // count
    window = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return TensorDataset(window[:, :-1], window[:, 1:])


def rotated(x: Tensor) -> Tensor:
    """Turn pairs of features by angles that grow with the position: queries and keys then meet by their distance."""
    length, width = x.shape[-2:]
    speed = 1000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angle = torch.arange(length, device=x.device)[:, None] * speed
    cos, sin = angle.cos().type_as(x), angle.sin().type_as(x)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        heads = self.query_key_value(self.before_attention(x)).view(samples, length, 3 * self.heads, -1).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(rotated(query), rotated(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.byte(x)))


def next_byte_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@torch.no_grad()
def continued(model: nn.Module, text: str, length: int, temperature: float = 0.8) -> str:
    model.eval()
    x = torch.tensor([list(text.encode())])
    for _ in range(length):
        odds = F.softmax(model(x[:, -CONTEXT:])[:, -1] / temperature, dim=-1)
        x = torch.cat([x, torch.multinomial(odds, 1)], dim=1)
    return bytes(x[0].tolist()).decode(errors="replace")


def train(worker: paceline.Worker) -> None:
    text, held_out = standard_library()
    model = worker.prepare(GPT())
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True))
    schedule = worker.prepare(
        torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=3e-3, total_steps=STEPS, pct_start=0.1, cycle_momentum=False)
    )
    step = worker.stepper(model, optim, next_byte_loss, clip_norm=1.0)
    for batch in worker.batches(windows(text, STEPS * BATCH)):
        loss = step(batch)
        schedule.step()
        worker.report(loss=loss, lr=schedule.get_last_lr()[0])
    measured = worker.evaluate(model, windows(held_out, 512), {"loss": next_byte_loss})
    sample = continued(model, "class Worker:\n    def ", length=400)  # on all workers: they may hold it together
    if worker.is_first:
        print(f"held-out loss {measured['loss']:.3f} nats per byte, on unseen files. It writes:\n\n{sample}")


if __name__ == "__main__":
    paceline.run(train, workers=2, plan=Plan(batch=Batch(size=BATCH, micro=BATCH // 2)), save_every=400)
