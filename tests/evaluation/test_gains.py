"""Gains over training alone, from hand-made scores."""

from __future__ import annotations

from typing import Any

import pytest

from osfl.evaluation.comparison import summarize
from osfl.evaluation.gains import gains_over, with_gains
from osfl.evaluation.scores import spread


def result(method: str, own: dict[str, float], seed: int = 0, on: str = "test", **settings: Any) -> Any:
    rows = [{"client": client, "train": 8, "val": 2, "class_counts": [5, 5]} for client in own]
    scores = {"global": {"accuracy": 0.5}, "clients": {"own": spread(own), "everyone": spread(own)}, "majority": 0.5}
    costs = {"upload_bytes": 0, "download_bytes": 0, "messages_per_client": 1}
    return {
        "method": method,
        "seed": seed,
        "preset": "cpu",
        "settings": settings,
        "clients": rows,
        "scores": scores,
        "costs": costs,
        "task": {"classes": ["a", "b"]},
        "data": {"dataset": "d", "evaluated_on": on},
    }


ALONE = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.5}
TOGETHER = {"a": 0.9, "b": 0.6, "c": 0.5, "d": 0.2}


def test_gains_by_hand() -> None:
    found = gains_over(result("fol", TOGETHER), result("local_only", ALONE))
    assert found["over"] == "local_only"
    assert found["values"] == pytest.approx({"a": 0.4, "b": 0.1, "c": 0.0, "d": -0.3})
    assert found["mean"] == pytest.approx(0.05) and found["median"] == pytest.approx(0.05)
    assert (found["worst_client"], found["share"], found["share_that_loses"]) == ("d", 0.5, 0.25)
    assert found["worst"] == pytest.approx(-0.3) and found["everyone"] == pytest.approx(0.05)


def test_only_runs_on_the_same_shards_are_compared() -> None:
    alone = result("local_only", ALONE)
    for other in (result("fol", TOGETHER, seed=1), result("fol", TOGETHER, on="val"), result("fol", {"a": 1.0})):
        assert "gains" not in with_gains([alone, other])[1]
    reported = with_gains([result("fol", TOGETHER), alone])
    assert "gains" in reported[0] and "gains" not in reported[1]


def test_the_one_that_trains_alike_is_compared_with() -> None:
    alone = [result("local_only", ALONE, epochs=20, lr=0.1), result("local_only", TOGETHER, epochs=5, lr=0.1)]
    fol = result("fol", TOGETHER, epochs=5, lr=0.1, students=2)
    reported = with_gains([*alone, fol])[2]["gains"]
    assert reported["over"] == "local_only" and reported["mean"] == 0.0
    reported = with_gains([*alone, result("fol", TOGETHER, epochs=5, lr=0.2, pretrained="weights")])[2]["gains"]
    assert reported["over"] == "local_only, trained otherwise (lr, pretrained)" and reported["mean"] == 0.0
    assert with_gains([*alone, result("fedcgs", TOGETHER, ridge=1.0)])[2]["gains"]["over"] == "local_only"


def test_a_comparison_has_gains_and_medians() -> None:
    runs = with_gains([result(m, own, seed) for seed in (0, 1) for m, own in (("local_only", ALONE), ("fol", TOGETHER))])
    methods = summarize(runs)["methods"]
    assert methods["fol"]["gains.mean"]["mean"] == pytest.approx(0.05) and methods["fol"]["gains.mean"]["n"] == 2
    assert methods["fol"]["gains.share"]["mean"] == 0.5
    assert methods["local_only"]["gains.mean"]["mean"] is None
    assert methods["fol"]["scores.clients.own.median"]["mean"] == pytest.approx(0.55)


def test_other_images_or_another_task_are_other_shards() -> None:
    alone, fol = result("local_only", ALONE), result("fol", TOGETHER)
    for key in ("digest", "partition", "samples", "test_samples"):
        other: Any = {**fol, "data": {**fol["data"], key: "another"}}
        assert "gains" not in with_gains([alone, other])[1]
    other = {**fol, "task": {"classes": ["a", "c"]}}
    assert "gains" not in with_gains([alone, other])[1]


def test_the_worst_of_equals_is_the_first_by_name() -> None:
    found = gains_over(result("fol", {"b": 0.4, "a": 0.4, "c": 0.9}), result("local_only", {"b": 0.5, "a": 0.5, "c": 0.5}))
    assert found["worst_client"] == "a"


def test_scripts_find_who_gains_in_the_comparison() -> None:
    reported = summarize(with_gains([result("local_only", ALONE), result("fol", TOGETHER)]))["runs"]
    assert "gains" not in reported[0] and reported[1]["gains"]["values"]["d"] == pytest.approx(-0.3)
