"""Attributes and presence: which classes a client has, told from its model, and whether a site's images are in the round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from osfl.core.types import Dataset
from osfl.evaluation.privacy.rates import Floats, area
from osfl.models.inputs import to_input
from osfl.models.norms import norms

_SETS = 400  # of images that are drawn for each side


def answered_shares(model: nn.Module, probes: Dataset, classes: int, device: torch.device) -> Floats:
    """A classifier's mean probabilities over probe images, as many of each class: it says more often what it saw more often."""
    with torch.inference_mode():
        answers = model.to(device).eval()(to_input(probes.images, device)).cpu().double().softmax(-1)
    mean = torch.stack([answers[probes.labels == c].mean(0) for c in range(classes) if bool((probes.labels == c).any())])
    found: Floats = mean.mean(0).numpy()
    return found


def shares_from_batch_norm(model: nn.Module, probes: Dataset, classes: int, device: torch.device) -> Floats | None:
    """The mixture of classes whose mean activations fit the running means of all batch norms best; None without any."""
    layers = norms(model)
    if not layers:
        return None
    inputs: list[torch.Tensor] = []

    def keep(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        inputs.append(given[0].mean((0, 2, 3)).cpu())

    hooks = [layer.register_forward_pre_hook(keep) for layer in layers]
    columns = []
    try:
        for c in range(classes):
            mine = probes.images[probes.labels == c]
            inputs.clear()
            with torch.inference_mode():
                model.to(device).eval()(to_input(mine if len(mine) else probes.images, device))
            columns.append(torch.cat(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    scale = torch.cat([layer.running_var.detach().cpu().sqrt() for layer in layers if layer.running_var is not None])
    means = torch.cat([layer.running_mean.detach().cpu() for layer in layers if layer.running_mean is not None])
    matrix = (torch.stack(columns, 1) / scale.clamp_min(1e-6)[:, None]).double().numpy()
    target = (means / scale.clamp_min(1e-6)).double().numpy()
    sum_to_one = np.full((1, classes), len(target) ** 0.5)
    weights: Floats = nnls(np.concatenate([matrix, sum_to_one]), np.append(target, len(target) ** 0.5))[0]
    shares: Floats = weights / max(weights.sum(), 1e-12)
    return shares


def distance(found: Floats, counts: Sequence[int]) -> float:
    """Total variation between shares of classes."""
    true = np.asarray(counts, float) / max(1, sum(counts))
    return float(np.abs(found - true).sum() / 2)


def set_area(members: Floats, others: Floats, size: int, rng: np.random.Generator) -> float:
    """How often the mean score of so many members is above that of as many non-members."""
    draws = [np.stack([rng.choice(one, size) for _ in range(_SETS)]).mean(1) for one in (members, others)]
    return area(*draws)["value"]
