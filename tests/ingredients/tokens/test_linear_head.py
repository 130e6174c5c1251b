"""The linear head against a loop written out here."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch.nn import functional

from osfl.ingredients.tokens.training import linear_head


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_head_by_hand(optimizer: Literal["sgd", "adamw"], standardize: bool) -> None:
    """From zero, momentum 0.9 (or AdamW), the rate falling along a cosine; standardization folded into the weights."""
    x = torch.randn(10, 3, generator=rng(1)) * torch.tensor([1.0, 2.0, 0.5]) + 1
    y, weight, bias = torch.arange(10) % 3, torch.zeros(3, 3, requires_grad=True), torch.zeros(3, requires_grad=True)
    z = (x - x.mean(0)) / x.std(0) if standardize else x
    adam, velocity, order = torch.optim.AdamW([weight, bias], 0.1), [torch.zeros(3, 3), torch.zeros(3)], rng(2)
    for epoch in range(3):
        rate = 0.1 * (1 + math.cos(math.pi * epoch / 3)) / 2
        adam.param_groups[0]["lr"] = rate
        for index in torch.randperm(10, generator=order).split(4):
            slopes = torch.autograd.grad(functional.cross_entropy(z[index] @ weight.T + bias, y[index]), [weight, bias])
            if optimizer == "adamw":
                weight.grad, bias.grad = slopes
                adam.step()
                continue
            with torch.no_grad():
                for parameter, v, slope in zip((weight, bias), velocity, slopes, strict=True):
                    v.mul_(0.9).add_(slope)
                    parameter.sub_(rate * v)
    head = linear_head(
        x,
        y,
        3,
        rng(2),
        epochs=3,
        batch_size=4,
        optimizer=optimizer,
        lr=0.1,
        standardize=standardize,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
    assert torch.allclose(head(x), z @ weight.T + bias, atol=1e-5) and not head.training


def test_a_feature_that_never_changes_counts_for_nothing() -> None:
    x = torch.cat([torch.randn(10, 2, generator=rng(1)), torch.full((10, 1), 5.0)], 1)
    head = linear_head(
        x,
        torch.arange(10) % 3,
        3,
        rng(2),
        epochs=3,
        batch_size=4,
        optimizer="sgd",
        lr=0.1,
        standardize=True,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
    assert bool(head(x).isfinite().all()) and not bool(head.weight[:, 2].any())
