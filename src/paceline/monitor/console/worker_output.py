"""Shows what the workers print: standard output as it is, each distinct line of standard error once.

A Python warning and its source line are one text. Tracebacks are left out, because the failure report shows the one
that matters. If a worker goes on after a traceback, one line reports it a little later, so that nothing is hidden.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from paceline.monitor.console.deduplication import Deduplicator, tag
from paceline.monitor.records.run_files import GrowingFile, local_path
from paceline.units import printable

__all__ = ["WorkerOutput"]

SURVIVED_S = 10.0  # a worker that has not ended this long after a traceback goes on; a failing one is gone by then
WARNING_WAIT_S = 0.3  # for the source line of a warning

RANK = re.compile(r"^\[rank\d+\]: ")  # torch puts it before each line of an uncaught error, and before nothing else
TRACEBACK = re.compile(r"^\s*(\+ Exception Group )?Traceback \(most recent call last\):")
INFORMATIONAL = re.compile(r"^I\d{4} \d\d:\d\d:\d+\.\d+\s+\d+ ")  # a line of absl's or glog's: the log has it
WARNING = re.compile(r"^\S.*:\d+: \w*Warning: ")
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


class WorkerOutput:
    """Follows stdout.log and stderr.log of `workers` below an attempt's directory; `show` gets what is to be seen.

    Standard output is that of worker 0, untouched; with `everyone` that of all workers, each line tagged `[k] `.
    `names`: what the workers are called, by rank, where that is not by their numbers. `hides_information`: leave out
    what a framework logs at the level of information, as TensorFlow does without being asked.
    """

    def __init__(
        self,
        directory: Path,
        workers: Collection[int],
        *,
        everyone: bool,
        show: Callable[[str], None],
        names: Sequence[str] = (),
        hides_information: bool = False,
    ) -> None:
        self._directory, self._everyone, self._show, self._names = directory, everyone, show, names
        self._hides_information = hides_information
        self._stdout: dict[int, GrowingFile] = {}
        self._stderr: dict[int, GrowingFile] = {}
        self._texts: dict[int, _StderrSplitter] = {}
        self._once = Deduplicator(
            workers, lambda text, said_by: self._show(printable(f"{tag(said_by, names)} {text}", colors=True))
        )
        self.follow(workers)

    def follow(self, workers: Collection[int]) -> None:
        """These take part now: new workers' files are followed from their beginning, those of workers that left to
        their end.
        """
        for worker in sorted(set(workers) - self._texts.keys()):
            place = self._directory / f"worker_{worker}"
            if self._everyone or worker == 0:
                self._stdout[worker] = GrowingFile(place / "stdout.log", say=self._warn)
            self._stderr[worker] = GrowingFile(place / "stderr.log", say=self._warn)
            self._texts[worker] = _StderrSplitter(hides_information=self._hides_information)
        self._once.expect(workers)

    def _warn(self, text: str) -> None:
        self._show(printable(f"warning: {text}"))

    def poll(self, now: float) -> None:
        """Show what is new; `now` is monotonic, in seconds."""
        for worker, file in self._stdout.items():
            self._show_stdout(worker, file.poll())
        for worker, file in self._stderr.items():
            self._take_stderr(worker, file.poll(), now)
        self._once.release(now)

    def finish(self, now: float, *, failed: Collection[int] = ()) -> None:
        """Show what is left, unfinished lines too, and close the files; tracebacks of `failed` are shown elsewhere."""
        for worker, file in self._stdout.items():
            self._show_stdout(worker, [*file.poll(limit_bytes=None), *filter(None, [file.rest()])])
        for worker, file in self._stderr.items():
            self._take_stderr(worker, [*file.poll(limit_bytes=None), file.rest()], now)
            for text in self._texts[worker].end():
                self._once.add(text, worker, now)
        self._once.release(now, everything=True)
        for worker, texts in self._texts.items():
            if texts.traceback and worker not in failed:
                self._tell_traceback(worker, texts.traceback)
        for file in (*self._stdout.values(), *self._stderr.values()):
            file.close()

    def _show_stdout(self, worker: int, lines: list[str]) -> None:
        if lines:
            name = self._names[worker] if self._names else worker
            self._show("\n".join([f"[{name}] {line}" for line in lines] if self._everyone else lines))

    def _take_stderr(self, worker: int, lines: list[str], now: float) -> None:
        texts = self._texts[worker]
        for line in lines:
            for text in texts.take(line, now):
                self._once.add(text, worker, now)
        for text in texts.overdue(now):
            self._once.add(text, worker, now)
        if texts.traceback and now - texts.traceback_since > SURVIVED_S:
            self._tell_traceback(worker, texts.traceback)
            texts.traceback = ""

    def _tell_traceback(self, worker: int, error: str) -> None:
        text = f"{tag([worker], self._names)} {error} (its traceback is in {local_path(self._stderr[worker].path)})"
        self._show(printable(text, colors=True))


class _StderrSplitter:
    """Cuts one worker's standard error into texts that belong together; keeps tracebacks out of them."""

    def __init__(self, *, hides_information: bool) -> None:
        self._hides_information = hides_information
        self.traceback = ""  # the last traceback's error, until the caller has taken it
        self.traceback_since = 0.0
        self._state = "text"  # | "warning" | "frames" (of a traceback) | "error" (its last line was seen)
        self._warning = ""
        self._warning_since = 0.0

    def take(self, raw: str, now: float) -> Iterator[str]:
        """Take a line; yield the texts that are complete with it."""
        line, num_tags = RANK.subn("", raw.rstrip("\r"))
        line = line[line.rfind("\r") + 1 :]  # of a progress bar that rewrites its line, the last state
        if self._state == "frames":
            if line and not line[0].isspace() and not TRACEBACK.match(line):
                self._state, self.traceback, self.traceback_since = "error", line, now
            return
        if self._state == "error":
            if num_tags and not TRACEBACK.match(line) and line not in CHAINED:
                return  # the error's message goes on
            if not line or line[0].isspace():
                return  # so it does here, as far as one can tell without the tags
            if line in CHAINED:
                self.traceback = ""  # the next one says more
                return
        if self._state == "warning":
            self._state = "text"
            if line[:1].isspace():
                yield f"{self._warning}\n{line}"
                return
            yield self._warning
        yield from self._fresh(line, now)

    def overdue(self, now: float) -> Iterator[str]:
        """Yield a warning whose source line does not come."""
        if self._state == "warning" and now - self._warning_since > WARNING_WAIT_S:
            yield from self.end()

    def end(self) -> Iterator[str]:
        """Yield what is held back."""
        if self._state == "warning":
            self._state = "text"
            yield self._warning

    def _fresh(self, line: str, now: float) -> Iterator[str]:
        if TRACEBACK.match(line):
            self._state = "frames"
        elif WARNING.match(line):
            self._state, self._warning, self._warning_since = "warning", line, now
        else:
            self._state = "text"
            if line.strip() and not (self._hides_information and INFORMATIONAL.match(line)):
                yield line
