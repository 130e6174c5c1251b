"""The floors of coverage are checked, and a room below its floor fails."""

import json
from pathlib import Path

import pytest

from tests.coverage_floors import FLOORS, main


def write_report(path: Path, wire: int) -> str:
    lines = {"wire/gate.py": wire, "rounds/state.py": 96, "cli/run.py": 96, "__init__.py": 96}
    files = {f"src/osfl/{name}": {"summary": {"covered_lines": n, "num_statements": 100}} for name, n in lines.items()}
    path.write_text(json.dumps({"files": files}))
    return str(path)


@pytest.mark.parametrize(("wire", "code"), [(95, 0), (94, 1)])
def test_a_room_below_its_floor_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], wire: int, code: int) -> None:
    assert main(write_report(tmp_path / "coverage.json", wire)) == code
    assert ("wire: 94.0 % of lines run, expected at least 95.0 %" in capsys.readouterr().out) == bool(code)


def test_a_room_that_was_not_measured_fails(tmp_path: Path) -> None:
    (tmp_path / "coverage.json").write_text('{"files": {}}')
    assert main(str(tmp_path / "coverage.json")) == 1
    assert FLOORS["wire"] == FLOORS["rounds"] == 95 and FLOORS["everything"] == 90
