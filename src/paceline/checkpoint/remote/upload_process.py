"""The process that keeps a run's checkpoints in a store, beside the run: `python -m` this, one JSON object a line.

It is told on its standard input, and tells on its standard output:

    in   {"run_dir": ..., "address": ..., "keep": 3, "fresh": false, "alone": true, "fetch": true}    first
    out  {"says": "note", "text": ...}                 while it looks whether the store can be used, and downloads
    out  {"says": "ready", "step": 200}                the newest step that was downloaded, or null: now the run begins
    out  {"says": "refused", "text": ...}              instead, and ends: the run is not to begin
    out  {"says": "begun", "step": ..., "address": ..., "num_bytes": ...}
    out  {"says": "done" | "failed", ...}              the fields of an `UploadReport`
    in   {"end": true}                                 the run has ended: upload what is left
    out  {"says": "ended", "left": [300]}              which steps are not uploaded; then it ends

Where its input ends without a word, the run's process is gone, and it ends, too: the next start goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

from paceline.checkpoint.remote.download import fetch_newest
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints, folder_of
from paceline.checkpoint.remote.run_identity import SupersededError, claim
from paceline.checkpoint.remote.staged_upload import UPLOADS, locked
from paceline.checkpoint.remote.uploader import Uploader
from paceline.errors import PacelineError
from paceline.plain_data import read_object
from paceline.private_files import make_run_directory
from paceline.storage.object_store import ObjectStore
from paceline.storage.probe import probe

__all__ = ["main"]

NICENESS = 10
LOOK_S = 0.5
AGAIN_S = 30.0  # after a failed upload, unless a newer checkpoint comes first


def main() -> int:
    """Serve one run; returns the exit status."""
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    asked, is_over = read_object(sys.stdin.readline()), threading.Event()
    threading.Thread(target=_listen, args=(is_over,), name="listen", daemon=True).start()
    run_dir = Path(str(asked["run_dir"]))
    store = ObjectStore(str(asked["address"]))
    remote = RemoteCheckpoints(store)
    try:
        probe(store)
        found = remote.look()
        own = claim(store, run_dir, remote=found, is_fresh=bool(asked["fresh"])) if asked["alone"] else None
        step = None
        if asked["fetch"] and not asked["fresh"]:
            make_run_directory(run_dir)
            with locked(run_dir / UPLOADS / ".lock"):  # of hosts that share the disk one downloads
                step = fetch_newest(run_dir / "checkpoints", remote, found=found, say=_note)
    except (PacelineError, OSError) as error:
        _tell(says="refused", text=str(error))
        return 1

    def begun(step: int, num_bytes: int) -> None:
        _tell(says="begun", step=step, address=store.where(folder_of(step)), num_bytes=num_bytes)

    uploader = Uploader(
        run_dir, remote, keep=int(asked["keep"]), is_fresh=bool(asked["fresh"]), claim=own, on_begin=begun
    )
    if asked["fresh"]:
        uploader.drop_all()
    _tell(says="ready", step=step)
    try:
        left = _serve(uploader, is_over)
    except SupersededError as error:
        _tell(says="failed", step=0, address=store.address, reason=str(error))
        left = uploader.waiting()
    _tell(says="ended", left=left)
    return 0


def _serve(uploader: Uploader, is_over: threading.Event) -> list[int]:
    """Upload what comes until the run is over, and all is uploaded, or cannot be; returns the steps that are not."""
    while True:
        was_over = is_over.is_set()
        report = uploader.turn()
        if report is not None:
            _tell(says="done" if report.reason is None else "failed", **dataclasses.asdict(report))
        left = uploader.waiting()
        if was_over and (not left or (report is not None and report.reason is not None)):
            return left
        if report is not None and report.reason is not None:
            _await_change(uploader, is_over, left)
        elif not left or report is None:
            is_over.wait(LOOK_S)


def _await_change(uploader: Uploader, is_over: threading.Event, failed: list[int]) -> None:
    """After a failure: wait for the next checkpoint, a while, or the run's end."""
    for _ in range(int(AGAIN_S / LOOK_S)):
        if is_over.wait(LOOK_S) or uploader.waiting() != failed:
            return


def _listen(is_over: threading.Event) -> None:
    for line in sys.stdin:
        with contextlib.suppress(ValueError):
            if read_object(line).get("end"):
                is_over.set()
    os._exit(1)  # the run's process is gone; what is sent stays there, and the next start goes on


def _note(text: str) -> None:
    _tell(says="note", text=text)


def _tell(**fields: Any) -> None:
    try:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # connections that hang do not hold up the end
