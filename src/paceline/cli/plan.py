"""`paceline plan`: shows what a plan means on a number of workers, and every rule that it breaks.

`paceline plan train.py --check` also looks at what a script prepares. It prints every problem of its models with the
plan, remarks, and the memory that each worker needs, as tables that fit 100 columns.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import config, settings
from paceline.cli.arguments import Commands, add_command
from paceline.cli.plan_costs.options import add_options
from paceline.cli.script_failure import script_failure
from paceline.errors import PacelineError, PlanError
from paceline.plan import AllReduce, Batch, CommandPlan, Compute, ParameterServer, Plan
from paceline.plan.script_scan import workers_of_script
from paceline.schedule.allreduce.build import ALGORITHMS, build, num_chunks_of
from paceline.schedule.allreduce.rounds import draw
from paceline.schedule.micro_batches import split_evenly
from paceline.units import bytes_text

if TYPE_CHECKING:
    from paceline.cli.plan_costs.question import CostQuestion
    from paceline.parallel.check.memory_estimate import MemoryEstimate
    from paceline.worker.script_inspection import InspectionReport

__all__ = ["add", "check_script", "is_about_script", "run", "table"]

EXAMPLES = """\
  paceline plan                                            the plan of defaults
  paceline plan "replicas=4+cast(dtype=bf16)"
  paceline plan "batch(size=64,micro=4)" --workers 3 --set plan.compute.precision=bf16
  paceline plan --from ds_config.json --workers 4          the plan that a configuration of DeepSpeed is
  paceline plan "allreduce(algorithm=tree)" --workers 5 --draw      what each worker sends to which, round by round
  paceline plan train.py --check --plan "tensor=4"         what of the script's models cannot be cut so, and why
  paceline plan train.py --workers 64 --cluster h100x8-ib  what a step costs there, and which plan is the fastest
  paceline plan train.py --cluster h100x8-ib --cluster a100x8-ib --samples 1e6 --price 3
  paceline plan train.py --cluster a100x8-ib --what-if workers=8,16,32 link=25Gbit
  paceline plan train.py --workers 2 --cluster here --verify 3

With a script, it is run in this process up to its first loop over batches, with models that have no memory of their
weights, and every model that it prepares is looked at: what cannot be cut, with the remedy; what is cut how much,
what is tied or not used; and what each worker would hold. Nothing is trained, and no other process is started, but for
--cluster here (paceline doctor) and --verify (some steps of each plan).

The text is parts joined by "+", defaults left out:
  replicas=N                                               as many copies of the model (default: one for each worker)
  allreduce(algorithm=auto|ring|tree|halving|hierarchical,bucket_bytes=N)  how they agree
  localsgd(every=N,outer=nesterov(lr=0.7,momentum=0.9))    the same, every N steps
  raw | cast(dtype=bf16) | cast(dtype=fp16)                what travels between them
  batch(size=N,micro=N,shuffle=true,drop_last=false,seed=N)  the global batch, and the micro-batches it is cut into
  compute(precision=fp32|bf16|fp16|fp64,recompute=none|blocks,compile=false)
Exit status 2: the plan breaks a rule, a model cannot be cut, or it does not fit the cluster."""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "plan",
        summary="show what a plan means, and which rules it breaks",
        description="Show what a plan means on so many workers, as text and as Python, and every rule that it breaks; "
        "or look at what a script prepares, and say all that stands against its plan.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "text",
        metavar="TEXT|SCRIPT",
        nargs="?",
        default="default",
        help="the plan, as one line of text; or a script, and its arguments behind it",
    )
    parser.add_argument("--plan", metavar="TEXT", help="with a script: the plan, in place of the script's own")
    parser.add_argument("--workers", metavar="N", help="workers of the job (default: the plan's replicas, or 1)")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set one value, for example plan.batch.size=64",
    )
    parser.add_argument(
        "--from",
        dest="source",
        metavar="FILE",
        help="the plan that a configuration is: a ds_config.json of DeepSpeed, or a file of accelerate launch",
    )
    parser.add_argument("--check", action="store_true", help="say only what is wrong")
    parser.add_argument("--draw", action="store_true", help="draw how replicas sum, if the plan names an algorithm")
    add_options(parser)
    parser.add_argument("--hosts", metavar="N", help="with --draw: so many hosts (default: one for each replica)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan and its broken rules; returns 2 when there are any."""
    from paceline.cli.plan_costs.question import read_question

    question = read_question(arguments)
    if arguments.source is not None:
        return _convert(arguments)
    if _is_script(arguments.text):
        return check_script(
            Path(arguments.text),
            args=arguments.script_args,
            plan=CommandPlan.of(None if arguments.plan is None else Plan.parse(arguments.plan), arguments.overrides),
            workers=_workers(arguments.workers),
            is_short=arguments.check,
            question=question,
        )
    if question is not None:
        raise config.PlanError("--cluster goes with a script: what a step costs depends on the script's model.")
    if arguments.plan is not None:
        raise config.PlanError(f"--plan goes with a script; without one, write: paceline plan {arguments.plan!r}.")
    plan = settings.apply(Plan.parse(arguments.text), *arguments.overrides)
    workers = _workers(arguments.workers) or plan.layout.workers or 1
    broken = plan.check(workers=workers)
    if not arguments.check:
        resolved = plan.resolve(workers)
        print(f"plan     {resolved}")
        print(f"python   {resolved!r}")
        print(f"workers  {workers}")
        print(f"batch    {_batch_text(resolved.batch, workers)}")
    for rule in broken:
        print(f"paceline: {rule.says} {rule.fix}", file=sys.stderr)
    if arguments.draw and not broken:
        print(f"\n{_drawing(plan, workers, arguments.hosts)}")
    return 2 if broken else 0


