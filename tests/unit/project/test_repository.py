"""The repository keeps its promises: what imports no torch, who reads the environment, what is pinned and packaged."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

import paceline
from source_trees import PACKAGE, nodes, sources

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_TORCH = ["environment", "errors", "events", "config", "units", "world_detection", "host_memory", "lr_scaling"]
WITHOUT_TORCH_FOLDERS = ["plan", "schedule", "launch", "monitor", "cli", "elastic", "runs"]
WITHOUT_TORCH_FILES = ["comm/messages/json_channel.py", "comm/rendezvous/kv_store.py"]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def light_modules() -> list[str]:
    files = [PACKAGE / "__init__.py", *(PACKAGE / f"{name}.py" for name in WITHOUT_TORCH)]
    files += [PACKAGE / name for name in WITHOUT_TORCH_FILES]
    files += [path for folder in WITHOUT_TORCH_FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    # Importing __main__ runs the command; its imports are those of cli.main.
    return sorted(module_name(path) for path in files if path.name != "__main__.py")


def normal(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def test_modules_that_promise_it_import_no_torch() -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *light_modules()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "paceline.plan.job" in light_modules()


def test_no_command_but_the_one_that_asks_imports_the_planner() -> None:
    code = "import sys, paceline.cli.main; print([name for name in sys.modules if name.startswith('paceline.planner')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["[]"], done.stdout + done.stderr


@pytest.mark.thorough
def test_the_warm_parent_imports_what_all_plans_need_and_no_parameter_servers() -> None:
    code = (
        "import importlib, sys\n"
        "from paceline.launch.fork.warm_parent_client import MODULES\n"
        "for name in MODULES:\n"
        "    importlib.import_module(name)\n"
        "rare = 'zmq', 'paceline.sync.parameter_server', 'paceline.sync.local.gossip', 'paceline.worker.bare'\n"
        "print([name for name in rare if name in sys.modules])\n"
        "print('paceline.worker.loop.synchronous' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["[]", "True"], done.stdout + done.stderr


def test_only_one_file_touches_the_environment() -> None:
    offenders = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                touches = node.attr in ("environ", "environb", "getenv", "putenv", "unsetenv")
            else:
                touches = isinstance(node, ast.ImportFrom) and node.module == "os" and "env" in ast.dump(node)
            if touches and path != PACKAGE / "environment.py":
                offenders.append(f"{path.relative_to(ROOT)}: {ast.unparse(node)}")
    assert offenders == []


def test_no_class_name_stands_for_two_ideas() -> None:
    defined = defaultdict(list)
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                defined[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in defined.items() if len(paths) > 1}


def test_no_library_code_asserts_or_excepts_everything() -> None:
    offenders = []
    for path in sources():
        for node in nodes(path):
            if isinstance(node, ast.Assert) or (isinstance(node, ast.ExceptHandler) and node.type is None):
                offenders.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert offenders == []


def test_every_module_says_what_it_is_and_lists_its_public_names() -> None:
    offenders = []
    for path in sources():
        tree = nodes(path)[0]
        assert isinstance(tree, ast.Module)
        if not ast.get_docstring(tree):
            offenders.append(f"{path.relative_to(ROOT)} does not open with one sentence saying what it is")
        listed = [
            ast.literal_eval(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        ]
        defines = any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) for node in tree.body)
        if defines and not listed and path.name != "__main__.py":
            offenders.append(f"{path.relative_to(ROOT)} has no __all__")
    assert offenders == []


def test_constraints_pin_every_requirement_to_one_version() -> None:
    rows = [row for row in (ROOT / "constraints.txt").read_text().splitlines() if row and not row.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", row) for row in rows), "only name==version"
    pinned = {normal(row) for row in rows}
    assert len(pinned) == len(rows)
    extras = [one for group in PROJECT["optional-dependencies"].values() for one in group]
    required = {normal(one) for one in [*PROJECT["dependencies"], *extras]} - {"paceline"}
    assert required - pinned == set()
    assert "torch==2.13.0" in rows


def test_every_dependency_has_a_lower_and_an_upper_bound_but_torch_which_is_never_downgraded() -> None:
    for requirement in PROJECT["dependencies"]:
        if requirement != "torch>=2.11":
            assert ">=" in requirement and "<" in requirement.replace(">=", ""), requirement
    assert "torch>=2.11" in PROJECT["dependencies"]


def test_the_package_is_typed_licensed_and_has_its_command() -> None:
    assert (PACKAGE / "py.typed").exists()
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["scripts"] == {"paceline": "paceline.cli.main:main"}
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    assert "\nmake test " in (ROOT / "README.md").read_text()
    assert "\nmake test\n" in (ROOT / ".ci" / "run").read_text()


def test_no_module_has_the_name_of_a_public_object() -> None:
    """Importing such a module would put it in the place of the object: `paceline.run` once was either."""
    modules = {path.name.removesuffix(".py") for path in PACKAGE.iterdir()}
    assert not modules & set(paceline.__all__)
