"""The proximal step by its definition, and filters that stay silent."""

import torch
from torch import nn

from osfl.core.types import Task
from osfl.methods.fol.pruning import hold, layers_of, prunable, pruned_share, pull, shrink, silence
from osfl.models.build import build_model

TASK = Task("toy", ("a", "b", "c"), (1, 8, 8))


def rows(*norms: float) -> torch.Tensor:
    """Filters (n, 2, 3, 3) of these norms, in random directions."""
    drawn: torch.Tensor = torch.randn(len(norms), 2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    lengths: torch.Tensor = torch.linalg.vector_norm(drawn, dim=(1, 2, 3), keepdim=True)
    return drawn / lengths * torch.tensor(norms, dtype=torch.float64).view(-1, 1, 1, 1)


def test_shrinking_takes_exactly_the_threshold_off_each_norm() -> None:
    before = rows(0.0, 0.1, 0.3, 0.30001, 2.0)
    after = before.clone()
    shrink(after, 0.3)
    norms = torch.linalg.vector_norm(after, dim=(1, 2, 3))
    assert torch.equal(after[:3], torch.zeros_like(after[:3]))
    assert torch.allclose(norms[3:], torch.tensor([0.00001, 1.7], dtype=torch.float64), atol=1e-12)
    cosines = (after[3:] * before[3:]).sum((1, 2, 3)) / norms[3:] / torch.linalg.vector_norm(before[3:], dim=(1, 2, 3))
    assert torch.allclose(cosines, torch.ones(2, dtype=torch.float64))


def test_shrinking_is_the_proximal_operator() -> None:
    """argmin_v ½‖v - w‖² + t‖v‖: no small change of the result is better."""
    w, t, rng = rows(0.2, 1.5), 0.4, torch.Generator().manual_seed(1)
    v = w.clone()
    shrink(v, t)

    def value(x: torch.Tensor) -> float:
        return float(((x - w) ** 2).sum() / 2 + t * torch.linalg.vector_norm(x, dim=(1, 2, 3)).sum())

    for _ in range(50):
        assert value(v) <= value(v + 0.01 * torch.randn(v.shape, generator=rng, dtype=torch.float64)) + 1e-12


def test_no_threshold_changes_nothing() -> None:
    before = rows(0.0, 0.5)
    after = before.clone()
    shrink(after, 0.0)
    assert torch.equal(before, after)


def test_pulling_minimizes_distance_plus_penalty_and_never_overshoots() -> None:
    w, anchor = rows(1.0, 2.0), rows(0.5, 0.1)
    for strength in (0.0, 0.25, 1e9):
        v = w.clone()
        pull(v, anchor, strength)
        slope = (v - w) + 2 * strength * (v - anchor)  # of ½‖v - w‖² + strength ‖v - anchor‖²
        assert torch.allclose(slope, torch.zeros_like(slope), atol=1e-6)
    assert torch.allclose(v, anchor, atol=1e-8)


def with_zeros(architecture: str, only: str = "") -> tuple[nn.Module, dict[str, torch.Tensor]]:
    model = build_model(architecture, TASK, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for layer in prunable(model):
            if only in layer.name:
                layer.weight[1] = 0
            if layer.norm is not None:
                layer.norm.bias.fill_(0.3)
    return model, silence(model)


def test_silent_filters_say_exactly_zero_in_both_modes() -> None:
    model, masks = with_zeros("cnn-w8")
    output: dict[str, torch.Tensor] = {}
    for layer in prunable(model):
        assert layer.norm is not None
        layer.norm.register_forward_hook(lambda _m, _i, out, name=layer.name: output.update({name: out.detach()}))
    for training in (True, False):
        model.train(training)(torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1)))
        assert all(torch.equal(out[:, 1], torch.zeros_like(out[:, 1])) for out in output.values()) and len(output) == 3
        assert all(bool(out[:, 0].abs().sum() > 0) for out in output.values())
    assert all(mask.tolist().count(True) == 1 for mask in masks.values())
    assert pruned_share(masks) == 3 / (8 + 16 + 32)


def test_held_filters_survive_an_optimizer() -> None:
    """Residual sums give a zero shift a gradient, and momentum would revive it."""
    model, masks = with_zeros("resnet18-w4", only="conv2")
    layers, optimizer = prunable(model), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    moved = False
    for seed in range(3):
        x = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(x), torch.arange(6) % 3).backward()
        optimizer.step()
        moved = moved or any(bool((t[masks[x.name]] != 0).any()) for x in layers for t in x.filter_tensors())
        hold(layers, masks)
    assert moved, "without `hold` nothing would have been lost: the test shows nothing"
    assert all(bool((t[masks[x.name]] == 0).all()) for x in layers for t in x.filter_tensors())


def test_the_head_is_never_pruned() -> None:
    for architecture, head in (("cnn-w8", "head"), ("resnet18-w4", "fc"), ("vit-p4-w16-d1-h2", "head")):
        model = build_model(architecture, TASK, torch.Generator().manual_seed(0))
        assert layers_of(model)[-1].name == head
        assert head not in silence(model)


def test_filters_without_a_norm_behind_them_lose_their_bias() -> None:
    model = build_model("vit-p4-w16-d1-h2", TASK, torch.Generator().manual_seed(0))
    layer = next(layer for layer in prunable(model) if isinstance(layer.module, nn.Linear))
    assert layer.norm is None and layer.module.bias is not None
    with torch.no_grad():
        layer.weight[1], layer.module.bias[:] = 0, 0.3
    assert silence(model)[layer.name].nonzero().tolist() == [[1]]
    assert (layer.module.bias == 0).nonzero().tolist() == [[1]]
