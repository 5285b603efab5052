"""The user's own `torch.autograd.Function` between units is one operation.

Its forward consists of ordinary operations, but their derivatives are not those that count: a straight-through
estimator rounds, and passes the gradient on. So recording and replay see the call of the function as a whole, which
torch does not show to function modes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]  # nothing public tells which mode is on top
    handle_torch_function,
    has_torch_function,
)

__all__ = ["CustomFunction", "watched_functions"]


class CustomFunction:
    """The `apply` of a class derived from torch.autograd.Function, as a torch function: equal for the same class."""

    def __init__(self, of: type, apply: Callable[..., Any]) -> None:
        self._of, self._apply = of, apply
        self._on_call: Callable[..., None] | None = None
        self.__name__ = f"{of.__name__}.apply"

    def tell(self, on_call: Callable[..., None]) -> None:
        """Have `on_call(func, args, kwargs)` called for each torch function that its forward calls."""
        self._on_call = on_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with contextlib.nullcontext() if self._on_call is None else _Calls(self._on_call):
            return self._apply(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other._of is self._of

    def __hash__(self) -> int:
        return hash(self._of)


class _Calls(TorchFunctionMode):
    def __init__(self, on_call: Callable[..., None]) -> None:
        super().__init__()
        self._on_call = on_call

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._on_call(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def watched_functions(mode: TorchFunctionMode, *, passes_by: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """While it lasts, `mode` sees each call of such a function that is made under it, unless `passes_by()`."""
    original = vars(torch.autograd.Function)["apply"]

    def apply(of: type, *args: Any, **kwargs: Any) -> Any:
        own = original.__get__(None, of)
        if _get_current_function_mode() is not mode or not has_torch_function((None,)) or passes_by():
            return own(*args, **kwargs)
        return handle_torch_function(CustomFunction(of, own), (), *args, **kwargs)

    setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010  # its type says that it is a method
    try:
        yield
    finally:
        setattr(torch.autograd.Function, "apply", original)  # noqa: B010
