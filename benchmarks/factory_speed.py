"""Which generator is worth its minutes: learning, sampling, and the classifier that comes of it, for each kind of factory.

    python -m benchmarks.factory_speed

One class a client, the validation images of blood cells, one seed, all kinds in one run. `processor_minutes` count the work
of all cores from images to classifier; the peak is a convolution measured in the same run. Sampling is measured both ways:
cell after cell with all cores inside each operation, and cells side by side in a pool, which is what a round does.
"""

from __future__ import annotations

import json
import time

import torch
from torch.nn import functional

from benchmarks.measuring import medians, require_quiet
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.evaluation.scores import probabilities
from osfl.methods.federated_factory import FederatedFactory, Settings
from osfl.methods.federated_factory.cells import Cell, cells_of
from osfl.methods.federated_factory.factories import sample_cell
from osfl.runtime.meter import measure
from osfl.runtime.workers import Workers, compute_threads, default_workers
from osfl.simulate.simulation import Federation, Simulation, prepare

SIZES = {"images_per_class": 500, "epochs": 10, "edm_images": 12_000}  # half as many images to learn from as in the cpu preset
KINDS = ("mixture", "vae", "edm")
SAMPLED = 256  # images of each cell, when sampling is timed


def run() -> dict[str, object]:
    require_quiet()
    peak = _conv_gflops()
    rows: dict[str, object] = {kind: _case(kind, peak) for kind in KINDS}
    return {
        "data": "bloodcells-28, 2,000 images, silos, seed 0, scored on validation images",
        "settings": SIZES,
        "workers": default_workers(),
        "conv_peak_gflops": round(peak, 1),
        **rows,
    }


def _case(kind: str, peak: float) -> dict[str, object]:
    changes = {**SIZES, "factory": kind}
    federation = prepare(
        Simulation("federated_factory", "bloodcells-28", None, "silos", changes=changes, samples=2000, evaluate_on="val")
    )
    plan = federation.plan
    method = FederatedFactory(plan.task, resolve_settings(FederatedFactory, "cpu", changes))
    started, ctx = time.process_time(), Context(plan, torch.device("cpu"), map=Workers().map)
    with compute_threads(1):
        start = time.perf_counter()
        with measure() as learning:
            payloads = ctx.map(lambda shard: method.client_phase(shard, Context(plan, ctx.device)), federation.shards)
        learned = time.perf_counter() - start
        uploads = [Upload(s.client, plan.digest, p) for s, p in zip(federation.shards, payloads, strict=True)]
        release = method.server_phase(uploads, ctx)
    minutes = (time.process_time() - started) / 60
    answers = probabilities(method.build(release.shared), federation.test.images, ctx.device, ctx.map).argmax(1)
    accuracy = float((answers == federation.test.labels.numpy()).mean())
    seen = _images_seen(kind, method.settings, federation)
    return {
        "learning_s": round(learned, 2),
        "learning_images_per_s": round(seen / learned),
        "learning_share_of_peak": round(learning.flops / learned / 1e9 / peak, 3),
        "classes": len(uploads),
        "upload_bytes_a_class": _size(uploads[0]),
        **_sampling(method, uploads, ctx, peak),
        "accuracy": round(accuracy, 4),
        "processor_minutes": round(minutes, 3),
        "accuracy_points_per_processor_minute": round(100 * accuracy / minutes, 1),
    }


def _images_seen(kind: str, settings: Settings, federation: Federation) -> int:
    """Images that pass through the learning generators of all classes. A mixture stops by itself; its images count once."""
    if kind == "mixture":
        return sum(len(shard.train) for shard in federation.shards)
    each = settings.vae_steps * settings.vae_batch if kind == "vae" else settings.edm_images
    return each * len(federation.shards)


def _sampling(method: FederatedFactory, uploads: list[Upload], ctx: Context, peak: float) -> dict[str, object]:
    cells = cells_of(uploads, len(method.task.classes))

    def sample(cell: Cell) -> torch.Tensor:
        return sample_cell(cell, SAMPLED, method.settings, method.task, ctx)

    def in_turn() -> None:
        with compute_threads(default_workers()):
            for cell in cells:
                sample(cell)

    def side_by_side() -> None:
        with compute_threads(1):
            ctx.map(sample, cells)

    with measure() as work:
        sample(cells[0])
    seconds = medians({"in_turn": in_turn, "side_by_side": side_by_side}, 3)
    images = SAMPLED * len(cells)
    return {
        "sampling_images_per_s": round(images / seconds["side_by_side"]),
        "sampling_times_in_turn": round(seconds["in_turn"] / seconds["side_by_side"], 2),
        "sampling_share_of_peak": round(work.flops * len(cells) / seconds["side_by_side"] / 1e9 / peak, 3),
    }


def _size(upload: Upload) -> int:
    return sum(value.numel() * value.element_size() for value in upload.payload.tensors.values())


def _conv_gflops() -> float:
    """The best of a few convolutions of the size that small U-Nets live on, all cores."""
    x = torch.randn(64, 64, 16, 16).to(memory_format=torch.channels_last)
    weight = torch.randn(64, 64, 3, 3).to(memory_format=torch.channels_last)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        functional.conv2d(x, weight, padding=1)
        best = min(best, time.perf_counter() - start)
    return 2 * 64 * 64 * 9 * 16 * 16 * 64 / best / 1e9


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