def _convert(arguments: argparse.Namespace) -> int:
    """Print what another framework's configuration is as a plan; returns 2 where something of it is refused."""
    if arguments.text != "default" or arguments.plan is not None:
        raise PlanError("--from FILE gives the plan: leave out the plan, or the script.")
    from paceline.compat.config_file import convert_config_file

    found = convert_config_file(Path(arguments.source), workers=_workers(arguments.workers))
    plan = settings.apply(Plan.parse(found.plan), *arguments.overrides)
    if not arguments.check:
        print(f"plan     {plan}")
        print(f"python   {plan!r}")
        print(f"job      {' '.join(f'--{name} {value}' for name, value in found.job.items()) or '(no option)'}")
        for title, rows in (("taken", found.taken), ("ignored", found.ignored)):
            print(f"\n{title}\n{table(rows, ANSWERED) or '(nothing)'}")
        print("\nrefused")
    print(table(found.refused, ANSWERED) or "(nothing)")
    return 2 if found.refused else 0


def is_about_script(words: Sequence[str]) -> bool:
    """Whether the command's words name a script, whose own arguments follow it."""
    return any(_is_script(word) for word in words)


def _is_script(word: str) -> bool:
    return word.endswith(".py")


def _workers(text: str | None) -> int | None:
    if text is None:
        return None
    workers = config.parse_value(text, int, path="--workers")
    if workers < 1:
        raise config.PlanError(f"--workers is {workers}; it must be at least 1.")
    return workers


