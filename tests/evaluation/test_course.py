"""Accuracy on the way, and bytes at equal accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from osfl.core.types import Payload
from osfl.evaluation.comparison import summarize
from osfl.evaluation.course import equal_accuracy, mean_courses
from osfl.reports.course import course_figures, equal_rows
from osfl.rounds.folder import MILESTONES, Round
from osfl.simulate.compare import compare
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

SMALL = {"clients": 2, "samples": 60, "image_size": 8, "preset": "smoke"}


def result(method: str, accuracy: float, messages: int = 1, seed: int = 0, curve: list[float] | None = None) -> Any:
    """As much of a result as is looked at."""
    found: dict[str, Any] = {
        "method": method,
        "seed": seed,
        "clients": [],
        "data": {"dataset": "toy"},
        "settings": {"architecture": "cnn"},
        "scores": {"global": {"accuracy": accuracy}},
        "costs": {"messages_per_client": messages, "upload_bytes": 100 * messages, "download_bytes": 50 * messages},
    }
    if curve is not None:
        found["course"] = {"unit": "round", "at": list(range(1, len(curve) + 1)), "accuracy": curve}
    return found


def test_bytes_of_the_first_round_that_is_as_good() -> None:
    groups = {"once": [result("once", 0.6)], "often": [result("often", 0.8, 4, curve=[0.2, 0.5, 0.6, 0.8])]}
    (row,) = equal_accuracy(groups)
    assert (row["rounds"], row["reference_bytes"], row["bytes"], row["ratio"]) == (3, 3 * 150, 150, 3.0)
    assert not row["other_network"] and equal_rows({"equal_accuracy": [row]})[0]["reference"] == "often"
    groups["often"][0]["settings"] = {"architecture": "vit"}
    assert equal_rows({"equal_accuracy": equal_accuracy(groups)})[0]["reference"] == "often (another network)"


def test_what_is_never_reached_is_stated() -> None:
    groups = {
        "once": [result("once", 0.9), result("once", 0.3, seed=1)],
        "often": [result("often", 0.5, 2, seed=s, curve=[0.4, 0.5]) for s in (0, 1)],
    }
    (row,) = equal_accuracy(groups)
    assert row["rounds"] is None and row["ratio"] is None and (row["reached"], row["n"]) == (1, 2)
    assert equal_rows({"equal_accuracy": [row]})[0]["rounds"] == "in 1 of 2 seeds"


def test_other_shards_are_not_compared() -> None:
    groups = {"once": [result("once", 0.6)], "often": [result("often", 0.8, 4, seed=1, curve=[0.7])]}
    assert equal_accuracy(groups) == []


def test_the_mean_curve_over_seeds() -> None:
    found = mean_courses({"often": [result("often", 0.8, 2, seed=s, curve=[0.2 + s, 0.4]) for s in (0, 1)]})
    assert found["often"]["accuracy"] == pytest.approx([0.7, 0.4])


def test_curves_of_different_steps_exchange_on_one_axis() -> None:
    own = result("once", 0.6)
    own["course"] = {"unit": "server epoch", "at": [2, 4], "accuracy": [0.2, 0.6]}
    (figure,) = course_figures(own, [result("often", 0.8, 3, curve=[0.1, 0.2, 0.3])]).values()
    assert figure["x"] == [1, 2, 3, 4] and figure["percent"]
    once, often = figure["series"].values()
    assert once == [None, pytest.approx(20), pytest.approx(40), pytest.approx(60)]  # per cent, as everywhere on the page
    assert often == [pytest.approx(10), pytest.approx(20), pytest.approx(30), None]


def test_of_a_long_way_only_some_models_are_kept(tmp_path: Path) -> None:
    fl_round = Round(tmp_path, None, None, "")  # type: ignore[arg-type]
    for done in range(1, 201):
        fl_round.milestone(done, 200, lambda: Payload({}))
    kept = list(fl_round.milestones())
    assert len(kept) == MILESTONES and kept[-1] == 200


def test_rounds_and_server_epochs_are_scored(tmp_path: Path) -> None:
    comparison = compare(Simulation("dense", **SMALL), ["dense", "fedavg_rounds", "ensemble"], [0], tmp_path)  # type: ignore[arg-type]
    many = json.loads((tmp_path / "fedavg_rounds" / "seed0" / "results.json").read_text())
    once = json.loads((tmp_path / "dense" / "seed0" / "results.json").read_text())
    assert many["course"]["unit"] == "round" and many["course"]["at"] == [1, 2]
    assert once["course"]["unit"] == "server epoch" and once["course"]["at"] == [1, 2]
    for found in (many, once):  # the last model on the way is the one that was released
        assert found["course"]["accuracy"][-1] == found["scores"]["global"]["accuracy"]
    assert {row["method"] for row in comparison["equal_accuracy"]} == {"dense", "ensemble"}
    assert "Bytes at equal accuracy, against many rounds" in (tmp_path / "report" / "index.html").read_text()
    assert "Accuracy over server epochs and rounds" in (tmp_path / "dense" / "seed0" / "report" / "index.html").read_text()
    assert not (tmp_path / "dense" / "seed0" / "scratch").exists()


def test_a_killed_run_keeps_its_curve(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    simulation = Simulation("dense", **SMALL)  # type: ignore[arg-type]
    whole = run(simulation, tmp_path / "whole")

    def stop(what: str, done: int, total: int) -> None:
        if what == "synthesis" and done == 1 and not stopped:
            stopped.append(True)
            raise Killed

    stopped: list[bool] = []
    with pytest.raises(Killed):
        run(simulation, tmp_path / "parts", progress=stop)
    assert run(simulation, tmp_path / "parts")["course"] == whole["course"]


def test_summaries_of_old_results_have_no_curves() -> None:
    assert summarize([], labels=[])["equal_accuracy"] == []
