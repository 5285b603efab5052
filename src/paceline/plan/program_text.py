"""Reads in a program's text, without running it, how it becomes distributed: by which calls and packages, or never.

Read are the script and the modules beside it that it imports, over several levels. What text cannot tell is left open:
a package that is not known here may do anything.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ModuleText", "ProgramText", "read_module"]

MOST_MODULES = 200  # that are read
LOCAL_RANK = re.compile(r"""add_argument\(\s*['"](--local[-_]rank)['"]""")

# Names by which a program of torch makes process groups.
MAKES_GROUPS = frozenset({"init_process_group", "init_device_mesh", "DeviceMesh"})
# Packages that make no process group of their own accord.
OTHER_PACKAGES = frozenset(
    {
        "PIL",
        "albumentations",
        "click",
        "cv2",
        "einops",
        "h5py",
        "matplotlib",
        "mlflow",
        "numpy",
        "omegaconf",
        "pandas",
        "requests",
        "rich",
        "safetensors",
        "scipy",
        "seaborn",
        "sklearn",
        "tensorboard",
        "tensorboardX",
        "tiktoken",
        "tokenizers",
        "torch",
        "torchaudio",
        "torchinfo",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "wandb",
        "yaml",
    }
)
RUNS_OTHER_CODE = frozenset({"exec", "eval", "import_module", "run_path", "run_module", "__import__", "execv", "Popen"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModuleText:
    """One file of a program."""

    path: Path
    source: str
    tree: ast.Module

    @property
    def imports(self) -> Iterator[str]:
        """The full names of the modules that it imports, and of what it takes out of them; relative ones begin with
        dots."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = "." * node.level + (node.module or "")
                yield module
                yield from (
                    f"{module}.{alias.name}" if node.module else f"{module}{alias.name}" for alias in node.names
                )

    @property
    def calls_run(self) -> bool:
        """Whether it has a call of `paceline.run`, under any name."""
        packages, functions = set[str](), set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                packages |= {alias.asname or alias.name for alias in node.names if alias.name == "paceline"}
            elif isinstance(node, ast.ImportFrom) and node.module == "paceline":
                functions |= {alias.asname or alias.name for alias in node.names if alias.name == "run"}
        called = [node.func for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        return any(
            (isinstance(one, ast.Name) and one.id in functions)
            or (
                isinstance(one, ast.Attribute)
                and one.attr == "run"
                and isinstance(one.value, ast.Name)
                and one.value.id in packages
            )
            for one in called
        )

    @property
    def names(self) -> Iterator[str]:
        """All names and attributes in it, and what it imports by name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                yield node.id
            elif isinstance(node, ast.Attribute):
                yield node.attr
            elif isinstance(node, ast.ImportFrom):
                yield from (alias.name for alias in node.names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramText:
    """A script, and the modules beside it that it imports; empty where the script cannot be read or parsed."""

    modules: tuple[ModuleText, ...]
    unread: tuple[str, ...] = ()  # files beside the script that could not be parsed

    @classmethod
    def of(cls, script: Path, *, levels: int = 10) -> ProgramText:
        """Read a script, and what it imports over so many levels."""
        root, seen = script.resolve().parent, dict[Path, ModuleText | None]()
        pending = [(script, 0)]
        while pending and len(seen) < MOST_MODULES:
            path, level = pending.pop(0)
            place = path.resolve()
            if place in seen:
                continue
            seen[place] = found = read_module(path)
            if found is not None and level < levels:
                pending += [(file, level + 1) for name in found.imports for file in _files_of(name, root, path)]
        unread = tuple(str(path) for path, found in seen.items() if found is None)
        return cls(modules=tuple(found for found in seen.values() if found is not None), unread=unread)

    @functools.cached_property
    def makes_groups(self) -> bool:
        """Whether the program makes process groups of torch by itself."""
        return any(name in MAKES_GROUPS for module in self.modules for name in module.names)

    @property
    def uses_rpc(self) -> bool:
        """Whether the program calls torch.distributed.rpc, whose agents meet by themselves."""
        return any(name == "init_rpc" for module in self.modules for name in module.names)

    @property
    def local_rank_option(self) -> str | None:
        """The option by which the program wants its local rank, as torch.distributed.launch gives it."""
        found = (LOCAL_RANK.search(module.source) for module in self.modules)
        return next((one[1] for one in found if one is not None), None)

    @property
    def packages(self) -> frozenset[str]:
        """The packages that it imports, without those of Python and its own modules."""
        own = {module.path.stem for module in self.modules} | {module.path.parent.name for module in self.modules}
        named = {name.partition(".")[0] for module in self.modules for name in module.imports}
        return frozenset(named - own - set(sys.stdlib_module_names) - {""})

    @property
    def is_never_distributed(self) -> bool:
        """Whether the text shows that no call in it can join a run: it makes no process group, and uses no package that
        might."""
        if not self.modules or self.unread or self.makes_groups:
            return False
        if any(name in RUNS_OTHER_CODE for module in self.modules for name in module.names):
            return False
        return "torch" in self.packages and self.packages <= OTHER_PACKAGES

    @property
    def calls_run(self) -> bool:
        """Whether it gives a function to `paceline.run`, and so has no loop of its own."""
        return any(module.calls_run for module in self.modules)

    @property
    def runs_paceline(self) -> bool:
        """Whether it uses Paceline itself."""
        return "paceline" in self.packages


def read_module(path: Path) -> ModuleText | None:
    """Read and parse a file; None where that cannot be done."""
    try:
        source = path.read_bytes()
        return ModuleText(path=path, source=source.decode(errors="replace"), tree=ast.parse(source))
    except (OSError, SyntaxError, ValueError):
        return None


def _files_of(name: str, root: Path, importer: Path) -> Iterator[Path]:
    """The files, below the script's folder, of an imported module."""
    dots = len(name) - len(name.lstrip("."))
    base = root if not dots else importer.resolve().parents[min(dots, len(importer.resolve().parents)) - 1]
    parts = [part for part in name.lstrip(".").split(".") if part]
    if not parts and dots:
        return
    place = base.joinpath(*parts)
    for file in (place.with_suffix(".py"), place / "__init__.py"):
        if file.is_file() and root in file.resolve().parents:
            yield file
