"""How much memory a training may use, and into how many parts its batches are cut for that (gradient accumulation)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar

import torch

from osfl.core.errors import DeviceError

_USABLE = 0.9  # of a device's memory: the rest is the driver's and what allocators cannot use
_budget: ContextVar[int] = ContextVar("osfl_memory", default=0)
_workers: ContextVar[int] = ContextVar("osfl_workers_of_a_device", default=1)


@contextlib.contextmanager
def budget(memory: int) -> Iterator[None]:
    """Each training that begins here may use so many bytes; 0: what its device has."""
    token = _budget.set(memory)
    try:
        yield
    finally:
        _budget.reset(token)


@contextlib.contextmanager
def sharing(workers: int, devices: int) -> Iterator[None]:
    """So many workers compute at once, spread over so many devices: what is free on a device is for all who compute there."""
    token = _workers.set(math.ceil(workers / devices))
    try:
        yield
    finally:
        _workers.reset(token)


def available(device: torch.device) -> int:
    """Bytes that one training may use: as the user said, or of a GPU its part of nearly all that is free for this process, by
    the workers that share it; 0: nobody knows, so no limit."""
    if _budget.get() or device.type != "cuda":
        return _budget.get()
    free, _ = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)  # of this process: torch keeps it, for whoever asks next
    return int(_USABLE * (free + ours) / _workers.get())


def micro_batch(batch: int, fixed: float, each: float, memory: int) -> int:
    """Images that go through the network at once: all of a batch, or equal parts that fit; 0 where not even one fits.

    `fixed`: bytes whatever the batch; `each`: bytes of one image.
    """
    if not memory or fixed + batch * each <= memory:
        return batch
    most = int((memory - fixed) // each)
    return 0 if most < 1 else math.ceil(batch / math.ceil(batch / most))


def too_little(what: str, needed: float, memory: int, fix: str) -> DeviceError:
    """The refusal of a training that cannot fit."""
    return DeviceError(
        f"{what} needs more memory than it may use",
        field="memory",
        expected=f"at least {needed / 1e9:.1f} GB",
        got=f"{memory / 1e9:.1f} GB",
        fix=f"{fix} The same command then goes on; what was finished is kept.",
    )
