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
)
SETTLED_S = 0.8  # after which curves are drawn


def make_runs(folder: Path) -> None:
    """Some runs as a team has them: finished, failed, stopped and going on."""
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
