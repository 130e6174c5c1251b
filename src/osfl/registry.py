"""A method is found by its file name in osfl/methods; methods outside the package by the entry-point group `osfl.methods`.

Listing names imports no method (and so no torch); only `load` does.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from osfl.errors import UsageError
from osfl.protocol import Configured, Method, Plan, Reference

GROUP = "osfl.methods"


@cache
def _inside() -> tuple[str, ...]:
    folder = Path(__file__).parent / "methods"
    return tuple(sorted(info.name for info in pkgutil.iter_modules([str(folder)]) if not info.name.startswith("_")))


def _outside() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _inside()}


def names() -> tuple[str, ...]:
    """Every method that `--method` accepts."""
    return (*_inside(), *sorted(_outside()))


def nearest(word: str, known: tuple[str, ...] | list[str]) -> str:
    """' Did you mean a or b?' or nothing."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""


def load(name: str) -> type[Any]:
    """The class of a method; an unknown name gets the nearest ones."""
    if name in _inside():
        return _method_in(importlib.import_module(f"osfl.methods.{name}"))
    point = _outside().get(name)
    if point is None:
        raise UsageError(
            f"there is no method {name!r}.{nearest(name, names())}",
            field="method",
            fix=f"Known methods: {', '.join(names())}. `osfl ls methods` explains them.",
        )
    found = point.load()
    return _method_in(found) if isinstance(found, ModuleType) else _checked(found, point.value)


def _method_in(module: ModuleType) -> type[Any]:
    """The one method class that a module defines."""
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, Configured)
    ]
    if len(own) != 1:
        raise UsageError(f"{module.__name__} must define exactly one method class, found {[c.__name__ for c in own]}")
    return _checked(own[0], module.__name__)


def _checked(found: Any, where: str) -> type[Any]:
    """A class that lacks a verb is refused by name, before a round starts."""
    verbs = ("simulate", "build") if hasattr(found, "simulate") else (
        "architectures", "contract", "client_phase", "server_phase", "personalize", "build",
    )  # fmt: skip
    missing = [verb for verb in (*verbs, "Settings", "PRESETS", "DEVIATIONS") if not hasattr(found, verb)]
    if not inspect.isclass(found) or missing:
        raise UsageError(f"{where} is not a method: it lacks {', '.join(missing) or 'a class'}", fix="See docs/walk.md.")
    return found


def is_reference(method: Method | Reference | type[Any]) -> bool:
    """References (centralised, multi-round) exist in simulation only; one-shot methods run everywhere."""
    return hasattr(method, "simulate")


def one_shot(plan: Plan) -> Any:
    """The plan's method, ready to work; refused if it exists in simulation only."""
    method = load(plan.method)(plan.task, plan.settings)
    if is_reference(method):
        raise UsageError(f"{plan.method} pools images or speaks many times: it exists in simulation only", field="method",
                         fix="Choose a one-shot method; see `osfl ls methods`.")  # fmt: skip
    return method


def describe(name: str) -> str:
    """The first sentence of a method's file, read without importing it."""
    if name in _inside():
        source = (Path(__file__).parent / "methods" / f"{name}.py").read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(source)) or "").strip().splitlines()[0]
    return f"from {_outside()[name].value}"
