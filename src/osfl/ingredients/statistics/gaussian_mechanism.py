"""The analytic Gaussian mechanism (Balle and Wang, ICML 2018): the exact epsilon and delta of Gaussian noise, either way.

Noise of standard deviation `multiplier` times the L2 sensitivity is (epsilon, delta)-private if and only if (their Theorem 8)
delta >= Phi(1 / 2m - epsilon m) - e^epsilon Phi(-1 / 2m - epsilon m). Several sums with noise of their own, whose multipliers
are m_i, are together as private as one with 1 / m^2 = sum 1 / m_i^2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import torch

LARGEST_EPSILON = 1e6


def delta_of(epsilon: float, multiplier: float) -> float:
    """The least delta of this noise at this epsilon."""
    near, far = 0.5 / multiplier - epsilon * multiplier, -0.5 / multiplier - epsilon * multiplier
    logs = torch.special.log_ndtr(torch.tensor([near, far], dtype=torch.float64)).tolist()
    return max(0.0, math.exp(logs[0]) * -math.expm1(min(0.0, epsilon + logs[1] - logs[0])))


@lru_cache
def multiplier_for(epsilon: float, delta: float) -> float:
    """The least noise, in units of the sensitivity, that is (epsilon, delta)-private."""
    return _least(lambda multiplier: delta_of(epsilon, multiplier) <= delta, 1e-9, 1e12)


def epsilon_for(multiplier: float, delta: float) -> float:
    """The least epsilon of this noise at this delta; 0 where it hides everything at that delta, infinite beyond reason."""
    if delta_of(0.0, multiplier) <= delta:
        return 0.0
    if delta_of(LARGEST_EPSILON, multiplier) > delta:
        return math.inf
    return _least(lambda epsilon: delta_of(epsilon, multiplier) <= delta, 1e-12, LARGEST_EPSILON)


def _least(fits: Callable[[float], bool], low: float, high: float) -> float:
    """The least number between two positive ones that fits, where all larger ones do; rounded to the side that fits."""
    while high / low > 1 + 1e-12:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def shown_epsilon(epsilon: float) -> float | None:
    """As a statement shows it: rounded up to four digits, never down; None: no finite epsilon."""
    if not math.isfinite(epsilon):
        return None
    if epsilon == 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(epsilon)) - 3)
    return float(f"{math.ceil(epsilon / unit - 1e-6) * unit:.4g}")
