"""The table of claims: computed from records alone, and it tells a difference from noise."""

from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import claims
from benchmarks.claims import (
    EQUAL,
    GLOBAL,
    OWN,
    PAPERS,
    RECEIVED,
    SENT,
    Claim,
    differences,
    holm,
    judge,
    judged,
    spelled,
    table,
)
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
    ("a", "b", "message"),
    [
        ([0.8, 0.9, 0.7], [0.6, 0.7, 0.4], "yes"),
        ([0.6, 0.7, 0.4], [0.8, 0.9, 0.7], "no"),
        ([0.8, 0.5, 0.7], [0.6, 0.7, 0.6], "inconclusive"),
        ([0.8], [0.1], "inconclusive"),  # one seed says nothing about its spread
    ],
)
def test_a_claim_holds_where_the_difference_is_larger_than_its_noise(a: list[float], b: list[float], message: str) -> None:
    assert verdict(record("x", a=a, b=b))[0] == message


def test_seeds_are_compared_pair_by_pair() -> None:
    """Rows that vary by tenths from seed to seed can differ by hundredths on each."""
    assert verdict(record("x", a=[0.91, 0.512, 0.711], b=[0.9, 0.5, 0.7])) == ("yes", ())


def test_rows_that_have_other_seeds_are_compared_on_those_of_both() -> None:
    one = record("x", a=[0.9, 0.8, 0.7], b=[0.1, 0.2])
    one["methods"]["b"]["release_digests"] = {"seed1": "", "seed2": ""}
    assert differences(Claim("", "a", "b", everywhere), [one])["x"] == pytest.approx([0.7, 0.5])


def test_everywhere_is_judged_cell_by_cell() -> None:
    """One cell that is surely below refutes it, however far the others are above, and however wide their interval is."""
    good, bad = record("x", a=[0.9] * 9, b=[0.1] * 9), record("y", a=[0.4, 0.41, 0.42], b=[0.5, 0.5, 0.5])
    assert verdict(good, bad, everywhere=True) == ("no", ("y",)) and verdict(good, bad) == ("yes", ("y",))
    few = record("x", a=[0.9, 0.2, 0.9], b=[0.1, 0.1, 0.1])
    assert verdict(few, bad) == ("inconclusive", ("y",)) and verdict(few, bad, everywhere=True) == ("no", ("y",))
    unsure = record("y", a=[0.4, 0.5], b=[0.5, 0.5])
    assert verdict(good, unsure, everywhere=True) == ("inconclusive", ("y",)) and verdict(good, unsure) == ("yes", ("y",))
    assert verdict(good, everywhere=True) == ("yes", ())
    assert verdict(record("z", a=[0.9, 0.5], b=[0.4, 0.6]), everywhere=True) == ("inconclusive", ())


def test_what_single_cells_refute_counts_with_their_chance() -> None:
    """-0.1, -0.09, -0.08: t = 15.6 with two degrees of freedom, p = 0.0041; twice that, for the clearest of two cells."""
    good, bad = record("x", a=[0.9] * 9, b=[0.1] * 9), record("y", a=[0.4, 0.41, 0.42], b=[0.5, 0.5, 0.5])
    claim = Claim("a above b", "a", "b", everywhere, everywhere=True)
    assert judged("a", claim, differences(claim, [good, bad])).chance == pytest.approx(2 * 0.0041, rel=0.02)
    unsure = record("y", a=[0.4, 0.5], b=[0.5, 0.5])
    assert judged("a", claim, differences(claim, [good, unsure])).chance == 1


def test_cells_that_are_not_above_are_named_with_the_share_that_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim("90 %, each", "a", "b", everywhere, times=0.9, everywhere=True)
    monkeypatch.setattr(claims, "PAPERS", {"m": (claim, Claim("b above a, each", "b", "a", everywhere, everywhere=True))})
    cells = [record("x", a=[0.95, 0.96], b=[1.0, 1.0]), record("y", a=[0.8, 0.81], b=[1.0, 1.0])]
    cells.append(record("z", a=[0.5, 1.0], b=[1.0, 1.0]))
    lines = table(judge(cells))
    assert "| 1 of 3 | 2 | **no**: y 80.5 %; not above: z 75.0 % |" in lines[1]
    assert "| +16.3 ± 19.4 global | 3 of 3 | 2 | inconclusive |" in lines[2]  # above in each, and not by more than its interval
    assert "| 2 | inconclusive; not above: z 75.0 % |" in table(judge([cells[0], cells[2]]))[1]


@pytest.mark.parametrize(
    ("accuracy", "sent", "spared"),
    [
        (0.9, 30.0, 0.25),  # the rounds ended below with 40 bytes: as good, they take more
        (0.9, 50.0, None),  # ... or less than 50, or more
        (0.5, 50.0, -0.25),  # as good with 40: nothing is spared
        (0.5, 30.0, None),  # as good with 40 or earlier
    ],
)
def test_bytes_at_equal_accuracy_are_known_or_open(accuracy: float, sent: float, spared: float | None) -> None:
    one = record("x", a=[accuracy], b=[0.6])
    for label, total in (("a", sent), ("b", 40.0)):
        one["methods"][label][SENT], one["methods"][label][RECEIVED] = {"values": [total - 10]}, {"values": [10.0]}
    claim = Claim("less", "a", "b", everywhere, EQUAL, everywhere=True)
    gaps = differences(claim, [one])
    assert gaps["x"] == ([] if spared is None else [pytest.approx(spared)])
    found = judged("a", claim, gaps)
    assert found.open == (("x",) if spared is None else ()) and (spared is not None or "open: x" in table([found])[1])


