"""The site's prior: one classifier for all sites, corrected at each by how often its classes occur there.

By Bayes' rule, log p(c | x) at a site is log p(x | c) + log p(c) up to a constant. A release answers for the classes as they
are in the whole round; a site knows its own shares, and needs no training to use them. This is a control for every personalized
method: whatever trains at the sites should be better than counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from osfl.core.types import ADDED, Payload, Release, Shard
from osfl.ingredients.statistics.gaussians import NEVER
from osfl.ingredients.training.local import not_positive

RARE = 0.01  # images that a class counts as where a site has none: unlikely, not impossible
PRIOR, TEMPERATURE = "site/prior", "site/temperature"


@dataclass(frozen=True)
class SitePrior:
    """Whether sites correct the release by their class shares; mixed into Settings."""

    personalize: Literal["none", "prior"] = field(default="none", metadata=ADDED)  # prior: weigh classes as the site has them
    prior_temperature: float = field(default=1.0, metadata=ADDED)  # on the release's log-probabilities; below 1: less confident


def site_prior_problems(settings: SitePrior) -> list[str]:
    return not_positive(settings, "prior_temperature")


def site_log_prior(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """ln((n_c + 0.01) / (n + 0.01 C)) of a site's training labels, (classes,) in float64."""
    counts = torch.bincount(labels, minlength=classes).double() + RARE
    return (counts / counts.sum()).log()


def corrected_prior(own: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
    """The site's prior; a class that no site has stays out of the question."""
    return torch.where(released <= NEVER, torch.full_like(own, NEVER), own)


def with_site_prior(release: Release, shard: Shard, classes: int, settings: SitePrior) -> Payload:
    """The release as a site's own model: the same tensors and the site's prior beside them; or as it is, if nobody asks."""
    payload = release.for_client(shard.client)
    if settings.personalize == "none":
        return payload
    temperature = torch.tensor([settings.prior_temperature], dtype=torch.float64)
    own = {PRIOR: site_log_prior(shard.train.labels, classes), TEMPERATURE: temperature}
    return Payload({**payload.tensors, **own}, payload.facts)


def without_site_prior(payload: Payload) -> Payload:
    """What the method itself made."""
    return Payload({n: t for n, t in payload.tensors.items() if n not in (PRIOR, TEMPERATURE)}, payload.facts)


def corrected(model: nn.Module, payload: Payload) -> nn.Module:
    """The model, weighed by the prior in the payload; as it is where there is none."""
    if PRIOR not in payload.tensors:
        return model
    return PriorCorrected(model, payload.tensors[PRIOR], float(payload.tensors[TEMPERATURE])).eval()


class PriorCorrected(nn.Module):
    """temperature * log p(c | x) + log p_site(c), where the model answers as if all classes were equally frequent."""

    def __init__(self, model: nn.Module, log_prior: torch.Tensor | Sequence[float], temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        self.register_buffer("log_prior", torch.as_tensor(log_prior).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x)
        return self.temperature * logits.log_softmax(-1) + self.get_buffer("log_prior")
