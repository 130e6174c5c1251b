"""What this machine can do at best, measured in the same run as everything that is compared with it."""

from __future__ import annotations

import time

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
