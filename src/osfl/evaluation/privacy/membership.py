"""Membership inference: was this image in the training data? Four attacks on one number for each image.

The number is a *signal*: how well what is attacked fits the image, on the scale of log-odds, larger for what it has learned.
For a classifier it is log p / (1 - p) of the image's own class, whose order is that of the loss; for generators, tokens and
statistics minus the logarithm of a distance (osfl.evaluation.privacy.signals).

- threshold: the signal itself (loss), or for a classifier that of the most probable class, without the label and without
  shadows (confidence);
- LiRA, offline (Carlini et al., "Membership Inference Attacks From First Principles", IEEE S&P 2022): how far the signal is
  above that of shadows which did not see the image, in their standard deviations. With few shadows the deviation is the same
  for all images, as in the paper's Section VI-C;
- RMIA, offline (Zarifzadeh et al., "Low-Cost High-Power Membership Inference Attacks", ICML 2024): the share of the population
  that the image's likelihood ratio p / p_x exceeds by gamma, with p_x = ((1 + a) p_out + (1 - a)) / 2.

A shadow is what the same method makes of images that the attacker drew: half of those that are tested, and all others of the
site, which this attacker knows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from scipy.special import expit

from osfl.evaluation.privacy.rates import Floats, Mask

MANY = 32  # shadows without an image from which its own deviation is estimated
OFFLINE_A = 0.3  # how much easier an image is for a model that saw it; the paper's value for CIFAR-10
GAMMA = 1.0  # with a larger one, scores of small ratios would be ties
LIRA, RMIA = "lira", "rmia"


def lira(signal: Floats, shadows: Floats, seen: Mask) -> Floats:
    """Offline LiRA's statistic (n,) of a signal (n,), given those of shadows (k, n) and whether each saw the image (k, n)."""
    out = np.where(seen, np.nan, shadows)
    mean = np.nanmean(out, axis=0)
    count = (~np.isnan(out)).sum(0)
    if count.min() >= MANY:
        spread = np.nanstd(out, axis=0, ddof=1)
    else:
        free = max(1, int((count - 1).clip(0).sum()))
        spread = np.full_like(mean, np.sqrt(np.nansum((out - mean) ** 2) / free))
    found: Floats = (signal - mean) / np.maximum(spread, 1e-6)
    return found


def rmia(signal: Floats, shadows: Floats, seen: Mask) -> Floats:
    """Offline RMIA's score (n,); the population that an image is compared with are all that are tested."""
    out = np.nanmean(np.where(seen, np.nan, expit(shadows)), axis=0)
    ratio = expit(signal) / (((1 + OFFLINE_A) * out + (1 - OFFLINE_A)) / 2)
    below = np.searchsorted(np.sort(ratio), ratio / GAMMA, side="right")
    found: Floats = below / len(ratio) + 1e-9 * ratio  # ties of the share are broken by the ratio itself
    return found


def attacks(name: str, signal: Floats, shadows: Floats | None, seen: Mask | None) -> Mapping[str, Floats]:
    """Scores by attack: the signal's own name, and the calibrated ones where there are shadows."""
    found = {name: signal}
    if shadows is not None and seen is not None and len(shadows):
        found |= {LIRA: lira(signal, shadows, seen), RMIA: rmia(signal, shadows, seen)}
    return found
