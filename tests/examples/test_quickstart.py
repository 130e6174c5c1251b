"""The first thing a newcomer runs."""

import runpy
from pathlib import Path


def test_quickstart(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "quickstart.py"
    accuracy = runpy.run_path(str(example))["main"](tmp_path / "run")
    assert 0 < accuracy <= 1 and (tmp_path / "run" / "report" / "index.html").exists()
