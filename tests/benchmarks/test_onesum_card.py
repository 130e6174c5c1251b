"""The table of OneSum's card: the best of the five by the records, the aim, and a reason where it is missed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import onesum_card
from benchmarks.grid import CELLS, RECORDS
from benchmarks.onesum_card import GLOBAL, OWN, lines_of, table


def record(cell: str, n: int = 3, **reached: tuple[float, float]) -> dict[str, Any]:
    """Rows by label (two underscores are an @) with global and own accuracy."""
    rows = {
        label.replace("__", "@"): {GLOBAL: {"mean": everyone, "n": n}, OWN: {"mean": own, "n": n}}
        for label, (everyone, own) in reached.items()
    }
    return {"cell": cell, "methods": rows}


def test_the_best_of_the_five_is_not_a_control_and_not_pooled_training() -> None:
    made = record(
        "blood-silos",
        onesum=(0.60, 0.55),
        federated_factory=(0.40, 0.41),
        fedbicross=(0.30, 0.62),
        centralized=(0.99, 0.99),
        fedavg=(0.45, 0.2),
    )
    made["methods"]["federated_factory@personalize=prior"] = {GLOBAL: {"mean": 0.2, "n": 3}, OWN: {"mean": 0.9, "n": 3}}
    made["methods"]["onesum@prior=site"] = {GLOBAL: {"mean": 0.3, "n": 3}, OWN: {"mean": 0.61, "n": 3}}
    (line,) = lines_of([made])
    assert [str(line.five[metric]) for metric in (GLOBAL, OWN)] == ["federated_factory 40.0", "fedbicross 62.0"]
    assert [str(line.others[metric]) for metric in (GLOBAL, OWN)] == ["fedavg 45.0", "federated_factory personalize=prior 90.0"]
    assert (line.everyone, line.shared, line.own) == (0.60, 0.55, 0.61)
    assert line.met(GLOBAL) and line.met(OWN) is False


@pytest.mark.parametrize(("mine", "met"), [(0.41, True), (0.4099, False)])
def test_the_aim_is_a_whole_point(mine: float, met: bool) -> None:
    (line,) = lines_of([record("blood-silos", onesum=(mine, 0.1), federated_factory=(0.40, 0.4))])
    assert line.met(GLOBAL) is met and line.met(OWN) is None
    verdict = table([record("blood-silos", onesum=(mine, 0.1), federated_factory=(0.40, 0.4))])[2]
    assert verdict.endswith("| met, own not run |" if met else "| global missed |")


def test_rows_without_all_seeds_and_cells_without_onesum_are_left_out() -> None:
    some = record("blood-silos", n=2, onesum=(0.9, 0.9), fedbicross=(0.1, 0.1))
    assert not list(lines_of([some, record("cifar-silos", fedbicross=(0.1, 0.1)), record("digits-silos", onesum=(0.9, 0.9))]))


def test_every_missed_aim_has_a_reason_and_every_reason_an_aim() -> None:
    there = [RECORDS / f"{cell}.json" for cell in CELLS if (RECORDS / f"{cell}.json").exists()]
    lines = list(lines_of([json.loads(path.read_text("utf-8")) for path in there]))
    assert len(lines) > 20
    missed = {
        (line.cell, name) for line in lines for name, metric in (("global", GLOBAL), ("own", OWN)) if line.met(metric) is False
    }
    assert missed == set(onesum_card.REASONS)
