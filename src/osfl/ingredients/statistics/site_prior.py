"""The site's prior: one classifier for all sites, corrected at each by how often its classes occur there.

By Bayes' rule, log p(c | x) at a site is log p(x | c) + log p(c) up to a constant. A release answers as if all classes were
equally frequent, or as they are in the whole round, and then their shares are divided out; a site knows its own shares, and
needs no training to use them. Every method whose release is one classifier can do it (`OneClassifier`). This is a control for
every personalized method: whatever trains at the sites should be better than counting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from osfl.core.method import Context, Method
from osfl.core.types import ADDED, Payload, Release, Shard, Task, Upload
from osfl.ingredients.statistics.claimed_counts import capped_sites
from osfl.ingredients.statistics.class_counts import reported_counts
from osfl.ingredients.statistics.gaussians import NEVER
from osfl.ingredients.training.local import not_positive

RARE = 0.01  # images that a class counts as where a site has none: unlikely, not impossible
PRIOR, TEMPERATURE = "site/prior", "site/temperature"
LEARNED = "release/log_shares"  # of the classes, as the release learned them; without it: all alike


@dataclass(frozen=True)
class SitePrior:
    """Whether sites correct the release by their class shares; mixed into Settings."""

    personalize: Literal["none", "prior"] = field(default="none", metadata=ADDED)  # prior: weigh classes as the site has them
    prior_temperature: float = field(default=1.0, metadata=ADDED)  # on the release's log-probabilities; below 1: less confident


def site_prior_problems(settings: SitePrior, task: Task) -> list[str]:
    found = not_positive(settings, "prior_temperature")
    if settings.personalize == "prior" and task.several:
        found.append("setting 'personalize': prior weighs classes of which an image has one; set personalize=none")
    return found


def site_log_prior(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """ln((n_c + 0.01) / (n + 0.01 C)) of a site's training labels, (classes,) in float64."""
    counts = torch.bincount(labels, minlength=classes).double() + RARE
    return (counts / counts.sum()).log()


def corrected_prior(own: torch.Tensor, released: torch.Tensor) -> torch.Tensor:
    """The site's prior; a class that no site has stays out of the question."""
    return torch.where(released <= NEVER, torch.full_like(own, NEVER), own)


def weighed_by_site(probability: torch.Tensor, learned: torch.Tensor, temperature: float, labels: torch.Tensor) -> torch.Tensor:
    """Scores (n, classes) of a classifier whose probabilities hold the `learned` log shares, with those of a site's training
    labels in their place."""
    likelihood = probability.clamp_min(torch.finfo(torch.float64).tiny).log() - learned
    scores = temperature * likelihood + site_log_prior(labels, len(learned))
    return torch.where(learned <= NEVER, torch.full_like(scores, NEVER), scores)


def with_site_prior(release: Release, shard: Shard, classes: int, settings: SitePrior) -> Payload:
    """The release as a site's own model: the same tensors and the site's prior beside them, over what the release learned; or
    as it is, if nobody asks."""
    payload = release.for_client(shard.client)
    if settings.personalize == "none":
        return payload
    temperature = torch.tensor([settings.prior_temperature], dtype=torch.float64)
    log_prior = site_log_prior(shard.train.labels, classes)
    if LEARNED in payload.tensors:
        log_prior = log_prior - settings.prior_temperature * payload.tensors[LEARNED]
    own = {PRIOR: log_prior, TEMPERATURE: temperature}
    return Payload({**payload.tensors, **own}, payload.facts)


def with_class_shares(release: Release, uploads: Sequence[Upload], settings: SitePrior, share: float) -> Release:
    """The release and, where sites correct it, the log shares of the classes in the whole round, in which its classifier
    learned them. A class that nobody has keeps a share of 1: there is nothing to divide out. As sites claim their counts; none
    counts more than `share`."""
    if settings.personalize == "none":
        return release
    claims = [reported_counts(upload.payload.facts, upload.client) for upload in uploads]
    total = capped_sites(torch.tensor(claims, dtype=torch.float64), share).sum(0)
    learned = torch.where(total > 0, total / total.sum(), 1.0).log()
    return replace(release, shared=Payload({**release.shared.tensors, LEARNED: learned}, release.shared.facts))


def without_site_prior(payload: Payload) -> Payload:
    """What the method itself made."""
    return Payload({n: t for n, t in payload.tensors.items() if n not in (PRIOR, TEMPERATURE, LEARNED)}, payload.facts)


def corrected(model: nn.Module, payload: Payload) -> nn.Module:
    """The model, weighed by the prior in the payload; as it is where there is none."""
    if PRIOR not in payload.tensors:
        return model
    return PriorCorrected(model, payload.tensors[PRIOR], float(payload.tensors[TEMPERATURE])).eval()


class OneClassifier(Method):
    """Mixed into methods whose release is one classifier, before the class that builds it: sites may correct it by their class
    shares. The settings have `SitePrior`."""

    def problems(self, clients: int) -> list[str]:
        return [*super().problems(clients), *site_prior_problems(self.settings, self.task)]

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        return with_site_prior(release, shard, len(self.task.classes), self.settings)

    def needs_images_after_round(self) -> bool:
        return bool(self.settings.personalize == "prior")

    def build(self, payload: Payload) -> nn.Module:
        return corrected(super().build(without_site_prior(payload)), payload)


class PriorCorrected(nn.Module):
    """temperature * log p(c | x) + log prior(c): the site's, where the model answers as if classes were equally frequent."""

    def __init__(self, model: nn.Module, log_prior: torch.Tensor | Sequence[float], temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature
        self.register_buffer("log_prior", torch.as_tensor(log_prior).float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(x)
        return self.temperature * logits.log_softmax(-1) + self.get_buffer("log_prior")
