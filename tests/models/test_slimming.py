"""Silent filters can leave: the same answers from smaller tensors, and the way back from tensors to a narrow model."""

import pytest
import torch

from osfl.core.types import Task
from osfl.models.build import build_model
from osfl.models.naming import ModelError, named
from osfl.models.slimming import links, load_slim, slim

TASK = Task("toy", ("a", "b", "c"), (3, 32, 32))


def pruned(architecture: str, every: int = 3) -> torch.nn.Module:
    """A model whose every third filter is silent, wherever it has a single reader."""
    rng = torch.Generator().manual_seed(0)
    model = build_model(architecture, TASK, rng).eval()
    with torch.no_grad():
        for conv, norm, _ in links(model).values():
            norm.running_mean.normal_(generator=rng)  # type: ignore[union-attr]
            norm.running_var.uniform_(0.5, 2.0, generator=rng)  # type: ignore[union-attr]
            norm.bias.normal_(generator=rng)
            for tensor in (conv.weight, norm.weight, norm.bias):
                tensor[::every] = 0
    return model


@pytest.mark.parametrize("architecture", ["cnn-w8", "resnet18-w8", "resnet50-w4"])
def test_a_slim_model_answers_as_the_full_one_with_fewer_numbers(architecture: str) -> None:
    model, x = pruned(architecture), torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    thin = slim(model)
    with torch.no_grad():
        assert torch.allclose(model(x), thin(x), atol=1e-5)
    size, before = (sum(p.numel() for p in m.parameters()) for m in (thin, model))
    assert size < 0.75 * before


@pytest.mark.parametrize("architecture", ["cnn-w8", "resnet18-w8"])
def test_named_tensors_of_a_slim_model_load_again(architecture: str) -> None:
    thin = slim(pruned(architecture))
    again = build_model(architecture, TASK).eval()
    load_slim(again, named(thin, "model"), "model")
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        assert torch.equal(thin(x), again(x))


def test_a_model_without_silent_filters_stays_as_it_is() -> None:
    model = build_model("cnn-w8", TASK, torch.Generator().manual_seed(0)).eval()
    assert {n: t.shape for n, t in named(slim(model), "m").items()} == {n: t.shape for n, t in named(model, "m").items()}


def test_a_filter_that_still_shifts_is_not_silent() -> None:
    model = build_model("cnn-w8", TASK, torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        model.stages[0].conv.weight[0] = 0  # type: ignore[index,union-attr]
        model.stages[0].bn.weight[0] = 0  # type: ignore[index,union-attr]
        model.stages[0].bn.bias[0] = 0.5  # type: ignore[index,union-attr]
    assert slim(model).stages[0].conv.out_channels == 8  # type: ignore[index,union-attr]


def test_a_layer_that_is_silent_altogether_keeps_one_filter() -> None:
    model, x = pruned("cnn-w8", every=1), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    thin = slim(model)
    with torch.no_grad():
        assert torch.allclose(model(x), thin(x), atol=1e-6)
    assert [conv.out_channels for conv, _, _ in links(thin).values()] == [1, 1, 1]


def test_tensors_that_do_not_belong_together_are_refused_by_name() -> None:
    tensors = named(slim(pruned("cnn-w8")), "model")
    tensors["model/stages.1.conv.weight"] = tensors["model/stages.1.conv.weight"][:, :2].contiguous()
    with pytest.raises(ModelError, match=r"stages.1.conv.weight"):
        load_slim(build_model("cnn-w8", TASK), tensors, "model")


def test_a_filter_that_still_scales_is_not_silent() -> None:
    """Without weights and shift it says what its running mean and scale make of zero."""
    model, x = build_model("cnn-w8", TASK, torch.Generator().manual_seed(0)).eval(), torch.zeros(1, 3, 32, 32)
    with torch.no_grad():
        model.stages[0].conv.weight[0] = 0  # type: ignore[index,union-attr]
        model.stages[0].bn.bias[0] = 0  # type: ignore[index,union-attr]
        model.stages[0].bn.running_mean[0] = -5  # type: ignore[index,union-attr]
        assert torch.allclose(slim(model)(x), model(x), atol=1e-6)
    assert slim(model).stages[0].conv.out_channels == 8  # type: ignore[index,union-attr]


def test_a_layer_without_any_filter_is_refused_by_name() -> None:
    tensors = named(build_model("cnn-w8", TASK), "model")
    tensors["model/stages.1.conv.weight"] = tensors["model/stages.1.conv.weight"][:0]
    with pytest.raises(ModelError, match=r"stages.1.conv.weight"):
        load_slim(build_model("cnn-w8", TASK), tensors, "model")
