"""`paceline drill`: injects faults into a job, and says for each whether Paceline kept what it promises."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import NoReturn

from paceline.cli.arguments import Commands, add_command
from paceline.cli.drill.request import drill_request

__all__ = ["add", "run"]

EXAMPLES = """\
  paceline drill train.py --workers 4                            one fault of each kind, each in a run of its own
  paceline drill train.py --workers 4 --faults "kill:worker=2,step=9; stop:worker=1,step=20"
  paceline drill train.py --workers 4 --random 10 --seed 7 --together
  paceline drill train.py --keep-plan --set plan.batch.size=64 -- --width 64

faults, as KIND:worker=RANK,step=STEP:
  kill, term, stop   the worker gets that signal; stop with seconds=: it goes on after so many
  slow               it computes times= (3) as long, for steps= (20)
  cut                it is cut off from all others
  full_disk          no room for a checkpoint; of worker 0
  torn_checkpoint    everything is killed in the middle of a save, and the newest checkpoint is torn; of worker 0
  flip               a bit of its weights changes (three workers or more)
  nan, spike         one of its micro-batches gives no number, or one that is far off
  kill_server        the parameter servers that it has started are killed (under sync=ParameterServer)

where= (of kill, term, stop, cut and kill_server): forward, sum, commit, save or regroup.
docs/reference/drill.md says what each of them is, and what is promised.

exit status: 0 all promises held; 1 not, or the script fails undisturbed; 2 the command or plan cannot work"""


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "drill",
        summary="have faults come to a job on this machine, and see whether it loses anything",
        description="Run a script undisturbed, then under faults (killed, stopped and slow workers, cut links, full "
        "disks, torn checkpoints, wrong numbers), and say for each what it cost and whether what Paceline promises "
        "held.",
        usage="paceline drill [options] SCRIPT.py [options] [the script's arguments] [-- more of them]",
        examples=EXAMPLES,
    )
    parser.add_argument("script", metavar="SCRIPT.py", type=Path, help="a Python script that calls paceline.run")
    parser.add_argument("--workers", metavar="N", help="workers of the job (default: the script's own number)")
    parser.add_argument("--plan", metavar="TEXT", help="the plan, as one line of text (default: the script's own)")
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="set one value of the plan or the job, as for `paceline run`",
    )
    faults = parser.add_mutually_exclusive_group()
    faults.add_argument("--faults", metavar="TEXT", help="the faults, with semicolons between them")
    faults.add_argument("--random", dest="num_random", metavar="N", help="draw so many faults of all kinds")
    parser.add_argument("--seed", metavar="N", help="of what is drawn (default: 0)")
    parser.add_argument("--steps", metavar="N", help="steps of each run (default: 40)")
    parser.add_argument("--together", action="store_true", help="have all faults come in one run")
    parser.add_argument(
        "--keep-plan",
        action="store_true",
        help="run the script's plan as it is (default: a fixed number of replicas N becomes 1-N, where they can come "
        "and go)",
    )
    parser.add_argument(
        "--tolerance",
        metavar="X",
        help="largest relative difference of a loss (default: as the plan promises, 1e-5 where nothing rounds)",
    )
    parser.add_argument("--save-every", metavar="STEPS", help="steps between checkpoints (default: an eighth)")
    parser.add_argument(
        "--silence-s", metavar="SECONDS", help="a worker not heard of for so long is given up (default: 3)"
    )
    parser.add_argument(
        "--limit-s", metavar="SECONDS", help="a run that takes longer is ended (default: by the undisturbed one)"
    )
    parser.add_argument(
        "--keep", metavar="DIR", type=Path, help="keep the runs in this directory (default: those that failed)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Drill, print the table and the verdict; returns 1 where a promise did not hold."""
    from paceline.cli.drill.run import main_drill

    signal.signal(signal.SIGTERM, _leave)
    return main_drill(drill_request(arguments))


def _leave(signum: int, _: object) -> NoReturn:
    """End by an exception, so that runs are ended and file systems and cables are as before."""
    raise SystemExit(128 + signum)
