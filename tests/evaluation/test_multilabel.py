"""Scores of multi-label models, against numbers made by hand; thresholds see validation images only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from osfl.core.headline import constant_labels
from osfl.core.types import Dataset, Shard
from osfl.data.source import Part
from osfl.evaluation.multilabel import HALF, metrics, own_accuracy, score_labels, thresholds
from osfl.evaluation.scores_with_intervals import constant_share, score_probabilities
from osfl.reports.evaluation import below_constant, write_evaluation_report

P = np.array([[0.9, 0.2], [0.6, 0.4], [0.4, 0.1], [0.1, 0.3]])
Y = np.array([[1, 0], [0, 1], [1, 0], [0, 0]])


def test_metrics_by_hand() -> None:
    found = metrics(P, Y, np.array([0.5, 0.35]))
    # class 0: yes to images 0 and 1: one right of two; class 1: yes to image 1, right
    assert found["accuracy"] == pytest.approx(6 / 8) and found["f1"] == pytest.approx((0.5 + 1) / 2)
    assert found["f1_micro"] == pytest.approx(2 * 2 / (3 + 3)) and found["balanced_accuracy"] == pytest.approx((0.5 + 1) / 2)
    # of the 4 pairs (has, has not) of class 0 three are in order; class 1 is in order
    assert found["auroc"] == pytest.approx((3 / 4 + 1) / 2)
    assert found["ap"] == pytest.approx(((1 + 2 / 3) / 2 + 1) / 2)
    pairs = [(p > q) + 0.5 * (p == q) for p in (0.9, 0.4, 0.4) for q in (0.2, 0.6, 0.1, 0.1, 0.3)]
    assert found["auroc_micro"] == pytest.approx(np.mean(pairs))
    assert found["nll"] == pytest.approx(-np.log([0.9, 0.4, 0.4, 0.9, 0.8, 0.4, 0.9, 0.7]).mean())


def test_a_class_without_images_has_no_score_and_spoils_none() -> None:
    found = metrics(P, np.array([[1, 0], [0, 0], [1, 0], [0, 0]]), np.array([0.5, 0.5]))
    assert found["auroc"] == pytest.approx(3 / 4) and found["ap"] == pytest.approx((1 + 2 / 3) / 2)
    none = metrics(P, np.zeros((4, 2), dtype=np.int64), np.array([0.5, 0.5]))
    assert none["auroc"] is None and none["ap"] is None and none["auroc_micro"] is None


@pytest.mark.parametrize(("metric", "answer"), [("accuracy", 0), ("f1", 1), ("balanced_accuracy", 1), ("auroc", 0)])
def test_a_constant_answer_reaches_what_is_stated(metric: str, answer: int) -> None:
    """Findings of 1, 3 and 0 of ten images: never yes has the best accuracy, always yes the best F1."""
    truth = np.array([[place < 1, place < 3, False] for place in range(10)]).astype(np.int64)
    found = metrics(np.full((10, 3), float(answer)), truth, np.full(3, HALF))
    floor = constant_labels(metric, constant_share(truth), truth.sum(0).tolist(), len(truth))
    assert found[metric] == pytest.approx(floor) and (metric != "f1" or floor == pytest.approx((2 / 11 + 6 / 13) / 2))  # type: ignore[literal-required]


def test_an_evaluation_that_is_no_better_than_always_yes_says_so(tmp_path: Path) -> None:
    truth = np.array([[1, 0], [0, 1], [1, 0], [0, 0]])
    part = Part(Dataset(torch.zeros((4, 2, 2, 1), dtype=torch.uint8), torch.from_numpy(truth)))
    for probability, below in ((np.ones((4, 2)), True), (truth.astype(float), False)):
        scored = score_probabilities(probability, part, ("a", "b"), metric="f1", resamples=20, cuts=np.full(2, HALF))
        about = {"schema": 1, "model": {}, "cautions": [], "command": "osfl evaluate", "environment": {}}
        data = {"name": "findings", "part": "test", "images": 4}
        evaluation: Any = {**about, "task": {"classes": ["a", "b"], "kind": "multilabel"}, "data": data, **scored}
        page = write_evaluation_report(evaluation, tmp_path).read_text()
        sentence = "no better than answering each class with yes, or with no, whatever the image: macro F1 0.533."
        assert (sentence in page) == below == (below_constant(evaluation) != "")
        assert "macro F1, always yes" in page


def test_thresholds_are_where_f1_is_highest() -> None:
    assert thresholds(P, Y).tolist() == pytest.approx([0.25, 0.35])  # class 0: three yes, F1 0.8; class 1: one yes
    assert thresholds(P, np.array([[1, 0], [1, 0], [1, 0], [1, 0]])).tolist() == [HALF, HALF]


def test_own_accuracy_weighs_by_how_often_the_client_has_a_class() -> None:
    assert own_accuracy([(0.5, 1.0), (1.0, 0.0)], [2, 10], 10) == pytest.approx(((0.2 * 0.5 + 0.8) + 1.0) / 2)
    assert own_accuracy([(None, 1.0)], [0], 10) == 1.0 and own_accuracy([(None, 1.0)], [1], 10) == 0.0


class _Answers(nn.Module):
    """Log-odds that the pixels say."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 4 * x[:, 0, 0, :2]


def _dataset(pixels: list[list[int]], labels: list[list[int]]) -> Dataset:
    images = torch.tensor(pixels, dtype=torch.uint8)[:, None, None, :].repeat(1, 1, 2, 1)
    return Dataset(images, torch.tensor(labels))


def test_test_images_have_no_say_in_the_thresholds() -> None:
    val = _dataset([[250, 10], [200, 200], [60, 5], [50, 0]], [[1, 0], [0, 1], [0, 0], [0, 0]])
    shards = [Shard(client, val, val) for client in ("a", "b")]
    model = _Answers()
    tests = [_dataset([[90, 90], [10, 10]], [[1, 0], [0, 1]]), _dataset([[250, 90], [0, 250]], [[0, 1], [1, 0]])]
    found = [
        score_labels(
            dict.fromkeys(("a", "b"), model),
            test,
            ("row", "column"),
            shards,
            device=torch.device("cpu"),
            run_map=lambda work, items: [work(item) for item in items],
        )
        for test in tests
    ]
    cuts = [[scores["labels"][name]["threshold"] for name in ("row", "column")] for scores in found]
    assert cuts[0] == cuts[1] and cuts[0] != [HALF, HALF]
    assert (
        found[0]["confusion"] == []
        and not found[0]["personalized"]
        and found[0]["clients"]["own"]["values"].keys() == {"a", "b"}
    )
    assert found[0]["majority"] == 0.5 and found[0]["labels"]["row"]["images"] == 1
