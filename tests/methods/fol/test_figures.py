"""Pictures of what clients learned from their neighbors, from hand-made notes."""

from __future__ import annotations

from typing import Any

import pytest

from osfl.methods.fol.figures import exchange_figures

OWN = "Weight of the own model in its client's ensemble"
RISK = "Theorem 1: risk of student and ensemble"
PRUNED = "Filters pruned of the neighbors' models"
DESCENT = "Theorem 2: distance to the distilled optimum, last layer only"


def reported(risk: float, bound: float, **more: Any) -> dict[str, Any]:
    return {
        "gap": {"risk": risk, "variation": (risk + bound) / 2, "bound": bound, "printed": 100 * bound},
        "pruned": {},
        **more,
    }


def test_weights_are_counted_in_tenths_and_one_is_in_the_last() -> None:
    weights = {"a": 0.0, "b": 0.05, "c": 0.1, "d": 0.95, "e": 1.0}
    shown = exchange_figures({name: reported(0.1, 0.2) for name in weights}, weights)[OWN]
    assert shown["series"]["clients"] == [2, 1, 0, 0, 0, 0, 0, 0, 0, 2] and shown["note"] == ""
    assert (shown["bins"][0], shown["bins"][-1], len(shown["bins"])) == (0.0, 1.0, 11)


def test_clients_stand_in_the_order_of_their_bounds() -> None:
    shown = exchange_figures({"a": reported(0.1, 0.9), "b": reported(0.3, 0.4)}, {"a": 1.0, "b": 1.0})[RISK]
    assert "as printed is 40 to 90" in shown["note"]
    assert shown["series"]["bound: mean √(KL/2)"] == [0.4, 0.9] and shown["series"]["difference of risks"] == [0.3, 0.1]


def test_descents_are_means_over_clients_and_absent_without_any() -> None:
    rows = [
        {"measured": [1.0, 0.2], "promised": [1.0, 0.8], "printed": [1.0, 1.0]},
        {"measured": [1.0, 0.4], "promised": [1.0, 0.9], "printed": [1.0, 0.9]},
    ]
    notes = {name: reported(0.1, 0.2, descent=row) for name, row in zip("ab", rows, strict=True)}
    series = exchange_figures({**notes, "c": reported(0.1, 0.2)}, dict.fromkeys("abc", 1.0))[DESCENT]["series"]
    assert series["measured"] == pytest.approx([1.0, 0.3]) and series["promised"] == pytest.approx([1.0, 0.85])
    assert series["printed"] == pytest.approx([1.0, 0.95])
    assert exchange_figures({"c": reported(0.1, 0.2)}, {"c": 1.0}).keys() == {OWN, RISK}


def test_what_pruning_leaves_is_reported_over_all_clients() -> None:
    notes = {
        "a": reported(0.1, 0.2, pruned={"b": 0.25, "c": 0.0}, bytes={"kept": 10, "whole": 40}, left_out=["d"]),
        "b": reported(0.1, 0.2, pruned={"a": 0.5}, bytes={"kept": 50, "whole": 60}),
    }
    found = exchange_figures(notes, {"a": 0.5, "b": 0.5})
    assert found[PRUNED]["series"]["models"] == [1, 0, 1, 0, 0, 1, 0, 0, 0, 0]
    assert "60.0% of their bytes" in found[PRUNED]["note"]
    assert "d (at a)" in found[OWN]["note"]
