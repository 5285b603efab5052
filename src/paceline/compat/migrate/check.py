"""The check of a program: each distributed call with its verdict, the lines that change, and how to start it."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.compat.migrate.tables import CallVerdict, FrameworkTable, framework_tables
from paceline.compat.migrate.uses import NameUse, uses_in
from paceline.errors import PlanError
from paceline.plan.program_text import ModuleText, ProgramText
from paceline.units import shell_text

__all__ = ["CallFinding", "MigrationReport", "check_program_calls"]

ONE_LEVEL = 1  # of modules beside the script that it imports
# Names that stand for another one: torch keeps several places for the same thing.
SAME = {
    "torch.distributed.init_device_mesh": "torch.distributed.device_mesh.init_device_mesh",
    "torch.distributed._composable.fsdp": "torch.distributed.fsdp",
    "torch.nn.parallel.distributed": "torch.nn.parallel",
    "torch.distributed._tensor": "torch.distributed.tensor",
    "torch.distributed.distributed_c10d": "torch.distributed",
}
RECEIVES = ("torch.distributed.recv", "torch.distributed.irecv")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallFinding:
    """One use of a framework's distributed names."""

    file: str
    line: int
    framework: str
    call: str  # as the program has it
    name: str  # in full
    verdict: str  # works | counterpart | refused
    says: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MigrationReport:
    """What a program's text says."""

    script: str
    findings: tuple[CallFinding, ...]
    changes: tuple[tuple[str, str], ...]  # a line before, and after
    starts: tuple[str, ...]  # commands
    unread: tuple[str, ...]  # files that could not be parsed
    is_paceline: bool  # it is a program of Paceline's own already

    @property
    def num_refused(self) -> int:
        return sum(finding.verdict == "refused" for finding in self.findings)


def check_program_calls(script: Path, *, args: Sequence[str] = ()) -> MigrationReport:
    """Read a script, and the modules beside it that it imports. Raises PlanError for one that cannot be read."""
    try:
        ast.parse(script.read_bytes())
    except OSError as error:
        raise PlanError(f"{script} cannot be read: {error.strerror}. Name a Python script.") from error
    except (SyntaxError, ValueError) as error:
        raise PlanError(f"{script} is no Python program: {error}. Name a Python script.") from error
    program = ProgramText.of(script, levels=ONE_LEVEL)
    findings = [finding for module in program.modules for finding in _findings(module, script)]
    used = [table for table in framework_tables() if any(one.framework == table.name for one in findings)]
    main = used[:1] if used and used[0].name != "torch" else used
    return MigrationReport(
        script=str(script),
        findings=tuple(findings),
        changes=tuple(
            (table.change[0], table.change[1]) for table in used if table.change and not _is_here(findings, table)
        ),
        starts=tuple(_start(table, script, args) for table in main),
        unread=program.unread,
        is_paceline=program.runs_paceline,
    )


def _findings(module: ModuleText, script: Path) -> Iterator[CallFinding]:
    tables = framework_tables()
    has_keras = any(name.split(".")[0] in ("keras", "tf_keras") for name in module.imports)

    def class_of(path: str) -> str | None:
        return next((found for table in tables if (found := table.class_of(path)) is not None), None)

    for use in uses_in(module, class_of=class_of):
        path = _settled(use.path)
        table = next((one for one in tables if one.watches(path)), None)
        if table is None or (path in table.watched and not table.lists(path)):
            continue  # none of these, or a package's own name
        verdict = _verdict(table, use, path)
        if use.call is not None or verdict.kind != "works":  # else a constant, a class in an annotation, ...
            yield _finding(module, script, table, use, path, verdict)
    if has_keras:
        yield from _methods(module, script, next(table for table in tables if table.methods))


def _methods(module: ModuleText, script: Path, table: FrameworkTable) -> Iterator[CallFinding]:
    """Calls of methods whose objects the text does not tell, such as `model.fit` in a program of Keras."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in table.methods:
            text = ast.unparse(node.func)
            if text.startswith("paceline."):
                continue
            use = NameUse(line=node.lineno, path=text, text=text, call=node)
            verdict = CallVerdict(kind="counterpart", says=table.methods[node.func.attr])
            yield _finding(module, script, table, use, f"keras.Model.{node.func.attr}", verdict)


def _finding(
    module: ModuleText, script: Path, table: FrameworkTable, use: NameUse, path: str, verdict: CallVerdict
) -> CallFinding:
    file = module.path
    if file.is_relative_to(script.resolve().parent):
        file = script.parent / file.relative_to(script.resolve().parent)
    return CallFinding(
        file=str(file),
        line=use.line,
        framework=table.name,
        call=use.text,
        name=path,
        verdict=verdict.kind,
        says=verdict.says,
    )


def _verdict(table: FrameworkTable, use: NameUse, path: str) -> CallVerdict:
    """The table's verdict, or what the arguments of this call say against it."""
    call = use.call
    if path in RECEIVES and call is not None:
        is_named = len(call.args) > 1 or any(one.arg in ("src", "group_src") for one in call.keywords)
        if not is_named:
            return CallVerdict(kind="refused", says="without a source it is not built: recv(tensor, src=rank)")
    return table.verdict(path)


def _settled(path: str) -> str:
    """The name under which the tables have it."""
    for one, other in SAME.items():
        if path == one or path.startswith(f"{one}."):
            return other + path.removeprefix(one)
    if path.startswith("tensorflow.compat.v2."):
        return "tensorflow." + path.removeprefix("tensorflow.compat.v2.")
    return path


def _is_here(findings: Sequence[CallFinding], table: FrameworkTable) -> bool:
    """Whether the program has been changed already."""
    own = [finding for finding in findings if finding.framework == table.name]
    return bool(own) and all(finding.name.startswith("paceline.") for finding in own)


def _start(table: FrameworkTable, script: Path, args: Sequence[str]) -> str:
    return " ".join([table.start.format(script=shell_text(str(script))), *([shell_text(*args)] if args else [])])
