"""The commands about a run that exists already: status, logs, stop, resize, report, trace and audit."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import config, environment
from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError

if TYPE_CHECKING:
    from paceline.runs.submitted_run import SubmittedRun

__all__ = ["add"]

ENGINE_FILE = "engine.json"


def add(commands: Commands) -> None:
    """Declare the commands."""
    for add_one in (_add_status, _add_logs, _add_stop, _add_resize, _add_report, _add_trace, _add_audit):
        add_one(commands)


def _submitted(run_dir: Path) -> SubmittedRun | None:
    """The run where an engine has it; None where its supervisor was started by hand, also on the engine's own hosts."""
    if not (run_dir / ENGINE_FILE).is_file() or environment.engine() is not None:
        return None
    from paceline.monitor.records.run_record import RunRecord
    from paceline.runs.submitted_run import SubmittedRun

    with contextlib.suppress(ValueError):
        if RunRecord.load(run_dir).is_alive():
            return None

    return SubmittedRun.find(run_dir)


def _add_status(commands: Commands) -> None:
    parser = add_command(
        commands,
        "status",
        summary="show how a run is doing: state, step, loss, workers",
        description="Show a run's state, step, loss and speed, and each worker's rank, host and process.",
        examples="  paceline status runs/train-20260101-120000\n  paceline status RUN --json",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=_status)


def _status(arguments: argparse.Namespace) -> int:
    """Print the status; returns its exit status."""
    there = _submitted(arguments.run_dir)
    if there is not None:
        if not there.is_readable:
            return there.run_there("status", there.record.run_dir_there, *(["--json"] if arguments.json else []))
        if not arguments.json:
            print(there.state().says)
    from paceline.monitor.status.status import main_status

    return main_status(arguments.run_dir, json=arguments.json)


