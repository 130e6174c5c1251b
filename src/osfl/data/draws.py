"""The draws behind `--partition`: a list of indices for each client, from labels and a generator."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from osfl.core.errors import DataError, UsageError
from osfl.data.source import Indices

Shares = npt.NDArray[np.float64]
REDRAWS = 1000
SMALLEST = 2  # one image to train on, one to validate with


def per_class(
    labels: Indices, n: int, alpha: float, rng: np.random.Generator, *, least: int, balance_cap: bool
) -> list[Indices]:
    """Dirichlet per class; all is drawn again until each client has `least` images, as FedISCA and DENSE do.

    Where that never happens (many clients, strong skew) the draw with the largest smallest client is used.
    """
    values, counts = np.unique(labels, return_counts=True)
    best, size = np.zeros((len(values), n), dtype=np.int64), -1
    for _ in range(REDRAWS):
        drawn = _counts(counts, n, alpha, rng, balance_cap)
        if (smallest := int(drawn.sum(axis=0).min())) > size:
            best, size = drawn, smallest
        if size >= least:
            break
    if size < min(least, SMALLEST):
        raise DataError(
            f"dirichlet:{alpha:g} leaves one of {n} clients without images in each of {REDRAWS} draws",
            field="partition",
            fix="Use fewer clients, a larger concentration, more samples, or dirichlet-client (clients of equal size).",
        )
    shuffled = [rng.permutation(np.flatnonzero(labels == value)) for value in values]
    chunks = [np.split(members, np.cumsum(row)[:-1]) for members, row in zip(shuffled, best, strict=True)]
    return [np.concatenate(own) for own in zip(*chunks, strict=True)]


def _counts(counts: Indices, n: int, alpha: float, rng: np.random.Generator, balance_cap: bool) -> Indices:
    """How many images of each class go to each client, (classes, n): cuts at ⌊cumsum(p) · n_c⌋."""
    drawn = np.zeros((len(counts), n), dtype=np.int64)
    for row, count in zip(drawn, counts, strict=True):
        shares = dirichlet(alpha, n, rng)
        if balance_cap:  # a client that already holds an equal share gets nothing of later classes
            capped = shares * (drawn.sum(axis=0) < counts.sum() / n)
            shares = capped / capped.sum() if capped.sum() > 0 else shares
        cuts = np.floor(np.cumsum(shares)[:-1] * count).astype(np.int64)
        row[:] = np.diff(cuts, prepend=0, append=count)
    return drawn


def dirichlet(alpha: float, n: int, rng: np.random.Generator) -> Shares:
    """Dir(alpha) that survives tiny alpha, where every gamma draw underflows to 0: then one takes all."""
    shares: Shares = np.asarray(rng.dirichlet(np.full(n, alpha)), dtype=np.float64)
    if np.isfinite(shares).all() and shares.sum() > 0:
        return np.asarray(shares / shares.sum(), dtype=np.float64)
    return np.asarray(np.arange(n) == rng.integers(n), dtype=np.float64)


def per_client(labels: Indices, n: int, alpha: float, sigma: float, rng: np.random.Generator, *, least: int) -> list[Indices]:
    """Each client fills its size from its own class mixture; a class that is used up leaves the mixtures.

    The clients take one image each in turn. One after the other, the last would get only what the first left over.
    """
    values, codes = np.unique(labels, return_inverse=True)
    pools = [rng.permutation(np.flatnonzero(codes == c)).tolist() for c in range(len(values))]
    mixtures = [dirichlet(alpha, len(values), rng) for _ in range(n)]
    sizes = client_sizes(len(labels), n, sigma, rng, least)
    parts: list[list[int]] = [[] for _ in range(n)]
    steps, waiting = _steps(mixtures, pools), list(range(n))
    while waiting:
        for client, u in zip(waiting, rng.random(len(waiting)), strict=True):
            below = math.nextafter(steps[client][-1], 0)
            pool = pools[bisect_right(steps[client], min(u * steps[client][-1], below))]
            parts[client].append(pool.pop())
            if not pool:
                steps = _steps(mixtures, pools)
        waiting = [client for client in waiting if len(parts[client]) < sizes[client]]
    return [np.array(part, dtype=np.int64) for part in parts]


def _steps(mixtures: list[Shares], pools: list[list[int]]) -> list[list[float]]:
    """Cumulated weights of the classes that are left; a client whose classes are all used up takes any image."""
    left = np.array([len(pool) for pool in pools], dtype=np.float64)
    weights = [np.where(left > 0, mixture, 0.0) for mixture in mixtures]
    return [np.cumsum(w if w.sum() > 0 else left).tolist() for w in weights]


def client_sizes(images: int, n: int, sigma: float, rng: np.random.Generator, least: int) -> Indices:
    """Log-normal sizes that add up to all images, none below `least`; equal when sigma is 0."""
    weights = rng.lognormal(0.0, sigma, n) if sigma else np.ones(n)
    sizes = least + np.floor(weights / weights.sum() * (images - least * n)).astype(np.int64)
    sizes[np.argsort(-weights, kind="stable")[: images - int(sizes.sum())]] += 1
    return np.asarray(sizes, dtype=np.int64)


def k_classes(labels: Indices, n: int, k: int, rng: np.random.Generator) -> list[Indices]:
    """Each client holds k classes; a class is shared evenly by those that hold it."""
    values = np.unique(labels)
    if k > len(values) or n * k < len(values):
        raise UsageError(
            f"classes:{k} with {n} clients does not fit {len(values)} classes",
            field="partition",
            fix=f"The classes of a client must be between {math.ceil(len(values) / n)} and {len(values)}.",
        )
    parts: list[list[Indices]] = [[] for _ in range(n)]
    for value, clients in zip(values, _holders(len(values), n, k, rng), strict=True):
        members = rng.permutation(np.flatnonzero(labels == value))
        for client, chunk in zip(clients, np.array_split(members, len(clients)), strict=True):
            parts[client].append(chunk)
    if min(sum(map(len, chunks)) for chunks in parts) == 0:
        raise DataError(f"classes:{k} leaves one of {n} clients without images", field="partition", fix="Use fewer.")
    return [np.concatenate(chunks) for chunks in parts]


def _holders(classes: int, n: int, k: int, rng: np.random.Generator) -> list[list[int]]:
    """For each class the clients that hold it.

    Dealing the least-dealt classes first (ties at random) covers every class as soon as n·k reaches their number.
    """
    holders: list[list[int]] = [[] for _ in range(classes)]
    for client in rng.permutation(n):
        tie = rng.random(classes)
        for chosen in sorted(range(classes), key=lambda c: (len(holders[c]), tie[c]))[:k]:
            holders[chosen].append(int(client))
    return holders
