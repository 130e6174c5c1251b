"""One version and one date, wherever they stand."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from osfl import __version__
from osfl.cli.main import answer

ROOT = Path(__file__).parent.parent


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["--version"]) == 0
    newest, date = re.findall(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", text("CHANGELOG.md"), re.M)[0]
    cited = dict(re.findall(r"^(version|date-released): (\S+)$", text("CITATION.cff"), re.M))
    found = {
        "pyproject.toml": tomllib.loads(text("pyproject.toml"))["project"]["version"],
        "osfl --version": capsys.readouterr().out.split()[-1],
        "CHANGELOG.md": newest,
        "CITATION.cff": cited["version"],
    }
    assert found == dict.fromkeys(found, __version__)
    assert cited["date-released"] == date


def test_pages_name_the_wheel_of_this_version() -> None:
    named = {page.name: re.findall(r"osfl-(\d[\w.]*?)-py3", page.read_text("utf-8")) for page in (ROOT / "docs").rglob("*.md")}
    assert {version for found in named.values() for version in found} == {__version__}
