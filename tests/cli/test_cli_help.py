"""Help answers at once and ends with commands that work."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from osfl.cli.main import EXAMPLES, VERBS
from tests.cli.conftest import Osfl

HEAVY = ("torch", "numpy", "sklearn", "jinja2", "PIL", "scipy")


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    code = f"import osfl.cli.main, sys; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("command", ["--help", "run --help", "ls methods", "ls presets", "ls architectures", "--version"])
def test_help_and_lists_import_no_torch(command: str) -> None:
    code = f"import sys, osfl.cli.main as m; m.answer({command.split()!r}); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "False"


def test_python_m_osfl() -> None:
    result = subprocess.check_output([sys.executable, "-m", "osfl", "--version"], text=True)
    assert result.startswith("osfl ")


@pytest.mark.parametrize("verb", VERBS)
def test_help_ends_with_its_examples(osfl: Osfl, verb: str) -> None:
    result = osfl(f"{verb} --help")
    text = " ".join(result.out.split())
    assert result.code == 0
    end = text[text.index("Commands that work as they stand:") :]
    assert all(f"$ {example}" in end for example in VERBS[verb][1])
    assert "--format" in text


def test_the_first_page_lists_every_verb(osfl: Osfl) -> None:
    text = osfl("--help").out
    assert all(f" {verb} " in text for verb in VERBS)
    assert all(example in text for example in EXAMPLES)


def test_the_page_about_the_command_line_lists_every_verb() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `osfl "))
    assert [verb for verb in VERBS if f"`osfl {verb}" not in rows] == []


@pytest.mark.parametrize("verb", VERBS)
def test_examples_work(osfl: Osfl, verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one folder; the demo only at its smallest, for its real size takes a minute."""
    monkeypatch.setattr("osfl.simulate.rehearsal.TARGET", 0.05)
    for example in VERBS[verb][1]:
        if example.startswith("python"):
            subprocess.run([sys.executable, *shlex.split(example)[1:]], check=True, cwd=tmp_path)
            continue
        if example == "osfl demo" or example.startswith(
            "osfl dashboard"
        ):  # a coordinator stays open; tests/coordinator starts real ones
            continue
        result = osfl(example.removeprefix("osfl "))
        assert result.code == 0, f"{example}\n{result.out}\n{result.err}"
