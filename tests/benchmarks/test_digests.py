"""The record of release digests: it is what the code gives where last bits can be compared, and a change is noticed."""

from __future__ import annotations

import json
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
