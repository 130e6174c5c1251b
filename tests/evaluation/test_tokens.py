"""Discrepancy of token sequences against values worked out by hand, and a run that ends with it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from osfl.core.result import read_result
from osfl.core.seeds import torch_generator
from osfl.evaluation.distances import gaussian_discrepancy, median_squared_distance
from osfl.evaluation.tokens import Features, judge_tokens
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation


def draw(*labels: str | int) -> torch.Generator:
    return torch_generator(0, *labels)


def test_discrepancy_by_hand() -> None:
    """x = 0, 1 and y = 0, 2 with k = exp(-d²): k(0,1) + k(0,2) - (k(0,0) + k(0,2) + k(1,0) + k(1,2)) / 2."""
    a, b = torch.tensor([[0.0], [1.0]]).double(), torch.tensor([[0.0], [2.0]]).double()
    by_hand = math.exp(-1) + math.exp(-4) - (1 + math.exp(-4) + 2 * math.exp(-1)) / 2
    assert gaussian_discrepancy(a, b, 1.0) == pytest.approx(by_hand, abs=1e-12)
    assert gaussian_discrepancy(a, b, 4.0) == pytest.approx(
        math.exp(-1 / 4) + math.exp(-1) - (1 + math.exp(-1) + 2 * math.exp(-1 / 4)) / 2, abs=1e-12
    )


def test_discrepancy_is_unbiased() -> None:
    """Over all ways of splitting four points in halves of one sample each way the mean is 0 for one distribution."""
    x = torch.tensor([[0.0], [1.0], [3.0], [4.5]]).double()
    splits = [([0, 1], [2, 3]), ([0, 2], [1, 3]), ([0, 3], [1, 2])]
    assert sum(gaussian_discrepancy(x[a], x[b], 2.0) for a, b in splits) == pytest.approx(0, abs=1e-12)


def test_the_width_is_the_median_of_pairs() -> None:
    assert median_squared_distance(torch.tensor([[0.0], [1.0], [3.0]]).double()) == 4.0  # of 1, 9, 4
    assert median_squared_distance(torch.zeros(1, 3).double()) == 0.0


def _normal(count: int, shift: float, seed: str) -> Features:
    rows = torch.randn(count, 3, 4, generator=draw(seed)) + shift
    return Features(rows, torch.arange(count) % 2)


def test_same_distribution_is_near_zero_and_another_is_not() -> None:
    real, held_out = _normal(200, 0.0, "real"), _normal(150, 0.0, "held out")
    near, far = (
        judge_tokens({"synthetic": _normal(300, shift, "made"), "training": real, "held_out": held_out}, ("a", "b"), draw=draw)
        for shift in (0.0, 0.5)
    )
    assert near is not None and far is not None
    assert near["shape"] == [3, 4] and near["overall"]["compared"] == 150 and near["classes"]["a"]["held_out"] == 75
    assert near["squared_width"] == far["squared_width"] and near["overall"]["mmd_floor"] == far["overall"]["mmd_floor"]
    assert abs(near["overall"]["mmd"] or 1) < 0.005 < 0.02 < (far["overall"]["mmd"] or 0)


def test_dependence_between_tokens_is_seen() -> None:
    """Each token alone has the right distribution; together they have not."""
    rows = torch.randn(200, 1, 4, generator=draw("twins"))
    twins = Features(rows.expand(-1, 3, -1), torch.zeros(200, dtype=torch.int64))
    loose = Features(torch.randn(200, 3, 4, generator=draw("loose")), torch.zeros(200, dtype=torch.int64))
    found = judge_tokens({"synthetic": loose, "training": twins, "held_out": twins}, ("a",), draw=draw)
    assert found is not None and (found["overall"]["mmd"] or 0) > 0.02


def test_too_few_say_nothing_and_none_are_not_judged() -> None:
    real, few = _normal(20, 0.0, "real"), Features(torch.zeros(1, 3, 4), torch.zeros(1, dtype=torch.int64))
    found = judge_tokens({"synthetic": few, "training": real, "held_out": real}, ("a", "b"), draw=draw)
    assert found is not None and found["overall"]["mmd"] is None and found["classes"]["b"]["compared"] == 0
    none = Features(torch.zeros(0, 3, 4), torch.zeros(0, dtype=torch.int64))
    assert judge_tokens({"synthetic": none, "training": real, "held_out": real}, ("a", "b"), draw=draw) is None


@pytest.mark.parametrize("method", ["falcon", "fedpft"])
def test_a_round_of_features_is_compared(tmp_path: Path, method: str) -> None:
    small = Simulation(method, "digits", 2, "iid", "smoke", samples=120, image_size=8)
    result = run(small, tmp_path / "one", machine=Machine(workers=1))
    overall = result["tokens"]["overall"]
    assert overall["mmd"] is not None and overall["training"] == sum(row["train"] for row in result["clients"])
    assert read_result(tmp_path / "one") == result
    assert run(small, tmp_path / "two", machine=Machine(workers=2))["tokens"] == result["tokens"]
    page = (tmp_path / "one" / "report" / "index.html").read_text(encoding="utf-8")
    assert "Synthetic features compared with real ones" in page


def test_methods_without_synthetic_features_are_not_compared(tmp_path: Path) -> None:
    for method, changes in (("fedcgs", {}), ("falcon", {"server": "average"})):
        small = Simulation(method, "digits", 2, "iid", "smoke", samples=120, image_size=8, changes=changes)
        assert "tokens" not in run(small, tmp_path / method)
