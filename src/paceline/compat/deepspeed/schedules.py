"""DeepSpeed's learning rate schedules, over any torch optimizer: each is a formula of the number of steps taken.

`step()` is called after each optimizer step. The first one, at construction, has number -1; the first `step()` has 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

Rates = float | Sequence[float]  # one for all parameter groups, or one for each


class _Schedule:
    """A schedule that writes the learning rate of each parameter group as a function of its step number."""

    def __init__(self, optimizer: Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration
        if last_batch_iteration == -1:
            self._apply()

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group at this step."""
        raise NotImplementedError  # each schedule below has its own

    def get_last_lr(self) -> list[float]:
        """The learning rate that each parameter group has now."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one step, or to the step with this number."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The number of the step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a step; rates are those of the optimizer's own state until the next `step()`."""
        self.last_batch_iteration = state["last_batch_iteration"]

    def _apply(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _of_groups(self, value: Rates, name: str) -> list[float]:
        count = len(self.optimizer.param_groups)
        if isinstance(value, (int, float)):
            return [float(value)] * count
        if len(value) != count:
            raise ValueError(f"{name} has {len(value)} values; the optimizer has {count} parameter groups")
        return list(value)


class LRRangeTest(_Schedule):
    """Raise the rate without end, to see where training diverges (Smith 2018, "A disciplined approach").

    rate = min_lr (1 + step_rate (n + 1) / step_size), with whole stairs where `lr_range_test_staircase` is true.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        _require_steps("lr_range_test_step_size", lr_range_test_step_size)
        self.optimizer = optimizer
        self._least = self._of_groups(lr_range_test_min_lr, "lr_range_test_min_lr")
        self._size, self._rate, self._has_stairs = (
            lr_range_test_step_size,
            lr_range_test_step_rate,
            lr_range_test_staircase,
        )
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self._least)
        interval = (self.last_batch_iteration + 1) / self._size
        grown = 1 + self._rate * (math.floor(interval) if self._has_stairs else interval)
        return [least * grown for least in self._least]


class OneCycle(_Schedule):
    """Raise the rate to its largest, bring it back, then let it decay; momentum goes the other way (Smith 2018)."""

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        _require_steps("cycle_first_step_size", cycle_first_step_size)
        self.optimizer = optimizer
        self._first = float(cycle_first_step_size)
        self._second = self._first if cycle_second_step_size is None else float(cycle_second_step_size)
        stairs = cycle_first_stair_count
        self._stairs = stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self._decay_step, self._decay_lr, self._decay_mom = decay_step_size, decay_lr_rate, decay_mom_rate
        self._least = self._of_groups(cycle_min_lr, "cycle_min_lr")
        self._most = self._of_groups(cycle_max_lr, "cycle_max_lr")
        self._cycles_momentum = cycle_momentum and "betas" in optimizer.defaults
        self._least_mom = self._of_groups(cycle_min_mom, "cycle_min_mom")
        self._most_mom = self._of_groups(cycle_max_mom, "cycle_max_mom")
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self._least)
        if self.last_batch_iteration < self._first + self._second:
            share = self._share()
            return [least + (most - least) * share for least, most in zip(self._least, self._most, strict=True)]
        return [least / (1 + self._decay_lr * self._decayed()) for least in self._least]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The two betas of each parameter group at this step; None where momentum stays."""
        if not self._cycles_momentum:
            return None
        if self.last_batch_iteration < 0:
            return [(least, 0.99) for least in self._least_mom]
        if self.last_batch_iteration < self._first + self._second:
            share = self._share()
            pairs = zip(self._least_mom, self._most_mom, strict=True)
            return [(most - (most - least) * share, 0.99) for least, most in pairs]
        return [(most * (1 + self._decay_mom * self._decayed()), 0.99) for most in self._most_mom]

    def _apply(self) -> None:
        super()._apply()
        for group, betas in zip(self.optimizer.param_groups, self.get_mom() or [], strict=False):
            group["betas"] = betas

    def _share(self) -> float:
        """How far the rate is from its least to its most."""
        at = (self.last_batch_iteration + 1) % (self._first + self._second)
        share, stairs = (
            (at / self._first, self._stairs[0])
            if at <= self._first
            else ((self._first + self._second - at) / self._second, self._stairs[1])
        )
        return math.floor(share * stairs) / stairs if stairs > 0 else share

    def _decayed(self) -> float:
        """How many decay steps are over since the cycle's end."""
        if not self._decay_step:
            return 0.0
        return (self.last_batch_iteration - (self._first + self._second) + 1) / self._decay_step


class WarmupLR(_Schedule):
    """Raise the rate from its least to its most within `warmup_num_steps`, then keep it.

    `warmup_type` is "log", as log(n + 1) / log(steps), or "linear", as n / steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _require_steps("warmup_num_steps", warmup_num_steps)
        _require_kind(warmup_type)
        self.optimizer = optimizer
        most = [float(group["lr"]) for group in optimizer.param_groups] if warmup_max_lr is None else warmup_max_lr
        self._least = self._of_groups(warmup_min_lr, "warmup_min_lr")
        self._most = self._of_groups(most, "warmup_max_lr")
        self._steps, self._kind = max(2, warmup_num_steps), warmup_type
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return list(self._least)
        share = self._share()
        return [least + (most - least) * share for least, most in zip(self._least, self._most, strict=True)]

    def _share(self) -> float:
        if self.last_batch_iteration < self._steps:
            return _warmed(self.last_batch_iteration, self._steps, self._kind)
        return self._after()

    def _after(self) -> float:
        """The share of the largest rate after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Warm up as `WarmupLR`, then bring the rate down to 0 in a line until step `total_num_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _require_steps("total_num_steps", total_num_steps)
        self._total = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def _after(self) -> float:
        return max(0.0, (self._total - self.last_batch_iteration) / max(1.0, self._total - self._steps))


class WarmupCosineLR(_Schedule):
    """Raise the optimizer's own rates from a share of them to the whole, then bring them down along a cosine."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        _require_steps("total_num_steps", total_num_steps)
        _require_steps("warmup_num_steps", warmup_num_steps)
        _require_kind(warmup_type)
        self._own = [float(group["lr"]) for group in optimizer.param_groups]
        self._total, self._steps, self._kind = total_num_steps, max(2, warmup_num_steps), warmup_type
        self._least, self._end = warmup_min_ratio, cos_min_ratio
        super().__init__(optimizer, last_batch_iteration)

    def get_lr(self) -> list[float]:
        ratio = self.get_lr_ratio()
        return [own * ratio for own in self._own]

    def get_lr_ratio(self) -> float:
        """The share of the optimizer's own rates at this step."""
        number = self.last_batch_iteration
        if number < 0:
            return 0.0
        if number < self._steps:
            return self._least + (1 - self._least) * _warmed(number, self._steps, self._kind)
        progress = min(1.0, (number - self._steps + 1) / max(1, self._total - self._steps))
        return max(0.0, self._end + (1 - self._end) * (1 + math.cos(math.pi * progress)) / 2)


def _warmed(number: int, steps: int, kind: str) -> float:
    return math.log(number + 1) / math.log(steps) if kind == "log" else number / steps


def _require_steps(name: str, value: int) -> None:
    if isinstance(value, bool) or value != int(value) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be a number of steps, at least 1")


def _require_kind(kind: str) -> None:
    if kind not in ("log", "linear"):
        raise ValueError(f"warmup_type is {kind!r}; it must be 'log' or 'linear'")
