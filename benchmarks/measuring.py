"""How speed is measured: variants in turns, medians, and the machine's own peak in the same run."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping

import torch


def sgemm_gflops(threads: int, size: int = 2048, repeats: int = 5) -> float:
    """Best of a few float32 matrix products, in GFLOP/s."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a = torch.randn(size, size)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return 2 * size**3 / best / 1e9


def require_quiet() -> None:
    """Stop on a busy machine: operations that use all cores wait for the slowest, up to ten times as long, which flatters
    whatever does not."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:
        raise SystemExit(f"the machine is busy (load {load:.1f} on {cores} cores): measure again when it is quiet")


def medians(
    variants: Mapping[str, Callable[[], object]], rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds of each variant after one turn to warm up; in turns, so that a noisy neighbor hits all alike.

    `clock=time.process_time` counts the work of all threads instead of the time on the wall, which waits for neighbors.
    """
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds + 1):
        for name, work in variants.items():
            start = clock()
            work()
            seconds[name].append(clock() - start)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}
