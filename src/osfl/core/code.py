"""The digest of a method's code: its own files and every file of ours that they import, without running any of them."""

from __future__ import annotations

import ast
import hashlib
import inspect
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
_ROOMS = ("methods", "ingredients", "models")  # where what a method computes is written; other rooms carry and judge it


def code_digest(method: type[object]) -> str:
    """Equal as long as nothing changed that decides what the method computes; comments count as changes, too."""
    own = Path(inspect.getfile(method))
    seen: set[Path] = set()
    waiting = [*own.parent.rglob("*.py")] if own.name == "__init__.py" else [own]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen.add(path)
            waiting += _imported(path)
    whole = hashlib.sha256()
    for path in sorted(seen, key=_name):
        whole.update(f"{_name(path)}\n{_content(path)}\n".encode())
    return whole.hexdigest()


def _name(path: Path) -> str:
    """The same wherever the package is installed."""
    return str(path.relative_to(_PACKAGE)) if path.is_relative_to(_PACKAGE) else path.name


@cache
def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def _imported(path: Path) -> tuple[Path, ...]:
    """Files of ours that a file names in an import, wherever in it."""
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
    parts = [name.split(".")[1:] for name in named if name.startswith("osfl.")]
    files = [_PACKAGE.joinpath(*part) for part in parts if part[0] in _ROOMS]
    found = [file for path in files for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]
    return tuple(sorted(found))
