"""Distances, scores and intervals against values by hand; what excludes a method; and who is left."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from osfl.evaluation.advice.known import Case, Cell, Row, class_share, counted_share, distance, known_cells
from osfl.evaluation.advice.needs import Wants, excluded
from osfl.evaluation.advice.ranking import NEAR, REACH, UNKNOWN, advise, quantile

HERE = Case(sites=5, images=4000, classes=8, share=0.25, side=28, channels=3, kind="medical")


def row(*everyone: float, own: tuple[float, ...] = (0.5,), upload: float = 1e6, server: float = 1.0, weights: str = "") -> Row:
    return Row(everyone, own, upload, server, 1.0, weights)


def cell(name: str, sites: int, **rows: Row) -> Cell:
    case = Case(sites, 4000, 8, 0.25, 28, 3, "medical")
    return Cell(name, name, case, 0.2, {label.replace("__", "@"): one for label, one in rows.items()})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"sites": 20}, 2.0),
        ({"images": 1000}, 2.0),
        ({"classes": 2}, 2.0),
        ({"share": 1.0}, 2.0),
        ({"side": 224}, 3.0),
        ({"channels": 1}, 2.0),
        ({"kind": "natural"}, 3.0),
        ({"sites": None, "side": None, "kind": None}, 0.0),
        ({"sites": 10, "images": 8000, "channels": 1}, 4.0),
    ],
)
def test_a_doubling_counts_one(changes: dict[str, object], expected: float) -> None:
    other = Case(**{**HERE.__dict__, **changes})
    assert distance(HERE, other) == distance(other, HERE) == pytest.approx(expected)


def test_the_share_of_classes_that_a_site_has() -> None:
    assert [class_share(kind, 5, 8) for kind in ("silos", "classes:2", "iid", "domains")] == [1 / 8, 2 / 8, 1, 1]
    assert class_share("dirichlet:0.1", 5, 8) == pytest.approx(0.3 / 1.1)
    assert class_share("dirichlet:0.05", 1000, 8) == 1 / 8  # never less than one class
    assert counted_share([[10, 10, 0, 0], [5, 5, 5, 5], [0, 0, 0, 0]]) == pytest.approx((0.5 + 1) / 2)
    assert counted_share([[30, 10]]) == pytest.approx(1600 / (2 * 1000))


def test_the_score_is_the_weighted_difference_to_the_best_of_the_same_cells() -> None:
    cells = [cell("near", 5, onesum=row(0.9, 0.92), fedavg=row(0.5)), cell("far", 20, fedavg=row(0.4), dense=row(0.6))]
    found = {one.label: one for one in advise(HERE, Wants(), cells).ranked}
    pull = 2**-REACH
    assert found["onesum"].score == pytest.approx(-(pull * UNKNOWN) / (1 + pull))
    assert found["dense"].score == pytest.approx(-(pull * UNKNOWN) / (0.25 + pull))  # the best of a far cell: a little less
    assert found["fedavg"].score == pytest.approx(-(0.41 + 0.25 * 0.2 + pull * UNKNOWN) / (1.25 + pull))
    assert found["fedavg"].accuracy == pytest.approx((0.5 + 0.25 * 0.4) / 1.25)
    assert [(one.cell, one.distance) for one in found["fedavg"].evidence] == [("near", 0.0), ("far", 2.0)]
    assert list(found) == ["onesum", "dense", "fedavg"]


def test_a_method_is_listed_once_with_its_best_variant() -> None:
    cells = [cell("near", 5, onesum=row(0.9), onesum__symmetry=row(0.1), fedavg=row(0.5))]
    rows = dict(cells[0].rows)
    rows["onesum@symmetry=flip"] = rows.pop("onesum@symmetry")
    cells = [replace(cells[0], rows=rows)]
    advice = advise(HERE, Wants(), cells)
    assert [one.label for one in advice.ranked] == ["onesum", "fedavg"] and len(advice.variants) == 3


def test_an_excluded_method_is_no_rival() -> None:
    """FALCON needs weights that are not allowed: being far behind it is no fault."""
    cells = [cell("near", 5, falcon=row(0.99, weights="some-encoder"), fedavg=row(0.5))]
    advice = advise(HERE, Wants(encoder=False), cells)
    assert advice.excluded == {"falcon": "needs published weights (some-encoder)"}
    assert advice.ranked[0].evidence[0].behind == 0


def test_nothing_near_is_known() -> None:
    advice = advise(Case(sites=5 * 2**7), Wants(), [cell("one", 5, fedavg=row(0.5))])
    assert not advice.known and advice.ranked == () and advice.nearest[0][0] == 7 > REACH > NEAR


def test_the_interval_holds_the_middle_of_the_weight() -> None:
    values = [(0.5, 1.0), (0.9, 8.0), (0.7, 1.0)]
    assert [quantile(values, at) for at in (0.05, 0.1, 0.15, 0.2, 0.25, 0.9, 1.0)] == [0.5, 0.5, 0.7, 0.7, 0.9, 0.9, 0.9]


@pytest.mark.parametrize(
    ("label", "wants", "reason"),
    [
        ("fedavg", Wants(), ""),
        ("local_only", Wants(), "sends nothing"),
        ("local_only", Wants(personal=True), ""),
        ("fedavg", Wants(personal=True), "one model"),
        ("onesum", Wants(personal=True), "one model"),
        ("onesum@prior=site", Wants(personal=True), ""),
        ("fedavg", Wants(server=False), "needs a server"),
        ("fol", Wants(server=False), ""),
        ("onesum@prior=site@topology=random:5@encounters=3", Wants(server=False), ""),
        ("fedavg", Wants(forget_class=True), "no part of its own for each class"),
        ("federated_factory", Wants(forget_class=True), ""),
        ("onesum", Wants(forget_class=True), "no part of its own for each class"),
        ("onesum@by_class=true", Wants(forget_class=True), ""),
        ("dense", Wants(secure_sum=True), "not only their sum"),
        ("onesum", Wants(secure_sum=True), ""),
        ("fedcgs", Wants(secure_sum=True), ""),
        ("fedavg", Wants(secure_sum=True), "set weighting=uniform, which no committed record has"),
        ("fedavg@personalize=prior@weighting=uniform", Wants(secure_sum=True), "set personalize=none"),
        ("fedavg@weighting=uniform", Wants(secure_sum=True), ""),
        ("onesum", Wants(epsilon=8.0), "no committed record has it with differential privacy"),
        ("federated_factory", Wants(epsilon=8.0), "no committed record has it with differential privacy"),
        ("onesum@epsilon=8@delta=1e-05@noise=share", Wants(epsilon=8.0), ""),
        ("onesum@epsilon=8@delta=1e-05@noise=share", Wants(epsilon=4.0), "no committed record has it with an epsilon below 8"),
        ("fedavg", Wants(upload=2e6), ""),
        ("fedavg", Wants(upload=5e5), "sends more: 1.0 MB a site"),
        ("fedavg", Wants(server_seconds=2), ""),
        ("fedavg", Wants(server_seconds=0.5), "its server takes longer: 1 s"),
    ],
)
def test_what_excludes_a_method(label: str, wants: Wants, reason: str) -> None:
    found = excluded(label, wants, replace(row(0.9), epsilon=8.0 if "@epsilon=8" in label else None))
    assert reason in found and bool(found) == bool(reason)


def test_server_seconds_that_no_record_has_are_no_reason_to_hope() -> None:
    unknown = replace(row(0.9), server=None)
    assert excluded("fedavg", Wants(), unknown) == ""
    assert excluded("fedavg", Wants(server_seconds=1e6), unknown) == "no committed record has its server seconds"


def test_rows_with_differential_privacy_count_only_where_it_is_wanted() -> None:
    """They neither compete with the others nor are beaten by them; the loosest that is allowed comes first."""
    noisy = {
        f"onesum@epsilon={e}@delta=1e-05@noise=share": replace(row(value), epsilon=e) for e, value in ((1.0, 0.7), (8.0, 0.8))
    }
    near = cell("near", 5, onesum=row(0.9), fedavg=row(0.5))
    cells = [replace(near, rows={**near.rows, **noisy})]
    plain = advise(HERE, Wants(), cells)
    assert [one.label for one in plain.variants] == ["onesum", "fedavg"] and not plain.excluded
    for most, best, accuracy in ((8.0, "8.0", 0.8), (4.0, "1.0", 0.7)):
        private = advise(HERE, Wants(epsilon=most), cells)
        assert [one.label for one in private.ranked] == [f"onesum@epsilon={best}@delta=1e-05@noise=share"]
        assert private.ranked[0].accuracy == accuracy and private.ranked[0].evidence[0].behind == 0
        assert private.excluded == {"fedavg": "no committed record has it with differential privacy"}
    none = advise(HERE, Wants(epsilon=0.5), cells)
    assert not none.ranked and none.excluded["onesum"].startswith("no committed record has it with an epsilon below 1")


def test_what_the_package_knows_is_whole() -> None:
    cells = known_cells()
    assert len(cells) > 60 and len({one.name for one in cells}) == len(cells)
    for one in cells:
        assert all(value is not None for value in one.case.__dict__.values()) and 0 < (one.constant or 0) < 1
        assert one.case.share is not None and 0 < one.case.share <= 1 and one.rows
        for found in one.rows.values():
            assert all(0 <= value <= 1 for value in (*found.everyone, *found.own)) and found.everyone
            known = (found.server, found.site)
            assert found.upload >= 0 and (None not in known if found.epsilon is None else known == (None, None))
            assert all(math.isfinite(value) for value in known if value is not None)
    assert sum(found.epsilon is not None for one in cells for found in one.rows.values()) >= 40
