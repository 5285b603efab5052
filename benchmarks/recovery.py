"""Recovery from kill -9 of one of 4 workers, and from a stopped one, beside torchrun, Ray Train and Horovod Elastic.

    python benchmarks/recovery.py [--kills 12] [--stops 5] [--peers torchrun,ray,horovod,horovod:5]
                                  [--ray-python PATH] [--horovod-python PATH]

Everybody does the same work (a step takes about 0.1 s here), and everybody's processes write down when they committed
which step. This program watches those files, kills a worker at a random moment, and reads from the files when the next
step was committed, when one that no worker had committed before, and when the killed one's successor had its first.
Peers that restart from checkpoints write one every 5 steps; Horovod keeps its state in memory as often. The runs follow
each other; nothing else should use the cores. `--ray-python` and `--horovod-python` are interpreters that have these
peers. Horovod's workers that are no neighbours of the dead one notice it by gloo's time-out, 30 s: "horovod:5" makes
that 5 s.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from driving.options import options_of
from driving.step_logs import Line, Logs, median_step
from paceline.events import Regrouped, decode

PROGRAMS = Path(__file__).parent / "programs"
WORKERS, BATCH, MICRO = 4, 128, 16
CALM_STEPS = 6  # committed by all, between two incidents
HOROVOD_HOSTS = ("localhost", "127.0.0.1", "127.0.1", "127.1")  # all of them this machine
STEPS = str(10**6)  # more than anybody takes
LIMIT_S = 120.0  # for anything that is waited for
LOOK_S = 0.002
SILENCE_S = 2.0
# torchrun: by default its workers meet in the launcher's own store, where a restart with 4 of them on 2 cores finds
# addresses of the dead, and fails, often for minutes (torch 2.13). With a store of their own each restart works.
SETTINGS = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PEERS = {"torchrun": 0.1, "ray": 0.1, "horovod": 0.3}  # at most so much of their times is the target
COMPUTING_S, STOPPED_S, REPLACED_S = 0.2, SILENCE_S + 0.2, 2.0  # targets: medians


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """What one loss cost; seconds from the signal on."""

    time: float
    computing_s: float | None  # a new membership stands (Paceline alone reports it)
    next_s: float  # a step is committed, perhaps for the second time
    progress_s: float  # a step is committed that was not before
    replaced_s: float  # the successor commits
    repeated: int  # committed steps that were taken again


class RunEnded(Exception):
    """A run that was to be measured has ended, or takes too long; with its last words."""


def wait_for(logs: Logs, process: subprocess.Popen[bytes], holds: Callable[[], bool], what: str) -> None:
    """Look at the files until something is true; raises RunEnded where that takes too long."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        logs.poll()
        if holds():
            return
        if process.poll() is not None or time.monotonic() > deadline:
            raise RunEnded(f"waiting for {what}: the run has ended, or takes too long")
        time.sleep(LOOK_S)


def strike(
    logs: Logs, process: subprocess.Popen[bytes], draw: random.Random, step_s: float, signum: int, run_dir: Path | None
) -> Incident:
    """Wait until all is calm, hit a worker at a random moment, and wait until its successor works."""
    calm_since = len(logs.lines)

    def calm() -> bool:
        fresh = logs.lines[calm_since:]
        return len({line.rank for line in fresh if line.step >= logs.top() - 1}) == WORKERS and (
            len(fresh) >= CALM_STEPS * WORKERS
        )

    wait_for(logs, process, calm, "all workers")
    time.sleep(draw.random() * step_s)
    logs.poll()
    rank = draw.randrange(WORKERS)
    pid, place, top = logs.pids()[rank], len(logs.lines), logs.top()
    when = time.time()
    os.kill(pid, signum)

    def after() -> list[Line]:
        return [line for line in logs.lines[place:] if line.time > when and line.pid != pid]

    def is_over() -> bool:
        return any(line.step > top for line in after()) and any(line.rank == rank for line in after())

    wait_for(logs, process, is_over, "the successor")
    top = max([top, *(line.step for line in logs.lines[place:] if line.time <= when)])
    wait_for(logs, process, lambda: any(line.step > top for line in after()), "new progress")
    before = {(line.rank, line.step) for line in logs.lines if line.time <= when}
    done = [line for line in after() if line.step > top or (line.rank, line.step) in before]  # else: the step in hand
    progress = next(line for line in done if line.step > top)
    return Incident(
        time=when,
        computing_s=None if run_dir is None else regrouped_after(run_dir, when),
        next_s=done[0].time - when,
        progress_s=progress.time - when,
        replaced_s=next(line.time for line in after() if line.rank == rank) - when,
        repeated=len({line.step for line in done if line.step <= top}),
    )


