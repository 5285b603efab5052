"""The nodes of a pool as its process sees them: what they offer, whether they answer, and what they should have.

An agent answers while its counter goes on and it has its lock. For how long a counter stands still is measured by the
pool's own clock, and only while the pool itself goes on: after a folder that stood still for both, nobody is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline import run_lock
from paceline.errors import PlanError
from paceline.pool.cached_file import CachedFile
from paceline.pool.node_files import NodeRecord, PartRecord, WantedPart, WantedParts, node_dir, node_names
from paceline.pool.pool_state import NodeEntry

__all__ = ["HERE", "LEFT", "SILENT", "NodeView", "Nodes"]

SILENCE_S = 30.0  # a node that has not been heard of for so long offers nothing
MOST_PASSED_S = 5.0  # that count between two looks
HERE, SILENT, LEFT = "here", "silent", "left"


class NodeView:
    """One node. `silent_s`: for how long it has not answered."""

    def __init__(self, record: NodeRecord) -> None:
        self.record, self.silent_s, self._has_lock = record, 0.0, True

    def heard(self, record: NodeRecord, passed_s: float, *, has_lock: bool) -> None:
        """Note what its file says now, `passed_s` after the last look."""
        goes_on = record.beat != self.record.beat and has_lock
        self.record, self._has_lock = record, has_lock
        self.silent_s = 0.0 if goes_on else self.silent_s + passed_s

    @property
    def state(self) -> str:
        if self.record.has_left:
            return LEFT
        return HERE if self._has_lock and self.silent_s < SILENCE_S else SILENT

    @property
    def is_here(self) -> bool:
        return self.state == HERE

    def part(self, run: str, start: int) -> PartRecord | None:
        """Return what the node says of its part of this start of a run; None: nothing yet."""
        part = self.record.parts.get(run)
        return part if part is not None and part.start == start else None


class Nodes:
    """All nodes of a pool, by name. `own`: the one of this process, if it is one; it has the pool's lock.

    `before_telling` is called before something that a node should have is written: an agent may act on it at once.
    """

    def __init__(
        self,
        pool: Path,
        *,
        own: str | None,
        say: Callable[[str], None],
        before_telling: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool, self._own, self._say, self._before_telling = pool, own, say, before_telling
        self._views: dict[str, NodeView] = {}
        self._files: dict[str, CachedFile[NodeRecord | None]] = {}
        self._wanted: dict[str, WantedParts] = {}
        self._problems: set[str] = set()
        self._last_look = time.monotonic()

    def look(self) -> bool:
        """Read what the nodes say; returns whether one has come, gone, or changed what it offers."""
        now = time.monotonic()
        passed_s, self._last_look = min(now - self._last_look, MOST_PASSED_S), now
        before = self._offers_and_states()
        has_locks = run_lock.is_held(self._pool)  # by this process, unless the disk has none
        for name in node_names(self._pool):
            record, view = self._read(name), self._views.get(name)
            if record is None or (record.has_left and view is not None and view.record is record):
                continue
            has_lock = not has_locks or run_lock.is_held(node_dir(self._pool, name))
            if view is None:
                view = self._views[name] = NodeView(record)
            view.heard(record, passed_s, has_lock=has_lock)
        self._tell(before)
        return self._offers_and_states() != before

    def get(self, name: str) -> NodeView | None:
        return self._views.get(name)

    def is_here(self, name: str) -> bool:
        """Whether a node answers."""
        return name in self._views and self._views[name].is_here

    @property
    def here(self) -> dict[str, NodeRecord]:
        """The nodes that answer."""
        return {name: view.record for name, view in self._views.items() if view.is_here}

    def entries(self, used: Mapping[str, int]) -> dict[str, NodeEntry]:
        """Return what `POOL/pool.json` says of the nodes: of those that have not left. `used`: devices of each."""
        return {
            name: NodeEntry(
                state=view.state,
                slots=view.record.slots,
                gpus=len(view.record.gpus or ()),
                used=used.get(name, 0),
            )
            for name, view in self._views.items()
            if view.state != LEFT and (view.is_here or used.get(name, 0))
        }

    def want(self, wanted: Mapping[str, Mapping[str, WantedPart]]) -> None:
        """Tell each node, by name, the parts that it should have; raises OSError."""
        parts = {name: WantedParts(parts=dict(wanted.get(name, {}))) for name in self._views}
        changed = [name for name in parts if name not in self._wanted or self._wanted[name] != parts[name]]
        if changed:
            self._before_telling()
        for name in changed:
            parts[name].save(self._pool, name)
            self._wanted[name] = parts[name]

    def _offers_and_states(self) -> dict[str, tuple[str, int]]:
        return {name: (view.state, view.record.slots) for name, view in self._views.items()}

    def _read(self, name: str) -> NodeRecord | None:
        try:
            return self._files.setdefault(name, NodeRecord.file(self._pool, name)).read()
        except (PlanError, OSError) as error:  # as if it had said nothing
            if str(error) not in self._problems:
                self._problems.add(str(error))
                self._say(str(error))
            view = self._views.get(name)
            return None if view is None else view.record

    def _tell(self, before: Mapping[str, tuple[str, int]]) -> None:
        for name, (state, slots) in self._offers_and_states().items():
            was = before.get(name, ("", 0))[0]
            if state == was or name == self._own:
                continue
            if state == HERE:
                self._say(f"node {name} is here, with {slots} {'device' if slots == 1 else 'devices'}")
            elif was == HERE:
                gone = "has left" if state == LEFT else "does not answer: its devices do not count"
                self._say(f"node {name} {gone}")