def _add_logs(commands: Commands) -> None:
    parser = add_command(
        commands,
        "logs",
        summary="print what the workers of a run wrote",
        description="Print the standard output and standard error of a run's workers, of the newest attempt.",
        examples="  paceline logs RUN\n  paceline logs RUN --worker 2 --stream stderr --follow",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--worker", metavar="K", help="only this worker's (default: all)")
    parser.add_argument("--stream", choices=("stdout", "stderr"), help="only this stream (default: both)")
    parser.add_argument("-f", "--follow", action="store_true", help="wait for more until the run ends")
    parser.set_defaults(run=_logs)


def _logs(arguments: argparse.Namespace) -> int:
    """Print the logs; returns its exit status."""
    from paceline.monitor.status.logs import main_logs

    there = _submitted(arguments.run_dir)
    if there is not None and not there.is_readable:
        if arguments.follow and arguments.worker is None and arguments.stream is None:
            return there.follow()
        given = {"--worker": arguments.worker, "--stream": arguments.stream}
        words = [f"{option}={value}" for option, value in given.items() if value is not None]
        return there.run_there("logs", there.record.run_dir_there, *words)
    worker = None if arguments.worker is None else config.parse_value(arguments.worker, int, path="--worker")
    return main_logs(arguments.run_dir, worker=worker, stream=arguments.stream, follow=arguments.follow)


def _add_stop(commands: Commands) -> None:
    parser = add_command(
        commands,
        "stop",
        summary="stop a run",
        description="Have a run on this host finish the step in hand, save, and end; wait until it has.",
        examples="  paceline stop RUN",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.set_defaults(run=_stop)


def _stop(arguments: argparse.Namespace) -> int:
    """Stop the run; returns its exit status."""
    there = _submitted(arguments.run_dir)
    if there is not None:
        return there.stop()
    from paceline.launch.coordinator.control_socket import ask_to_end
    from paceline.monitor.status.stop import main_stop

    return main_stop(arguments.run_dir, ask_to_end)


def _add_resize(commands: Commands) -> None:
    parser = add_command(
        commands,
        "resize",
        summary="give a run more or fewer replicas while it goes on",
        description=(
            "Give an elastic run, Layout(replicas=(least, most)), another number of replicas. New ones join, and "
            "others leave, between two steps; the batch, and so the training, stays the same."
        ),
        examples="  paceline resize RUN 6",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("replicas", metavar="REPLICAS", type=int, help="how many it should have")
    parser.set_defaults(run=_resize)


def _resize(arguments: argparse.Namespace) -> int:
    """Ask the run's supervisor; returns 0 when it has agreed, 1 when it refuses, 2 where there is no such run."""
    there = _submitted(arguments.run_dir)
    if there is not None:
        return there.resize(arguments.replicas)
    from paceline.launch.coordinator.control_socket import send_command
    from paceline.monitor.records.run_files import local_path
    from paceline.monitor.records.run_record import RUNNING, RunRecord

    try:
        record = RunRecord.load(arguments.run_dir)
    except ValueError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    name = local_path(record.run_dir)
    if record.state == RUNNING and not record.is_here():
        print(f"paceline: {name} runs on host {record.host}: use `paceline resize` there", file=sys.stderr)
        return 2
    if not record.is_alive():
        print(f"paceline: {name} does not run: it is {record.state_now()}", file=sys.stderr)
        return 2
    try:
        answer = send_command(record.pid, {"op": "resize", "replicas": arguments.replicas})
    except ConnectionError as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1
    if "error" in answer:
        print(f"paceline: {answer['error']}", file=sys.stderr)
        return 1
    print(f"{name}: {answer['says']}")
    return 0


def _add_report(commands: Commands) -> None:
    parser = add_command(
        commands,
        "report",
        summary="show where a run's time went, and what each incident cost",
        description="Attribute every second of a run: useful steps, waiting, saves, incidents, idle time. Print the "
        "table, and write a page with plots of loss, speed, workers and time that needs nothing but a browser.",
        examples="  paceline report RUN\n  paceline report RUN --html run.html\n"
        "  paceline report RUN --json --no-html\n"
        "  paceline report RUN copy_of_host_2 copy_of_host_3    several hosts without a shared disk\n\n"
        "exit status: 0 printed; 1 the page cannot be written; 2 there is no such run",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument(
        "others", metavar="OTHER", nargs="*", type=Path, help="copies of the run's directories on other hosts"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--html", metavar="PATH", type=Path, help="where to write the page (default: RUN/report.html)")
    page.add_argument("--no-html", action="store_true", help="write no page")
    parser.set_defaults(run=_report)


def _report(arguments: argparse.Namespace) -> int:
    """Print the report and write the page; returns the exit status."""
    there = _submitted(arguments.run_dir)
    if there is not None and not there.is_readable:
        if arguments.json:
            return there.run_there("report", there.record.run_dir_there, "--json", "--no-html")
        code = there.run_there("report", there.record.run_dir_there)
        if code == 0 and not arguments.no_html:
            there.fetch("report.html", arguments.html or arguments.run_dir / "report.html")
        return code
    from paceline.monitor.report.command import main_report

    page: Path | None = None if arguments.no_html else arguments.html or arguments.run_dir / "report.html"
    return main_report(arguments.run_dir, *arguments.others, json=arguments.json, page=page)


def _add_trace(commands: Commands) -> None:
    parser = add_command(
        commands,
        "trace",
        summary="write the steps of all workers as a timeline for Perfetto",
        description="Write the newest steps of all workers as a timeline, with the clocks of hosts aligned, in the "
        "trace event format that ui.perfetto.dev and chrome://tracing open. Of a predicted step: paceline plan SCRIPT "
        "--cluster NAME --trace FILE.",
        examples="  paceline trace RUN\n  paceline trace RUN --steps 100 --out trace.json\n"
        "  paceline trace RUN --otlp http://127.0.0.1:4318\n\n"
        "exit status: 0 written; 1 the collector did not take it; 2 there is no such run, or it has no step",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument(
        "others", metavar="OTHER", nargs="*", type=Path, help="copies of the run's directories on other hosts"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write it (default: RUN/trace.json)")
    parser.add_argument("--steps", metavar="N", default="1000", help="newest steps of each worker (default: 1000)")
    parser.add_argument(
        "--otlp",
        metavar="URL|FILE",
        help="send it as OpenTelemetry spans to a collector (OTLP over HTTP), or write them to a file as lines of JSON",
    )
    parser.set_defaults(run=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    """Write the timeline; returns the exit status."""
    steps = config.parse_value(arguments.steps, int, path="--steps")
    if steps < 1:
        raise PlanError(f"--steps is {steps}; it must be at least 1.")
    if arguments.otlp is not None and arguments.out is not None:
        raise PlanError("--otlp and --out are two forms of one timeline: give one of them.")
    there = _submitted(arguments.run_dir)
    if there is not None and not there.is_readable:
        if arguments.otlp is not None:
            raise PlanError(
                f"The files of {arguments.run_dir} are on the engine's hosts. Give this command there, or fetch them."
            )
        code = there.run_there("trace", there.record.run_dir_there, "--steps", str(steps))
        if code == 0:
            there.fetch("trace.json", arguments.out or arguments.run_dir / "trace.json")
        return code
    if arguments.otlp is not None:
        from paceline.monitor.report.otlp import main_otlp

        return main_otlp(arguments.run_dir, *arguments.others, to=arguments.otlp, steps=steps)
    from paceline.monitor.report.trace import main_trace

    out = arguments.out or arguments.run_dir / "trace.json"
    return main_trace(arguments.run_dir, *arguments.others, out=out, steps=steps)


def _add_audit(commands: Commands) -> None:
    parser = add_command(
        commands,
        "audit",
        summary="prove that every sample of each epoch was used exactly once",
        description="Prove from a run's ledger that every sample of each finished epoch was used exactly once, "
        "or list what was not.",
        examples="  paceline audit RUN\n\nExit status 0: proved, or no epoch is finished yet; "
        "1: samples are missing or were used twice.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=_audit)


def _audit(arguments: argparse.Namespace) -> int:
    """Audit the run; returns its exit status."""
    there = _submitted(arguments.run_dir)
    if there is not None and not there.is_readable:
        return there.run_there("audit", there.record.run_dir_there, *(["--json"] if arguments.json else []))
    from paceline.monitor.audit.audit import main_audit

    return main_audit(arguments.run_dir, json=arguments.json)
