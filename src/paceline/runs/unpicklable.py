"""Names what keeps a function of a notebook from being sent to the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

from paceline.errors import PlanError

__all__ = ["pickled_function"]


def pickled_function(function: Callable[[Any], Any], fields: Any) -> bytes:
    """Return the function and the fields, pickled; PlanError that names the global which cannot be."""
    import cloudpickle  # only here: the command never needs it

    try:
        return cloudpickle.dumps((function, fields))
    except Exception as error:  # what an object's own __reduce__ raises may be anything
        name = getattr(function, "__qualname__", type(function).__qualname__)
        raise PlanError(
            f"{name} cannot be sent to the workers: {_culprit(function) or 'something in it'} cannot be pickled "
            f"({type(error).__name__}: {error}). Make it inside of the function, or put all of it into a script."
        ) from error


def _culprit(function: Callable[..., Any]) -> str:
    """Return "it uses the global 'lock', a lock, which"; "" where no single name is found."""
    for name, value in _used(function, set()):
        if not _can_be_pickled(value):
            return f"it uses {name!r}, an object of type {type(value).__name__}, which"
    return ""


def _used(function: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what a function uses from outside, innermost first: what the functions that it calls use."""
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    outer = dict(
        zip(function.__code__.co_freevars, (_content(cell) for cell in function.__closure__ or ()), strict=True)
    )
    found = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    defaults = {f"a default of {function.__name__}": value for value in function.__defaults__ or ()}
    for name, value in (found | outer | defaults).items():
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _used(value, seen)
        else:
            yield name, value


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has no value yet
        return None


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    except Exception:
        return False
    return True
