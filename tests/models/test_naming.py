"""Modules to named tensors and back."""

from __future__ import annotations

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Field, Task
from osfl.models.build import build_model
from osfl.models.naming import ModelError, contract_of, load_named, named

TASK = Task("t", ("a", "b", "c"), (3, 16, 16))


def build(name: str = "resnet18-w4", seed: int = 0) -> torch.nn.Module:
    return build_model(name, TASK, torch_generator(seed, "model"))


@pytest.mark.parametrize("name", ["cnn-w4", "resnet18-w4", "vit-p4-w16-d1-h2", "efficientnet_lite0"])
def test_round_trip(name: str) -> None:
    model, other = build(name).train(), build(name, seed=1)
    x = torch.randn(4, 3, 16, 16, generator=torch_generator(0, "x"))
    model(x)  # moves the batch-norm statistics
    load_named(other, named(model, "model"), "model")
    assert torch.equal(model.eval()(x), other.eval()(x))


def test_names_are_copies_in_plain_order() -> None:
    model = build()
    tensors = named(model, "m")
    assert "m/bn1.running_mean" in tensors and "m/bn1.num_batches_tracked" in tensors
    assert all(t.is_contiguous() and not t.requires_grad for t in tensors.values())
    tensors["m/conv1.weight"].zero_()
    assert model.state_dict()["conv1.weight"].abs().sum() > 0


def test_loading_keeps_channels_last_and_other_prefixes() -> None:
    model = build()
    load_named(model, {**named(model, "m"), **named(model, "more")}, "m")
    weight = model.state_dict()["layer1.0.conv1.weight"]
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_the_contract_is_what_is_named() -> None:
    model = build()
    contract, tensors = contract_of(model, "m"), named(model, "m")
    assert contract.keys() == tensors.keys()
    assert contract["m/conv1.weight"] == Field("F32", (4, 3, 3, 3))
    assert contract["m/bn1.num_batches_tracked"] == Field("I64", ())
    assert all(contract[name].shape == tuple(tensors[name].shape) for name in tensors)


def test_refusals_say_which_tensor_and_change_nothing() -> None:
    model = build()
    before, good = named(model, "m"), named(build(seed=1), "m")
    wrong = {
        "lacks 'm/fc.bias'": {k: v for k, v in good.items() if k != "m/fc.bias"},
        "has 'm/spare', which the model does not": {**good, "m/spare": torch.zeros(1)},
        "expected F32 [3], got F32 [5]": {**good, "m/fc.bias": torch.zeros(5)},
        "expected F32 [3], got F64 [3]": {**good, "m/fc.bias": torch.zeros(3, dtype=torch.float64)},
        "lacks 'm/bn1.bias', 'm/bn1.num_batches_tracked', 'm/bn1.running_mean' and": {},
    }
    for output, tensors in wrong.items():
        with pytest.raises(ModelError) as caught:
            load_named(model, tensors, "m")
        assert output in str(caught.value) and caught.value.field
    assert all(torch.equal(before[k], v) for k, v in named(model, "m").items())
