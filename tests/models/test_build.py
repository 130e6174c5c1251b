"""Modules of every family: sizes, shapes, and first weights that depend on the generator only."""

from __future__ import annotations

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.models.build import build_model, to_images, to_input
from osfl.models.cnn import halve
from osfl.models.flops import forward_flops, inversion_flops, training_flops
from osfl.models.initial import initialize
from osfl.runtime.workers import Workers, compute_threads

VITS = ["vit-p4-w16-d2-h2", "vit_small_dinov2-p8-w12-d1-h2"]
SMALL = ["cnn-w4", "resnet18-w4", "resnet50-w4", "efficientnet_lite0", *VITS]


def task(side: int = 16, channels: int = 3, classes: int = 5) -> Task:
    return Task("t", tuple(f"c{i}" for i in range(classes)), (channels, side, side))


def build(name: str, of: Task, seed: int = 0) -> torch.nn.Module:
    return build_model(name, of, torch_generator(seed, "model"))


@pytest.mark.parametrize(
    ("name", "of", "parameters"),
    [
        ("cnn-w16", task(28, 1, 10), 29_178),
        ("resnet18", task(28, 3, 8), 11_172_936),
        ("resnet18-w16", task(28, 3, 8), 701_208),
        ("resnet18", task(224, 3, 1000), 11_689_512),  # as torchvision's
        ("resnet50", task(224, 3, 1000), 25_557_032),
        ("deit_tiny", task(224, 3, 1000), 5_717_416),
        ("vit", task(32, 3, 10), 208_074),
        ("efficientnet_lite0", task(224, 3, 1000), 4_652_008),
    ],
)
def test_parameter_counts(name: str, of: Task, parameters: int) -> None:
    assert sum(p.numel() for p in build_model(name, of).parameters()) == parameters


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("channels", [1, 3])
def test_logits_and_features(name: str, channels: int) -> None:
    model = build(name, task(16, channels)).eval()
    x = to_input(torch.zeros(3, channels, 16, 16, dtype=torch.uint8))
    features = model.features(x)  # type: ignore[operator]
    assert features.ndim == 2 and model(x).shape == (3, 5)
    head = list(model.children())[-1]
    assert torch.equal(head(features), model(x))


@pytest.mark.parametrize("side", [8, 9, 28, 33, 64, 80])
def test_cnn_and_resnet_take_any_size(side: int) -> None:
    for name in ("cnn-w4", "resnet18-w4"):
        assert build(name, task(side, 1))(torch.zeros(2, 1, side, side + 3)[..., :side]).shape == (2, 5)


@pytest.mark.parametrize("side", [2, 7, 8])
def test_halving_is_max_pooling(side: int) -> None:
    x = torch.randn(2, 3, side, side + 1, generator=torch_generator(0, "x")).to(memory_format=torch.channels_last)
    pooled = torch.nn.functional.max_pool2d(x, 2)
    assert torch.equal(halve(x), pooled) and torch.equal(halve(x.requires_grad_()), pooled)
    assert halve(x).requires_grad


def test_convolutional_networks_are_channels_last() -> None:
    model = build("resnet18-w4", task())
    weight = next(p for n, p in model.named_parameters() if n == "layer1.0.conv1.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@pytest.mark.parametrize("name", SMALL)
def test_every_value_is_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        out = real(*args, **kwargs)  # type: ignore[call-overload]
        return out.fill_(float("nan") if out.is_floating_point() else 99)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch, "empty", poisoned)
    for rng in (None, torch_generator(0, "x")):
        for key, value in build_model(name, task(), rng).state_dict().items():
            assert value.isfinite().all(), key
            assert not (value == 99).any(), key


@pytest.mark.parametrize("name", SMALL)
def test_first_weights_come_from_the_generator_only(name: str) -> None:
    before = torch.get_rng_state()
    with compute_threads(2):
        first = build(name, task()).state_dict()
    assert torch.equal(before, torch.get_rng_state()), "the global generator was used"
    torch.manual_seed(123)
    with compute_threads(1):
        second = build(name, task()).state_dict()
    other = build(name, task(), seed=1).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    drawn = [key for key in first if first[key].ndim >= 2]
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


def test_building_in_threads_gives_the_same() -> None:
    alone = [build("resnet18-w4", task(), seed).state_dict() for seed in range(4)]
    together = Workers(2).map(lambda seed: build("resnet18-w4", task(), seed).state_dict(), range(4))
    for a, b in zip(alone, together, strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


def test_activations_keep_their_scale() -> None:
    for name in ("cnn-w16", "resnet18-w16", "vit", "efficientnet_lite0"):
        model = build(name, task(32))
        x = torch.randn(32, 3, 32, 32, generator=torch_generator(0, "x"))
        assert 0.05 < float(model(x).detach().std()) < 5, name


def test_a_layer_without_a_rule_is_refused() -> None:
    with pytest.raises(AssertionError, match="PReLU"):
        initialize(torch.nn.Sequential(torch.nn.PReLU()), None)


def test_inputs_and_back() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).repeat(2, 3, 1, 1)
    x = to_input(images)
    assert x.dtype == torch.float32 and x.min() == -1 and x.max() == 1
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(to_images(x), images)
    assert torch.equal(to_input(x), x)


def test_flops_are_the_known_ones() -> None:
    mega = 2e6  # a multiply-add is two
    large, small = build_model("resnet18", task(28, 3, 8)), build_model("resnet18-w16", task(28, 3, 8))
    assert forward_flops(large, (3, 28, 28)) / mega == pytest.approx(456.7, abs=0.1)
    assert forward_flops(small, (3, 28, 28)) / mega == pytest.approx(28.8, abs=0.01)
    assert training_flops(small, (3, 28, 28)) == pytest.approx(3 * forward_flops(small, (3, 28, 28)), rel=0.02)
    assert inversion_flops(small, (3, 28, 28)) == 2 * forward_flops(small, (3, 28, 28))


def test_flops_of_depthwise_convolutions() -> None:
    model = build_model("efficientnet_lite0", task(32))
    assert training_flops(model, (3, 32, 32)) == pytest.approx(3 * forward_flops(model, (3, 32, 32)), rel=0.05)


def test_flops_leave_the_model_alone_and_see_frozen_weights() -> None:
    model = build("cnn-w4", task())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    trained = training_flops(model, (3, 16, 16))
    assert model.training and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert training_flops(model.requires_grad_(False), (3, 16, 16)) == forward_flops(model, (3, 16, 16)) < trained
