"""A comparison notices that code changed since a run was made, and repeats it when asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from osfl.core.code import code_digest
from osfl.core.registry import load
from osfl.simulate.compare import compare
from osfl.simulate.simulation import Simulation

SMALL = Simulation("fedavg", clients=2, partition="iid", preset="smoke", samples=60)


def test_changed_code_is_named_and_fresh_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(SMALL, ["fedavg"], [0], tmp_path)["changed"] == []
    assert compare(SMALL, ["fedavg"], [0], tmp_path)["changed"] == []
    path = tmp_path / "fedavg" / "seed0" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "0" * 64, "seed": 0}))
    reported = compare(SMALL, ["fedavg"], [0], tmp_path)
    assert reported["changed"] == ["fedavg"]
    assert "The code of fedavg changed" in (tmp_path / "report" / "index.html").read_text()
    again = compare(SMALL, ["fedavg"], [0], tmp_path, fresh=True)
    assert again["changed"] == [] and json.loads(path.read_text())["code"] == code_digest(load("fedavg"))


def test_the_digest_follows_imports_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {name: code_digest(load(name)) for name in ("fedavg", "ensemble", "onesum")}
    assert len(set(digests.values())) == 3
    changed = "ingredients/training/local.py"
    monkeypatch.setattr("osfl.core.code._content", lambda path: "new" if str(path).endswith(changed) else "old")
    with_new = {name: code_digest(load(name)) for name in ("fedavg", "onesum")}
    monkeypatch.setattr("osfl.core.code._content", lambda path: "old")
    assert code_digest(load("fedavg")) != with_new["fedavg"]


def test_fresh_deletes_runs_only(tmp_path: Path) -> None:
    kept = tmp_path / "fedavg" / "seed0" / "notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    compare(SMALL, ["fedavg"], [0], tmp_path, fresh=True)
    assert kept.exists()
