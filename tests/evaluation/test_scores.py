"""Scores against hand-made numbers and against scikit-learn."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score
from torch import nn

from osfl.core.types import Dataset, Task
from osfl.evaluation.scores import (
    calibration_error,
    confusion,
    metrics,
    own_accuracy,
    per_class_accuracy,
    probabilities,
    score,
    spread,
)
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.norms import norms

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 4, 200)
PROBABILITY = RNG.dirichlet(np.ones(4), 200) + 0.5 * np.eye(4)[LABELS]
PROBABILITY /= PROBABILITY.sum(1, keepdims=True)


def test_metrics_agree_with_scikit_learn() -> None:
    found, answers = metrics(PROBABILITY, LABELS), PROBABILITY.argmax(1)
    assert found["accuracy"] == pytest.approx((answers == LABELS).mean())
    assert found["balanced_accuracy"] == pytest.approx(balanced_accuracy_score(LABELS, answers))
    assert found["f1"] == pytest.approx(f1_score(LABELS, answers, average="macro"))
    assert found["auroc"] == pytest.approx(roc_auc_score(LABELS, PROBABILITY, multi_class="ovr", average="macro"))


def test_a_class_that_the_test_set_lacks_is_left_out() -> None:
    labels = np.array([0, 0, 2, 2])
    probability = np.eye(3)[[0, 0, 2, 0]]
    found = metrics(probability, labels)
    assert found["balanced_accuracy"] == 0.75
    assert per_class_accuracy(probability.argmax(1), labels, 3) == [1.0, None, 0.5]
    assert metrics(probability[:2], labels[:2])["auroc"] is None


def test_calibration_error_by_hand() -> None:
    """Always 0.9 sure and right three times out of four: the gap is 0.15."""
    probability = np.tile([0.9, 0.1], (4, 1))
    assert calibration_error(probability, np.array([0, 0, 0, 1])) == pytest.approx(0.15)
    assert calibration_error(np.eye(2)[[0, 1]], np.array([0, 1])) == 0.0


def test_own_accuracy_is_exact() -> None:
    assert own_accuracy([1.0, 0.5, 0.0], [1, 3, 0]) == pytest.approx(0.625)
    assert own_accuracy([1.0, None], [1, 9]) == 1.0
    assert own_accuracy([None], [3]) == 0.0


def test_confusion_rows_are_the_truth() -> None:
    assert confusion(np.array([1, 1, 0]), np.array([0, 1, 0]), 2).tolist() == [[1.0, 1.0], [0.0, 1.0]]


def test_spread_names_the_worst_client() -> None:
    found = spread({"b": 0.5, "a": 0.5, "c": 1.0})
    assert found["worst"] == 0.5 and found["worst_client"] == "a" and found["mean"] == pytest.approx(2 / 3)


class Constant(nn.Module):
    """Always answers one class."""

    def __init__(self, answer: int) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.eye(3)[torch.full((len(x),), self.answer)]


TEST = Dataset(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 0, 0, 1, 1, 2]))


def scored(models: dict[str, nn.Module], **options: object) -> dict[str, Any]:
    counts = {client: [4, 1, 0] for client in models}
    run = {"device": torch.device("cpu"), "run_map": lambda work, items: [work(i) for i in items], **options}
    return score(models, TEST, ("x", "y", "z"), counts, **run)  # type: ignore[arg-type, return-value]


def test_one_model_for_all() -> None:
    shared = Constant(0)
    found = scored({"a": shared, "b": shared})
    assert found["global"]["accuracy"] == 0.5 and found["majority"] == 0.5
    assert not found["personalized"]
    assert found["clients"]["own"]["values"] == {"a": 0.8, "b": 0.8}
    assert found["per_class"] == {"x": 1.0, "y": 0.0, "z": 0.0}


def test_a_model_each_is_a_mean_over_clients() -> None:
    found = scored({"a": Constant(0), "b": Constant(2)})
    assert found["personalized"]
    assert found["global"]["accuracy"] == pytest.approx((3 / 6 + 1 / 6) / 2)
    assert found["clients"]["everyone"]["values"] == pytest.approx({"a": 0.5, "b": 1 / 6})


def test_where_clients_are_domains_their_own_images_count() -> None:
    shared = Constant(0)
    domains = {"a": np.array([True, True, False, False, False, False]), "b": np.array([False] * 3 + [True] * 3)}
    assert scored({"a": shared, "b": shared}, domains=domains)["clients"]["own"]["values"] == {"a": 1.0, "b": 0.0}


def test_a_model_that_several_share_counts_for_each_of_them() -> None:
    shared = Constant(0)
    found = scored({"a": shared, "b": shared, "c": shared, "d": Constant(2)})
    assert found["global"]["accuracy"] == pytest.approx(found["clients"]["everyone"]["mean"])


def test_models_are_judged_frozen_and_left_as_they_were() -> None:
    rng = torch.Generator().manual_seed(0)
    model = build_model("cnn-w8", Task("t", ("a", "b", "c"), (1, 16, 16)), rng)
    images = torch.randint(0, 256, (300, 1, 16, 16), dtype=torch.uint8, generator=rng)
    model.train()(to_input(images))  # statistics that folding has to respect
    found = probabilities(model, images, torch.device("cpu"), lambda work, items: [work(item) for item in items])
    with torch.no_grad():
        expected = model.eval()(to_input(images)).double().softmax(-1)
    assert np.allclose(found, expected.numpy(), atol=1e-6)
    assert len(norms(model)) == 3 and all(parameter.requires_grad for parameter in model.parameters())
