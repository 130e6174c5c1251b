"""Figures of the code itself, for docs/decisions/0004: rooms, imports, types, settings, and what one run enters.

python -m benchmarks.code_figures            # prints the rows of the table; ten seconds

The run is FedAvg on digits: 2 clients, 40 images of 8 px, preset smoke, 2 workers. Files and functions are those of src/osfl
that `sys.setprofile` and `threading.setprofile` see in the second run of a process, so that imports do not count; lambdas,
comprehensions and generated functions do not count either. Matches are counted as `grep -ow` does, in docstrings, too.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from osfl.core.registry import load
from osfl.core.registry import names as method_names
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.architecture import ALLOWED, ROOT, SOURCE
from tests.simulate.test_hops import entered_directly, file_of, profiled


def entered() -> tuple[int, int]:
    """Files and named functions of ours that the second run of a process calls."""
    seen: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name, code = file_of(frame), frame.f_code
        if event == "call" and name is not None and not code.co_name.startswith("<"):
            seen.add((name, code.co_name, code.co_firstlineno))

    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=40, image_size=8)
    with tempfile.TemporaryDirectory() as folder:
        run(simulation, Path(folder) / "first", machine=Machine(workers=2))
        with profiled(note):
            run(simulation, Path(folder) / "second", machine=Machine(workers=2))
    return len({file for file, _, _ in seen}), len(seen)


def called_directly() -> int:
    """Files that simulate/run.py calls itself."""
    with tempfile.TemporaryDirectory() as folder:
        return len(entered_directly(Machine(workers=2), Path(folder) / "run")) - 1


def count(pattern: str, *folders: str) -> int:
    return sum(
        len(re.findall(pattern, path.read_text(encoding="utf-8")))
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
    )


def rows() -> Iterator[tuple[str, object]]:
    yield "loose modules in `src/osfl`", sum(not path.name.startswith("__") for path in SOURCE.glob("*.py"))
    yield "packages in `src/osfl`", sum((path / "__init__.py").exists() for path in SOURCE.iterdir())
    yield "rows of the import table", len(ALLOWED)
    yield "permissions in it", sum(map(len, ALLOWED.values()))
    yield "`method: Any` in `src`", count(r"\bmethod: Any\b", "src")
    yield "`Any` in `src`", count(r"\bAny\b", "src")
    yield "`# fmt: skip` in `src` and `tests`", count(r"# fmt: skip", "src", "tests")
    yield "`# type: ignore` in `src` and `tests`", count(r"# type: ignore", "src", "tests")
    settings = {name: set(load(name).Settings.__dataclass_fields__) for name in method_names()}
    yield "distinct settings over all methods", len(set[str]().union(*settings.values()))
    longest = max(settings, key=lambda name: len(settings[name]))
    yield f"longest list of settings ({longest})", len(settings[longest])
    files, functions = entered()
    yield "files entered by one run", files
    yield "functions entered by one run", functions
    yield "files that `simulate/run.py` calls directly", called_directly()


if __name__ == "__main__":
    for row, figure in rows():
        print(f"| {row} | {figure} |")
