"""Who may import whom, as a table of rooms; `python -m tests.architecture` draws it into docs/architecture.md."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Set
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "osfl"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: drawn by `python -m tests.architecture` -->", "<!-- end of rooms -->"

# room -> rooms that it may import, lowest first: every row names only rooms above it, so there is no cycle.
# A room may always import itself. "osfl" is the package's own __init__.py and __main__.py.
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "runtime": {"core"},
    "wire": {"core", "runtime"},
    "models": {"core", "runtime"},
    "data": {"core", "runtime"},
    "ingredients": {"core", "runtime", "models"},
    "methods": {"core", "runtime", "models", "ingredients"},
    "reports": {"core"},
    "evaluation": {"core", "runtime", "models", "data"},
    "rounds": {"core", "runtime", "wire", "models"},
    "roles": {"core", "runtime", "wire", "models", "data", "reports", "evaluation", "rounds"},
    "simulate": {
        "core",
        "runtime",
        "wire",
        "models",
        "data",
        "ingredients",
        "reports",
        "evaluation",
        "rounds",
    },
    "deploy": {"core", "runtime", "wire", "rounds", "roles"},
    "dashboard": {"core", "runtime", "wire", "reports", "rounds", "roles"},
    "cli": {
        "core",
        "runtime",
        "wire",
        "models",
        "data",
        "ingredients",
        "reports",
        "evaluation",
        "rounds",
        "roles",
        "simulate",
        "deploy",
        "dashboard",
    },
    "osfl": {"core", "rounds", "simulate", "cli"},
}
# Parts of a room that may import less than it: the ranking looks at records alone, judging never sees an image or a key, and
# what goes to a tracker is made of results alone.
NARROWER: dict[str, set[str]] = {
    "evaluation/advice": {"core"},
    "rounds/judging": {"core", "runtime", "models"},
    "simulate/tracking": {"core", "reports", "evaluation"},
}


def room_of(path: Path) -> str:
    """The first folder below src/osfl."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "osfl"


def imported(path: Path) -> set[str]:
    """Modules of ours that a file names in an import, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"osfl.{alias.name}" for alias in node.names} if node.module == "osfl" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "osfl"}


def rooms_imported(path: Path) -> set[str]:
    """The same as rooms; `import osfl` is the room `osfl`."""
    names = {name.split(".")[1] if "." in name else "osfl" for name in imported(path)}
    return {name if (SOURCE / name).is_dir() else "osfl" for name in names}


def listing(table: Mapping[str, Set[str]] = ALLOWED) -> str:
    """The table as text: a line a room."""
    width = max(map(len, table))
    rows = {room: ", ".join(other for other in table if other in others) or "nothing" for room, others in table.items()}
    return "\n".join(f"{room:<{width}} ─► {others}" for room, others in rows.items())


def diagram(table: Mapping[str, Set[str]] = ALLOWED) -> str:
    """The same as a drawing of direct steps: an import that a longer way implies has no arrow of its own."""
    arrows = []
    for room, others in table.items():
        implied = {far for other in others for far in table[other]}
        arrows += [f"    {room} --> {other}" for other in sorted(others - implied)]
    return "\n".join(["flowchart TD", *arrows])


def page() -> str:
    """docs/architecture.md with the picture of today."""
    text = PAGE.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    return f"{head}{BEGIN}\n\n```mermaid\n{diagram()}\n```\n\n```text\n{listing()}\n```\n\n{END}{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
