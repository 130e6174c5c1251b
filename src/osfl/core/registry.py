"""Methods are found by file or folder name in osfl/methods, or outside the package by the entry-point group `osfl.methods`.

Listing names imports no method (and so no torch); only `load` does.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

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


_OWN: dict[str, tuple[type[Method], str]] = {}  # of this process: name -> the class, and the file that it was given as


def names() -> tuple[str, ...]:
    """Every method that `--method` accepts."""
    return (*_inside(), *sorted(_outside()), *sorted(_OWN))


def register(method: type[Method], file: str = "") -> str:
    """Make a class of one's own a method of this process; its name, by which plans know it.

    Only whoever runs this process can do that: a plan that names a method never makes anybody load a file.
    """
    found = _checked(method, method.__qualname__)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", method.__name__).lower() if not file else Path(file).stem
    if name in _inside() or name in _outside():
        raise UsageError(f"there is a method {name!r} already", field="method", fix="Give yours another name.")
    _OWN[name] = (found, file)
    return name


def register_file(path: Path) -> str:
    """The same for the one method class that a Python file defines; the file is run."""
    if not path.is_file():
        raise UsageError(f"there is no file {path}", field="method", fix="Name a Python file, or one of `osfl ls methods`.")
    spec = importlib.util.spec_from_file_location(f"osfl_own_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return register(_method_in(module), str(path))


def given_as(name: str) -> str:
    """How a method is named on a command line: a file, if it was given as one."""
    return _OWN[name][1] or name if name in _OWN else name


def is_own(name: str) -> bool:
    return name in _OWN


def load(name: str) -> type[Method]:
    """The class of a method; an unknown name gets the nearest ones."""
    if name in _OWN:
        return _OWN[name][0]
    if name in _inside():
        return _method_in(importlib.import_module(f"osfl.methods.{name}"))
    point = _outside().get(name)
    if point is None:
        raise UsageError(
            f"there is no method {name!r}.{nearest(name, names())}",
            field="method",
            fix=f"Known methods: {', '.join(names())}. `osfl ls methods` explains them; one of your own is given as its file, "
            f"`--method ./{name}.py`.",
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


def _checked(found: object, where: str) -> type[Method]:
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
    return f"from {given_as(name)}" if is_own(name) else f"from {_outside()[name].value}"
