"""The comparison page and its markdown twin."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from osfl.core.result import Result
from osfl.evaluation.comparison import summarize
from osfl.reports.columns import is_pooled, shown_columns, table_rows
from osfl.reports.comparison import reading_help, write_comparison
from osfl.reports.markdown import comparison_markdown, safe
from tests.reports.conftest import Runs, Sampler


def page_of(results: list[Result], folder: Path, comparison: dict[str, Any] | None = None) -> str:
    comparison = comparison or summarize(results, command="osfl compare --methods <a>,b")
    return write_comparison(comparison, results, folder).read_text(encoding="utf-8")


@pytest.mark.parametrize("methods", [1, 2, 5, 25])
def test_the_page_holds_every_method_and_is_self_contained(demo_runs: Runs, tmp_path: Path, methods: int) -> None:
    results = demo_runs(methods, seeds=2)
    text = page_of(results, tmp_path)
    assert all(f">{result['method']}</th>" in text for result in results)
    assert not re.search(r"https?://|<script|<link|@import", text)
    assert "osfl compare --methods &lt;a&gt;,b" in text
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        ElementTree.fromstring(svg)


def test_one_seed_and_missing_values_are_no_problem(tmp_path: Path) -> None:
    accuracy = {"mean": 0.5, "std": None, "n": 1, "values": [0.5]}
    auroc: dict[str, Any] = {"mean": None, "std": None, "n": 0, "values": []}
    methods = {"a": {"scores.global.accuracy": accuracy, "scores.global.auroc": auroc}, "b": {}}
    comparison = {"schema": 1, "command": "", "data": {}, "methods": methods, "runs": []}
    text = page_of([], tmp_path, comparison)
    assert "50.0\xa0%" in text and "±" not in text.replace("± is the", "")


def test_the_best_is_marked_but_never_the_pooled_reference_nor_saying_nothing(demo_runs: Runs) -> None:
    comparison = summarize(demo_runs(5, seeds=3))
    titles = [column.title for column in shown_columns(comparison)]
    best = {
        (row.method, title)
        for row in table_rows(comparison)
        for title, cell in zip(titles, row.cells, strict=True)
        if cell.best
    }
    assert ("fedavg_rounds", "Accuracy") in best and ("ensemble", "Up") in best and ("fedavg", "Up") in best
    assert not any(method == "centralized" for method, _ in best) and ("local_only", "Up") not in best


def test_reading_help_names_the_best_and_the_bar(demo_runs: Runs) -> None:
    results = demo_runs(5, seeds=1)
    first = reading_help(summarize(results), results)[0]
    assert "fedavg_rounds has the highest balanced accuracy" in first and "78.0\xa0%" in first and "86.0\xa0%" in first


def test_ties_in_bytes_are_named_together(demo_runs: Runs) -> None:
    results = demo_runs(3, seeds=1)
    assert reading_help(summarize(results), results)[2].startswith("ensemble, fedavg upload least, 6.22\xa0MB")


def test_the_label_map_says_which_seed_it_shows(demo_runs: Runs, sample: Sampler, tmp_path: Path) -> None:
    assert "the same in every run" in page_of(demo_runs(2), tmp_path)
    results = [*demo_runs(2, seeds=1), sample("ensemble", clients=20, seed=5)]
    assert "together, with seed 0" in page_of(results, tmp_path)
    assert "Labels of each client" not in page_of([sample(), sample("fedavg", clients=20)], tmp_path)


def test_validation_is_not_called_test(demo_runs: Runs, tmp_path: Path) -> None:
    results = demo_runs(3, seeds=1)
    for result in results:
        result["data"]["evaluated_on"] = "val"
    text = page_of(results, tmp_path)
    assert "global validation set" in text and "global test set" not in text


def test_runs_on_different_data_are_not_compared_silently(sample: Sampler) -> None:
    other = sample("fedavg")
    other["data"]["partition"] = "iid"
    results = [sample("fedavg"), other]
    comparison = summarize(results)
    assert list(comparison["methods"]) == ["fedavg (dirichlet:0.1)", "fedavg (iid)"]
    assert any("not made on the same data" in sentence for sentence in reading_help(comparison, results))


def test_output_is_the_same_every_time(demo_runs: Runs, tmp_path: Path) -> None:
    assert page_of(demo_runs(), tmp_path / "a") == page_of(demo_runs(), tmp_path / "b")


def test_markdown_has_a_row_a_method_and_escapes_names(demo_runs: Runs, sample: Sampler) -> None:
    table = comparison_markdown(summarize(demo_runs(5)))
    rows = table.splitlines()
    assert len(rows) == 2 + 5 and len({row.count(" | ") for row in rows}) == 1 and "**83.0\xa0%**" in table
    hostile = comparison_markdown(summarize([sample("a|b<script>\nc")]))
    assert "<script>" not in hostile and "a\\|b" in hostile and len(hostile.splitlines()) == 3
    assert safe("[x](javascript:y)").startswith("\\[x\\]")


def test_pooling_features_does_not_compete_either() -> None:
    assert is_pooled("centralized_tokens") and is_pooled("centralized@epochs=2") and not is_pooled("fedavg")


def unbalanced(result: Result, balanced: float) -> Result:
    """The same run on a test set in which one class has most of the images."""
    size = len(result["task"]["classes"])
    result["scores"]["confusion"] = [
        [float(90 if row == column == 0 else row == column) for column in range(size)] for row in range(size)
    ]
    result["scores"]["global"]["balanced_accuracy"] = balanced
    return result


def test_on_unbalanced_data_accuracy_crowns_nobody(sample: Sampler, tmp_path: Path) -> None:
    """`always` answers the most frequent class, has the highest accuracy, sends least, and is marked best nowhere."""
    always, honest = unbalanced(sample("always", accuracy=0.91), 1 / 8), unbalanced(sample("honest", accuracy=0.8), 0.7)
    classes = len(always["task"]["classes"])
    always["scores"]["global"]["balanced_accuracy"] = 1 / classes
    always["costs"]["upload_bytes"] = 10
    comparison = summarize([always, honest, unbalanced(sample("other", accuracy=0.5), 0.4)])
    assert comparison["headline"]["metric"] == "balanced_accuracy" and comparison["below"] == ["always"]
    assert shown_columns(comparison)[0].title == "Balanced accuracy"
    rows = {row.method: row for row in table_rows(comparison)}
    assert not any(cell.best for cell in rows["always"].cells) and rows["honest"].cells[0].best
    reading = " ".join(reading_help(comparison, [always, honest]))
    assert "honest has the highest balanced accuracy" in reading and "always is no better than always answering" in reading
    assert "Balanced accuracy by method" in page_of([], tmp_path, comparison)
    chosen = summarize([always, honest], metric="accuracy")
    assert chosen["headline"]["metric"] == "accuracy" and "chosen with --metric" in chosen["headline"]["why"]


def test_smoke_runs_carry_a_banner_everywhere(demo_runs: Runs, tmp_path: Path) -> None:
    results = demo_runs(2, seeds=1)
    assert "Smoke run" not in page_of(results, tmp_path)
    results[0]["preset"] = "smoke"
    assert page_of(results, tmp_path).count("Smoke run") >= 2 and "Smoke run" in comparison_markdown(summarize(results))
