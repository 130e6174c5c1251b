"""How private training with noise is: the moments accountant of Gaussian noise on random batches (Poisson sampling).

Renyi differential privacy of one step at whole orders (Mironov, Talwar and Zhang, "Renyi Differential Privacy of the Sampled
Gaussian Mechanism", 2019, Section 3.3), added over the steps, and turned into (epsilon, delta) as in Canonne, Kamath and
Steinke ("The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Proposition 12). An upper bound, and nearly the least
one where epsilon is below ten.
"""

from __future__ import annotations

import math
from functools import lru_cache

ORDERS = (*range(2, 65), 96, 128, 192, 256, 512, 1024)
LARGEST = 1e4  # noise multiplier beyond which nothing is learned


def epsilon_of(rate: float, multiplier: float, steps: int, delta: float) -> float:
    """Epsilon of so many steps on images drawn with this probability each, with noise of `multiplier` clipping norms."""
    if steps == 0:
        return 0.0
    found: list[float] = []
    for order in ORDERS:
        renyi = steps * _renyi(rate, multiplier, order)
        found.append(renyi + math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1))
    return max(0.0, min(found))


@lru_cache(maxsize=100_000)
def _renyi(rate: float, multiplier: float, order: int) -> float:
    """Renyi divergence of one step at a whole order."""
    if rate == 1.0:
        return order / (2 * multiplier**2)
    terms = [
        math.lgamma(order + 1)
        - math.lgamma(k + 1)
        - math.lgamma(order - k + 1)
        + k * math.log(rate)
        + (order - k) * math.log1p(-rate)
        + k * (k - 1) / (2 * multiplier**2)
        for k in range(order + 1)
    ]
    top = max(terms)
    return max(0.0, top + math.log(sum(math.exp(term - top) for term in terms))) / (order - 1)


@lru_cache(maxsize=1000)
def multiplier_for(epsilon: float, delta: float, rate: float, steps: int) -> float:
    """The least noise, to one part in ten thousand, with which so many steps are (epsilon, delta)-private, or infinite."""
    if epsilon_of(rate, LARGEST, steps, delta) > epsilon:
        return math.inf
    low, high = 0.05, LARGEST
    while high / low > 1 + 1e-4:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon_of(rate, middle, steps, delta) <= epsilon else (middle, high)
    return high
