"""Frozen teachers answer as the models they were made from."""

from __future__ import annotations

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.models.build import build_model
from osfl.models.folding import freeze, is_frozen


@pytest.mark.parametrize("name", ["cnn-w8", "resnet18-w8", "resnet50-w4", "efficientnet_lite0", "vit-p4-w16-d1-h2"])
def test_folded_equals_unfolded(name: str) -> None:
    model = build_model(name, Task("t", ("a", "b", "c"), (3, 32, 32)), torch_generator(0, "model"))
    x = torch.randn(32, 3, 32, 32, generator=torch_generator(0, "x"))
    with torch.no_grad():
        for _ in range(3):
            model(x)  # statistics that are not the initial ones
    before = {key: value.clone() for key, value in model.state_dict().items()}
    teacher = freeze(model)
    assert model.training and all(p.requires_grad for p in model.parameters()), "the original was touched"
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in teacher.modules())
    expected = model.eval()(x).detach()
    assert float((teacher(x) - expected).abs().max()) < 5e-6 * max(1.0, float(expected.abs().max()))
    assert is_frozen(teacher) and freeze(teacher) is teacher and not is_frozen(model)


def test_gradients_still_reach_the_pixels() -> None:
    model = build_model("cnn-w4", Task("t", ("a", "b"), (1, 8, 8)), torch_generator(0, "model"))
    x = torch.randn(2, 1, 8, 8, generator=torch_generator(0, "x")).requires_grad_()
    freeze(model)(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_without_folding_statistics_stay() -> None:
    model = build_model("cnn-w4", Task("t", ("a", "b"), (1, 8, 8)), torch_generator(0, "model"))
    kept = freeze(model, fold=False)
    assert kept.state_dict().keys() == model.state_dict().keys() and not kept.training