def _drawing(plan: Plan, workers: int, hosts: str | None) -> str:
    """How replicas sum a tensor in as few chunks as the algorithm needs."""
    if not isinstance(plan.sync, AllReduce):
        how = "send to the servers, and get from them" if isinstance(plan.sync, ParameterServer) else "take steps alone"
        return f"{plan.sync}: replicas {how}; there is no schedule to draw."
    name, num_replicas = plan.sync.algorithm, workers // plan.layout.workers_each
    if name == "auto":
        return f"auto: timed in the run. Name an algorithm to see it: {', '.join(ALGORITHMS)}."
    num_hosts = num_replicas if hosts is None else config.parse_value(hosts, int, path="--hosts")
    if not 1 <= num_hosts <= num_replicas:
        raise config.PlanError(f"--hosts is {num_hosts}; it must be from 1 to the number of replicas, {num_replicas}.")
    return draw(
        build(
            name,
            num_workers=num_replicas,
            num_chunks=num_chunks_of(name, num_bytes=0, num_workers=num_replicas),
            hosts=tuple(replica * num_hosts // num_replicas for replica in range(num_replicas)),
        )
    )


def _batch_text(batch: Batch, workers: int) -> str:
    shares = sorted({len(share) for share in split_evenly(batch.num_micro, workers)})
    return (
        f"{batch.size} samples a step, {batch.num_micro} micro-batches of {batch.resolved_micro}"
        f"{'' if batch.size % batch.resolved_micro == 0 else f' (the last of {batch.size % batch.resolved_micro})'}; "
        f"each worker runs {' or '.join(map(str, shares))}"
    )


REFUSED = (24, 40, 32)  # columns: module, what, remedy
NOTED = (24, 74)
ANSWERED = (40, 58)  # columns: a key, and what became of it
GAP = "  "


def check_script(
    script: Path,
    *,
    args: Sequence[str],
    plan: CommandPlan,
    workers: int | None,
    is_short: bool,
    question: CostQuestion | None = None,
) -> int:
    """Print what was found; returns 2 where something stands against it. `is_short`: leave the plan itself out.

    `question`: what is asked about costs, which is answered below.
    """
    if not script.is_file():
        raise PlanError(f"There is no script {script}.")
    from paceline.worker.script_inspection import inspect_script

    try:
        found = inspect_script(script, args=args, plan=plan, workers=workers)
    except PacelineError:
        raise
    except Exception as error:  # the script's own
        raise script_failure(error, script) from error
    if not is_short:
        print(f"plan     {found.plan}")
        print(f"python   {found.plan!r}")
        print(f"workers  {found.workers}{_why_one(script, plan, args) if workers is None else ''}\n")
    _print_refusals(found)
    if found.remarks:
        print("\nGood to know")
        print(table([(one.module, one.what) for one in found.remarks], NOTED))
    for name, sizes in found.sizes.items():
        print(f"\nEach worker holds of {name}, beside activations (by formula)")
        print(_sizes_table(sizes, found.plan.compute))
    fits = question is None or _answer(found, question, script=script, args=args)
    return 2 if found.refusals or not fits else 0


def _answer(found: InspectionReport, question: CostQuestion, *, script: Path, args: Sequence[str]) -> bool:
    from paceline.cli.plan_costs.question import print_answer

    return print_answer(found, question, script=script, args=args)


def _why_one(script: Path, plan: CommandPlan, args: Sequence[str]) -> str:
    """A remark where the number of workers was said by nobody."""
    is_said = plan.whole is not None and plan.whole.layout.workers is not None
    if is_said or workers_of_script(script, plan.settings, args=args, say=lambda _: None) is not None:
        return ""
    return ", because neither the command nor the script says how many: --workers N"


def table(rows: Iterable[Sequence[str]], widths: Sequence[int]) -> str:
    """Return rows of cells, each wrapped to its column's width."""
    lines: list[str] = []
    for row in rows:
        cells = [_wrapped(cell, width) for cell, width in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            line = GAP.join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True))
            lines.append(line.rstrip())
    return "\n".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        words = [piece for word in line.split(" ") for piece in _pieces(word, width)]
        found += textwrap.wrap(" ".join(words), width) or [""]
    return found or [""]


def _pieces(word: str, width: int) -> Iterator[str]:
    """A module's name that is longer than a line goes on in the next one from a dot, or an underscore."""
    while len(word) > width:
        at = max(word.rfind(mark, 1, width + 1) for mark in "._")
        at = at if at > 0 else width
        yield word[:at]
        word = word[at:]
    yield word


def _print_refusals(found: InspectionReport) -> None:
    if not found.refusals:
        print(f"Nothing stands against {found.plan}.")
        return
    count = len(found.refusals)
    print(f"{count} {'thing stands' if count == 1 else 'things stand'} against {found.plan}")
    print(table([("module", "what", "remedy")], REFUSED))
    print(GAP.join("-" * width for width in REFUSED))
    print(table([(one.module, one.what, one.remedy) for one in found.refusals], REFUSED))


def _sizes_table(sizes: Sequence[MemoryEstimate], compute: Compute) -> str:
    is_offloaded = compute.offload != "none"
    head = ("", "parameters", "gradients", "optimizer", *(["elsewhere"] if is_offloaded else []), "most in a step")
    rows: list[tuple[str, ...]] = [head]
    for one in sizes:
        owner = "each" if one.stage is None else f"stage worker {one.stage}"
        rest = [one.parameters, one.gradients, one.optimizer, *([one.elsewhere] if is_offloaded else []), one.peak]
        rows.append((owner, *(_bytes(number) for number in rest)))
    text = "\n".join("".join(f"{cell:<16}" for cell in row).rstrip() for row in rows)
    if not is_offloaded:
        return text
    where = "the host's memory" if compute.offload_path is None else f"files in {compute.offload_path}"
    return f"{text}\nElsewhere is {where}; a step's most is what is in the device's memory."


def _bytes(number: int | None) -> str:
    return "not known before" if number is None else bytes_text(number)
