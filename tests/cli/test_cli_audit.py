"""What `osfl audit` says when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from osfl.cli.audit import _show


def test_a_run_of_a_comparison_is_told_how_to_stand_beside_the_others_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result: Any = {"reconstruction": {"attackers": {}}}
    _show(result, tmp_path / "falcon" / "seed0")
    assert "osflreport" not in "".join("".join(capsys.readouterr()).split())
    (tmp_path / "comparison.json").write_text("{}", encoding="utf-8")
    _show(result, tmp_path / "falcon" / "seed0")
    said = "".join("".join(capsys.readouterr()).split())  # lines may break anywhere
    assert f"osflreport{tmp_path}" in said
