"""Which optimizers need whole parameters, or all of them: every one of torch.optim and pytorch_optimizer is tried.

python benchmarks/optimizers.py            # the table of docs/reference/optimizers.md
python benchmarks/optimizers.py Adam LAMB  # rows of some
"""

from __future__ import annotations

import argparse
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from driving.options import options_of
from paceline.checkpoint.state_tree import freeze
from paceline.parallel.check.optimizer_requirements import needs_of
from paceline.parallel.check.optimizer_state import KeptState, kept_state
from paceline.parallel.check.optimizer_trial import wants_closure

__all__ = ["kinds", "made", "row_of", "table"]

SCOPES = {"numbers": "single numbers", "rows": "rows", "whole": "whole parameters", "unknown": "not known"}
MUON_LIKE = ("AdaGO", "AdaMuon", "Muon", "MuonClip", "NorMuon")  # with a group for matrices, and one for the rest


def kinds() -> Iterator[tuple[str, type[Optimizer]]]:
    """Yield every optimizer of both libraries, with its name."""
    import pytorch_optimizer

    for library in (torch.optim, pytorch_optimizer):
        for name in sorted(vars(library), key=str.lower):
            kind: Any = getattr(library, name)
            if not inspect.isclass(kind) or not issubclass(kind, Optimizer) or kind is Optimizer:
                continue
            if kind.__module__.startswith(library.__name__.partition(".")[0]):
                yield f"{library.__name__}.{name}", kind


def made(kind: type[Optimizer]) -> Optimizer:
    """Return an optimizer of this kind over a matrix, a vector and a kernel, with the options that it has by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Conv2d(2, 4, 3, bias=False))
    matrix, vector, kernel = model.parameters()
    takes = inspect.signature(kind.__init__).parameters
    options: dict[str, Any] = {}
    if "base_optimizer" in takes:
        options = {"base_optimizer": torch.optim.SGD, "lr": 0.1}
    if takes.get("lr") is not None and takes["lr"].default is inspect.Parameter.empty:
        options["lr"] = 0.1
    options |= {"num_data": 100} if "num_data" in takes else {}
    options |= {"num_iterations": 1000} if "num_iterations" in takes else {}
    create: Callable[..., Optimizer] = functools.partial(kind, **options)
    if kind is torch.optim.Muon or kind.__name__ == "SpectralSphere":
        return create([matrix])
    if kind.__name__ in MUON_LIKE and kind is not torch.optim.Muon:
        return create([{"params": [vector], "use_muon": False}, {"params": [matrix], "use_muon": True}])
    if kind.__name__ == "GSAM":
        base = torch.optim.SGD(model.parameters(), lr=0.1)
        return create(model.parameters(), base_optimizer=base, model=model, rho_scheduler=None)
    if "model" in takes and "params" not in takes:
        return create(model)
    if "optimizer" in takes:
        return create(torch.optim.SGD([matrix, vector, kernel], lr=0.1))
    return create([matrix, vector, kernel])


def row_of(name: str, kind: type[Optimizer]) -> str:
    """Return the table's row of one optimizer."""
    try:
        optimizer = made(kind)
        groups = optimizer.param_groups
    except Exception as error:  # a library may raise anything
        return f"| `{name}` | cannot be made here ({type(error).__name__}) | | | |"
    assert groups
    needs = needs_of(optimizer)
    shown = f"`{needs.why}`" if needs.why.replace("_", "").isalnum() else needs.why.partition(":")[0]
    shown = shown or ("random numbers" if needs.draws else "")
    if wants_closure(optimizer):
        shown = "steps by a closure"
    kept = _told(kept_state(optimizer, freeze))
    return f"| `{name}` | {SCOPES[needs.scope]} | {'yes' if needs.needs_all else ''} | {shown} | {kept} |"


def _told(kept: KeptState) -> str:
    if kept.refused:
        return "cannot be stored"
    if kept.is_incomplete:
        return "partly outside of it"
    return "shapes of its own" if kept.odd_tensors else ""


def table(only: Collection[str] = ()) -> Iterator[str]:
    """Yield the lines of the table, of the optimizers named in `only`, or of all."""
    chosen = [(name, kind) for name, kind in kinds() if not only or name.rpartition(".")[2] in only or name in only]
    yield from [
        "| optimizer | its step looks at | at all parameters together | shown by | state |",
        "|---|---|---|---|---|",
    ]
    yield from (row_of(*one) for one in chosen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="names of optimizers; default: all")
    warnings.simplefilter("ignore")
    options = options_of(parser, takes="about 2 minutes", quick={"only": ["Adam", "SGD", "Muon", "Lion"]})
    for line in table(options.only):
        print(line, flush=True)


if __name__ == "__main__":
    main()
