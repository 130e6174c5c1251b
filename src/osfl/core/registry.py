"""Methods are found by file or folder name in osfl/methods, or outside the package by the entry-point group `osfl.methods`.

Listing names imports no method (and so no torch); only `load` does.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from osfl.core.errors import UsageError, nearest
from osfl.core.method import Method
from osfl.core.types import Plan

GROUP = "osfl.methods"


@cache
def _inside() -> tuple[str, ...]:
    folder = Path(__file__).parent.parent / "methods"
    return tuple(sorted(info.name for info in pkgutil.iter_modules([str(folder)]) if not info.name.startswith("_")))


def _outside() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in _inside()}


def names() -> tuple[str, ...]:
    """Every method that `--method` accepts."""
    return (*_inside(), *sorted(_outside()))


def load(name: str) -> type[Method]:
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


def _method_in(module: ModuleType) -> type[Method]:
    """The one method class that a module defines."""
    own = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and value.__module__ == module.__name__ and issubclass(value, Method)
    ]
    if len(own) != 1:
        raise UsageError(f"{module.__name__} must define exactly one method class, found {[c.__name__ for c in own]}")
    return _checked(own[0], module.__name__)


def _checked(found: Any, where: str) -> type[Method]:
    """A class that lacks a part of a method is refused by name, before a round starts."""
    if not inspect.isclass(found) or not issubclass(found, Method):
        raise UsageError(
            f"{where} is not a method: it is no subclass of osfl.core.method.Method", fix="See docs/architecture.md."
        )
    parts = ("simulate", "build") if found.provides("simulate") else ("contract", "client_phase", "server_phase", "build")
    missing = [part for part in parts if not found.provides(part)]
    missing += [] if hasattr(found, "Settings") else ["Settings"]
    if missing:
        raise UsageError(f"{where} is not a method: it lacks {', '.join(missing)}", fix="See docs/architecture.md.")
    return found


def is_reference(method: Method | type[Method]) -> bool:
    """References (centralized, multi-round) exist in simulation only; one-shot methods run everywhere."""
    return method.provides("simulate")


def one_shot(plan: Plan) -> Method:
    """The plan's method, ready to work; refused if it exists in simulation only."""
    method = load(plan.method)(plan.task, plan.settings)
    if is_reference(method):
        raise UsageError(
            f"{plan.method} pools images or needs many rounds: it exists in simulation only",
            field="method",
            fix="Choose a one-shot method; see `osfl ls methods`.",
        )
    return method


def describe(name: str) -> str:
    """The first sentence of a method's file, read without importing it."""
    if name in _inside():
        folder = Path(__file__).parent.parent / "methods"
        file = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
        source = file.read_text(encoding="utf-8")
        return (ast.get_docstring(ast.parse(source)) or "").strip().splitlines()[0]
    return f"from {_outside()[name].value}"
