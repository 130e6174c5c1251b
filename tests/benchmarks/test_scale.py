"""Time to accuracy, growth and what bounds a phase: what is made of the measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import scale_page, server_growth, time_to_accuracy
from benchmarks.inversion_bounds import KINDS, Timed, kind_of


def test_an_accuracy_is_reached_at_the_first_scored_model_that_has_it() -> None:
    curve = {"seconds": [1.0, 2.0, 3.0], "accuracy": [0.2, 0.5, 0.4]}
    assert [time_to_accuracy.reached(curve, a) for a in (0.1, 0.3, 0.5, 0.6)] == [1.0, 2.0, 2.0, None]


def test_the_slowest_seed_counts_and_one_that_never_arrives_is_not_left_out() -> None:
    seeds = {
        "0": {"seconds": [1.0, 4.0], "accuracy": [0.1, 0.6]},
        "1": {"seconds": [2.0, 6.0], "accuracy": [0.35, 0.4]},
    }
    found = time_to_accuracy.summary(seeds, 0.3)
    assert found["seconds_to_public_code"] == 4.0 and found["times_faster"] == 105.0
    assert found["final_accuracy"] == 0.5 and found["seconds_in_all"] == 6.0 and found["seconds_to_near_final"] == 6.0
    never = time_to_accuracy.summary(seeds, 0.5)
    assert never["seconds_to_public_code"] is None and "times_faster" not in never


def test_what_grows_faster_than_the_aim_is_named_unless_its_paper_compares_all_pairs() -> None:
    rows = {name: {"cpu_seconds": {}, "exponent": e} for name, e in (("dense", 1.0), ("fedisca", 1.3), ("fedbicross", 1.5))}
    assert server_growth._figures(rows)["above_aim"] == ["fedisca"]


def test_operators_are_booked_by_kind_with_their_operations() -> None:
    assert [kind_of(name) for name in ("convolution_backward", "native_batch_norm", "addmm", "sqrt")] == [
        *list(KINDS)[:2],
        "matrix product",
        "elementwise and rest",
    ]
    with Timed() as timed:
        torch.relu(torch.ones(4, 3) @ torch.ones(3, 5))
    assert timed.flops == {"matrix product": 2 * 4 * 3 * 5} and timed.calls["activation"] == 1


def test_the_page_has_what_is_recorded_and_says_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_page, "RECORDS", tmp_path)
    assert sum("has no record yet" in line for line in scale_page.tables()) == 4
    row = {"cpu_seconds": {"5": 1.0, "20": 4.0, "80": 16.0}, "exponent": 1.0}
    figures = {"aim": 1.1, "compare_all_pairs": {"fedbicross": "why"}, "methods": {"dense": row, "fedbicross": row}}
    (tmp_path / "server_growth.json").write_text(json.dumps({"date": "2026-11-19", "figures": figures}))
    page = scale_page.tables()
    assert "| dense | 1.00 | 4.00 | 16.00 | 1.00 |  |" in page and "| fedbicross | 1.00 | 4.00 | 16.00 | 1.00 | why |" in page
    assert sum("has no record yet" in line for line in page) == 3
