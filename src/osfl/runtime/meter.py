"""What a phase costs: seconds, FLOPs, peak memory, and in a rehearsal also bytes of tensors.

A run opens a meter around each phase; code that computes calls `spend(flops)`. FLOPs are counted by torch's own counter
on one step and multiplied by the number of steps, because counting every operation would slow training by tens of per cent.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from osfl.core.types import Json


@dataclass
class Meter:
    seconds: float = 0.0  # by the wall clock: workers that wait for a core count, too
    processor_seconds: float = 0.0  # of the whole process: this phase's own only where one worker computes
    flops: float = 0.0
    made: int = 0  # synthetic samples
    made_flops: float = 0.0  # of `flops`, those that went into making them
    remarks: list[str] = field(default_factory=list)  # sentences for the results
    peak_bytes: int = 0  # of the whole process: phases of several clients that run at once share it
    tensor_bytes: int = 0  # most bytes of tensors that existed at once, where somebody counts (osfl.runtime.tensor_bytes)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self, *, seconds: float = 0.0, processor: float = 0.0, flops: float = 0.0, made: int = 0, made_flops: float = 0.0
    ) -> None:
        with self._lock:
            self.seconds += seconds
            self.processor_seconds += processor
            self.flops += flops
            self.made += made
            self.made_flops += made_flops

    def as_json(self) -> dict[str, Json]:
        made: dict[str, object] = {"made": self.made, "made_flops": int(self.made_flops)} if self.made else {}
        made |= {"remarks": self.remarks} if self.remarks else {}
        made |= {"tensor_bytes": self.tensor_bytes} if self.tensor_bytes else {}
        spent = {"seconds": round(self.seconds, 4), "processor_seconds": round(self.processor_seconds, 4)}
        return {**spent, "flops": int(self.flops), "peak_bytes": self.peak_bytes, **made}


class Counter(Protocol):
    """Counts bytes of tensors; each meter inside of another one has a high-water mark of its own."""

    def enter(self, outermost: bool) -> int: ...

    def leave(self, before: int) -> int: ...


_current: ContextVar[Meter | None] = ContextVar("osfl_meter", default=None)
_counter: ContextVar[Counter | None] = ContextVar("osfl_tensor_counter", default=None)


def spend(flops: float, *, makes: int = 0) -> None:
    """Book floating point operations on the phase that is running, if any; `makes`: so many synthetic samples came of them."""
    meter = _current.get()
    if meter is not None:
        meter.add(flops=flops, made=makes, made_flops=flops if makes else 0.0)


def spend_again(cost: Mapping[str, float]) -> None:
    """Book what work that is reused cost its first user."""
    meter = _current.get()
    if meter is not None:
        meter.add(flops=cost["flops"], made=int(cost.get("made", 0)), made_flops=cost.get("made_flops", 0.0))


def book(seconds: float, processor: float = 0.0) -> None:
    """Book seconds that this phase did not spend now (a client model trained earlier), or take some off (negative)."""
    meter = _current.get()
    if meter is not None:
        meter.add(seconds=seconds, processor=processor)


def remark(sentence: str) -> None:
    """Say something about the phase that is running which its results must tell."""
    meter = _current.get()
    if meter is not None and sentence not in meter.remarks:
        meter.remarks.append(sentence)


_STARTED = threading.Lock()


def start_up() -> None:
    """Load what torch loads at its first optimizer or first count of operations (some seconds, once a process), outside of
    any meter: it is no client's work."""
    import torch

    with _STARTED:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()


@contextlib.contextmanager
def measure() -> Iterator[Meter]:
    """Measure what happens inside; workers started inside inherit the meter (see runtime/workers.py)."""
    meter, counter = Meter(), _counter.get()
    before = counter.enter(_current.get() is None) if counter else 0
    token = _current.set(meter)
    start, worked = time.perf_counter(), time.process_time()
    try:
        yield meter
    finally:
        meter.add(seconds=time.perf_counter() - start, processor=time.process_time() - worked)
        meter.peak_bytes = peak_memory()
        meter.tensor_bytes = counter.leave(before) if counter else 0
        _current.reset(token)


@contextlib.contextmanager
def counting(counter: Counter) -> Iterator[None]:
    """Meters inside say how many bytes of tensors existed at once."""
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


def reset_peak_memory() -> None:
    """Start a new high-water mark where the system allows it (Linux); elsewhere the mark is that of the process."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The high-water mark of resident memory in bytes since the last reset."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # macOS says bytes, others kilobytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