def test_a_share_a_number_and_an_encounter() -> None:
    one = record("x", a=[0.9, 0.91], b=[1.0, 1.0])
    one["methods"]["a"]["own_by_encounter"] = {"1": [0.5, 0.5], "2": [0.6, 0.6]}
    assert verdict(one, times=0.8) == ("yes", ()) and verdict(one) == ("no", ("x",))
    assert differences(Claim("", "a", 0.5, everywhere), [one])["x"] == pytest.approx([0.4, 0.41])
    assert differences(Claim("", "a#2", "a#1", everywhere, OWN), [one])["x"] == pytest.approx([0.1, 0.1])


def test_a_margin_a_point_of_the_way_and_the_window_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    one = record("blood360-a0.1", **{"a": [0.5], "b@resolution=180": [0.6]})
    assert differences(Claim("", "a", "b@resolution={window}", everywhere, margin=0.2), [one])["blood360-a0.1"] == [
        pytest.approx(0.1)
    ]
    monkeypatch.setattr(claims, "_shown", lambda: {"blood360-a0.1": {"a": {"mean": [0, 0], "seed0": [0.55, 0.8]}}})
    assert differences(Claim("", "a%1", "a", everywhere), [one])["blood360-a0.1"] == [pytest.approx(0.3)]
    assert differences(Claim("", "a", "a%0.6", everywhere), [one])["blood360-a0.1"] == [pytest.approx(-0.05)]


def test_who_did_not_gain_had_too_small_a_budget_to_be_compared_with() -> None:
    better, worse = (record(cell, a=[0.5], b=[ended], fedavg=[0.4]) for cell, ended in (("x", 0.45), ("y", 0.3)))
    assert set(differences(Claim("", "a", "b", everywhere), [better, worse])) == {"x", "y"}
    assert set(differences(Claim("", "a", "b", everywhere, gained=True), [better, worse])) == {"x"}


def test_of_what_is_sent_less_is_more() -> None:
    one = record("x", a=[1.0], b=[1.0])
    one["methods"]["a"][SENT], one["methods"]["b"][SENT] = {"values": [30.0]}, {"values": [40.0]}
    assert differences(Claim("", "a", "b", everywhere, SENT), [one])["x"] == [0.25]


def test_many_claims_at_once_need_smaller_chances() -> None:
    assert holm([0.02, 0.001, 0.03]) == [True, True, True] and holm([0.03, 0.001, 0.03]) == [False, True, False]
    assert holm([0.04]) == [True] and holm([0.04, 0.9]) == [False, False]


def test_cells_without_the_rows_or_of_other_tables_have_no_say() -> None:
    claim = Claim("", "a", "b", "x".__eq__)
    assert differences(claim, [record("x", a=[1.0]), record("y", a=[1.0], b=[0.0])]) == {}
    assert {one.method for one in judge([record("blood-n5-a0.1", dense=[0.5, 0.5])])} == {"dense"}


def test_table_and_picture_say_the_same() -> None:
    rows = {"fedbicross": [0.9, 0.8], "dense": [0.5, 0.5], "coboosting": [0.5, 0.4], "fedisca": [0.91, 0.81]}
    found = judge([record("blood-n5-a0.1", **rows)])
    lines, drawn = "\n".join(table(found)), picture(found)
    assert "| above DENSE in every cell | ours | +35.0 ± 63.5 own | 1 of 1 | 2 | inconclusive | – |" in lines
    assert "| above Co-Boosting in every cell | ours | +40.0 ± 0.0 own | 1 of 1 | 2 | yes | yes |" in lines
    assert "| above FedISCA in every cell | ours | -1.0 ± 0.0 own | 0 of 1 | 2 | **no**: blood-n5-a0.1 -1.0 | yes |" in lines
    alone = judge([record("blood-n5-a0.1", fedbicross=[0.9], dense=[0.5])])[0]
    assert "| +40.0 (one seed) own | 1 of 1 | 1 | inconclusive | – |" in table([alone])[1]
    for one in found:
        assert one.claim.text in drawn and f"{one.above:+.1f}" in drawn
    ElementTree.fromstring(drawn)  # a file of its own, so it has to be XML


@pytest.mark.parametrize("claim", [claim for claims in PAPERS.values() for claim in claims], ids=lambda claim: claim.text)
def test_every_claim_is_about_rows_that_some_cell_of_the_grid_has(claim: Claim) -> None:
    rows = [row for row in (claim.left, claim.right) if isinstance(row, str)]
    assert any({spelled(cell, row)[0] for row in rows} <= set(methods_of(cell)) for cell in CELLS if claim.cells(cell))
    assert width_of(claim.text, 11) <= TEXT - 140, "the picture would cut it"
