"""OneSum under differential privacy: what one image can change, the noise that hides it, and a classifier of noisy sums.

Features are no longer than `norm` = 2^15 steps (`public.py`). One image more or less changes, in whole steps: the counts by 1,
the class sums by 2^15 at most, and G, with the off-diagonal values of its triangle counted twice, by |z z^T| = |z|^2 <= 2^30.
Each of the three has noise of its own: multiplier m_i = m / sqrt(share_i), so that 1 / m^2 = sum 1 / m_i^2 and all of them
together are as private as m says. Off the diagonal noise is sqrt(2) times smaller: those values count twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from osfl.core.errors import RoundError, TrainingError, go_on_without
from osfl.core.types import Json, Plan, Privacy, Total, Upload
from osfl.ingredients.statistics.gaussians import Statistics, unpacked
from osfl.ingredients.statistics.secret_noise import LARGEST, with_noise
from osfl.methods.onesum.features import LEVELS
from osfl.methods.onesum.gaussian_mechanism import epsilon_for, multiplier_for
from osfl.methods.onesum.head import Moments

SHARES = {"counts": 0.05, "sums": 0.65, "gram": 0.3}  # of 1 / m^2; found on validation images of blood cells
ROOM = 2**52  # all sites' noise stays below: sums of it are exact in float64, and far from the end of int64
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
    """How many sites' noise makes up what the plan promises: with shares the quorum, so that dropouts do not weaken it."""
    assert plan.privacy is not None
    return (plan.quorum or len(plan.clients)) if plan.privacy.noise == "share" else 1


def site_noise(plan: Plan) -> Noise:
    """What each site adds."""
    assert plan.privacy is not None
    multiplier = multiplier_for(plan.privacy.epsilon, plan.privacy.delta) / math.sqrt(contributors(plan))
    parts = {name: multiplier / math.sqrt(share) for name, share in SHARES.items()}
    return Noise(parts["counts"], parts["sums"] * LEVELS, parts["gram"] * LEVELS**2)


def largest(plan: Plan) -> Noise:
    """What noise of one site can at most be; no noise drawn is beyond."""
    return site_noise(plan).times(LARGEST)


def plan_problems(settings: Any, plan: Plan) -> list[str]:
    """Settings that a plan with differential privacy cannot have, a sentence each."""
    assert plan.privacy is not None
    wanted = {"by_class": False, "send": "triangle", "head": "lda", "shrinkage": "gcv"}
    found = [
        f"setting {name!r}: with [privacy] expected {value!r}, got {getattr(settings, name)!r}"
        for name, value in wanted.items()
        if getattr(settings, name) != value
    ]
    if settings.dimensions < 1:
        found.append("setting 'dimensions': [privacy] needs features of bounded norm; set dimensions=256")
    if too_much_noise(plan.privacy, len(plan.clients)):
        found.append("privacy.epsilon: its noise is more than whole numbers of 64 bits hold; a larger epsilon needs less")
    return found


def too_much_noise(privacy: Privacy, sites: int) -> bool:
    """Whether the noise of so many sites could leave the whole numbers that sums are exact in."""
    multiplier = multiplier_for(privacy.epsilon, privacy.delta) / math.sqrt(SHARES["gram"])
    return sites * multiplier * LARGEST * LEVELS**2 > ROOM


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


def check_shares(plan: Plan, uploads: int) -> None:
    """So many sites' noise must be all that the plan promises."""
    needed = contributors(plan)
    if uploads < needed:
        raise RoundError(
            "the noise of so few sites is less than the plan promises",
            field="privacy.noise",
            expected=f"uploads of {needed} sites, each with its share",
            got=uploads,
            fix="Wait for more uploads, or open a new round with a smaller quorum or noise = 'site'.",
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


def in_features(total: Total, plan: Plan, step: float) -> tuple[Statistics, Noise]:
    """A sum in whole steps, and its noise, in the units of the features."""
    whole, noise = total.tensors, site_noise(plan).times(math.sqrt(len(total.images)))
    sums, gram = whole["sums"].double() * step, unpacked(whole["gram"].double()) * step**2
    return Statistics(sums, gram, whole["counts"].double()), Noise(noise.counts, noise.sums * step, noise.gram * step**2)


def noisy_moments(total: Statistics, noise: Noise, classes: Sequence[str]) -> tuple[Moments, float]:
    """Moments and shrinkage of sums whose noise has these deviations, all in the units of the features. Post-processing:
    it costs no privacy.

    A class whose count does not stand out of the noise is taken for absent. Noise of a symmetric matrix has eigenvalues up to
    sqrt(2 d) deviations: half of that is taken from the eigenvalues of S_w, and lambda is a tenth of it.
    """
    counts = torch.where(total.counts > _STANDS_OUT * noise.counts, total.counts, 0.0)
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
    found = Moments(images, shares, mean, torch.ones_like(mean), centered, (vectors * kept) @ vectors.T)
    return found, shrinkage


def statement(plan: Plan, uploads: int) -> Json:
    """What is true of a release of so many uploads: epsilon, delta, against whom, and what was noised; from what ran."""
    privacy = plan.privacy
    assert privacy is not None
    multiplier, delta = multiplier_for(privacy.epsilon, privacy.delta), privacy.delta
    one = multiplier / math.sqrt(contributors(plan))  # the noise of one site
    against = {"release": epsilon_for(one * math.sqrt(uploads), delta), "term": epsilon_for(one, delta)}
    everybody = privacy.noise == "site"
    return {
        "epsilon": _shown(against["term" if everybody else "release"]),
        "delta": delta,
        "adversary": "everybody but the site itself: the server, other sites, and whoever gets the release"
        if everybody
        else "whoever gets the release; the server is trusted with the terms, and sites do not share their noise with others",
        "epsilon_release": _shown(against["release"]),  # to those who see the release alone
        "epsilon_term": _shown(against["term"]),  # to those who see one site's term: a server without secure sum
        "unit": "one image more or less at one site",
        "noise": privacy.noise,
        "sites": uploads,
        "noised": ["class counts", "class sums", "second moments"],
        "repeatable": False,
    }


def _shown(epsilon: float) -> float | None:
    """Rounded up to four digits, never down; None: beyond reason."""
    if not math.isfinite(epsilon):
        return None
    if epsilon == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 3)
    return float(f"{math.ceil(epsilon / unit - 1e-6) * unit:.4g}")
