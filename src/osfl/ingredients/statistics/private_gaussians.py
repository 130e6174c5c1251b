"""Gaussians that a site may send under differential privacy: from its counts, class sums and second moments with noise.

Sensitivity: vectors are whole numbers, none longer than LEVELS. One image more or less changes one count by LEVELS, one row of
the sums by |z| <= LEVELS, and the second moments by |z z^T| = |z|^2 <= LEVELS^2: as in `private_sums`, whose noise this is.

Whatever is computed from noisy sums and from nothing else of the images is as private as they are: Gaussians, what is drawn
from them (by the plan's seed, too), and classifiers that learn from that. Expectation maximization looks at the images again in
every step and would not be. So a class has one Gaussian, and all classes of a site share the covariance within classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from osfl.core.method import Context, Method
from osfl.core.types import Dataset, Json, Limits, Plan, Release, Shard, Upload
from osfl.ingredients.statistics.gaussians import folded_statistics
from osfl.ingredients.statistics.private_sums import (
    check_countable,
    check_noise,
    every_image,
    in_features,
    noise_problems,
    noised,
    noisy_gaussians,
    site_noise,
    statement,
)
from osfl.ingredients.statistics.public_map import LEVELS

MOST_IMAGES = 2**53 // LEVELS**2  # of a site, whose sums in whole numbers are exact


@dataclass(frozen=True)
class SiteGaussians:
    """What a site's noisy sums say of its classes."""

    counts: tuple[int, ...]  # images of each class; 0 where a class does not stand out of the noise: it has no Gaussian
    means: torch.Tensor  # (classes, d)
    covariance: torch.Tensor  # (d, d) within classes, positive definite

    @property
    def held(self) -> list[int]:
        return [c for c, count in enumerate(self.counts) if count]

    def sample(self, label: int, count: int, rng: torch.Generator) -> torch.Tensor:
        """(count, d)"""
        noise = torch.randn((count, len(self.covariance)), generator=rng, dtype=torch.float64)
        found: torch.Tensor = self.means[label] + noise @ torch.linalg.cholesky(self.covariance).T
        return found


def site_gaussians(vectors: torch.Tensor, labels: torch.Tensor, classes: Sequence[str], plan: Plan) -> SiteGaussians:
    """Of vectors (n, d) in whole steps, none longer than LEVELS; Gaussians are of vectors whose greatest length is 1.

    The noise comes from the operating system. A site whose classes all drown in it has a Gaussian of the largest one: a
    refusal would depend on its images.
    """
    exact = folded_statistics(vectors, labels, len(classes))
    sums = {"counts": exact.counts * LEVELS, "sums": exact.sums, "gram": exact.gram}
    sent = noised({name: value.round().to(torch.int64) for name, value in sums.items()}, site_noise(plan))
    found = noisy_gaussians(*in_features(sent, plan, 1 / LEVELS, 1), classes, largest=True)
    covariance = found.within + found.shrinkage * torch.eye(vectors.shape[1], dtype=torch.float64)
    counts = [max(1, round(float(share) * found.images)) if share > 0 else 0 for share in found.shares]
    return SiteGaussians(tuple(_within_limits(counts, plan.limits)), found.means + found.mean, covariance)


def _within_limits(counts: Sequence[int], limits: Limits) -> list[int]:
    """Noisy counts that a plan lets a site claim: noise must not decide whether an upload is refused."""
    found = [min(count, limits.class_samples) for count in counts]
    total = sum(found)
    if total > limits.samples:
        found = [max(1, count * limits.samples // total) if count else 0 for count in found]
    while sum(found) > limits.samples:  # classes of one image each, by the line above
        found[found.index(max(found))] -= 1
    return found


def images_to_sum(shard: Shard, plan: Plan) -> Dataset:
    """All images of the site: which ones are held out depends on all others."""
    data = every_image(shard)
    check_countable(len(data), min(plan.limits.samples, MOST_IMAGES), shard.client)
    return data


def private_facts(found: SiteGaussians, plan: Plan) -> dict[str, Json]:
    """What goes with the Gaussians: counts with noise, and what noise it was."""
    return {"class_counts": list(found.counts), "samples": sum(found.counts), "noise": site_noise(plan).as_json()}


class NoisyGaussianMethod(Method):
    """Mixed into methods whose upload under [privacy] follows from noisy sums of the site alone."""

    def gaussian_problems(self, plan: Plan) -> list[str]:
        """What such an upload cannot do with this plan, a sentence each."""
        assert plan.privacy is not None
        found = noise_problems(plan)
        if plan.privacy.noise != "site":
            found.append("privacy.noise: the server uses what each site sends by itself, not only its sum; set noise = 'site'")
        return found

    def adds_held_out(self, plan: Plan) -> bool:
        return plan.privacy is not None

    def check_upload(self, upload: Upload, ctx: Context) -> None:
        if ctx.plan.privacy is not None:
            check_noise(upload, ctx.plan)

    def privacy_statement(self, release: Release, uploads: Sequence[Upload], plan: Plan) -> Json:
        """The release follows from each upload by itself, not from their sum: nobody is protected by other sites' noise."""
        found = statement(plan, len(uploads))
        return {**found, "epsilon_release": found["epsilon_term"], "epsilon_site": found["epsilon_term"]}
