"""What is imported is declared: `pip install osfl` brings all that it needs, an extra brings all of its own."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "osfl"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# a module's name -> the name it is installed by, where they differ
INSTALLED_BY = {"PIL": "pillow", "gdcm": "python-gdcm", "sklearn": "scikit-learn", "mlflow": "mlflow-skinny"}
# Files that only run with an extra -> the extras, each of which must bring all that the file imports and the core does not.
EXTRAS = {
    "deploy/flower/app.py": ("flower",),
    "deploy/flower/gateway.py": ("flower",),
    "deploy/flower/tasks.py": ("flower",),
    "deploy/flower/grid.py": ("flower",),
    "simulate/ray.py": ("ray",),
    "data/medical.py": ("medical",),
    "models/latent_prior.py": ("diffusion",),
    "models/pretrained.py": ("hub",),
    "simulate/api.py": ("pandas",),
    "models/timm_models.py": ("timm",),
    "roles/export.py": ("onnx",),
    "simulate/tracking/to_tensorboard.py": ("tensorboard",),
    "simulate/tracking/to_mlflow.py": ("mlflow",),
    "simulate/tracking/to_wandb.py": ("wandb",),
}


def names(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]) for line in requirements}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of imported modules, `import_module("name")` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(word.value).split(".")[0] for word in node.args[:1] if isinstance(word, ast.Constant))


def foreign(path: Path) -> set[str]:
    """The distributions that this file imports from."""
    found = set(imported(ast.parse(path.read_text()))) - set(sys.stdlib_module_names) - {"osfl"}
    return {normal(INSTALLED_BY.get(name, name)) for name in found}


CORE = names(PROJECT["dependencies"])
FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if foreign(path))


@pytest.mark.parametrize("file", FILES)
def test_every_import_is_declared(file: str) -> None:
    missing = foreign(SOURCE / file) - CORE
    for extra in EXTRAS.get(file, ()):
        lacking = missing - names(PROJECT["optional-dependencies"][extra])
        assert not lacking, f"{file} imports {sorted(lacking)}: declare it in the extra {extra!r} of pyproject.toml"
    assert not missing or file in EXTRAS, f"{file} imports {sorted(missing)}: declare it in `dependencies` of pyproject.toml"


def test_everything_declared_is_imported() -> None:
    """A dependency that nobody imports is paid for by every user. Tools of tests and documentation are not imported."""
    used = set().union(*(foreign(SOURCE / file) for file in FILES))
    tools = ("dev", "docs")
    extras = {name for extra, lines in PROJECT["optional-dependencies"].items() if extra not in tools for name in names(lines)}
    assert not (CORE | extras) - used


def test_an_undeclared_import_is_noticed() -> None:
    tree = ast.parse('def late():\n    import click.core\n    import_module("ray")\nfrom PIL import Image\nfrom . import near')
    assert set(imported(tree)) == {"click", "ray", "PIL"}
    assert names(["flwr>=1.41,<1.43", "uvicorn[standard]", "huggingface_hub"]) == {"flwr", "uvicorn", "huggingface-hub"}


def test_the_pins_are_within_the_ranges() -> None:
    """constraints.txt, which `make test` installs, satisfies what we tell users to install."""
    from packaging.requirements import Requirement

    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {normal(name): version for name, version in (line.split("==") for line in lines)}
    wanted = [*PROJECT["dependencies"], *(line for lines in PROJECT["optional-dependencies"].values() for line in lines)]
    for requirement in map(Requirement, wanted):
        pinned = pins.get(normal(requirement.name))
        assert pinned and requirement.specifier.contains(pinned), f"{requirement} but constraints.txt has {pinned}"


def test_the_lock_has_the_pins_and_a_hash_of_each() -> None:
    """requirements.lock, which `make lock` writes, is what constraints.txt pins, with what every file must hash to."""
    entries = (ROOT / "requirements.lock").read_text().replace("\\\n", " ").splitlines()
    locked = {}
    for line in (line for line in entries if line.strip() and not line.startswith("#")):
        requirement, *hashes = line.split()
        name, version = requirement.split("==")
        locked[normal(name)] = version
        assert hashes and all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes if one != ";"), line
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = {normal(name): version for name, version in (line.split("==") for line in lines)}
    assert {name: pins[name] for name in locked if name in pins and pins[name] != locked[name]} == {}
    wanted = {normal(re.match(r"[A-Za-z0-9._-]+", line)[0]) for line in PROJECT["dependencies"]}  # type: ignore[index]
    assert wanted <= set(locked)
