"""Which private parts of torch the source uses: all are on their page, with what for, and the page names no others."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from source_trees import PACKAGE, nodes, sources

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "private-parts.md"
OTHERS = ("compat/keras/", "cli/", "sweep/", "monitor/export/")  # their private names are those of other packages
OWN_WORDS = {"_idx", "_of_", "_paceline_rows", "_proj_weight", "_replica_", "_worker_"}  # parts of names of ours
NOT_TORCH = ("sys", "os", "atexit", "threading", "subprocess")
NAME = re.compile("_[a-z][a-z_]+|_[A-Z][A-Z_]+")
ROW = re.compile(r"^\| `([^`]+)` \| ([^|]+) \| [^|]{10,} \|$", re.MULTILINE)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def own_names(files: dict[str, list[ast.AST]]) -> set[str]:
    """Private names that the package itself gives."""
    found: set[str] = set()
    for inside in files.values():
        for node in inside:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    found.add(name)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case _:
                    pass
    return (found - vars(nn.Module()).keys()) | OWN_WORDS  # some of ours may be called so, too


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression; "" where it does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def up_to_private(path: str) -> str:
    """A path as far as its first private name; of `torch._C`, which has everything, one more."""
    parts = path.split(".")
    first = next(place for place, part in enumerate(parts) if is_private(part))
    return ".".join(parts[: first + 1 + (parts[: first + 1] == ["torch", "_C"])])


def used(inside: list[ast.AST], own: set[str]) -> Iterator[str]:
    """Yield the private parts of others in a file: paths of modules, and bare names of attributes."""
    for node in inside:
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0) if module.split(".")[0] == "torch":
                for path in (f"{module}.{one.name}" for one in names):
                    if any(map(is_private, path.split("."))):
                        yield up_to_private(path)
            case ast.Attribute(attr=name) if (path := dotted(node)).startswith("torch."):
                if path != "torch._C" and any(map(is_private, path.split("."))):
                    yield up_to_private(path)
            case ast.Attribute(attr=name, value=value) if is_private(name) and name not in own:
                if dotted(value) not in ("self", "cls", *NOT_TORCH):
                    yield name
            case ast.Constant(value=str(name)) if NAME.fullmatch(name) and name not in own:
                yield name  # for `getattr`
            case _:
                pass


@pytest.fixture(scope="module")
def in_source() -> dict[str, set[str]]:
    """Each private part, and the files that use it."""
    files = {str(path.relative_to(PACKAGE)): nodes(path) for path in sources()}
    own = own_names(files)
    found: dict[str, set[str]] = {}
    for name, inside in files.items():
        for part in used(inside, own):
            if part.startswith("torch.") or not name.startswith(OTHERS):
                found.setdefault(part, set()).add(name)
    return found


def on_page() -> dict[str, set[str]]:
    return {part: set(files.strip().split(", ")) for part, files in ROW.findall(PAGE.read_text())}


@pytest.mark.thorough
def test_the_page_has_all_private_parts_that_are_used_and_where(in_source: dict[str, set[str]]) -> None:
    listed = on_page()
    short = {part.rpartition(".")[2]: part for part in listed}
    found = {part if part in listed else short.get(part, part): files for part, files in in_source.items()}
    assert {part: sorted(files) for part, files in found.items()} == {
        part: sorted(files) for part, files in listed.items()
    }


@pytest.mark.parametrize("path", sorted(part for part in on_page() if part.startswith("torch.")))
def test_the_torch_that_is_installed_has_it(path: str) -> None:
    module, _, rest = path, "", ""
    found: Any = None
    while found is None:
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
    for name in filter(None, rest.split(".")):
        found = getattr(found, name)
