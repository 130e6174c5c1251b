"""Membership inference: rates by hand, LiRA and RMIA beside references written from scratch, and attacks that find nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from osfl.core.seeds import numpy_generator, torch_generator
from osfl.core.types import Dataset, Exposed, Task
from osfl.evaluation.privacy.membership import lira, rmia
from osfl.evaluation.privacy.rates import (
    area,
    at_few_false_positives,
    exceeds_bound,
    most_true_positives,
    share,
    true_positives,
)
from osfl.evaluation.privacy.signals import _MEASURES, model_signals
from osfl.ingredients.training.local import Training, fit
from osfl.models.build import build_model

SIDE, CLASSES = 8, 3
CPU = torch.device("cpu")


def test_the_area_is_the_share_of_pairs_in_the_right_order() -> None:
    rng = numpy_generator(0, "area")
    members, others = rng.normal(0.5, 1, 40).round(1), rng.normal(0, 1, 60).round(1)
    pairs = [(m > o) + 0.5 * (m == o) for m in members for o in others]
    found = area(members, others)
    assert found["value"] == pytest.approx(np.mean(pairs)) and found["low"] < found["value"] < found["high"]
    sure = area(np.ones(5), np.zeros(5))
    assert sure["value"] == 1.0 and sure["low"] < 0.7  # five images are no proof


def test_the_interval_of_the_area_holds_the_truth_as_often_as_it_says() -> None:
    rng, truth = numpy_generator(0, "coverage"), 0.5 * (1 + math.erf(0.7 / 2))
    found = [area(rng.normal(0.7, 1, 40), rng.normal(0, 1, 40)) for _ in range(400)]
    assert 0.91 <= np.mean([one["low"] <= truth <= one["high"] for one in found]) <= 0.99


def test_true_positives_by_hand() -> None:
    others = np.arange(100.0)
    members = np.array([98.5, 99.5, 50.0, 98.0])
    found = true_positives(members, others, 0.01)  # one of a hundred may pass: the threshold is 98
    assert found is not None and found["value"] == 0.5
    assert at_few_false_positives(members, others)["0.001"] is None  # a hundred cannot tell a thousandth
    assert share(0, 10)["low"] == 0.0 and share(0, 10)["high"] == pytest.approx(1 - 0.025**0.1)


def test_what_exceeds_a_bound_is_noticed() -> None:
    others = np.arange(1000.0)
    assert exceeds_bound(np.full(1000, 2000.0), others, epsilon=1.0, delta=1e-5)
    assert not exceeds_bound(np.full(1000, 2000.0), others, epsilon=9.0, delta=1e-5)
    assert not exceeds_bound(others + 0.5, others, epsilon=0.1, delta=0.0)


def test_the_bound_is_attained_by_an_answer_that_lies_at_random() -> None:
    """Randomized response tells the truth with e^eps / (1 + e^eps): its threshold is on the bound, and mixtures are below."""
    for epsilon in (0.1, 1.0, 3.0):
        truth = math.exp(epsilon) / (1 + math.exp(epsilon))
        assert most_true_positives(1 - truth, epsilon, 0.0) == pytest.approx(truth)
        assert most_true_positives(0.0, epsilon, 1e-3) == pytest.approx(1e-3) and most_true_positives(1.0, epsilon, 0.0) == 1.0
    assert most_true_positives(0.5, 3.0, 0.0) == pytest.approx(1 - 0.5 * math.exp(-3))  # e^3 / 2 alone would allow everything
    assert most_true_positives(0.5, 1000.0, 0.0) == pytest.approx(1.0)


def _digits(count: int, label: str) -> Dataset:
    rng = torch_generator(0, label)
    return Dataset(
        torch.randint(0, 256, (count, 1, SIDE, SIDE), generator=rng, dtype=torch.uint8),
        torch.randint(0, CLASSES, (count,), generator=rng),
    )


def _overfitted(data: Dataset) -> nn.Module:
    model = build_model("cnn-w8", Task("noise", ("a", "b", "c"), (1, SIDE, SIDE)), torch_generator(0, "start"))
    fit(
        model,
        data,
        Training("cnn-w8", epochs=25, batch_size=32, lr=0.05, weight_decay=0.0, clip=5.0),
        torch_generator(0, "order"),
    )
    return model.eval()


def test_lira_on_an_overfitted_model_is_as_good_as_a_reference_from_scratch() -> None:
    data, member = _digits(80, "pool"), np.arange(80) % 2 == 0
    seen = numpy_generator(0, "seen").random((4, 80)).argsort(0) < 2
    target = _overfitted(data.subset(torch.from_numpy(member)))
    shadows = [_overfitted(data.subset(torch.from_numpy(row))) for row in seen]
    scores = lira(
        model_signals(target, data, CPU)["loss"], np.stack([model_signals(one, data, CPU)["loss"] for one in shadows]), seen
    )
    ours = area(scores[member], scores[~member])["value"]
    reference = _reference(target, shadows, data, seen)
    by_hand = np.mean([(a > b) + 0.5 * (a == b) for a in reference[member] for b in reference[~member]])
    assert ours == pytest.approx(by_hand, abs=0.01) and ours > 0.8
    shuffled = numpy_generator(0, "shuffled").permutation(member)
    assert abs(area(scores[shuffled], scores[~shuffled])["value"] - 0.5) < 0.15  # who was no member is not found


def _reference(target: nn.Module, shadows: list[nn.Module], data: Dataset, seen: np.ndarray) -> np.ndarray:
    """Offline LiRA, written from the paper: one image after the other, in plain Python."""

    def odds(model: nn.Module, i: int) -> float:
        with torch.no_grad():
            p = model(data.images[i : i + 1].float() / 127.5 - 1).double().softmax(-1)[0]
        own = int(data.labels[i])
        rest = float(sum(p[c] for c in range(CLASSES) if c != own))
        return math.log(max(float(p[own]), 1e-45)) - math.log(max(rest, 1e-45))

    out = [[odds(model, i) for model, row in zip(shadows, seen, strict=True) if not row[i]] for i in range(len(data))]
    means = [sum(values) / len(values) for values in out]
    squares = [(v - m) ** 2 for values, m in zip(out, means, strict=True) for v in values]
    deviation = math.sqrt(sum(squares) / len(squares))
    return np.array([0.5 * math.erfc(-(odds(target, i) - means[i]) / deviation / math.sqrt(2)) for i in range(len(data))])


def test_rmia_by_hand() -> None:
    signal, seen = np.array([2.0, -1.0]), np.zeros((1, 2), bool)
    shadows = np.array([[0.0, 1.0]])
    ratio = [1 / (1 + math.exp(-s)) / ((1.3 / (1 + math.exp(-o)) + 0.7) / 2) for s, o in zip(signal, shadows[0], strict=True)]
    found = rmia(signal, shadows, seen)
    assert ratio[0] > ratio[1] and found[0] == pytest.approx(1.0) and found[1] == pytest.approx(0.5)


def test_signals_of_a_model_do_not_saturate() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))
    with torch.no_grad():
        model[1].weight.zero_()  # type: ignore[operator]
        model[1].bias.copy_(torch.tensor([60.0, 0.0, 0.0]))  # type: ignore[operator]
    data = Dataset(torch.zeros(2, 1, SIDE, SIDE, dtype=torch.uint8), torch.tensor([0, 1]))
    found = model_signals(model, data, CPU)
    assert found["loss"].tolist() == pytest.approx([60 - math.log(2), -60.0], abs=1e-5)
    assert found["confidence"].tolist() == pytest.approx([60 - math.log(2)] * 2, abs=1e-5)


def test_what_statistics_say_of_an_image() -> None:
    rng = torch_generator(0, "rows")
    inside, outside = torch.randn(5, 20, generator=rng).double(), torch.randn(5, 20, generator=rng).double()
    gram = inside.T @ inside
    rows = torch.cat([inside, outside])
    one = Exposed(0, {"mean": inside[:1]}, rows, rows[:0], inside.mean(0, keepdim=True), inside, moments=lambda: gram)
    nearness, span, leverage = (_MEASURES[name](one) for name in ("nearness", "span", "leverage"))
    assert nearness is not None and span is not None and leverage is not None
    assert float(nearness[0]) < 1e-4 < float(nearness[5])
    assert float(leverage[:5].max()) <= 1 + 1e-6 < float(leverage[5:].min())
    assert float(span[:5].max()) < float(span[5:].min())
