"""Takes the pictures of `paceline ui` that the documentation shows, from made-up runs, with Chromium.

    python docs/screenshots.py [--out docs/_static]

Pages at three widths, in light and dark, as WebP.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

from chromium import Chromium
from synthetic_groups import decide, own_process, queue, searched, write_pool, write_sweep
from synthetic_runs import SyntheticRun

HERE = Path(__file__).resolve().parent
PAGES = {  # what is opened, and what has to be there
    "overview": ("#/", "document.querySelectorAll('.rows .row').length > 5"),
    "run": (
        "#/run/gpt-lr-3e-4",
        "!!document.querySelector('.lanes') && document.querySelectorAll('canvas').length > 5",
    ),
    "compare": (
        "#/compare/gpt-lr-3e-4/gpt-lr-1e-3/gpt-powersgd",
        "!!document.querySelector('.compared td') && document.querySelectorAll('canvas').length > 5",
    ),
    "pool": ("#/pool/lab", "!!document.querySelector('.plot rect') && document.querySelectorAll('.queued').length > 3"),
    "sweep": ("#/sweep/digits", "document.querySelectorAll('.plot .dot').length > 50"),
}
SHOTS = (
    ("overview", 1400, False, 560),
    ("overview", 800, True, 560),
    ("overview", 360, True, 760),
    ("run", 1400, True, 1500),
    ("run", 800, False, 1100),
    ("run", 360, False, 760),
    ("compare", 1400, False, 1100),
    ("compare", 800, True, 1100),
    ("compare", 360, True, 760),
    ("pool", 1400, False, 1000),
    ("pool", 800, True, 1000),
    ("pool", 360, False, 760),
    ("sweep", 1400, True, 1100),
    ("sweep", 800, False, 1100),
    ("sweep", 360, True, 760),
)
SETTLED_S = 0.8  # after which curves are drawn


def make_runs(folder: Path) -> None:
    """Some runs as a team has them: finished, failed, stopped and going on; a pool, and a sweep."""
    now = time.time()
    small = "replicas=4+batch(size=64,micro=8)"
    runs = [
        SyntheticRun(path=folder / "gpt-lr-3e-4", steps=1600, workers=4, plan=small, args=("--lr", "3e-4"),
                     evaluate_every=100, lose_at=700, began=now - 4000),
        SyntheticRun(path=folder / "gpt-lr-1e-3", steps=1600, workers=4, plan=small, args=("--lr", "1e-3"),
                     evaluate_every=100, seed=3, level=0.7, began=now - 9000),
        SyntheticRun(path=folder / "gpt-powersgd", steps=1200, last_step=1600, state="failed", workers=4, seed=4,
                     plan="replicas=4+wire=powersgd(rank=4)+batch(size=64,micro=8)", level=0.5, began=now - 12000,
                     error="worker 2 (pid 4711 on node3): RuntimeError: CUDA out of memory"),
        SyntheticRun(path=folder / "moe-experts", steps=900, last_step=4000, state="running", workers=8, seed=5,
                     plan="replicas=2+experts=4+batch(size=256,micro=8)", began=now - 364),
        SyntheticRun(path=folder / "far/diloco", steps=495, last_step=1600, state="stopped", seed=6, began=now - 90000,
                     plan="replicas=2+sync=localsgd(every=64,outer=nesterov(lr=0.7,momentum=0.9))"),
        SyntheticRun(path=folder / "far/diloco-int8", steps=1600, seed=7, began=now - 95000, level=0.6,
                     plan="replicas=2+sync=localsgd(every=64)+wire=int8"),
    ]  # fmt: skip
    for run in runs:
        run.write()
    make_pool(folder, now)
    make_sweep(folder / "digits", now)


def make_pool(folder: Path, now: float) -> None:
    """Eight devices, and six runs that want them."""
    pool, own = folder / "lab", own_process()
    here = {"host": own["host"], "pid": own["pid"], "pid_started_s": own["pid_started_s"]}
    for name, steps, seed in (("vit-base", 620, 8), ("bert-small", 240, 9)):
        SyntheticRun(path=folder / name, steps=steps, last_step=2000, state="running", workers=4, seed=seed,
                     plan="replicas=1-6+batch(size=96)", began=now - 4 - 0.4 * steps, **here).write()  # fmt: skip
    began = now - 1500
    for name, least, most, ago, terms in (
        ("gpt-lr-3e-4", 2, 4, 1500, {}),
        ("vit-base", 1, 6, 1320, {"priority": 2.0}),
        ("bert-small", 1, 4, 1100, {"deadline": now + 2400}),
        ("resnet-seeds", 4, 4, 60, {}),
        ("ablation-wide", 2, 6, 35, {"priority": 0.5}),
    ):
        queue(pool, folder / name, least=least, most=most, submitted=now - ago, **terms)
    waits = "others go first. It starts as soon as they allow, at the latest in"
    write_pool(
        pool,
        {
            "gpt-lr-3e-4": {"phase": "finished", "step": 1600, "last_step": 1600, "ended": now - 420, "exit_code": 0},
            "vit-base": {"phase": "running", "replicas": 5, "devices": 5, "step": 620, "last_step": 2000,
                         "parts": {"node1": {"replicas": 3}, "node2": {"replicas": 2}},
                         "since": now - 410, "why": "vit-base goes from 4 to 5 replicas on 2 nodes: it goes on 1.21 "
                         "times as fast, and finishes 58 s earlier."},
            "bert-small": {"phase": "running", "replicas": 3, "devices": 3, "step": 240, "last_step": 2000,
                           "parts": {"node2": {"replicas": 2}, "node1": {"replicas": 1}},
                           "since": now - 405, "why": "bert-small goes from 1 to 3 replicas on 2 nodes: it goes on 2.6 "
                           "times as fast, and finishes 11 min earlier."},
            "resnet-seeds": {"phase": "waiting", "since": now - 60,
                             "why": f"resnet-seeds waits for 4 devices: {waits} 9 min."},
            "ablation-wide": {"phase": "waiting", "since": now - 35,
                              "why": f"ablation-wide waits for 2 devices: {waits} 10 min."},
        },
        slots=8,
        nodes={name: {"state": "here", "slots": 4, "gpus": 4, "used": 4} for name in ("node1", "node2")},
    )  # fmt: skip
    decide(
        pool,
        [
            (began + 2, "gpt-lr-3e-4", 0, 4, "gpt-lr-3e-4 starts with 4 replicas on 1 node."),
            (began + 182, "vit-base", 0, 4, "vit-base starts with 4 replicas on 1 node."),
            (began + 402, "gpt-lr-3e-4", 4, 3, "gpt-lr-3e-4 goes from 4 to 3 replicas on 1 node, at 0.79 of its pace: "
             "it has 9 min left, and 2 of 3 runs go first."),
            (began + 404, "bert-small", 0, 1, "bert-small starts with 1 replica on 1 node."),
            (now - 410, "vit-base", 4, 5, "vit-base goes from 4 to 5 replicas on 2 nodes: it goes on 1.21 times as "
             "fast, and finishes 58 s earlier."),
            (now - 405, "bert-small", 1, 3, "bert-small goes from 1 to 3 replicas on 2 nodes: it goes on 2.6 times as "
             "fast, and finishes 11 min earlier."),
        ],
    )  # fmt: skip


def make_sweep(folder: Path, now: float) -> None:
    """A search of forty trials, of which two go on; some have their runs there."""
    trials = searched(40)
    for trial in trials[-2:]:
        trial |= {"state": "running", "step": 55, "last_step": 100, "replicas": 1, "value": 0.9}
    for trial in trials[10:]:
        loss = 1.2 - float(trial["value"])
        SyntheticRun(path=folder / f"trials/trial-{trial['number']:04}", steps=100, seed=trial["number"], level=loss,
                     evaluate_every=10, began=now - 3000 + 60 * trial["number"]).write()  # fmt: skip
    best = max((one for one in trials if one["state"] == "finished"), key=lambda one: one["value"])["number"]
    write_sweep(folder, trials, best=best, log=["lr"], pool=str(folder.parent / "lab"), started=now - 3000)


def main() -> None:
    """Serve the runs, and take all pictures."""
    parser = argparse.ArgumentParser(description="Take the pictures of the live page that the documentation shows.")
    parser.add_argument("--out", type=Path, default=HERE / "_static", help="where they go (default: docs/_static)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        make_runs(Path(folder) / "runs")
        words = [sys.executable, "-m", "paceline", "ui", "runs", "--port", "0"]
        with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
            try:
                address = (server.stdout.readline() if server.stdout is not None else "").split()[-1]
                with Chromium() as browser:
                    for name, width, is_dark, height in SHOTS:
                        take(browser, address, out, name, width=width, is_dark=is_dark, height=height)
                    for problem in browser.problems():
                        print(problem, file=sys.stderr)
            finally:
                server.terminate()


def take(browser: Chromium, address: str, out: Path, name: str, *, width: int, is_dark: bool, height: int) -> None:
    """Take one picture, of the page's first `height` pixels."""
    where, ready = PAGES[name]
    page = browser.open(address + where, width=width, height=height, is_dark=is_dark)
    page.wait_for(ready)
    time.sleep(SETTLED_S)
    path = out / f"ui-{name}-{width}-{'dark' if is_dark else 'light'}.webp"
    page.picture(path, height=height)
    print(f"{path}  {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
