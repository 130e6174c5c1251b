"""The house keeps its shape: imports point the allowed way, nothing that arrives can execute, torch comes late."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "osfl"
FILES = sorted(SOURCE.rglob("*.py"))

# room -> rooms (or top-level files) of ours that it may import; a room may always import itself
ALLOWED = {
    "protocol": {"seeds"},  # inside Context.generator and neighbours only
    "errors": set(),
    "seeds": set(),
    "meter": set(),
    "workers": set(),
    "result": {"errors"},
    "encounters": {"result"},
    "wire": {"errors", "protocol"},
    "models": {"errors", "protocol", "seeds"},
    "caching": set(),
    "data": {"caching", "errors", "protocol", "seeds"},
    "storage": {"meter", "protocol", "wire"},
    "ingredients": {"caching", "errors", "meter", "models", "protocol", "seeds", "storage", "workers"},
    "methods": {"errors", "ingredients", "models", "protocol"},
    "registry": {"errors", "protocol"},
    "contacts": {"errors", "protocol", "wire"},
    "topology": {"contacts", "errors", "protocol", "registry"},
    "plan": {"errors", "protocol", "registry", "topology", "wire"},
    "exposure": {"protocol"},
    "outgoing": {"errors", "exposure", "protocol", "storage"},
    "inputs": {"models", "result"},
    "round": {"errors", "meter", "protocol", "result", "storage", "wire"},
    "phases": {
        "contacts", "environment", "errors", "meter", "models", "outgoing", "protocol", "round", "storage", "wire", "workers",
    },
    "site": {"data", "errors", "inputs", "meter", "phases", "protocol", "registry", "round", "storage", "topology", "wire"},
    "meeting": {"errors", "phases", "protocol", "round", "site", "storage", "wire"},
    "coordinator": {"errors", "phases", "plan", "protocol", "registry", "round", "wire"},
    "provenance": {"errors", "protocol", "wire"},
    "traces": set(),
    "forgetting": {
        "environment", "errors", "phases", "plan", "protocol", "registry", "round", "storage", "traces", "wire", "workers",
    },
    "transports": {"errors", "protocol", "wire"},
    "flower_app": {"coordinator", "errors", "plan", "protocol", "site", "transports", "wire"},
    "certificates": set(),
    "flower_door": set(),
    "flower_tasks": set(),
    "cluster": {"errors", "meter", "phases", "plan", "protocol", "registry", "round"},
    "deployment": {"certificates", "coordinator", "errors", "plan", "protocol", "wire"},
    "inspection": {
        "errors", "exposure", "models", "outgoing", "plan", "protocol", "registry", "round", "site", "storage", "wire",
    },
    "desk": {"coordinator", "errors", "inspection", "phases", "protocol", "reports", "round", "wire"},
    "evaluation": {"data", "errors", "meter", "models", "protocol", "result"},
    "reports": {"errors", "result"},
    "environment": {"errors", "osfl"},
    "audit": {
        "errors", "evaluation", "phases", "protocol", "registry", "reports", "result", "round", "simulation",
    },
    "simulation": {"data", "errors", "inputs", "plan", "protocol", "registry", "topology"},
    "outcome": {
        "data", "evaluation", "inputs", "meter", "plan", "protocol", "registry", "result", "round", "simulation", "storage",
        "topology", "wire",
    },
    "run": {
        "cluster", "encounters", "environment", "errors", "evaluation", "meter", "outcome", "phases", "plan", "protocol",
        "registry", "reports", "result", "round", "simulation", "storage", "topology", "transports", "wire", "workers",
    },
    "market": {
        "environment", "errors", "models", "phases", "plan", "protocol", "registry", "reports", "result", "round", "storage",
        "transports", "wire", "workers",
    },
    "checks": {
        "forgetting", "phases", "protocol", "registry", "result", "round", "run", "simulation", "storage", "wire", "workers",
    },
}  # fmt: skip


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Rooms of ours that a file names in an import, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "osfl":
                names = [f"osfl.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {[*name.split("."), "osfl"][1] for name in names if name.split(".")[0] == "osfl"}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_the_allowed_way(path: Path) -> None:
    room = room_of(path)
    if room in ("cli", "estimate", "__init__", "__main__"):
        return  # cli may see everything; the package's front door too
    assert room in ALLOWED, f"{room} is a new room: say here whom it may import"
    extra = imported(path) - ALLOWED[room] - {room}
    assert not extra, f"{path.name} ({room}) must not import {sorted(extra)}"


@pytest.mark.parametrize("path", sorted((SOURCE / "methods").glob("*.py")), ids=lambda path: path.stem)
def test_methods_never_import_each_other(path: Path) -> None:
    assert "osfl.methods" not in path.read_text(encoding="utf-8")


def test_nobody_imports_cli() -> None:
    guilty = [path.name for path in FILES if "cli" in imported(path) and room_of(path) not in ("cli", "__main__")]
    assert not guilty


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


LIGHT = ("osfl", "osfl.protocol", "osfl.registry", "osfl.plan", "osfl.wire.inbox", "osfl.cli.main", "osfl.desk.server",
         "osfl.inspection.look")  # fmt: skip


@pytest.mark.parametrize("module", LIGHT)
def test_torch_comes_late(module: str) -> None:
    """The receiving desk starts in a tenth of a second, and --help answers at once, because they need no torch."""
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
        "from osfl.run import run, Simulation\n"
        "from osfl.simulation import open_source\n"
        "open_source('digits', 8, None)\n"
        "seen = []\n"
        "sys.addaudithook(lambda event, args: seen.append(args) if event == 'pickle.find_class' else None)\n"
        f"run(Simulation('fedavg', preset='smoke', samples=120, image_size=8), {str(tmp_path / 'run')!r})\n"
        "print(len(seen), seen[:3])"
    )
    assert events.startswith("0 "), events
