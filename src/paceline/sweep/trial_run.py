"""A trial as a run of the pool: its command with the trial's parameters filled in.

`{lr}` in the arguments, the plan, the environment and the job stands for the value of the parameter lr; `{{` and `}}`
are braces. Without arguments each parameter is an option of the script, in one word: `--lr=0.01`. As two words argparse
would take a value such as -1e-05 for an option of its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from paceline import clock, config, environment
from paceline.errors import PlanError
from paceline.plan import CommandPlan, Job, Plan
from paceline.pool.pool_run import PoolRun
from paceline.pool.replica_range import replica_range
from paceline.sweep.space import Value, value_text
from paceline.sweep.study_file import StudyFile
from paceline.units import shell_text

__all__ = ["check_commands", "command_anew", "pool_run", "run_name", "script_words"]

PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][A-Za-z0-9_]*)\}")
NOT_OF_TRIALS = {  # fields of a job that the sweep or the pool decides
    "program": "it is the study's `script`",
    "args": "they are the study's `arguments`",
    "run_dir": "each trial has its own",
    "workers": "the pool decides within the plan's replicas",
    "fresh": "an interrupted trial goes on",
    "launcher": "a pool starts processes",
    "hosts": "a pool decides where its runs are",
    "head": "a pool decides where its runs are",
    "slots": "a pool decides where its runs are",
    "token_file": "a pool decides where its runs are",
    "metrics_port": "trials that run side by side would all take it",
}


def run_name(study: StudyFile, number: int) -> str:
    """The name of a trial's run in its pool, which may have runs of other studies."""
    return f"{study.name}-trial-{number:04}"


def pool_run(study: StudyFile, number: int, parameters: Mapping[str, Value]) -> PoolRun:
    """Return the run of a trial. Raises PlanError where these values make no plan or job."""
    plan, words = _plan_and_options(study, parameters)
    arguments = script_words(study, parameters)
    script = study.settings.script
    least, most, each = replica_range(study.home / script, plan, workers=None, args=arguments, say=lambda text: None)
    now, deadline_s = clock.now(), study.settings.deadline_s
    own = {name: _filled(text, parameters) for name, text in study.environment.items()}
    own |= {environment.PARAMETERS: json.dumps(dict(parameters)), environment.POOL: str(study.pool.resolve())}
    return PoolRun(
        name=run_name(study, number),
        command=(*words, script, *(("--", *arguments) if arguments else ())),
        folder=str(study.home),
        environment=environment.child_environment(**own),
        run_dir=str(study.run_dir(number)),
        script=script,
        least=least,
        most=most,
        workers_each=each,
        submitted=now,
        priority=study.settings.priority,
        deadline=None if deadline_s is None else now + deadline_s,
    )


def command_anew(study: StudyFile, parameters: Mapping[str, Value]) -> str:
    """Return the command, as typed in a shell, that runs a trial once more without the pool."""
    _, words = _plan_and_options(study, parameters)
    arguments = script_words(study, parameters)
    own = [f"{name}={_filled(text, parameters)}" for name, text in study.environment.items()]
    script = study.settings.script
    run = shell_text(
        *(["env", *own] if own else []), "paceline", "run", *words, script, *(("--", *arguments) if arguments else ())
    )
    return run if study.home == Path.cwd() else f"cd {shell_text(str(study.home))} && {run}"


def script_words(study: StudyFile, parameters: Mapping[str, Value]) -> list[str]:
    """Return the script's own arguments with a trial's values."""
    said = study.settings.arguments
    if said is None:
        return [f"--{name}={value_text(parameters[name])}" for name in study.space.names]
    return [_filled(word, parameters) for word in _argument_words(said)]


def check_commands(study: StudyFile) -> None:
    """Raise PlanError where a place names no parameter, or a parameter has no place; or where the command of an example
    cannot work.
    """
    said = study.settings.arguments
    words = [f"{{{name}}}" for name in study.space.names] if said is None else _argument_words(said)
    texts = [*words, study.settings.plan or "", *study.environment.values(), *study.job.values()]
    named = {match[1] for text in texts for match in PLACE.finditer(text) if match[1]}
    for name in sorted(named - set(study.space.names)):
        near = config.suggest(name, study.space.names)
        raise PlanError(
            f"{study.path}: {{{name}}} stands for no parameter.{near} There are: {', '.join(study.space.names)}. "
            "Braces that are meant as such are doubled: {{ }}."
        )
    for name in study.space.ranges:
        if name not in named:
            raise PlanError(
                f"{study.path}: the parameter {name} is used nowhere. Put {{{name}}} into arguments, plan, "
                "[environment] or [job]."
            )
    try:
        _check_job(study)
        pool_run(study, 0, study.space.example())
    except PlanError as error:
        raise PlanError(f"{study.path}: {error}") from error


def _check_job(study: StudyFile) -> None:
    fields = config.annotations_of(Job)
    for name, text in study.job.items():
        if name in NOT_OF_TRIALS:
            raise PlanError(f"job.{name} cannot be set: {NOT_OF_TRIALS[name]}.")
        if name not in fields:
            raise config.unknown_name(Job, name, text, path="job")


def _plan_and_options(study: StudyFile, parameters: Mapping[str, Value]) -> tuple[CommandPlan, list[str]]:
    """The command's plan, and the words before the script."""
    settings = study.settings
    text = None if settings.plan is None else _filled(settings.plan, parameters)
    overrides = [] if settings.replicas is None else [f"plan.layout.replicas={settings.replicas}"]
    fields = config.annotations_of(Job)
    changes = {name: _filled(value, parameters) for name, value in study.job.items()}
    typed = {
        name: config.parse_value(value, fields[name], path=f"job.{name}", owner=Job, name=name)
        for name, value in changes.items()
    }
    dataclasses.replace(Job(), **typed)  # checked as a whole
    plan = CommandPlan.of(None if text is None else Plan.parse(text), overrides)
    words = [] if text is None else ["--plan", text]
    for override in (*overrides, *(f"{name}={value}" for name, value in changes.items())):
        words += ["--set", override]
    return plan, words


def _argument_words(said: str | tuple[str, ...]) -> list[str]:
    return shlex.split(said) if isinstance(said, str) else list(said)


def _filled(text: str, parameters: Mapping[str, Value]) -> str:
    def value(match: re.Match[str]) -> str:
        return match[0][0] if match[1] is None else value_text(parameters[match[1]])

    return PLACE.sub(value, text)
