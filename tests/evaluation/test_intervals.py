"""Bootstrap intervals: the same scores as everywhere, whole people, and intervals that hold the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from osfl.core.headline import constant_answer, headline
from osfl.evaluation.intervals import draws, estimates, scores_of
from osfl.evaluation.scores import metrics


def made_up(images: int, classes: int, seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, images)
    raw = rng.random((images, classes)) + 0.7 * np.eye(classes)[labels]
    return np.round(raw, 1) / np.round(raw, 1).sum(1, keepdims=True), labels  # rounded: there are ties


def accuracy(probability: NDArray[Any], labels: NDArray[Any], **how: Any) -> tuple[float, float]:
    """The interval of the accuracy."""
    found = estimates(probability, labels, **how).overall["accuracy"]
    assert found["low"] is not None and found["high"] is not None
    return found["low"], found["high"]


def test_with_weights_of_one_they_are_the_scores_of_every_report() -> None:
    probability, labels = made_up(200, 4)
    found = scores_of(probability, labels, np.ones((1, 200)))
    for name, value in metrics(probability, labels).items():
        assert found[name][0] == pytest.approx(value, abs=1e-12), name


def test_a_weight_of_two_is_the_image_twice() -> None:
    probability, labels = made_up(60, 3)
    weights = np.random.default_rng(1).integers(0, 4, 60).astype(float)
    again = np.repeat(np.arange(60), weights.astype(int))
    found = scores_of(probability, labels, weights[None])
    for name, value in metrics(probability[again], labels[again]).items():
        assert found[name][0] == pytest.approx(value, abs=1e-12), name


def test_a_class_that_is_absent_has_no_score_and_spoils_none() -> None:
    probability, labels = made_up(50, 3)
    labels[labels == 2] = 0
    found = estimates(probability, labels, resamples=20)
    assert found.by_class["recall"][2] == {"value": None, "low": None, "high": None}
    assert found.overall["balanced_accuracy"]["value"] == pytest.approx(metrics(probability, labels)["balanced_accuracy"])


def test_people_are_drawn_whole() -> None:
    people = np.array(["a", "a", "a", "b", "b", "c"])
    (block,) = draws(6, 50, people)
    assert (block[:, 0] == block[:, 2]).all() and (block[:, 3] == block[:, 4]).all() and (block[:, [0, 3, 5]].sum(1) == 3).all()


def test_images_of_one_person_widen_the_interval() -> None:
    right = np.repeat(np.arange(20) % 2, 10).astype(float)  # twenty people, ten images each, all right or all wrong
    probability = np.stack([right, 1 - right], axis=1)
    labels = np.zeros(200, dtype=np.int64)
    labels[-1] = 1
    alone = accuracy(probability, labels)
    people = accuracy(probability, labels, groups=np.repeat(np.arange(20), 10).astype(str))
    assert people[1] - people[0] > 2 * (alone[1] - alone[0])


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng, held = np.random.default_rng(0), 0
    for trial in range(60):
        right = rng.random(120) < 0.7
        probability = np.stack([right, ~right], axis=1).astype(float)
        low, high = accuracy(probability, np.zeros(120, dtype=np.int64), resamples=200, seed=trial)
        held += low <= 0.7 <= high
    assert held >= 50  # 57 expected


def test_the_headline_follows_the_balance_of_the_classes() -> None:
    assert headline([100, 90, 80])[0] == "accuracy"
    metric, why = headline([300, 100, 100])
    assert metric == "balanced_accuracy" and "3 times" in why
    assert headline([300, 100], "auroc") == ("auroc", "it was chosen with --metric")
    assert headline([10, 0])[0] == "accuracy"


@pytest.mark.parametrize("metric", ["accuracy", "balanced_accuracy", "auroc", "f1"])
def test_a_constant_answer_reaches_what_is_stated(metric: str) -> None:
    labels = np.repeat([0, 1, 2], [50, 30, 20])
    probability = np.tile([0.5, 0.3, 0.2], (100, 1))
    assert metrics(probability, labels)[metric] == pytest.approx(constant_answer(metric, [50, 30, 20]))  # type: ignore[literal-required]
