"""One simulated run enters, directly from simulate/run.py, only the files that docs/architecture.md lists."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import osfl
from osfl.runtime.machine import Machine
from osfl.simulate.run import run

SOURCE = Path(osfl.__file__).parent
TOP, POOL = "simulate/run.py", "runtime/workers.py"
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def file_of(frame: FrameType) -> str | None:
    """The file of ours that a frame runs in; None for others, and while a module is imported."""
    path = frame.f_code.co_filename
    return path.removeprefix(f"{SOURCE}/") if path.startswith(f"{SOURCE}/") and frame.f_code.co_name != "<module>" else None


def files_above(frame: FrameType | None) -> list[str]:
    """Files of ours from this frame up to the first one; neighbors in the same file count once, and the pool's `map` between
    a function and the work that it is given not at all."""
    chain: list[str] = []
    while frame is not None:
        name = file_of(frame)
        if name is not None and chain[-1:] != [name] and not (chain and name == POOL):
            chain.append(name)
        frame = frame.f_back
    return chain


@contextlib.contextmanager
def profiled(note: Callable[[FrameType, str, Any], None]) -> Iterator[None]:
    """Call `note` for every call in this thread, and in every thread that starts meanwhile."""
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def entered_directly(machine: Machine, folder: Path) -> set[str]:
    """Files that simulate/run.py calls itself, in its own thread or in those of its pool. A thread of a pool that another file
    uses begins in that file, so that nothing in it counts."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and file_of(frame) is not None:
            chain = files_above(frame)
            if len(chain) <= 2 and chain[-1] == TOP:
                entered.update(chain)

    simulation = osfl.Simulation("fedavg", "digits", 2, "iid", "smoke", samples=40, image_size=8)
    with profiled(note):
        run(simulation, folder, machine=machine)
    return entered


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_enters_the_listed_files_only(workers: int, tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8").split("<!-- hops -->")[1].split("<!-- end")[0]
    listed = set(re.findall(r"^\| `([\w/]+\.py)`", page, re.M))
    assert entered_directly(Machine(workers=workers), tmp_path / "run") == {TOP, *listed}


def test_calls_in_threads_of_a_pool_are_seen() -> None:
    seen: set[str] = set()

    def inside() -> None:
        pass

    with profiled(lambda frame, event, _: seen.add(f"{threading.current_thread().name} {frame.f_code.co_name}")):
        thread = threading.Thread(target=inside, name="pool")
        thread.start()
        thread.join()
    assert "pool inside" in seen
