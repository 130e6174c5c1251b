"""One simulated run enters, directly from simulate/run.py, only the files that docs/architecture.md lists."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import osfl
from osfl.simulate.run import run

SOURCE = Path(osfl.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def file_of(frame: FrameType) -> str | None:
    """The file of ours that a frame runs in; None for others, and while a module is imported."""
    path = frame.f_code.co_filename
    return path.removeprefix(f"{SOURCE}/") if path.startswith(f"{SOURCE}/") and frame.f_code.co_name != "<module>" else None


def files_above(frame: FrameType | None) -> list[str]:
    """Files of ours from this frame up to the first one; neighbors in the same file count once."""
    chain: list[str] = []
    while frame is not None:
        name = file_of(frame)
        if name is not None and chain[-1:] != [name]:
            chain.append(name)
        frame = frame.f_back
    return chain


def test_a_run_enters_the_listed_files_only(tmp_path: Path) -> None:
    listed = set(
        re.findall(r"^\| `([\w/]+\.py)`", PAGE.read_text("utf-8").split("<!-- hops -->")[1].split("<!-- end")[0], re.M)
    )
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and file_of(frame) is not None and len(chain := files_above(frame)) <= 2:
            entered.update(chain)

    simulation = osfl.Simulation("fedavg", "digits", 2, "iid", "smoke", samples=40, image_size=8)
    sys.setprofile(note)
    try:
        run(simulation, tmp_path / "run")
    finally:
        sys.setprofile(None)
    assert entered == {"simulate/run.py", *listed}
