"""All engines by name, and how their settings are read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paceline import config
from paceline.errors import PlanError
from paceline.launch.engines.engine import Engine, Refusal
from paceline.launch.engines.submission import Submission

if TYPE_CHECKING:
    pass

__all__ = ["ENGINES", "host_count", "read_engine", "refusals", "settings_of"]

ENGINES = {"Kubernetes": "kubernetes", "Ray": "ray", "Slurm": "slurm", "Ssh": "ssh"}  # class: module of this package


def read_engine(value: object, *, settings: Sequence[str] = (), hosts: str | int | None = None) -> Engine:
    """Return the engine that a value means: "slurm", "slurm(partition=gpu)", a table of a job file, or an engine; with
    settings such as "partition=gpu" changed. `hosts` may be the names of an engine's hosts, "a,b:4". Raises PlanError.
    """
    kind = _annotation()
    engine: Any
    if isinstance(value, str):
        engine = config.read_short(value, kind, path="on")
    elif isinstance(value, Mapping):
        engine = config.convert_value(dict(value), kind, path="engine", owner=object, name="engine")
    elif type(value).__name__ in ENGINES:
        engine = value
    else:
        raise PlanError(
            f"on is {value!r}; it must be {', '.join(name.lower() for name in ENGINES)}, or one with settings."
        )
    engine = _with(engine, settings)
    if hosts is None or isinstance(hosts, int) or hosts.strip().isdecimal():
        return engine
    if "hosts" not in config.annotations_of(type(engine)):
        raise PlanError(f"hosts is {hosts!r}; {engine.title} chooses the hosts by itself: give their number.")
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    return read_engine(settings_of(engine) | {"hosts": names})


def host_count(engine: Engine, hosts: str | int) -> str:
    """Return the number of hosts, as text, where they may be named."""
    names = getattr(engine, "hosts", ())
    return str(hosts) if isinstance(hosts, int) or hosts.strip().isdecimal() else str(len(names))


def settings_of(engine: Engine) -> dict[str, Any]:
    """Return an engine's settings as plain data, which `read_engine` reads back."""
    return {config.KIND: type(engine).__name__, **config.to_table(engine)}


def refusals(engine: Engine, submission: Submission, *, detach: bool) -> Iterator[Refusal]:
    """Yield why the engine cannot run the job, by the rules for all engines and its own."""
    job, title = submission.job, engine.title
    if submission.function is not None and not engine.takes_functions:
        yield Refusal(
            says=f"{title} runs a script on its hosts, and {submission.function.name} is a function of a notebook, or "
            "of text without a file.",
            fix="Write the run into a script, and start that.",
        )
    if job.launcher == "inline":
        yield Refusal(
            says=f"launcher='inline' runs worker 0 in the calling process, and {title} starts all of them elsewhere.",
            fix="Leave --launcher out, or leave --on out to debug on this host.",
        )
    if "head" in submission.given:
        yield Refusal(
            says=f"head={job.head!r} says where the hosts meet, which is {title}'s to decide.", fix="Leave --head out."
        )
    if "slots" in submission.given:
        yield Refusal(
            says=f"slots={job.slots} is one host's number of workers, and {title} starts all hosts alike.",
            fix="Leave --slots out, and choose --workers and --hosts.",
        )
    if "fresh" in submission.given and job.fresh:
        yield Refusal(
            says=f"fresh=True would start over each time that {title} starts a host again.",
            fix="Use another --run-dir, or remove the old one.",
        )
    if job.capture_dir is not None:
        yield Refusal(
            says="capture_dir collects the numbers of one host for a comparison.",
            fix="Leave --capture-dir or --on out.",
        )
    if detach and not engine.may_detach:
        yield Refusal(
            says=f"With {title} the run ends with the command that has started it, so it cannot be left (--detach).",
            fix="Leave --detach out, and start the command under nohup or in tmux.",
        )
    yield from engine.refusals(submission)


def _annotation() -> Any:
    kinds = [
        getattr(importlib.import_module(f"paceline.launch.engines.{home}"), name) for name, home in ENGINES.items()
    ]
    annotation = kinds[0]
    for kind in kinds[1:]:
        annotation = annotation | kind
    return annotation


def _with(engine: Engine, settings: Sequence[str]) -> Engine:
    table = settings_of(engine)
    fields = config.annotations_of(type(engine))
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            raise PlanError(f"--set engine.{setting} sets nothing: write it as engine.name=value.")
        if name not in fields:
            raise config.unknown_name(type(engine), name, text, path="engine")
        table[name] = config.parse_value(text, fields[name], path=f"--set engine.{name}", owner=type(engine), name=name)
    return read_engine(table) if settings else engine
