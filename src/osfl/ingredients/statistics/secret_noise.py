"""Gaussian noise from the operating system's randomness, which nobody can draw again: not with the plan's seed, not the site.

It is rounded to whole numbers before it is added to whole numbers. Rounding the sum of a whole number and real noise is the
same, and tells nothing more. The noise itself is computed in double precision (Box-Muller of two numbers of 53 bits), so
that a deviation is at most `LARGEST`: what an ideal Gaussian has beyond that, 1e-17 of a value, is not in delta.
"""

from __future__ import annotations

import math
import os

import numpy as np
import torch
from numpy.typing import NDArray

_BITS = 53
LARGEST = math.sqrt(2 * _BITS * math.log(2))  # 8.57, in standard deviations


def gaussian(count: int) -> torch.Tensor:
    """Standard normal numbers in float64, (count,)."""
    pairs = (count + 1) // 2
    words = np.frombuffer(os.urandom(16 * pairs), dtype="<u8").reshape(2, pairs) >> np.uint64(64 - _BITS)
    radius = np.sqrt(-2 * np.log((words[0] + np.uint64(1)) * 2.0**-_BITS))
    angle = words[1] * (2 * math.pi * 2.0**-_BITS)
    return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count])


def with_noise(values: torch.Tensor, deviation: float | torch.Tensor) -> torch.Tensor:
    """Whole numbers (int64) plus noise of this standard deviation, rounded; a tensor has one for each value."""
    noise = gaussian(values.numel()).reshape(values.shape) * deviation
    return values + noise.round().to(torch.int64)


def uniform(count: int) -> NDArray[np.float64]:
    """Numbers in [0, 1), (count,), from the same source."""
    words = np.frombuffer(os.urandom(8 * count), dtype="<u8") >> np.uint64(64 - _BITS)
    return words.astype(np.float64) * 2.0**-_BITS
