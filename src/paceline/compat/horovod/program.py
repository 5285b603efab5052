"""Have a program that is written for Horovod find Paceline where it imports `horovod`.

`paceline run --as horovod` calls `prepare_program` before the program runs. From then on `horovod`, `horovod.torch` and
what programs import below them are modules of this package, whether Horovod is installed or not.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

from paceline.compat.horovod.variables import set_place
from paceline.plan.job import Assignment

__all__ = ["MODULES", "prepare_program", "provide_modules"]

OWN = "paceline.compat.horovod"
VERSION = "0.28.1"  # of the Horovod whose interface this is

# Module of Horovod -> modules here whose names it has.
MODULES: dict[str, tuple[str, ...]] = {
    "horovod": (f"{OWN}.function_run",),
    "horovod.torch": (OWN,),
    "horovod.torch.mpi_ops": (OWN, f"{OWN}.operations", f"{OWN}.handles"),
    "horovod.torch.functions": (f"{OWN}.functions",),
    "horovod.torch.compression": (f"{OWN}.compression",),
    "horovod.torch.optimizer": (f"{OWN}.optimizer",),
    "horovod.torch.sync_batch_norm": (f"{OWN}.sync_batch_norm",),
    "horovod.torch.elastic": (f"{OWN}.elastic",),
    "horovod.torch.elastic.state": (f"{OWN}.elastic_state", f"{OWN}.elastic_sampler"),
    "horovod.torch.elastic.sampler": (f"{OWN}.elastic_sampler",),
    "horovod.common": (),
    "horovod.common.basics": (f"{OWN}.basics",),
    "horovod.common.elastic": (f"{OWN}.elastic_state", f"{OWN}.elastic_run", f"{OWN}.errors"),
    "horovod.common.exceptions": (f"{OWN}.errors",),
    "horovod.common.process_sets": (f"{OWN}.process_sets",),
    "horovod.common.util": (f"{OWN}.common_util",),
    "horovod.runner": (f"{OWN}.function_run",),
    "horovod.runner.util": (),
    "horovod.runner.util.threads": (f"{OWN}.common_util",),
}
HOW_ELSE = {  # what other parts of Horovod are for, and what there is in their place
    "horovod.tensorflow": "`paceline run` starts TensorFlow programs as they are",
    "horovod.keras": "`paceline run` starts Keras programs as they are",
    "horovod.mxnet": "MXNet is not supported",
    "horovod.spark": "start the program with `paceline run`, over SSH, Slurm, Kubernetes or Ray",
    "horovod.ray": "start the program with `paceline run` on Ray",
}


def prepare_program(assignment: Assignment) -> None:
    """Before the program of this worker begins: set what it reads, and provide Horovod's modules."""
    set_place(assignment)
    provide_modules()


def provide_modules() -> None:
    """Have imports of `horovod` and of what is below it find this package."""
    if not any(isinstance(finder, HorovodFinder) for finder in sys.meta_path):
        for name in [name for name in sys.modules if name == "horovod" or name.startswith("horovod.")]:
            del sys.modules[name]
        sys.meta_path.insert(0, HorovodFinder())


class HorovodFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds Horovod's modules, and makes them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in MODULES:
            is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
            return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)
        if fullname.partition(".")[0] != "horovod":
            return None
        top = ".".join(fullname.split(".")[:2])
        instead = HOW_ELSE.get(top, "this part of Horovod has no stand-in in Paceline")
        raise ModuleNotFoundError(
            f"{fullname} is not provided under `paceline run --as horovod`: {instead}.", name=fullname
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        for source in MODULES[module.__name__]:
            own = importlib.import_module(source)
            for name, value in vars(own).items():
                if not name.startswith("__") and not isinstance(value, types.ModuleType):
                    setattr(module, name, value)
        if module.__name__ == "horovod":
            module.__dict__["__version__"] = VERSION
        if module.__name__ == "horovod.torch":
            module.__dict__["elastic"] = importlib.import_module("horovod.torch.elastic")
