"""The switch between pretended sites: a process that hands frames on after a while, no faster than cables take them.

The Linux kernels of many machines shape rates but know no delay (netem is a module of its own). So each site's only
network device is a TAP, whose other end this process holds. A frame waits for its turn on the sender's cable, travels,
waits for its turn on the receiver's, and is there. What waits too long for a cable is dropped, as by any router, and
TCP slows down. It keeps up with some hundred Mbit/s in all.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import os
import select
import signal
import sys
import time

from paceline.launch.fork.process_lifetime import set_parent_death_signal

__all__ = ["Cable", "Switch", "main"]

FRAME_BYTES = 65_600  # no frame is larger
AT_ONCE = 64  # frames that are taken from one device before the others have their turn
WAITS_S = 0.2  # a cable's buffer


class Cable:
    """One direction of a site's cable: takes one frame after the other."""

    def __init__(self, *, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    def passed_at(self, now: float, num_bytes: int) -> float | None:
        """When a frame that comes now has left the cable; None: its buffer is full."""
        if self._bytes_per_s is None:
            return now
        begins = max(now, self._free_at)
        if begins - now > WAITS_S:
            return None
        self._free_at = begins + num_bytes / self._bytes_per_s
        return self._free_at


class Switch:
    """Knows where each site is and what is on its way; it has no clock of its own."""

    def __init__(self, num_sites: int, *, bytes_per_s: float | None, delay_s: float) -> None:
        self._delay_s = delay_s
        self._out = [Cable(bytes_per_s=bytes_per_s) for _ in range(num_sites)]
        self._in = [Cable(bytes_per_s=bytes_per_s) for _ in range(num_sites)]
        self._site_of = dict[bytes, int]()  # by a device's address
        self._numbers = itertools.count()
        # When it is due, its number, where to, whether it is at the receiver's end of its cable, and the frame.
        self._on_way: list[tuple[float, int, int, bool, bytes]] = []

    def take(self, now: float, site: int, frame: bytes) -> None:
        """A site has sent a frame."""
        self._site_of[frame[6:12]] = site
        left_at = self._out[site].passed_at(now, len(frame))
        if left_at is None:
            return
        known = self._site_of.get(frame[:6])
        for target in range(len(self._out)) if known is None else (known,):
            if target != site:
                self._push(left_at + self._delay_s, target, False, frame)

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """What has arrived by now, in order: where, and the frame."""
        arrived: list[tuple[int, bytes]] = []
        while self._on_way and self._on_way[0][0] <= now:
            when, _, target, is_there, frame = heapq.heappop(self._on_way)
            if is_there:
                arrived.append((target, frame))
            elif (passed_at := self._in[target].passed_at(when, len(frame))) is not None:
                self._push(passed_at, target, True, frame)
        return arrived

    def next_at(self) -> float | None:
        """When something is due; None: nothing is on its way."""
        return self._on_way[0][0] if self._on_way else None

    def _push(self, when: float, target: int, is_there: bool, frame: bytes) -> None:
        heapq.heappush(self._on_way, (when, next(self._numbers), target, is_there, frame))


def main() -> None:
    """Be a switch until killed, by its words: bits a second of each cable (0: no limit), delay, descriptors of TAPs."""
    set_parent_death_signal(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the programs on the sites: they say good-bye over it
    rate, delay_s, taps = float(sys.argv[1]), float(sys.argv[2]), [int(word) for word in sys.argv[3:]]
    switch = Switch(len(taps), bytes_per_s=rate / 8 or None, delay_s=delay_s)
    poll = select.poll()
    for tap in taps:
        os.set_blocking(tap, False)
        poll.register(tap, select.POLLIN)
    site_of = {tap: site for site, tap in enumerate(taps)}
    print("ready", flush=True)
    while True:
        next_at = switch.next_at()
        for tap, _ in poll.poll(None if next_at is None else max(0.0, (next_at - time.monotonic()) * 1e3)):
            with contextlib.suppress(BlockingIOError):  # it has no more
                for _ in range(AT_ONCE):
                    frame = os.read(tap, FRAME_BYTES)
                    switch.take(time.monotonic(), site_of[tap], frame)
        for target, frame in switch.due(time.monotonic()):
            try:
                os.write(taps[target], frame)
            except OSError as error:
                if error.errno not in (
                    errno.EAGAIN,
                    errno.EIO,
                ):  # its queue is full or it is down: lost, as on any switch
                    raise


if __name__ == "__main__":
    main()
