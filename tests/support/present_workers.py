"""What a worker of an elastic Horovod program tells the others before a session, for tests."""

from __future__ import annotations

from paceline.compat.horovod.membership import NEVER, PresentWorker

__all__ = ["present_worker"]


def present_worker(
    rank: int = 0,
    *,
    host: int = 0,
    state_since: float = NEVER,
    generation: int = 0,
    planned: int = -1,
    needs_sync: bool = True,
    is_newcomer: bool = False,
) -> PresentWorker:
    """One that has opened its first session."""
    return PresentWorker(
        rank=rank,
        host=host,
        state_since=state_since,
        num_opened=1,
        generation=generation,
        planned=planned,
        needs_sync=needs_sync,
        is_newcomer=is_newcomer,
    )
