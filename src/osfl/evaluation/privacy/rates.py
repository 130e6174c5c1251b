"""How well scores tell members from others: area under the curve, and true positives at few false ones, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, rankdata

from osfl.core.result import Rate

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
FALSE_POSITIVES = (0.001, 0.01)  # the rates at which true positives are counted
_Z = 1.959964  # of a 95 % interval


def share(hits: int, of: int) -> Rate:
    """A share with its exact 95 % interval (Clopper and Pearson)."""
    low = 0.0 if hits == 0 else float(beta.ppf(0.025, hits, of - hits + 1))
    high = 1.0 if hits == of else float(beta.ppf(0.975, hits + 1, of - hits))
    return {"value": hits / of, "low": low, "high": high}


def area(members: Floats, others: Floats) -> Rate:
    """The chance that a member scores higher than another, ties counted half; DeLong's variance in Wilson's interval."""
    m, n = len(members), len(others)
    ranks = rankdata(np.concatenate([members, others]))
    above = (ranks[:m] - rankdata(members)) / n  # for each member the share of others below it
    below = 1 - (ranks[m:] - rankdata(others)) / m
    value = float(above.mean())
    variance = (np.var(above, ddof=1) / m if m > 1 else 0.0) + (np.var(below, ddof=1) / n if n > 1 else 0.0)
    size = min(m, n) if variance <= 0 else value * (1 - value) / float(variance)  # as many coin flips vary as much
    return _wilson(value, max(1.0, size))


def _wilson(value: float, size: float) -> Rate:
    scale = 1 + _Z**2 / size
    middle = (value + _Z**2 / (2 * size)) / scale
    reach = _Z / scale * math.sqrt(max(0.0, value * (1 - value)) / size + _Z**2 / (4 * size**2))
    return {"value": value, "low": max(0.0, middle - reach), "high": min(1.0, middle + reach)}


def true_positives(members: Floats, others: Floats, false_positives: float) -> Rate | None:
    """Share of members above the threshold that at most so large a share of the others pass; None: too few others to say."""
    allowed = math.floor(false_positives * len(others) + 1e-9)
    if allowed < 1 or not len(members):
        return None
    return share(int((members > threshold(others, allowed)).sum()), len(members))


def threshold(others: Floats, allowed: int) -> float:
    """The least score that at most `allowed` of the others exceed."""
    return float(np.sort(others)[::-1][allowed])


def at_few_false_positives(members: Floats, others: Floats) -> Mapping[str, Rate | None]:
    return {f"{rate:g}": true_positives(members, others, rate) for rate in FALSE_POSITIVES}


def most_true_positives(false_positives: float, epsilon: float, delta: float) -> float:
    """What (epsilon, delta) allows any attack to find at so many false positives (Kairouz, Oh and Viswanath, 2015):
    TPR <= e^epsilon FPR + delta, and 1 - FPR <= e^epsilon (1 - TPR) + delta."""
    epsilon = min(epsilon, 50.0)  # e^1000 is no float
    near = math.exp(epsilon) * false_positives + delta
    far = 1 - math.exp(-epsilon) * (1 - delta - false_positives)
    return max(0.0, min(1.0, near, far))


def exceeds_bound(members: Floats, others: Floats, epsilon: float, delta: float) -> bool:
    """Whether some threshold finds surely more than differential privacy allows (`most_true_positives`).

    Surely: the low end of the one share's interval against the high end of the other's, at the rates that are stated.
    """
    for rate in FALSE_POSITIVES:
        found, allowed = true_positives(members, others, rate), math.floor(rate * len(others) + 1e-9)
        if found is not None and found["low"] > most_true_positives(share(allowed, len(others))["high"], epsilon, delta):
            return True
    return False