def regrouped_after(run_dir: Path, when: float) -> float | None:
    """Seconds from `when` until the others stood together again, by the coordinator's log."""
    with open(run_dir / "attempt_1" / "events.jsonl", encoding="utf-8") as lines:
        records = [decode(line) for line in lines if line.endswith("\n")]
    return min(
        (one.time - when for one in records if isinstance(one.event, Regrouped) and one.time > when), default=None
    )


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a session of its own, ended afterwards."""
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **SETTINGS},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        except RunEnded as end:
            text = (folder / "output").read_text(errors="replace")[-3000:]
            raise RunEnded(f"{end}\n{' '.join(command)}\n{text}") from None
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def command_of(peer: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """What a user of `peer` would type."""
    name, _, timeout_s = peer.partition(":")
    work = [str(folder), str(options.width), str(options.rate)]
    script = str(PROGRAMS / f"recover_{name}.py")
    match name:
        case "paceline":
            plan = f"replicas=1-{WORKERS}+batch(size={BATCH},micro={MICRO})"
            words = ["--plan", plan, "--workers", str(WORKERS), "--run-dir", str(folder / "run")]
            words += ["--silence-s", str(SILENCE_S), "--no-tensorboard", "--no-save-at-end"]
            return [sys.executable, "-m", "paceline", "run", script, *words, "--", *work]
        case "ray":
            return [options.ray_python, script, *work, STEPS, str(WORKERS)]
        case "horovod":
            # Horovod gives up the host of a worker that is lost, for a second at least: so each has a host of its own.
            hosts = folder / "hosts.sh"
            hosts.write_text("#!/bin/sh\n" + "".join(f"echo {host}:1\n" for host in HOROVOD_HOSTS))
            hosts.chmod(0o755)
            launch = ["-m", "horovod.runner.launch", "--gloo", "-np", str(WORKERS), "--min-np", "1"]
            launch += ["--max-np", str(WORKERS), "--host-discovery-script", str(hosts)]
            launch += ["--blacklist-cooldown-range", "1", "2", "--network-interfaces", "lo"]
            names = ",".join(HOROVOD_HOSTS)
            settings = [f"HOROVOD_GLOO_TIMEOUT_SECONDS={timeout_s}"] if timeout_s else []
            return [
                "env",
                *settings,
                options.horovod_python,
                *launch,
                options.horovod_python,
                script,
                *work,
                STEPS,
                names,
            ]
        case _:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORKERS)]
            return [sys.executable, *launch, "--max-restarts", "1000", script, *work, STEPS]


def incidents(
    peer: str, options: argparse.Namespace, *, num: int, signum: int = signal.SIGKILL, is_shown: bool = True
) -> tuple[float, list[Incident]]:
    """Run one program and hit it `num` times; returns the undisturbed step's seconds, and what each loss cost."""
    draw, found = random.Random(options.seed), list[Incident]()
    with tempfile.TemporaryDirectory(prefix="paceline-recovery-", ignore_cleanup_errors=True) as name:
        folder, logs = Path(name), Logs(Path(name))
        with running(command_of(peer, folder, options), folder) as process:
            wait_for(logs, process, lambda: logs.top() >= 4 * CALM_STEPS, "the first steps")
            step_s = median_step(logs.lines)
            run_dir = folder / "run" if peer == "paceline" else None
            for _ in range(num):
                found.append(strike(logs, process, draw, step_s, signum, run_dir))
                if is_shown:
                    print(f"{peer}: {shown(found[-1])}", flush=True)
    return step_s, found


def shown(one: Incident) -> str:
    computing = "" if one.computing_s is None else f"regrouped {one.computing_s:.3f} s, "
    return (
        f"{computing}next step {one.next_s:.3f} s, new progress {one.progress_s:.3f} s, "
        f"successor {one.replaced_s:.3f} s, {one.repeated} steps repeated"
    )


