"""A network whose gradients are many for what a small batch computes, and numbers to train it on."""

from torch import Tensor, nn, randn
from torch.utils.data import Dataset

__all__ = ["Pairs", "wide_net"]


def wide_net(width: int, layers: int) -> nn.Sequential:
    """Square layers one after the other: width x width parameters each."""
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())])


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """So many pairs; a few are drawn, and come again and again."""

    def __init__(self, width: int, count: int) -> None:
        self._count = count
        self._drawn = randn(64, width)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self._drawn[index % len(self._drawn)]
        return x, x.flip(0)
