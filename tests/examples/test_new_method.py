"""A method outside the package, registered by entry point, passes the same checks as ours."""

import importlib
from pathlib import Path

import pytest

from osfl.core.registry import describe, load, names
from osfl.simulate.checks import CHECKS

FOLDER = Path(__file__).parents[2] / "examples" / "new_method"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What pip would do: the module on the path, and a dist-info that names its entry point."""
    info = tmp_path / "median_vote-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: median-vote\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[osfl.methods]\nmedian_vote = median_vote:MedianVote\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(FOLDER))
    importlib.invalidate_caches()
    return "median_vote"


def test_it_is_short(installed: str) -> None:
    assert len((FOLDER / "median_vote.py").read_text().splitlines()) <= 40


def test_it_is_found_by_name(installed: str) -> None:
    assert installed in names()
    assert load(installed).__name__ == "MedianVote"
    assert "median_vote" in describe(installed)


@pytest.mark.parametrize("check", CHECKS)
def test_it_passes_the_shared_checks(installed: str, check: str, tmp_path: Path) -> None:
    CHECKS[check](installed, tmp_path / "runs")