def row(name: str, step_s: float, found: list[Incident], ours: list[Incident] | None) -> str:
    """A line of the table; ratios are Paceline's medians over this one's."""

    def cell(field: str) -> str:
        value = median(field, found)
        if math.isnan(value):
            return "-"
        ratio = "" if ours is None else f" (**{median(field, ours) / value:.3f}x**)"
        return f"{value:.3f}{ratio}"

    repeated = statistics.mean(one.repeated for one in found)
    cells = [cell(field) for field in ("computing_s", "next_s", "progress_s", "replaced_s")]
    return f"| {name} | {len(found)} | {step_s:.3f} | {' | '.join(cells)} | {repeated:.1f} | {repeated * BATCH:.0f} |"


def median(field: str, of: list[Incident]) -> float:
    """The median of what is known; nan: nothing is."""
    values = [value for one in of if (value := getattr(one, field)) is not None]
    return statistics.median(values) if values else math.nan


def verdicts(step_s: float, ours: list[Incident], peers: Mapping[str, list[Incident]], stops: list[Incident]) -> str:
    """What should be reached, and whether it was, a line each."""
    computing = median("computing_s", ours)
    limits = {
        "regrouped": (computing, COMPUTING_S),
        "next step": (median("next_s", ours), COMPUTING_S + 2 * step_s),
        "successor's first step": (median("replaced_s", ours), REPLACED_S),
        "steps repeated": (sum(one.repeated for one in ours), 0),
    }
    if stops:
        limits["regrouped after SIGSTOP"] = (median("computing_s", stops), STOPPED_S)
    for peer, found in peers.items():
        for field, name in (("next_s", "next step"), ("progress_s", "new progress")):
            limits[f"{name}, as a share of {peer}'s"] = (
                median(field, ours) / median(field, found),
                PEERS[peer.partition(":")[0]],
            )
    lines = ["| target | reached | at most | |", "|---|---|---|---|"]
    for name, (reached, most) in limits.items():
        lines.append(f"| {name} | {reached:.3f} | {most:.3f} | {'yes' if reached <= most else '**no**'} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--peers", default="torchrun", help="of torchrun, ray, horovod, with commas; empty: none")
    parser.add_argument("--ray-python", default=sys.executable, help="an interpreter that has ray[train]")
    parser.add_argument("--horovod-python", default=sys.executable, help="an interpreter that has horovod")
    parser.add_argument("--width", type=int, default=1536, help="of the model: makes the step longer")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    options = options_of(parser, takes="about 8 minutes", quick={"kills": 1, "stops": 1, "peers": "", "width": 256})
    wanted = list(filter(None, options.peers.split(",")))
    if unknown := [peer for peer in wanted if peer.partition(":")[0] not in PEERS]:
        parser.error(f"--peers: {', '.join(unknown)} is not known; known are {', '.join(PEERS)}")
    step_s, ours = incidents("paceline", options, num=options.kills)
    rows, peers, stops = [row("Paceline, kill -9", step_s, ours, None)], dict[str, list[Incident]](), list[Incident]()
    for peer in wanted:
        try:
            peer_step_s, peers[peer] = incidents(peer, options, num=options.kills)
        except RunEnded as end:  # what the others have shown is not to be lost
            print(end, file=sys.stderr)
            rows.append(f"| {peer}, kill -9 | its run ended ||||||||")
            continue
        rows.append(row(f"{peer}, kill -9", peer_step_s, peers[peer], ours))
    if options.stops:
        stop_step_s, stops = incidents("paceline", options, num=options.stops, signum=signal.SIGSTOP)
        rows.append(row(f"Paceline, SIGSTOP, silence_s={SILENCE_S:.0f}", stop_step_s, stops, None))
    print(
        "\n| what | times | step, s | regrouped, s | next step, s | new progress, s | successor's first step, s | "
        "steps repeated | samples read twice |\n|---|---|---|---|---|---|---|---|---|"
    )
    print("\n".join(rows))
    print(f"\n{verdicts(step_s, ours, peers, stops)}")


if __name__ == "__main__":
    main()
