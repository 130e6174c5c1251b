"""Rooms import only the rooms that the table allows, nothing that is received can execute, torch is imported late."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture import ALLOWED, NARROWER, PAGE, SOURCE, imported, page, room_of, rooms_imported

FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_the_allowed_way(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{room} is a new room: say in tests/architecture.py whom it may import"
    extra = rooms_imported(path) - ALLOWED[room] - {room}
    assert not extra, f"{path.name} ({room}) must not import {sorted(extra)}"


@pytest.mark.parametrize("folder", NARROWER)
def test_a_part_of_a_room_imports_less_than_the_room(folder: str) -> None:
    room = folder.split("/")[0]
    assert NARROWER[folder] < ALLOWED[room]
    paths = sorted((SOURCE / folder).rglob("*.py"))
    assert paths
    for path in paths:
        inside = {name for name in imported(path) if f"{name}.".startswith(f"osfl.{folder.replace('/', '.')}.")}
        extra = {name for name in imported(path) - inside if name.split(".")[1] not in NARROWER[folder]}
        assert not extra, f"{path.name} ({folder}) must not import {sorted(extra)}"


def test_the_table_has_no_cycle_and_no_idle_permission() -> None:
    """Every row names rooms above it only, and each permission is used: the table says no more than the code needs."""
    rooms = list(ALLOWED)
    assert all(rooms.index(other) < rooms.index(room) for room, others in ALLOWED.items() for other in others)
    used = {(room_of(path), other) for path in FILES for other in rooms_imported(path)}
    assert not [(room, other) for room, others in ALLOWED.items() for other in others if (room, other) not in used]


def test_only_rooms_at_the_top() -> None:
    loose = {path.name for path in SOURCE.iterdir() if path.name != "__pycache__" and not path.is_dir()}
    assert loose == {"__init__.py", "__main__.py", "py.typed"}
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == {*ALLOWED} - {"osfl"}


@pytest.mark.parametrize("room", [room for room in ALLOWED if room != "osfl"])
def test_every_room_says_what_belongs_there(room: str) -> None:
    """And the files and folders that it names are there."""
    text = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text(encoding="utf-8")))
    assert text
    named = re.findall(r"\b[a-z_]+(?:\.py\b|/)", text)
    assert not [name for name in named if not (SOURCE / room / name).exists()]


def test_the_picture_in_the_docs_is_current() -> None:
    assert page() == PAGE.read_text(encoding="utf-8"), "draw it again: python -m tests.architecture"


def where_to_look() -> list[tuple[str, str, str]]:
    """Question, file and function of each row of the table in docs/architecture.md."""
    table = PAGE.read_text(encoding="utf-8").split("## Where to look")[1]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    return [(question, file, function) for question, file, function in rows[1:]]


def defined(path: Path) -> set[str]:
    """`function`, `Class` and `Class.method` of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
    return found


@pytest.mark.parametrize(("question", "file", "function"), where_to_look())
def test_where_to_look_names_files_and_functions(question: str, file: str, function: str) -> None:
    """Every file of a row exists, and every function is defined in one of them."""
    marked = [word for part in re.findall(r"`([^`]+)`", f"{file} {function}") for word in part.split(": ")]
    paths = [SOURCE / word for word in marked if "/" in word]
    names = [word for word in marked if "/" not in word]
    assert paths and names, "name the file in the second column and the function in the third"
    assert not [path for path in paths if not path.exists()], question
    known = {name for path in paths if path.is_file() for name in defined(path)}
    assert not set(names) - known, f"{question}: not defined in {[path.name for path in paths]}"


def test_the_glossary_has_each_term_once() -> None:
    rows = (PAGE.parent / "glossary.md").read_text(encoding="utf-8").splitlines()
    terms = [row.split(" | ")[0].strip("| ") for row in rows if row.startswith("| ")]
    assert len(terms) > 50 and not [term for term in terms if terms.count(term) > 1]


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_methods_never_import_each_other(path: Path) -> None:
    own = path.relative_to(SOURCE / "methods").parts[0].removesuffix(".py")
    others = {name for name in imported(path) if name.startswith("osfl.methods")}
    assert all(name == f"osfl.methods.{own}" or name.startswith(f"osfl.methods.{own}.") for name in others), others


def test_ingredients_are_shared() -> None:
    """What one method alone uses stands beside it."""
    needs = {path: imported(path) for path in FILES}
    methods = {path.relative_to(SOURCE / "methods").parts[0] for path in (SOURCE / "methods").rglob("*.py")} - {"__init__.py"}

    def reached(name: str) -> set[str]:
        folder = SOURCE / "methods" / name
        todo = [*folder.rglob("*.py")] if folder.is_dir() else [folder]
        seen: set[str] = set()
        while todo:
            for module in needs[todo.pop()] - seen:
                seen.add(module)
                file = SOURCE.parent.joinpath(*module.split(".")).with_suffix(".py")
                todo += [file] if file.exists() else []
        return seen

    users: dict[str, set[str]] = {}
    for name in methods:
        for module in reached(name):
            users.setdefault(module, set()).add(name)
    single = {module: by for module, by in users.items() if module.startswith("osfl.ingredients.") and len(by) == 1}
    assert not single, f"move to methods/<name>/: {single}"


EXECUTES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "tarfile"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_that_can_execute_data(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & EXECUTES
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in EXECUTES
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ("eval", "exec", "torch.load", "torch.save", "__import__"), f"{name} at line {node.lineno}"
            risky = [k for k in node.keywords if k.arg == "allow_pickle" and getattr(k.value, "value", True) is not False]
            assert not risky, f"allow_pickle at line {node.lineno}"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


LIGHT = (
    "osfl",
    "osfl.core.types",
    "osfl.core.method",
    "osfl.core.registry",
    "osfl.core.plan",
    "osfl.core.settings",
    "osfl.wire.inbox",
    "osfl.rounds.state",
    "osfl.cli.main",
    "osfl.dashboard.server",
    "osfl.roles.inspection.look",
    "osfl.evaluation.advice.ranking",
)


@pytest.mark.parametrize("module", LIGHT)
def test_torch_comes_late(module: str) -> None:
    """The coordinator starts in a tenth of a second, and --help answers at once, because they need no torch."""
    assert python(f"import sys, {module}; print('torch' in sys.modules)") == "False"


def test_nothing_needs_torchvision_timm_or_medmnist() -> None:
    banned = {"torchvision", "timm", "medmnist"}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & banned, path


def test_no_unpickling_event_in_a_full_run(tmp_path: Path) -> None:
    """Python announces every unpickling of a global; a whole round has none of ours."""
    events = python(
        "import sys\n"
        "from osfl.simulate.run import run, Simulation\n"
        "from osfl.simulate.simulation import open_source\n"
        "open_source('digits', 8, None)\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: seen.append(args) if event == 'pickle.find_class' else None)\n"
        f"run(Simulation('fedavg', preset='smoke', samples=120, image_size=8), {str(tmp_path / 'run')!r})\n"
        "print(len(seen), seen[:3])"
    )
    assert events.startswith("0 "), events
