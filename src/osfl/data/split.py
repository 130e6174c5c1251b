"""Holding out a share of the images: the same share of each class, and never a part of a patient.

Pure functions of labels and groups. The fixed test split uses seed 0 whatever the user's seed is, so that a test set
never depends on a partition.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from osfl.core.seeds import numpy_generator
from osfl.data.source import Indices, Names

Mask = npt.NDArray[np.bool_]


def strata_of(labels: Indices, domains: Names | None = None) -> Indices:
    """One number for each pair of class and domain that occurs."""
    if domains is None:
        return labels
    names, codes = np.unique(domains, return_inverse=True)
    return np.asarray(labels * len(names) + codes, dtype=np.int64)


def hold_out_mask(strata: Indices, fraction: float, seed: int, *labels: str, groups: Names | None = None) -> Mask:
    """True for what is held out: about `fraction` of each stratum, something where possible, never everything."""
    held = np.zeros(len(strata), dtype=np.bool_)
    if len(strata) < 2 or fraction <= 0:
        return held
    rng = numpy_generator(seed, "hold-out", *labels)
    targets = _targets(strata, fraction)
    held = _hold_samples(strata, targets, rng) if groups is None else _hold_groups(strata, groups, targets, rng)
    return _with_both_sides(held, strata, groups, rng)


def _targets(strata: Indices, fraction: float) -> dict[int, int]:
    """How many to hold out of each stratum; a stratum of one stays whole."""
    sizes = Counter(strata.tolist())
    return {stratum: min(int(fraction * n + 0.5), n - 1) for stratum, n in sorted(sizes.items())}


def _hold_samples(strata: Indices, targets: dict[int, int], rng: np.random.Generator) -> Mask:
    held = np.zeros(len(strata), dtype=np.bool_)
    for stratum, target in targets.items():
        held[rng.permutation(np.flatnonzero(strata == stratum))[:target]] = True
    return held


def _hold_groups(strata: Indices, groups: Names, targets: dict[int, int], rng: np.random.Generator) -> Mask:
    """Whole groups in random order, each held out if that brings the strata closer to their targets."""
    names, codes = np.unique(groups, return_inverse=True)
    members = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1])
    missing, held = dict(targets), np.zeros(len(strata), dtype=np.bool_)
    for group in rng.permutation(len(names)):
        counts = Counter(strata[members[group]].tolist())
        if sum(abs(missing[s] - n) for s, n in counts.items()) < sum(abs(missing[s]) for s in counts):
            held[members[group]] = True
            for stratum, n in counts.items():
                missing[stratum] -= n
    return held


def _with_both_sides(held: Mask, strata: Indices, groups: Names | None, rng: np.random.Generator) -> Mask:
    """With two images (or two patients) there is always one on each side."""
    if held.any() and not held.all():
        return held
    if groups is not None and len(np.unique(groups)) < 2:
        return np.zeros_like(held)  # one patient: better no validation than a leak
    largest = Counter(strata.tolist()).most_common(1)[0][0]
    chosen = int(rng.choice(np.flatnonzero(strata == largest)))
    moved = np.arange(len(held)) == chosen if groups is None else groups == groups[chosen]
    result: Mask = moved if not held.any() else ~moved
    return result


def stratified_pick(strata: Indices, n: int, seed: int, *labels: str) -> Indices:
    """Sorted indices of `n` images with the proportions of the strata kept (largest remainders)."""
    if n >= len(strata):
        return np.arange(len(strata), dtype=np.int64)
    rng = numpy_generator(seed, "pick", *labels)
    values, sizes = np.unique(strata, return_counts=True)
    shares = sizes * n / len(strata)
    quota = np.floor(shares).astype(np.int64)
    quota[np.argsort(quota - shares, kind="stable")[: n - int(quota.sum())]] += 1
    picks = [rng.permutation(np.flatnonzero(strata == v))[:k] for v, k in zip(values, quota, strict=True)]
    return np.sort(np.concatenate(picks)).astype(np.int64)
