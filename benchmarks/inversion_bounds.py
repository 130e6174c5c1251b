"""What bounds inversion and the server phases built on it: processor time by kind of operator, one thread.

    python -m benchmarks.bench inversion_bounds

Every operator is timed by the processor clock of its thread, so that a busy neighbor changes little, and its floating point
operations are counted by torch's formulas. `share_of_peak` sets what an operator kind does in its time against a matrix product
of 2048 x 2048, measured the same way in the same run. `convolutions_alone` is the share of the peak that would be left if
everything but convolutions took no time at all: where that is below 0.5, no other change can reach half of the peak.
`gb_per_second` is what an operator kind reads and writes in its time, by the sizes of its tensors, and `copy_gb_per_second`
what a copy of 64 MB does: a kind that is as fast moves memory as fast as this machine can, and only fewer passes over the
activations would help. Small tensors stay in the processor's cache and may be faster; tiny ones cost the call.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.inversion_speed import CASES, SHORT, TASK, _context, _models, _uploads
from osfl.core.seeds import torch_generator
from osfl.ingredients.inversion.pixels import Inversion, Watched, balanced_labels, invert
from osfl.methods import fedbicross, fedisca
from osfl.runtime.workers import compute_threads, keep_freed_memory

PEAK_SIZE, PEAK_TURNS = 2048, 5
KINDS: Mapping[str, tuple[str, ...]] = {  # by beginnings of the operators' names; the first that fits
    "convolution": ("convolution", "mkldnn_convolution", "_conv"),
    "batch norm": ("native_batch_norm", "_native_batch_norm", "mean", "var", "cudnn_batch_norm"),
    "pooling": ("max_pool", "avg_pool", "_adaptive", "adaptive"),
    "matrix product": ("mm", "addmm", "bmm", "baddbmm"),
    "activation": ("relu", "threshold"),
    "copy": ("copy", "clone", "_to_copy", "roll", "flip", "cat", "stack", "index", "contiguous", "empty", "zeros", "fill"),
}


class Timed(TorchDispatchMode):
    """Seconds of the thread's processor time, calls and operations of every kind of operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self.flops: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.thread_time()
        out = func(*args, **(kwargs or {}))
        spent = time.thread_time() - start
        kind = kind_of(func.overloadpacket.__name__)
        self.seconds[kind] += spent
        self.calls[kind] += 1
        self.bytes[kind] += sum(x.numel() * x.element_size() for x in tree_leaves((args, out)) if isinstance(x, torch.Tensor))
        if func.overloadpacket in flop_registry:
            self.flops[kind] += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def kind_of(operator: str) -> str:
    return next((kind for kind, names in KINDS.items() if operator.startswith(names)), "elementwise and rest")


def run() -> dict[str, Any]:
    keep_freed_memory()
    with compute_threads(1):
        peak = _peak()
        peaks = {"gflops_peak": round(peak / 1e9, 1), "copy_gb_per_second": round(_copy() / 1e9, 1)}
        return {**peaks, **{name: _bounds(work, peak) for name, work in _works().items()}}


def _works() -> dict[str, Callable[[], object]]:
    works: dict[str, Callable[[], object]] = {f"inversion_{name}": _inversion(name) for name in CASES}
    for name, method in (("fedisca", fedisca.FedISCA), ("fedbicross", fedbicross.FedBiCross)):
        settings: Any = method.Settings(**{**method.PRESETS["cpu"], **SHORT})
        uploads = _uploads(settings.architecture, 5)
        works[name] = _phase(method(TASK, settings), uploads, settings)
    return works


def _inversion(name: str) -> Callable[[], object]:
    architecture, images, steps, _ = CASES[name]
    model, labels = _models(architecture, 1)[0], balanced_labels(images, range(8))
    return lambda: invert([Watched(model)], labels, TASK.image, Inversion(steps=steps), torch_generator(0, "bounds"))


def _phase(method: Any, uploads: Any, settings: Any) -> Callable[[], object]:
    def work() -> object:
        ctx = _context(settings, uploads)
        return method.server_phase(uploads, type(ctx)(ctx.plan, ctx.device))  # one after the other: one thread is timed

    return work


def _peak() -> float:
    """Operations a second of a matrix product, the best of some."""
    a, best = torch.randn(PEAK_SIZE, PEAK_SIZE, generator=torch_generator(0, "peak")), float("inf")
    for _ in range(PEAK_TURNS):
        start = time.thread_time()
        a @ a
        best = min(best, time.thread_time() - start)
    return 2 * PEAK_SIZE**3 / best


def _copy() -> float:
    """Bytes a second that a copy reads and writes, the best of some."""
    a, best = torch.zeros(16 << 20), float("inf")
    b = a.clone()
    for _ in range(PEAK_TURNS):
        start = time.thread_time()
        b.copy_(a)
        best = min(best, time.thread_time() - start)
    return 2 * a.numel() * a.element_size() / best


def _bounds(work: Callable[[], object], peak: float) -> dict[str, Any]:
    work()  # warms up
    start = time.thread_time()
    work()
    plain = time.thread_time() - start
    with Timed() as timed:
        work()
    inside, flops = sum(timed.seconds.values()), sum(timed.flops.values())
    kinds = sorted(timed.seconds, key=lambda kind: -timed.seconds[kind])
    return {
        "cpu_seconds": round(plain, 3),
        "share_of_peak": round(flops / plain / peak, 3),
        "convolutions_alone": round(timed.flops["convolution"] / timed.seconds["convolution"] / peak, 3),
        "operators": {
            kind: {
                "share_of_time": round(timed.seconds[kind] / inside, 3),
                "calls": timed.calls[kind],
                "gb_per_second": round(timed.bytes[kind] / timed.seconds[kind] / 1e9, 1),
                **({"share_of_peak": round(timed.flops[kind] / timed.seconds[kind] / peak, 3)} if timed.flops[kind] else {}),
            }
            for kind in kinds
        },
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
