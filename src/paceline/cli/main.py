"""The `paceline` command: runs a sub-command, and turns errors into one message and an exit status.

Exit status: 0 done, 1 the run (or a proof) failed, 2 the command, job or plan cannot work, 75 and 76 run it again, 130
interrupted. The files
beside this one declare sub-commands and their arguments in `add(commands)`, which must import little. Each sub-command
sets a function `run(arguments)`, which imports what it needs and returns the exit status.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from paceline import clock
from paceline.cli import (
    checkpoints,
    dashboard,
    doctor,
    existing_runs,
    export,
    host,
    import_,
    migrate,
    plan,
    pool,
    run,
    sweep,
    ui,
)
from paceline.cli.arguments import Commands, Parser, split_script
from paceline.cli.drill import command as drill
from paceline.cli.parity import command as parity
from paceline.elastic.membership_messages import TOO_FEW
from paceline.errors import DISK_FULL, LaunchError, PacelineError, PlanError
from paceline.launch.io.standard_streams import open_missing_streams
from paceline.units import printable

__all__ = ["main"]

STARTS_A_SCRIPT = ("run", "doctor", "parity", "drill")  # and a script has arguments of its own
COMMANDS = (
    run,
    plan,
    doctor,
    parity,
    drill,
    pool,
    sweep,
    existing_runs,
    ui,
    checkpoints,
    export,
    import_,
    migrate,
    dashboard,
    host,
)

EXAMPLES = """\
examples:
  paceline run train.py --workers 4                        4 workers on this machine
  paceline run train.py --workers 4 --lr 0.1               what paceline does not know goes to the script
  paceline run job.toml --set plan.batch.size=64           a job file, and one value changed
  paceline run train.py --workers 8 --hosts 2 --head node1:29500 --token-file token
                                                           the same command on each of 2 hosts
  paceline plan "replicas=4+batch(size=64)"                is this plan sound, and what does it mean?
  paceline plan train.py --check --plan "tensor=4"         can this script's models be split so?
  paceline parity train.py --workers 1,2,4                 the same loss on 1, 2 and 4 workers?
  paceline status runs/train-20260101-120000               how is it going?

`paceline COMMAND --help` describes a command.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process) and return its exit status."""
    command_started = clock.now()
    open_missing_streams()
    words = list(sys.argv[1:] if argv is None else argv)
    as_given = tuple(words)
    parser, commands = _parser()
    try:
        script_args: tuple[str, ...] = ()
        if words and (words[0] in STARTS_A_SCRIPT or (words[0] == "plan" and plan.is_about_script(words[1:]))):
            words[1:], script_args = split_script(words[1:], commands.choices[words[0]])
        arguments = parser.parse_args(words)
        arguments.script_args, arguments.command_started = script_args, command_started
        arguments.words = as_given
        exit_status: int = arguments.run(arguments)
        sys.stdout.flush()  # here, where a closed reader is handled
        return exit_status
    except (PlanError, LaunchError) as error:
        print(f"paceline: {printable(str(error))}", file=sys.stderr)
        return TOO_FEW if isinstance(error, LaunchError) and error.is_accident else 2
    except PacelineError as error:
        print(f"paceline: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has ended (`paceline logs RUN | head`); exit quietly
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in DISK_FULL or error.filename is not None:
            raise
        print(f"paceline: the output cannot be written: {error.strerror}. Free space where it goes.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left of it
        return 1


def _parser() -> tuple[Parser, Commands]:
    parser = Parser(
        prog="paceline",
        description="Train a PyTorch model on many workers from one script, with the same loss on any number of them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    for command in COMMANDS:
        command.add(commands)
    return parser, commands


class Version(argparse.Action):
    """Prints the installed version; looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            version = metadata.version("paceline")
        except metadata.PackageNotFoundError:
            version = "(run from its sources, not installed)"
        print(f"paceline {version}")
        parser.exit()
