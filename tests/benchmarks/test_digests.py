"""The record of release digests: it is what the code gives where last bits can be compared, and a change is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import digests
from osfl.runtime.environment import numerics

RECORD: dict[str, Any] = json.loads(digests.RECORD.read_text(encoding="utf-8"))


@pytest.mark.skipif(RECORD["numerics"] != numerics(), reason="the record is of another machine, torch or numpy")
def test_the_digests_of_two_methods_are_those_of_the_record() -> None:
    """After a wanted change: `python -m benchmarks.digests --write`, and the commit says why."""
    assert digests.changed(RECORD, ["fedavg", "onesum"]) == []


def test_a_change_is_noticed_and_named() -> None:
    now = digests.digests_of("fedavg")
    record: dict[str, Any] = {"numerics": numerics(), "digests": {"fedavg": now, "ensemble": {**now, "tensors": "0" * 64}}}
    assert digests.changed(record, ["fedavg"]) == []
    assert digests.changed(record, ["ensemble", "local_only"]) == [
        "ensemble: other tensors",
        "local_only: not in the record; write it again with --write",
    ]
    record["digests"]["fedavg"] = {**now, "release": "0" * 64}
    assert digests.changed(record, ["fedavg"]) == ["fedavg: the same tensors, another plan or other facts"]


def test_other_last_bits_are_not_compared() -> None:
    with pytest.raises(SystemExit, match="not comparable"):
        digests.changed({"numerics": {**numerics(), "cpu": "another"}, "digests": {}}, ["fedavg"])


def test_one_row_is_written_again_and_the_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "RECORD", tmp_path / "digests.json")
    monkeypatch.setattr(digests, "digests_of", lambda name: {"release": name, "tensors": "new"})
    old = {name: {"release": name, "tensors": "old"} for name in ("fedavg", "onesum")}
    digests.RECORD.write_text(json.dumps({"numerics": numerics(), "digests": old}))
    digests.main(["--write", "onesum"])
    found = json.loads(digests.RECORD.read_text())["digests"]
    assert {name: one["tensors"] for name, one in found.items()} == {"fedavg": "old", "onesum": "new"}
    digests.RECORD.write_text(json.dumps({"numerics": {**numerics(), "cpu": "another"}, "digests": old}))
    with pytest.raises(SystemExit, match="not comparable"):
        digests.main(["--write", "onesum"])
