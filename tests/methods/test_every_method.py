"""Shared checks over the registry: a new method file is tested here without a line being added."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from osfl.core.registry import names
from osfl.evaluation.embedding import random_space
from osfl.simulate.checks import CHECKS, small_federation
from osfl.simulate.run import run_federation


@pytest.fixture(autouse=True)
def _quick_judges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging synthetic images is no part of these promises and has tests of its own: in the cheapest space, and not drawn."""
    monkeypatch.setattr("osfl.evaluation.generators.available_space", random_space)
    for place in ("planes", "generator_figures"):
        monkeypatch.setattr(f"osfl.evaluation.{place}.plane", lambda parts, seed, note: {"kind": "scatter", "series": {}})


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("method", names())
def test_every_method(method: str, check: str, tmp_path: Path) -> None:
    CHECKS[check](method, tmp_path)


def digests(folder: Path) -> dict[str, list[str]]:
    found = {}
    for method in names():
        result = run_federation(small_federation(method), folder / method, {"preset": "smoke", "command": ""})
        found[method] = [result["plan_digest"], result["release_digest"], result["models_digest"]]
    return found


def test_a_new_process_gives_the_same_bytes(tmp_path: Path) -> None:
    """Every method, with another salt for Python's own hashes."""
    code = (
        "import json, sys; from pathlib import Path; from tests.methods.test_every_method import digests; "
        "print(json.dumps(digests(Path(sys.argv[1]))))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "there")],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "4711"},
        cwd=Path(__file__).parents[2],
    )
    assert json.loads(other.stdout) == digests(tmp_path / "here")
