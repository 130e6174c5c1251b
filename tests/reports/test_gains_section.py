"""Who gains and who loses, as pages say it; and how scores grow from one encounter to the next."""

from __future__ import annotations

import re
from pathlib import Path

from osfl.core.result import Gains, Result
from osfl.evaluation.comparison import summarize
from osfl.evaluation.gains import with_gains
from osfl.reports.comparison import write_comparison
from osfl.reports.gains import encounters_section, gains_section
from osfl.reports.page import write_report
from osfl.reports.plots import differences, ranked
from tests.reports.conftest import Sampler, sample_encounters


def text_of(path: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", path.read_text(encoding="utf-8"))).replace("\xa0", " ")


def reported(sample: Sampler) -> Result:
    own: Gains = {
        "mean": 0.1,
        "median": 0.2,
        "worst": -0.3,
        "worst_client": "client-04",
        "share": 0.6,
        "share_that_loses": 0.2,
        "everyone": -0.015,
        "over": "local_only",
        "values": {"a": 0.5, "b": 0.2, "c": 0.1, "d": -0.3, "e": 0.0},
    }
    return {**sample("fol"), "gains": own}


def test_a_run_says_who_gains(sample: Sampler, tmp_path: Path) -> None:
    assert gains_section(sample()) == {"gains": None}
    assert "Gain of each client" not in text_of(write_report(sample(), tmp_path / "without"))
    text = text_of(write_report(reported(sample), tmp_path / "with"))
    assert "3 of 5 clients gain over local training (60 %), 1 lose. Mean +10.0 points, median +20.0 points" in text
    assert "least: client-04, -30.0 points. On the images of everybody: -1.5 points." in text and "Compared with" not in text


def test_a_page_says_when_others_train_otherwise(sample: Sampler, tmp_path: Path) -> None:
    run = reported(sample)
    text = text_of(write_report({**run, "gains": {**run["gains"], "over": "local_only, trained otherwise (lr)"}}, tmp_path))
    assert "everybody: -1.5 points. Compared with local_only, trained otherwise (lr)." in text


def test_bars_are_sorted_and_who_loses_is_below_the_line() -> None:
    drawn = ranked({"a": -0.1, "b": 0.3, "c": 0.0}, what="w", y_label="y")
    assert drawn.index("b: +30.0") < drawn.index("a: -10.0") and "c: " not in drawn
    tops = [float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', drawn)]
    assert tops[0] < tops[1]
    assert ranked({f"client-{i}": 0.1 for i in range(70)}, what="w", y_label="y").count("<rect") == 70


def test_a_comparison_shows_every_variant(sample: Sampler, tmp_path: Path) -> None:
    runs = with_gains([sample("local_only", accuracy=0.5), sample("fol", accuracy=0.6), sample("fol", accuracy=0.7)])
    comparison = summarize(runs, labels=["local_only", "fol", "fol@align=false"])
    text = text_of(write_comparison(comparison, runs, tmp_path))
    assert "fol, seed" in text and "fol@align=false, seed" in text and "local_only, seed" not in text
    assert "Clients that gain" in text


def test_many_methods_share_one_table(sample: Sampler, tmp_path: Path) -> None:
    names = ["local_only", "fol", "fedavg", "dense", "dafl"]
    runs = with_gains([sample(name, accuracy=0.5 + 0.1 * i) for i, name in enumerate(names)])
    few = text_of(write_comparison(summarize(runs[:4], labels=names[:4]), runs[:4], tmp_path / "few"))
    assert "Method by method" not in few and "fol, seed" in few
    many = text_of(write_comparison(summarize(runs, labels=names), runs, tmp_path / "many")).split("Gain of each client", 1)[1]
    assert many.index("dafl, ") < many.index("Method by method") < many.index("fol, seed")


def test_differences_have_a_color_above_zero_and_one_below() -> None:
    drawn = differences(["m"], ["a", "b", "c"], [[-16.0, 1.0, 0.0]], what="w", unit="points")
    cells = re.findall(r'fill="var\(--(\w+),#\w+\)" fill-opacity="([\d.]+)"', drawn)[:3]
    assert [name for name, _ in cells] == ["loss", "heat", "heat"]
    assert [float(strength) for _, strength in cells] == [1.0, 0.28, 0.04]  # by the square root: a quarter of the largest
    assert "m, b: +1 points" in drawn and "-16 points" in drawn and "+1 points" in drawn
    assert "loss" not in differences(["m"], ["a"], [[2.0]], what="w")  # nobody loses: no scale for it


def test_encounters_are_drawn_one_below_the_other(sample: Sampler, tmp_path: Path) -> None:
    result = sample("fol")
    assert encounters_section(result) == {"encounters": ""}
    text = text_of(write_report({**result, "encounters": sample_encounters(result)}, tmp_path))
    assert "exchanged with their neighbors 3 times, with exactly one upload each in every encounter" in text
    assert "Accuracy by encounter" in text and "encounter 3" in text
