"""The figure and the bounds of `benchmarks/privacy_curve.py`."""

from __future__ import annotations

import pytest

from benchmarks.privacy_curve import DELTA, EPSILONS, GROUPS, SHOWN, _missing, best, by_the_noise, picture
from osfl.core.result import Membership, Rate
from osfl.evaluation.privacy.rates import most_true_positives


def row(party: str, auc: float, found: float, beyond: bool) -> Membership:
    rate: Rate = {"value": found, "low": found / 2, "high": 2 * found}
    area: Rate = {"value": auc, "low": auc - 0.1, "high": auc + 0.1}
    made: Membership = {
        "party": party,
        "of": "all",
        "attack": "lira",
        "signal": "loss",
        "members": 100,
        "others": 100,
        "auc": area,
        "tpr": {"0.01": rate},
        "exceeds_bound": beyond,
    }
    return made


def test_the_best_attack_of_each_party_stands_beside_its_bound() -> None:
    rows = [row("server", 0.6, 0.02, False), row("server", 0.7, 0.01, True), row("outsider", 0.5, 0.01, False)]
    found = best(rows, 1.0, sums=True)
    assert (found["server"]["auc"]["value"], found["server"]["tpr_at_0.01"]["value"]) == (0.7, 0.02)
    assert (found["server"]["beyond_the_bound"], found["outsider"]["beyond_the_bound"]) == (1, 0)
    assert 0.01 < found["bound_by_the_noise"] < found["bound"] == pytest.approx(0.01 * 2.71828 + DELTA, abs=1e-4)
    assert best(rows, None, sums=True)["bound"] is None and "bound_by_the_noise" not in best(rows, 1.0, sums=False)
    assert all(by_the_noise(e) < most_true_positives(0.01, e, DELTA) for e in EPSILONS if e is not None)


def test_the_figure_has_a_line_for_every_method_and_says_how_many_seeds() -> None:
    assert {name for methods in GROUPS.values() for name in methods} == set(SHOWN)
    names = ["inf" if e is None else f"{e:g}" for e in EPSILONS]
    whole = {method: {name: {"accuracy": {"0": 50.0, "1": 60.0}} for name in names} for method in SHOWN}
    drawn = picture(whole)
    assert drawn.count("<polyline") == len(SHOWN) and "2 seeds" in drawn and "FederatedFactory, mixtures" in drawn
    part = picture({"onesum": {"1": {"accuracy": {"0": 50.0}}, "3": {"accuracy": {}}}})
    assert "one seed" in part and part.count("<circle") == 1


def test_the_attack_is_on_every_seed_at_the_smallest_epsilon_and_on_the_first_elsewhere() -> None:
    row = {"accuracy": {"0": 50.0, "1": 60.0}, "attack": {"0": {}}}
    assert [_missing(row, 1.0, seed) for seed in (0, 1, 2)] == [False, True, True]
    assert [_missing(row, 8.0, seed) for seed in (0, 1, 2)] == [False, False, True]
    assert _missing({"accuracy": {"0": 50.0}}, None, 0)
