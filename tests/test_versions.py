"""`.ci/versions.py`: what it would notice in another version of Python, on made-up packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parent.parent / ".ci" / "versions.py"
    spec = importlib.util.spec_from_file_location("versions", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "SOURCE", tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    package = tmp_path / "made_up"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "fine.py").write_text("from made_up import __name__\n")
    (package / "wanting.py").write_text("import no_such_package_anywhere\n")
    return module


def test_a_missing_package_is_named(versions: ModuleType) -> None:
    assert versions.here() == "3 files compile without a warning, 2 modules import; the others need no_such_package_anywhere"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("text = '\\d'\n", SyntaxError),  # a warning of the compiler
        ("def f(:\n", SyntaxError),
        ("from typing import NoSuchName\n", ImportError),
        ("import osfl.no_such_room\n", ModuleNotFoundError),
        ("1 / 0\n", ZeroDivisionError),
    ],
)
def test_what_fails_there_stops_it(versions: ModuleType, text: str, error: type[Exception]) -> None:
    (versions.SOURCE / "made_up" / "broken.py").write_text(text)
    with pytest.raises(error):
        versions.here()


def test_a_version_that_is_not_there_is_skipped_and_named(
    versions: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "OTHERS", ("9.99",))
    versions.main()
    assert capsys.readouterr().out == "Python 9.99: not on this machine, skipped\n"
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert versions.found(own) is not None and versions.found("9.99") is None
