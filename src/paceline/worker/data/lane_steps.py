"""The steps of a stream in lanes as one reader finds them, which asks nobody else for ends and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from paceline.data.sharded_stream import LaneSource
from paceline.plan import Batch
from paceline.schedule.lane_mix import LaneMix
from paceline.worker.data.data_loading import ReadOptions, open_loader
from paceline.worker.data.lane_reading import LaneItems, LaneReader, Shares
from paceline.worker.data.lane_table import LaneTable

__all__ = ["lane_steps"]

STATE_STEPS = 8  # a reader that begins anew passes over the items of as many steps at most


def lane_steps(
    reading: ReadOptions,
    lanes: Sequence[LaneSource],
    mixing: LaneMix | None,
    *,
    batch: Batch,
    epochs: int,
    mine: Shares,
    loaders: int = 0,
    prefetch: int = 2,
    pin: bool = False,
    timeout_s: float = 0.0,
) -> Iterator[tuple[int, int, LaneItems]]:
    """Yield (epoch, first position, items) of each step, of the micro-batches that `mine` names.

    Raises ValueError where an epoch has no sample.
    """
    table = LaneTable([one.num_lanes for one in lanes], mixing=mixing, seed=reading.seed)
    epoch = position = 0
    while epoch < epochs:
        reader = LaneReader(
            reading,
            lanes,
            table,
            size=batch.size,
            drop_last=batch.drop_last,
            epoch=epoch,
            position=position,
            mine=mine,
            reads_all=False,
            keeps_state=lambda start: start // batch.size % STATE_STEPS == 0,
            num_parts=max(1, loaders),
        )
        opened = open_loader(reader, None, loaders=loaders, prefetch=prefetch, pin=pin, timeout_s=timeout_s)
        while True:
            parts: list[LaneItems] = [next(opened) for _ in range(max(1, loaders))]
            if ends := {key: count for part in parts for key, count in part.ends.items()}:
                table.ends.update(ends)
                break
            if not parts[0].num_samples:
                if not position:
                    raise ValueError(f"the stream gives no sample in its epoch {epoch + 1}")
                before = table.progress_at(epoch, position, batch.size)
                epoch, position = epoch + 1, 0
                table.begin_epoch(epoch, before)
                break
            if states := {key: state for part in parts for key, state in part.states.items()}:
                table.note(epoch, position, table.progress_at(epoch, position, batch.size), states)
            table.reached(epoch, position, batch.size)
            data = tuple(one for part in parts for one in part.data)
            yield epoch, position, LaneItems(parts[0].num_samples, data)
            position += parts[0].num_samples
