"""Noise of the operating system: Gaussian, in whole numbers, bounded, and of no seed."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from osfl.ingredients.statistics.secret_noise import LARGEST, gaussian, with_noise


def test_it_is_standard_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    drawn = gaussian(400_001)
    assert drawn.dtype == torch.float64
    assert abs(float(drawn.mean())) < 5 / math.sqrt(len(drawn))
    assert float(drawn.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * len(drawn)))
    for x in (-2.0, -0.5, 0.0, 1.0, 2.5):  # the distribution function
        share = 0.5 * math.erfc(-x / math.sqrt(2))
        assert float((drawn < x).double().mean()) == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / len(drawn)))
    half = len(drawn) // 2
    assert abs(float((drawn[:half] * drawn[half : 2 * half]).mean())) < 5 / math.sqrt(half)  # pairs of one radius, too


def test_no_seed_repeats_it_and_the_system_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    one = gaussian(8)
    torch.manual_seed(0)
    assert not torch.equal(one, gaussian(8))
    monkeypatch.setattr(os, "urandom", lambda count: bytes(range(count)))
    assert torch.equal(gaussian(8), gaussian(8))


@pytest.mark.parametrize(("byte", "most"), [(0, LARGEST), (255, 1e-7)])
def test_the_most_extreme_bits_stay_within_the_bound(byte: int, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: bytes([byte]) * count)
    assert float(gaussian(4).abs().max()) <= most


def test_whole_numbers_stay_whole_and_large_ones_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.tensor([2**60 + 1, -(2**60) - 1])
    assert torch.equal(with_noise(large, 0.0), large)
    moved = with_noise(torch.zeros(200_000, dtype=torch.int64), 3.0)
    assert moved.dtype == torch.int64
    assert float(moved.double().std()) == pytest.approx(math.sqrt(9 + 1 / 12), rel=0.02)  # and that of rounding
