"""Sums under differential privacy: what one image can change, the noise that hides it, and a Gaussian of noisy sums.

Feature vectors are no longer than LEVELS = 2^15 steps of a grid, and an image counts 2^15 steps, too. One image more or less
changes, in whole steps: the counts by 2^15, the class sums by 2^15 at most, and G, with the off-diagonal values of its triangle
counted twice, by |z z^T| = |z|^2 <= 2^30. Each of the three has noise of its own: multiplier m_i = m / sqrt(share_i), so that
1 / m^2 = sum 1 / m_i^2 and all of them together are as private as m says. Off the diagonal noise is sqrt(2) times smaller:
those values count twice.

Shares of noise: each site adds noise of variance sigma^2 / k, with k the sites of the quorum that keep their noise to
themselves (`contributors`). Each rounds its own share, so that masks can be added to it. The sum of rounded shares is as
private as the rounded sum up to exp(-(pi sigma_i)^2), which a share of `FINEST` steps or more puts below 1e-1000: fewer steps
are refused. (Kairouz, Liu and Steinke, ICML 2021, have the argument for discrete Gaussians.) Counts have a grid finer than
whole images for this reason: a share far below one image would be rounded to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from osfl.core.errors import RoundError, TrainingError, go_on_without
from osfl.core.sums import ALL_SITES
from osfl.core.types import ClientId, Dataset, Json, Plan, Shard, Summand, Task, Upload
from osfl.ingredients.statistics.gaussian_mechanism import epsilon_for, multiplier_for, shown_epsilon
from osfl.ingredients.statistics.gaussians import Statistics, unpacked
from osfl.ingredients.statistics.one_vs_rest import images_in
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.ingredients.statistics.secret_noise import LARGEST, with_noise

SHARES = {"counts": 0.05, "sums": 0.65, "gram": 0.3}  # of 1 / m^2; found on validation images of blood cells
HEADROOM = 2**52  # all sites' noise stays below: sums of it are exact in float64, and far from the end of int64
FINEST = 16  # steps: the least deviation of a share
_STANDS_OUT = 3.0  # deviations of a count's noise below which a class counts as absent
_KEPT, _SHRINKAGE, _LEAST = 0.5, 0.1, 0.01  # of the largest eigenvalue of noise, the same, and of the mean variance


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the noise in a term or in a sum of terms, in whole steps of the grid."""

    counts: float
    sums: float
    gram: float  # on the diagonal

    def times(self, factor: float) -> Noise:
        return Noise(self.counts * factor, self.sums * factor, self.gram * factor)

    def as_json(self) -> Json:
        """As uploads state it; six digits, because the last bits differ between processors."""
        return {name: float(f"{value:.6g}") for name, value in asdict(self).items()}


def contributors(plan: Plan) -> int:
    """How many sites' noise makes up what the plan promises. Shares: the quorum without the plan's colluders, so that neither
    dropouts nor sites that tell others their noise weaken it."""
    assert plan.privacy is not None
    return (plan.quorum or len(plan.clients)) - plan.privacy.colluders if plan.privacy.noise == "share" else 1


def site_noise(plan: Plan) -> Noise:
    """What each site adds."""
    assert plan.privacy is not None
    multiplier = multiplier_for(plan.privacy.epsilon, plan.privacy.delta) / math.sqrt(contributors(plan))
    parts = {name: multiplier / math.sqrt(share) for name, share in SHARES.items()}
    return Noise(parts["counts"] * LEVELS, parts["sums"] * LEVELS, parts["gram"] * LEVELS**2)


def largest(plan: Plan, sites: int = 1) -> Noise:
    """What noise of so many sites can at most be; no noise drawn is beyond."""
    return site_noise(plan).times(LARGEST * sites)


def with_headroom(summands: Mapping[str, Summand], plan: Plan) -> dict[str, Summand]:
    """Summands of a secure sum (counts, sums, gram) whose bounds have headroom for the tails of a site's noise, too."""
    headroom = asdict(largest(plan))
    return {
        name: Summand(one.shape, int(one.bound) + math.ceil(headroom[name]) + 1, whole=True) for name, one in summands.items()
    }


def noise_problems(plan: Plan) -> list[str]:
    """Noise too large for whole numbers, or shares of it so small that rounding could change them, a sentence each."""
    assert plan.privacy is not None
    if contributors(plan) < 1:
        return []  # osfl.core.plan names it
    noise, sites = site_noise(plan), len(plan.clients)
    found = []
    if sites * LARGEST * noise.gram > HEADROOM:
        found.append("privacy.epsilon: its noise is more than whole numbers of 64 bits hold; a larger epsilon needs less")
    if min(noise.counts, noise.sums) < FINEST:
        found.append("privacy.epsilon: a site's noise would be lost in rounding; a smaller epsilon, or fewer shares, need more")
    if plan.judging.combine != "mean":
        found.append("judging.combine: noisy sums are only added, so that each site's noise counts alike; leave it out")
    return found


