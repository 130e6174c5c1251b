"""Ensembles: modes by hand-made numbers, and the fast path."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from osfl.core.errors import TrainingError, UsageError
from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.ensembles.ensemble import MODES, Ensemble, combine, fast_logits, weights_for
from osfl.models.build import build_model
from osfl.models.flops import forward_flops
from osfl.models.folding import freeze
from osfl.runtime.meter import measure
from osfl.runtime.workers import Workers, compute_threads

TASK = Task("t", ("a", "b", "c"), (1, 8, 8))
COUNTS = torch.tensor([[10, 0, 0], [5, 20, 5]])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):  # threads that wait for each other are most of the time of tiny models
        yield


def members(*names: str) -> list[nn.Module]:
    return [build_model(name, TASK, torch_generator(i, "member")) for i, name in enumerate(names)]


def pixels(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch_generator(0, "x"))


def log(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_modes_by_hand() -> None:
    logits = torch.stack([log([[0.6, 0.3, 0.1]]), log([[0.2, 0.2, 0.6]])])
    mean_logits = torch.tensor([[math.log(0.12) / 2, math.log(0.06) / 2, math.log(0.06) / 2]])
    torch.testing.assert_close(combine(logits, "logits"), mean_logits)
    torch.testing.assert_close(combine(logits, "probabilities").exp(), torch.tensor([[0.4, 0.25, 0.35]]))
    by_size = combine(logits, "size", weights_for("size", COUNTS)).exp()  # shares 1/4 and 3/4
    torch.testing.assert_close(by_size, torch.tensor([[0.3, 0.225, 0.475]]))
    by_class = combine(logits, "class_count", weights_for("class_count", COUNTS)).exp()
    raw = torch.tensor([[0.6 * 2 / 3 + 0.2 / 3, 0.2, 0.6]])  # who never saw a class has no vote on it
    torch.testing.assert_close(by_class, raw / raw.sum())


@pytest.mark.parametrize("mode", MODES)
def test_only_proportions_of_weights_matter(mode: str) -> None:
    logits = torch.randn(2, 4, 3, generator=torch_generator(0, "logits"))
    weights = weights_for(mode, COUNTS)
    torch.testing.assert_close(combine(logits, mode, weights), combine(logits, mode, 1000 * weights))


@pytest.mark.parametrize("mode", MODES)
def test_one_member_is_itself(mode: str) -> None:
    (model,) = members("cnn-w4")
    seen = [[5, 5, 5]] if mode == "odds" else [[3, 1, 7]]  # odds free an answer of how often its member saw each class
    alone = Ensemble([model], mode, weights_for(mode, torch.tensor(seen))).eval()
    x = pixels()
    if mode == "logits":
        assert torch.equal(alone(x), model(x))
    torch.testing.assert_close(alone(x).softmax(-1), model(x).softmax(-1))


@pytest.mark.parametrize("mode", MODES)
def test_operations_are_counted_in_every_mode(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.models.flops._known", {})
    counts = torch.tensor([[10, 0, 0], [5, 20, 0]])  # nobody has the last class
    ensemble = Ensemble(members("cnn-w4", "cnn-w8"), mode, weights_for(mode, counts))
    alone = sum(forward_flops(member, TASK.image) for member in ensemble.members)
    assert alone <= forward_flops(ensemble, TASK.image) < 1.001 * alone


def test_modes_propagate_to_members() -> None:
    ensemble = Ensemble(members("cnn-w4", "resnet18-w4"))
    assert not any(module.training for module in ensemble.eval().modules())
    assert all(module.training for module in ensemble.train().modules())
    assert sum(isinstance(module, nn.BatchNorm2d) for module in ensemble.modules()) == 3 + 20


def test_different_architectures_and_gradients_to_pixels() -> None:
    for mode in MODES:
        ensemble = Ensemble(members("cnn-w4", "vit-p4-w8-d1-h2"), mode, weights_for(mode, COUNTS)).eval()
        x = pixels().requires_grad_()
        ensemble(x).square().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_a_class_that_nobody_has_is_never_predicted() -> None:
    counts = torch.tensor([[4, 0, 0], [2, 3, 0]])
    logits = torch.tensor([[[0.0, 0.0, 500.0]], [[-300.0, 0.0, 500.0]]]).requires_grad_()
    out = combine(logits, "class_count", weights_for("class_count", counts))
    assert out.isfinite().all() and out[0, 2] == out.min() and out[0, 2] < -27
    torch.testing.assert_close(out.exp().sum(-1), torch.ones(1))
    out[:, 0].sum().backward()
    assert logits.grad is not None and logits.grad.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
def test_extreme_logits_stay_finite(mode: str) -> None:
    logits = torch.tensor([[[1e30, -1e30, 0.0]], [[-1e30, 0.0, 1e30]]])
    assert combine(logits, mode, weights_for(mode, COUNTS)).isfinite().all()


@pytest.mark.parametrize(
    "weights",
    [torch.zeros(2), torch.tensor([1.0, -1.0]), torch.tensor([1.0, float("nan")]), torch.ones(3), torch.ones(2, 1, 1)],
)
def test_weights_that_make_no_sense(weights: torch.Tensor) -> None:
    with pytest.raises(TrainingError) as caught:
        combine(torch.zeros(2, 1, 3), "probabilities", weights)
    assert caught.value.field == "weights" and caught.value.fix


def test_options_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match="class_count"):
        Ensemble(members("cnn-w4"), "median")
    with pytest.raises(TrainingError, match="needs weights"):
        Ensemble(members("cnn-w4"), "size")


def test_fast_logits_equal_the_plain_loop() -> None:
    group = members("cnn-w4", "resnet18-w4", "vit-p4-w8-d1-h2")
    images = torch.randint(0, 256, (70, 1, 8, 8), dtype=torch.uint8, generator=torch_generator(0, "images"))
    with torch.no_grad():
        plain = torch.stack([m.eval()(images.float() / 127.5 - 1) for m in group])
    fast = fast_logits(group, images, batch=32)
    assert fast.shape == (3, 70, 3) and not fast.requires_grad
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


def test_fast_logits_have_the_same_bits_for_any_number_of_workers() -> None:
    group = [freeze(m) for m in members(*["cnn-w8"] * 5)]
    x = pixels(100)
    one, two, four = (fast_logits(group, x, run_map=Workers(count).map, batch=32) for count in (1, 2, 4))
    assert torch.equal(one, two) and torch.equal(one, four)


def test_fast_logits_are_booked() -> None:
    group = members("cnn-w4", "cnn-w4")
    with measure() as meter:
        fast_logits(group, pixels(10))
    assert meter.flops == pytest.approx(20 * forward_flops(group[0], (1, 8, 8)))
