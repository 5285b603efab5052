"""Every check that needs a device, on the one that is here, within ten minutes: a table of what holds.

    make accelerator                                     with the Python that has torch: PYTHON=python3
    python benchmarks/accelerator.py [--device auto|cuda|cpu] [--out accelerator] [--limit 570] [--only NAME,...]

Nothing is installed or fetched: what is needed beside torch is looked for first, and named where it lacks. Checks run
one after the other, each in a process of its own with a limit of its own; what they find is kept at once, so that there
is a table whatever happens. When the time is over, the rest is told as not run. On the CPU (`--device cpu`) the same
checks run in small, which shows that they work and says nothing of devices.

OUT/table.md and OUT/table.json have the rows, OUT/log.txt what the checks have said. Exit status 0: nothing that was
asked fails to hold.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

from driving.options import options_of

ROOT = Path(__file__).resolve().parents[1]

CHECKS = {  # what matters most comes first; with the most seconds that each may take
    "communicator": 60.0,
    "parity": 200.0,
    "elastic": 150.0,
    "step_time": 100.0,
    "precisions": 90.0,
    "memory": 120.0,
    "stall": 90.0,
    "compiled": 120.0,
    "warm_start": 90.0,
    "wires": 120.0,
    "llama": 110.0,
}
NEEDED = ("torch", "numpy", "cloudpickle", "rich", "psutil", "safetensors", "prometheus_client")
PROBE_S = 120.0  # a driver that is loaded anew takes long
PROBE = (
    "import json, torch; n = torch.cuda.device_count() if torch.cuda.is_available() else 0; "
    "print(json.dumps([n, torch.cuda.get_device_name(0) if n else '', torch.__version__, torch.version.cuda or '']))"
)


def main() -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--out", type=Path, default=Path("accelerator"), help="a folder for the table and the logs")
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for everything")
    parser.add_argument("--only", default="", help=f"some of {','.join(CHECKS)}")
    options = options_of(parser, takes="at most ten minutes", quick={"only": "communicator", "device": "cpu"})
    names = [one for one in options.only.split(",") if one] or list(CHECKS)
    if unknown := [name for name in names if name not in CHECKS]:
        parser.error(f"--only: there is no check {unknown[0]!r}; there are {', '.join(CHECKS)}")
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        print(
            f"{sys.executable} lacks {', '.join(lacking)}. Nothing is installed here: choose a Python that has them, "
            "make accelerator PYTHON=/path/to/python, or put wheels of them on PYTHONPATH",
            file=sys.stderr,
        )
        return 2
    try:
        facts = _facts(options.device)
    except _NoDeviceError as error:
        print(f"--device {options.device}: {error}. --device cpu tries the checks themselves", file=sys.stderr)
        return 2
    return _run(names, options, facts, began)


def _run(names: list[str], options: argparse.Namespace, facts: dict[str, str], began: float) -> int:
    sys.path.insert(0, str(ROOT / "src"))
    from device_checks.clock_budget import run_checks
    from device_checks.rows import Row, write_tables

    folder: Path = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if facts["device"] != "cpu" else "cpu"

    def keep(rows: list[Row]) -> None:
        write_tables(folder, rows, {**facts, "seconds": f"{time.monotonic() - began:.0f}"})

    keep([])
    try:
        rows = run_checks(
            names, limits_s=CHECKS, device=device, folder=folder, deadline=began + options.limit, after_each=keep
        )
    finally:
        shutil.rmtree(folder / "scratch", ignore_errors=True)
    keep(rows)
    print((folder / "table.md").read_text())
    print(f"{folder / 'table.md'}, table.json; took {time.monotonic() - began:.0f} s", file=sys.stderr)
    return int(any(row.verdict in ("does not hold", "failed") for row in rows))


class _NoDeviceError(Exception):
    """There is none, or it cannot be looked for."""


def _facts(wanted: str) -> dict[str, str]:
    """What the table is about. Raises _NoDeviceError where a device is wanted and there is none, or where it cannot be
    told whether there is one: a broken driver is no machine without a GPU."""
    import json

    try:
        number, name, torch, cuda = json.loads(_probed())
    except _NoDeviceError:
        if wanted != "cpu":
            raise
        number, name, torch, cuda = 0, "", "unknown", ""
    if wanted == "cuda" and not number:
        raise _NoDeviceError("torch finds no device here")
    has_device = bool(number) and wanted != "cpu"
    return {
        "device": f"{number} x {name}" if has_device else "cpu",
        "torch": torch + (f" (CUDA {cuda})" if cuda else ""),
        "Python": platform.python_version(),
        "cores": str(os.cpu_count()),
        "at": _revision(),
    }


def _probed() -> str:
    """What a process of its own says of this machine's devices, so that this one touches none."""
    try:
        asked = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise _NoDeviceError(f"torch has looked for a device for {PROBE_S:g} s, without an answer") from None
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
        raise _NoDeviceError(f"torch cannot look for a device: {said[-1]}")
    return asked.stdout.strip().splitlines()[-1]


def _revision() -> str:
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or "no revision"


if __name__ == "__main__":
    sys.exit(main())