def sites_in(upload: Upload) -> int:
    """How many sites' noise an upload holds: the server phase of a secure sum gets one upload of all."""
    return int(upload.payload.facts["sites"]) if upload.client == ALL_SITES else 1


def check_noise(upload: Upload, plan: Plan) -> None:
    """A term with other noise than the plan's would make its epsilon untrue; who sent it is named."""
    expected = site_noise(plan).as_json()
    if upload.payload.facts.get("noise") != expected:
        raise RoundError(
            "this upload was not made with the noise that the plan asks for",
            client=upload.client,
            field="facts.noise",
            expected=expected,
            got=str(upload.payload.facts.get("noise", "nothing")),
            fix=go_on_without(upload.client),
        )


def check_claims(upload: Upload, counts: torch.Tensor, plan: Plan) -> None:
    """n_c of a site in images, within what the plan lets a site claim; noise is no claim."""
    limits = plan.limits
    sites = len(plan.clients) if upload.client == ALL_SITES else 1
    noise = largest(plan, sites).counts / LEVELS if plan.privacy is not None else 0.0
    if bool((counts < -noise).any()):
        raise RoundError(
            "it claims fewer images than none",
            client=upload.client,
            field="counts",
            expected=f"at least {-noise:.0f}",
            got=int(counts.min()),
            fix=go_on_without(upload.client),
        )
    images, of_a_class = float(images_in(counts, plan.task)), float(counts[: len(plan.task.classes)].max())
    claims = (("samples", images - noise * len(counts)), ("class_samples", of_a_class - noise))
    for name, images in claims:
        if images > sites * getattr(limits, name):
            raise RoundError(
                "it claims more images than the plan allows a site",
                client=upload.client,
                field="counts",
                expected=f"at most {sites * getattr(limits, name)} (limits.{name})",
                got=int(images),
                fix=go_on_without(upload.client),
            )


def check_bounds(term: Statistics, vectors: int, noise: Noise, task: Task) -> None:
    """|A_c| <= n_c b and |G_ij| <= n b^2, and no more beyond than noise can be."""
    counts = (term.counts + noise.counts / LEVELS) * vectors
    images = images_in(counts, task)
    if task.several and bool((counts > images).any()):
        raise RoundError("it claims more images of a class than images", field="counts", expected=f"at most {images:.0f}")
    if bool((term.sums.abs() > counts[:, None] * LEVELS + noise.sums).any()):
        raise RoundError("its class sums do not fit its counts", field="sums", expected="at most count times bound")
    if bool((term.gram.abs() > images * LEVELS**2 + noise.gram).any()):
        raise RoundError("its second moments do not fit its counts", field="gram", expected="at most count times bound squared")


def check_shares(plan: Plan, uploads: int) -> None:
    """So many sites' noise must be all that the plan promises, also where its colluders are among them."""
    assert plan.privacy is not None
    needed = contributors(plan) + plan.privacy.colluders
    if uploads < needed:
        raise RoundError(
            "the noise of so few sites is less than the plan promises",
            field="privacy.noise",
            expected=f"uploads of {needed} sites, each with its share",
            got=uploads,
            fix="Wait for more uploads, or open a new round with a smaller quorum or noise = 'site'.",
        )


def every_image(shard: Shard) -> Dataset:
    """Held-out images, too: which ones are held out depends on all others."""
    parts = (shard.train, shard.val)
    return Dataset(torch.cat([one.images for one in parts]), torch.cat([one.labels for one in parts]).long())


def check_countable(images: int, most: int, client: ClientId) -> None:
    """No more images than sums hold exactly, and than the plan lets a site have: bounds of the sums rest on it."""
    if images > most:
        raise TrainingError(
            "it has more images than its sums can hold",
            client=client,
            field="limits.samples",
            expected=f"at most {most}",
            got=images,
            fix="Learn from fewer images, or divide them between two clients.",
        )


def noised(exact: Mapping[str, torch.Tensor], noise: Noise) -> dict[str, torch.Tensor]:
    """A site's counts, class sums and triangle of G in int64, each with noise."""
    return {
        "counts": with_noise(exact["counts"], noise.counts),
        "sums": with_noise(exact["sums"], noise.sums),
        "gram": with_noise(exact["gram"], _triangle(exact["sums"].shape[1], noise.gram)),
    }


def _triangle(d: int, deviation: float) -> torch.Tensor:
    """Deviations of the noise on the folded G."""
    row, column = torch.triu_indices(d, d).unbind()
    return torch.where(row == column, 1.0, math.sqrt(0.5)).double() * deviation


