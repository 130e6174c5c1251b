"""Many clients at once: a pool of threads with one compute thread each.

Faster than one process that uses all cores for one client at a time (benchmarks/records/run_speed.json), because small
layers do not fill two cores. One compute thread a worker also makes results bit-identical for any number of workers.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Out = TypeVar("Out")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt(3)


def default_workers() -> int:
    """One worker a core this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


@contextlib.contextmanager
def compute_threads(count: int) -> Iterator[None]:
    """Run with this many threads inside each operation, then restore what was set."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def keep_freed_memory() -> bool:
    """Let the process keep memory that tensors give back, for the next ones; the same bits, and the same peak.

    The C library of Linux returns large blocks at once, so that every step of training asks for them again and the kernel
    fills them with zeros. `benchmarks/inversion_speed.py` measures what that costs. False where it cannot be asked for.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to set
            c = ctypes.CDLL(None)
            return bool(c.mallopt(_MMAP_THRESHOLD, 1 << 30) and c.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))
    return False


def return_freed_memory() -> None:
    """Give the system what tensors gave back, also between small ones that stay: for a loop that keeps a little of each of
    many uploads. It takes milliseconds; another C library has nothing to ask for."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


class Workers:
    """`workers.map(work, items)`: results in the order of the items; the first failure is raised, nothing more is started."""

    def __init__(self, count: int | None = None) -> None:
        self.count = count or default_workers()
        keep_freed_memory()

    def map(self, work: Callable[[Item], Out], items: Iterable[Item]) -> list[Out]:
        pending = list(items)
        with compute_threads(1):
            if self.count == 1 or len(pending) <= 1:
                return [work(item) for item in pending]
            with ThreadPoolExecutor(self.count, "osfl-worker", initializer=torch.set_num_threads, initargs=(1,)) as pool:
                # Each task inherits the caller's context variables, so that costs are booked on the caller's meter.
                futures = [pool.submit(contextvars.copy_context().run, work, item) for item in pending]
                try:
                    return [future.result() for future in futures]
                except BaseException:
                    for future in futures:
                        future.cancel()
                    raise
