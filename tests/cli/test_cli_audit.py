"""What `osfl audit` says when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osfl.cli.audit import _show


def test_a_run_of_a_comparison_is_reported_how_to_stand_beside_the_others_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit = {"membership": [], "canaries": [], "verdict": ["Nothing was found."], "not_shown": ["Much."]}
    result: Any = {"reconstruction": {"attackers": {}}, "audit": audit}
    _show(result, tmp_path / "falcon" / "seed0")
    shown = "".join("".join(capsys.readouterr()).split())
    assert "osflreport" not in shown and "Nothingwasfound." in shown and "Notshown:Much." in shown
    (tmp_path / "comparison.json").write_text("{}", encoding="utf-8")
    _show(result, tmp_path / "falcon" / "seed0")
    output = "".join("".join(capsys.readouterr()).split())  # lines may break anywhere
    assert f"osflreport{tmp_path}" in output
