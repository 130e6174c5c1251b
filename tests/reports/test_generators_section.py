"""What pages say of generators: every number of results.json, the space in words, and no bound taken for a proof."""

from __future__ import annotations

import re
from pathlib import Path

from osfl.evaluation.comparison import summarize
from osfl.reports.comparison import write_comparison
from osfl.reports.generators import bound_rows, generators_section
from osfl.reports.page import write_report
from tests.reports.conftest import Runs, Sampler


def text_of(path: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", path.read_text(encoding="utf-8"))).replace("\xa0", " ")


def test_a_run_without_generators_has_no_section(sample: Sampler, tmp_path: Path) -> None:
    assert generators_section(sample()) == {"generators": None}
    assert "Synthetic images compared with real ones" not in text_of(write_report(sample(), tmp_path))


def test_a_run_with_generators_names_the_space_the_floor_and_the_copies(
    sample: Sampler, demo_runs: Runs, tmp_path: Path
) -> None:
    text = text_of(write_report(sample(generators=True), tmp_path, demo_runs(5, seeds=1)))
    assert "EfficientNet-Lite0 (ImageNet) features at 64 px" in text and "FD (floor)" in text and "FID" not in text
    assert "2853 (359)" in text and "37.0 (-0.05)" in text and "97 (0) %" in text
    assert "Generators copy training images of basophil" in text and "too few to say" in text
    assert "2√(½ × 1.60) = 179 %" in text and "From 100 % on, it is vacuous." in text
    assert "reaches 90.0 %, this run 78.0 %: a gap of 12.0 points" in text
    assert "Too few images to estimate the error of platelet" in text and "not a bound" in text
    assert "This figure cannot be drawn" not in text


def test_no_bound_is_stated_not_drawn(sample: Sampler) -> None:
    result = sample(generators=True)
    bound = result["generators"]["bound"]
    bound |= {"value": None, "error": None, "infinite": ["monocyte"]}
    assert "There is no bound" in generators_section(result)["generators"]["bound"][0]
    bound["infinite"] = []
    assert "too few images" in generators_section(result)["generators"]["bound"][0]


def test_hostile_names_stay_text(sample: Sampler, tmp_path: Path) -> None:
    page = write_report(sample(generators=True, odd=True, clients=4), tmp_path).read_text(encoding="utf-8")
    assert "<script" not in page


def test_a_comparison_shows_the_bound_beside_the_gap_and_work_beside_bytes(demo_runs: Runs, tmp_path: Path) -> None:
    results = demo_runs(10, seeds=2)
    comparison = summarize(results)
    assert list(comparison["gaps"]) == ["federated_factory"]
    found = {r["method"]: r["scores"]["global"]["accuracy"] for r in results if r["seed"] == 0}
    assert comparison["gaps"]["federated_factory"]["values"][0] == found["centralized"] - found["federated_factory"]
    row = bound_rows(comparison)[0]
    assert row["bound"] == "179\xa0%" and row["error"] == "1.60" and row["gap"].endswith("points")
    text = text_of(write_comparison(comparison, results, tmp_path))
    assert "Generator error: bound and measured gap" in text and "Operations against bytes" in text
    assert "many rounds" in text and "TFLOP" in text


def test_without_generators_or_operations_nothing_is_drawn(demo_runs: Runs, tmp_path: Path) -> None:
    results = demo_runs(3, seeds=1)
    for result in results:
        for phase in result["costs"]["phases"].values():
            phase["flops"] = 0.0
    text = text_of(write_comparison(summarize(results), results, tmp_path))
    assert "Generator error: bound" not in text and "Operations against bytes" not in text
