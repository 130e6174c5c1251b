"""Differential privacy of a run, in sentences for its report and its model card."""

from __future__ import annotations

from collections.abc import Sequence

from osfl.core.result import DifferentialPrivacy
from osfl.reports.text import many


def privacy_sentences(stated: DifferentialPrivacy) -> Sequence[str]:
    """Epsilon, delta, against whom, what was noised, and what does not follow from it."""
    who = "Each site added all of the noise" if stated["noise"] == "site" else "The noise of all sites together hides an image"
    sentences = [
        f"Differential privacy: epsilon {_number(stated['epsilon'])}, delta {stated['delta']:g}, for {stated['unit']}, "
        f"against {stated['adversary']}.",
        f"{who}: Gaussian noise on {', '.join(stated['noised'])}, in {many(stated['sites'], 'upload')}.",
    ]
    if stated["noise"] == "share":
        sentences += _of_shares(stated)
    else:
        sentences.append(f"Who sees the release alone has epsilon {_number(stated['epsilon_release'])}.")
    sentences.append(
        "Another round with the same images spends its epsilon on top of this one. Models that a site makes its own "
        "use its images without noise; epsilon does not cover them. Noise is drawn anew, so nobody can repeat this round "
        "bit by bit."
    )
    return sentences


def _of_shares(stated: DifferentialPrivacy) -> Sequence[str]:
    """What holds for who sees less noise than all of it."""
    term = _number(stated["epsilon_term"])
    if stated.get("secure_sum"):
        upload = f"Uploads were masked. Who got the masks of one site off its upload would have epsilon {term} for it."
    else:
        upload = f"Who sees one site's upload has epsilon {term} for it: it holds a share of the noise."
    site = _number(stated.get("epsilon_site"))
    return [upload, f"Another site with the release, which knows its own share, has epsilon {site}."]


def _number(epsilon: float | None) -> str:
    return "beyond all bounds" if epsilon is None else f"{epsilon:g}"
