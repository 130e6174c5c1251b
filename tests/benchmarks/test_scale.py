"""Time to accuracy, growth and what bounds a phase: what is made of the measurements."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
    assert sum("has no record yet" in line for line in scale_page.tables()) == 6
    row = {"cpu_seconds": {"5": 1.0, "20": 4.0, "80": 16.0}, "exponent": 1.0}
    figures = {"aim": 1.1, "compare_all_pairs": {"fedbicross": "why"}, "methods": {"dense": row, "fedbicross": row}}

    def record(name: str, figures: Mapping[str, Any]) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": "2026-11-19", "figures": figures}))

    def memory(peak: float, received: float) -> dict[str, float]:
        return {"peak_mb": peak, "uploads_mb": received}

    record("server_growth", figures)
    page = scale_page.tables()
    assert "| dense | 1.00 | 4.00 | 16.00 | 1.00 |  |" in page and "| fedbicross | 1.00 | 4.00 | 16.00 | 1.00 | why |" in page
    assert sum("has no record yet" in line for line in page) == 5
    record("server_memory", {"fedavg": {"sites": {"10": memory(390, 8), "1000": memory(460, 800)}, "peak_times": 1.179}})
    ratios = {"flops": 1.0, "seconds": 1.6, "memory_bytes": 0.9}
    record("estimates", {"within": 1.5, "outside": {"dense": ["seconds"]}, "methods": {"dense": {"ratios": ratios}}})
    page = scale_page.tables()
    assert "| fedavg | 390 MB (8 MB received) | 460 MB (800 MB received) | 1.18 |" in page
    assert "| dense | 1.00 | 1.60 | 0.90 | – | seconds |" in page and any("for 0 of 1 methods" in line for line in page)
