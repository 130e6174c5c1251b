"""The table of claims: computed from records alone, and it tells a difference from noise."""

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.claims import GLOBAL, OWN, PAPERS, Claim, differences, judge, judged, table
from benchmarks.claims_picture import TEXT, picture
from benchmarks.grid import CELLS, methods_of
from osfl.reports.svg import width_of


def record(cell: str, **rows: list[float]) -> dict[str, Any]:
    """One whose rows reach the same on both metrics."""
    methods: dict[str, Any] = {label: {metric: {"values": found} for metric in (OWN, GLOBAL)} for label, found in rows.items()}
    for label, found in rows.items():
        methods[label]["release_digests"] = {f"seed{seed}": "" for seed in range(len(found))}
    return {"cell": cell, "seeds": [0, 1, 2], "methods": methods}


def everywhere(cell: str) -> bool:
    return True


def verdict(*records: dict[str, Any], **changes: Any) -> tuple[str, tuple[str, ...]]:
    claim = Claim("a above b", **{"left": "a", "right": "b", "cells": everywhere, **changes})
    found = judged("a", claim, differences(claim, records))
    return found.holds, found.below


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ([0.8, 0.9, 0.7], [0.6, 0.7, 0.4], "yes"),
        ([0.6, 0.7, 0.4], [0.8, 0.9, 0.7], "no"),
        ([0.8, 0.5, 0.7], [0.6, 0.7, 0.6], "inconclusive"),
        ([0.8], [0.1], "inconclusive"),  # one seed says nothing about its spread
    ],
)
def test_a_claim_holds_where_the_difference_is_larger_than_its_noise(a: list[float], b: list[float], says: str) -> None:
    assert verdict(record("x", a=a, b=b))[0] == says


def test_seeds_are_compared_pair_by_pair() -> None:
    """Rows that vary by tenths from seed to seed can differ by hundredths on each."""
    assert verdict(record("x", a=[0.91, 0.512, 0.711], b=[0.9, 0.5, 0.7])) == ("yes", ())


def test_rows_that_have_other_seeds_are_compared_on_those_of_both() -> None:
    one = record("x", a=[0.9, 0.8, 0.7], b=[0.1, 0.2])
    one["methods"]["b"]["release_digests"] = {"seed1": "", "seed2": ""}
    assert differences(Claim("", "a", "b", everywhere), [one])["x"] == pytest.approx([0.7, 0.5])


def test_everywhere_names_the_cells_that_fail() -> None:
    good, bad = record("x", a=[0.9] * 9, b=[0.1] * 9), record("y", a=[0.4, 0.5], b=[0.5, 0.5])
    assert verdict(good, bad, everywhere=True) == ("no", ("y",)) and verdict(good, bad) == ("yes", ("y",))
    assert verdict(good, everywhere=True) == ("yes", ())
    assert verdict(record("z", a=[0.9, 0.5], b=[0.4, 0.6]), everywhere=True) == ("inconclusive", ())


def test_a_share_a_number_and_an_encounter() -> None:
    one = record("x", a=[0.9, 0.91], b=[1.0, 1.0])
    one["methods"]["a"]["own_by_encounter"] = {"1": [0.5, 0.5], "2": [0.6, 0.6]}
    assert verdict(one, times=0.8) == ("yes", ()) and verdict(one) == ("no", ("x",))
    assert differences(Claim("", "a", 0.5, everywhere), [one])["x"] == pytest.approx([0.4, 0.41])
    assert differences(Claim("", "a#2", "a#1", everywhere, OWN), [one])["x"] == pytest.approx([0.1, 0.1])


def test_cells_without_the_rows_or_of_other_tables_have_no_say() -> None:
    claim = Claim("", "a", "b", "x".__eq__)
    assert differences(claim, [record("x", a=[1.0]), record("y", a=[1.0], b=[0.0])]) == {}
    assert {one.method for one in judge([record("blood-n5-a0.1", dense=[0.5, 0.5])])} == {"dense"}


def test_table_and_picture_say_the_same() -> None:
    rows = {"fedbicross": [0.9, 0.8], "dense": [0.5, 0.5], "coboosting": [0.5, 0.4], "fedisca": [0.91, 0.81]}
    found = judge([record("blood-n5-a0.1", **rows)])
    lines, drawn = "\n".join(table(found)), picture(found)
    assert "| above DENSE in every cell | +35.0 ± 63.5 own | 1 of 1 | inconclusive |" in lines
    assert "| above Co-Boosting in every cell | +40.0 ± 0.0 own | 1 of 1 | yes |" in lines
    assert "| above FedISCA in every cell | -1.0 ± 0.0 own | 0 of 1 | **no**: blood-n5-a0.1 |" in lines
    alone = judge([record("blood-n5-a0.1", fedbicross=[0.9], dense=[0.5])])[0]
    assert "| +40.0 (one seed) own | 1 of 1 | inconclusive |" in table([alone])[1]
    for one in found:
        assert one.claim.says in drawn and f"{one.above:+.1f}" in drawn
    ElementTree.fromstring(drawn)  # a file of its own, so it has to be XML


@pytest.mark.parametrize("claim", [claim for said in PAPERS.values() for claim in said], ids=lambda claim: claim.says)
def test_every_claim_is_about_rows_that_some_cell_of_the_grid_has(claim: Claim) -> None:
    wanted = {row.partition("#")[0] for row in (claim.left, claim.right) if isinstance(row, str)}
    assert any(wanted <= set(methods_of(cell)) for cell in CELLS if claim.cells(cell))
    assert width_of(claim.says, 11) <= TEXT - 140, "the picture would cut it"
