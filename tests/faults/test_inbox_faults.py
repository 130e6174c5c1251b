"""kill -9, full and broken disks, power cuts, races, random lives. `benchmarks/wire_faults.py` does the same at full size."""

from __future__ import annotations

from pathlib import Path

from tests.faults.failures import failing_calls, power_cuts
from tests.faults.kills import at_random, numbered
from tests.faults.races import races
from tests.faults.sequences import sequences


def test_killed_at_numbered_steps(tmp_path: Path) -> None:
    found = numbered(tmp_path, every=9)
    assert found["points"] >= 30
    assert (found["not_killed"], found["lost"], found["torn"], found["not_resumed"]) == (0, 0, 0, 0)


def test_killed_at_random_moments(tmp_path: Path) -> None:
    found = at_random(tmp_path, 10)
    assert (found["lost"], found["torn"], found["not_resumed"]) == (0, 0, 0)


def test_every_call_that_can_fail(tmp_path: Path) -> None:
    found = failing_calls(tmp_path, every=4)
    assert found["calls"] >= 100
    assert (found["unhandled"], found["false_acks"], found["lost"], found["torn"], found["not_resumed"]) == (0, 0, 0, 0, 0)


def test_power_cuts(tmp_path: Path) -> None:
    found = power_cuts(tmp_path, 100)
    assert (found["lost"], found["torn"], found["not_resumed"]) == (0, 0, 0)


def test_races_have_one_winner(tmp_path: Path) -> None:
    assert races(tmp_path, 10) == {"races": 10, "processes": 16, "one_winner": 10, "leftovers": 0}


def test_random_lives(tmp_path: Path) -> None:
    assert sequences(tmp_path, 20)["violations"] == 0