def in_features(whole: Mapping[str, torch.Tensor], plan: Plan, step: float, sites: int) -> tuple[Statistics, Noise]:
    """A sum of so many sites in whole steps, and its noise, in images and in the units of the features."""
    noise = site_noise(plan).times(math.sqrt(sites))
    counts, sums = whole["counts"].double() / LEVELS, whole["sums"].double() * step
    gram = unpacked(whole["gram"].double()) * step**2
    return Statistics(sums, gram, counts), Noise(noise.counts / LEVELS, noise.sums * step, noise.gram * step**2)


@dataclass(frozen=True)
class NoisyGaussians:
    """Gaussians of all classes with one covariance, and how much to add on its diagonal; in the units of the features."""

    images: float
    shares: torch.Tensor  # n_c / N, (classes,); 0 where a class does not stand out of the noise
    mean: torch.Tensor  # (d,)
    means: torch.Tensor  # from the mean, (classes, d); zeros for a class that does not stand out
    within: torch.Tensor  # (d, d), positive semidefinite
    shrinkage: float


def noisy_gaussians(total: Statistics, noise: Noise, classes: Sequence[str], *, largest: bool = False) -> NoisyGaussians:
    """Of sums whose noise has these deviations. Post-processing: it costs no privacy.

    A class whose count does not stand out of the noise is taken for absent; where none does, that is an error, or, with
    `largest`, the largest one counts as an image at least. Noise of a symmetric matrix has eigenvalues up to
    sqrt(2 d) deviations: half of that is taken from the eigenvalues of S_w, and lambda is a tenth of it.
    """
    counts = torch.where(total.counts > _STANDS_OUT * noise.counts, total.counts, 0.0)
    if largest and not bool(counts.any()):
        counts[total.counts.argmax()] = total.counts.max().clamp_min(1.0)
    images, d = float(counts.sum()), total.gram.shape[0]
    if images <= 0:
        raise TrainingError(
            "no class has more images than the noise hides",
            field="privacy.epsilon",
            expected=f"a class of more than {_STANDS_OUT * noise.counts:.0f} images at all sites together",
            got=f"{float(total.counts.max()):.0f} in the largest of {len(classes)}, with noise",
            fix="Agree on a larger epsilon, or gather more images.",
        )
    known, shares = counts > 0, counts / images
    sums = torch.where(known[:, None], total.sums, 0.0)
    means, mean = sums / torch.where(known, counts, 1.0)[:, None], sums.sum(0) / images
    within = total.gram / images - (means * shares[:, None]).T @ means
    within.diagonal().add_(noise.sums**2 * int(known.sum()) / images)  # what noise in the sums takes away too much
    values, vectors = torch.linalg.eigh((within + within.T) / 2)
    edge = noise.gram * math.sqrt(2 * d) / images
    kept = (values - _KEPT * edge).clamp_min(0)
    shrinkage = max(_SHRINKAGE * edge, _LEAST * float(values.clamp_min(0).mean()))
    centered = torch.where(known[:, None], means - mean, 0.0)
    return NoisyGaussians(images, shares, mean, centered, (vectors * kept) @ vectors.T, shrinkage)


def statement(plan: Plan, sites: int) -> Json:
    """What is true of a release of so many sites: epsilon, delta, against whom, and what was noised; from what ran."""
    privacy = plan.privacy
    assert privacy is not None
    one, delta = site_noise(plan).sums * math.sqrt(SHARES["sums"]) / LEVELS, privacy.delta  # the multiplier of one site

    def against(honest: int) -> float | None:
        """Epsilon against who sees the sum and knows the noise of all but so many sites."""
        return shown_epsilon(epsilon_for(one * math.sqrt(honest), delta)) if honest > 0 else None

    everybody = privacy.noise == "site"
    return {
        "epsilon": against(1 if everybody else sites - privacy.colluders),
        "delta": delta,
        "adversary": _adversary(plan),
        "epsilon_release": against(sites),  # to those who see the release alone
        "epsilon_term": against(1),  # to those who see one site's term: a server without secure sum
        "epsilon_site": against(sites - 1),  # to another site of the round, which knows its own noise
        "unit": "one image more or less at one site",
        "noise": privacy.noise,
        "sites": sites,
        "colluders": privacy.colluders,
        "secure_sum": plan.secure_sum,
        "noised": ["class counts", "class sums", "second moments"],
        "repeatable": False,
    }


def _adversary(plan: Plan) -> str:
    """Whom epsilon holds against, as the plan has it."""
    assert plan.privacy is not None
    few = plan.privacy.colluders
    others = f"together with up to {few} sites that tell their noise" if few else "to whom no site tells its noise"
    if plan.privacy.noise == "site":
        return "everybody but the site itself: the server, other sites, and whoever gets the release"
    if plan.secure_sum:
        return (
            f"the server and whoever gets the release, {others}; the server sees the sum alone, as long as it tells the truth "
            "about who is missing"
        )
    return f"whoever gets the release, {others}; the server is trusted with the terms"
