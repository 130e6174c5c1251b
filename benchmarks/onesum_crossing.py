"""From how many images on a small trained network is better than OneSum's random features, with all images in one place.

    python -m benchmarks.onesum_crossing            resumable: what is in runs/onesum_crossing/ is not made again
    python -m benchmarks.onesum_crossing collect    what is there so far; every figure says of how many seeds it is

Blood cells and photographs, 250 images to all, three seeds, test images. OneSum with 64 and 128 filters has the sums of one
site, which are those of any number of sites; the network is that of the `centralized` rows (cnn-w16), trained for the preset's
20 epochs, and for up to 100 where images are few (`epochs_for`), or it would see too few batches.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.types import Upload
from osfl.evaluation.scores import probabilities
from osfl.runtime.atomic import append_line
from osfl.simulate.simulation import Federation, Simulation, prepare

SEEDS = (0, 1, 2)
SIZES: Mapping[str, tuple[int, ...]] = {  # images, of which a tenth is held out, as at a site
    "bloodcells-28": (250, 500, 1000, 2000, 4000, 11_965),
    "cifar10-subset": (250, 1000, 2500, 5000),
}
ROWS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "OneSum, 64 filters": ("onesum", {}),
    "OneSum, 128 filters": ("onesum", {"filters": 128}),
    "network": ("centralized", {}),
}
WIDE = "OneSum, 128 filters"
KEPT = Path("runs/onesum_crossing/points.jsonl")


def epochs_for(images: int) -> int:
    """Passes such that the network sees 60,000 images, at least 20 and at most 100."""
    return min(100, max(20, 60_000 // images))


def run(compute: bool = True) -> dict[str, Any]:
    done = _kept()
    wanted = [(seed, dataset, n, row) for seed in SEEDS for dataset in SIZES for n in SIZES[dataset] for row in ROWS]
    wanted.sort(key=lambda point: (point[3] == WIDE, point[0]))  # the slow row last
    for point in wanted if compute else ():
        if point not in done:
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            done[point] = _accuracy(*point)
            append_line(KEPT, json.dumps([*point, done[point]]).encode())
            print(time.strftime("%H:%M:%S"), *point, round(done[point], 4), flush=True)
    return {
        "scored_on": "test images",
        "seeds": list(SEEDS),
        "epochs_of_the_network": {str(n): epochs_for(n) for n in sorted({n for sizes in SIZES.values() for n in sizes})},
        "accuracy": {dataset: {row: _along(done, dataset, row) for row in ROWS} for dataset in SIZES},
    }


def _along(done: Mapping[tuple[int, str, int, str], float], dataset: str, row: str) -> dict[str, Any]:
    """Accuracy by the number of images, of the seeds that are finished."""
    values = {n: [done[s, dataset, n, row] for s in SEEDS if (s, dataset, n, row) in done] for n in SIZES[dataset]}
    return {str(n): {"mean": statistics.mean(found), "n": len(found), "values": found} for n, found in values.items() if found}


def _kept() -> dict[tuple[int, str, int, str], float]:
    lines = KEPT.read_text(encoding="utf-8").splitlines() if KEPT.exists() else []
    return {(seed, dataset, n, row): value for seed, dataset, n, row, value in map(json.loads, lines)}


def _accuracy(seed: int, dataset: str, images: int, row: str) -> float:
    name, changes = ROWS[row]
    changes = {**changes, "epochs": epochs_for(images)} if name == "centralized" else changes
    federation = prepare(Simulation(name, dataset, 1, "iid", "cpu", seed, changes, samples=images))
    method = load(name)(federation.plan.task, federation.plan.settings)
    ctx = Context(federation.plan, torch.device("cpu"))
    model = method.build(_shared(name, method, federation, ctx))
    answers = probabilities(model, federation.test.images, ctx.device, ctx.map).argmax(1)
    return float((answers == federation.test.labels.numpy()).mean())


def _shared(name: str, method: Any, federation: Federation, ctx: Context) -> Any:
    if name == "centralized":
        return method.simulate(federation.shards, ctx).release.shared
    uploads = [Upload(shard.client, "", method.client_phase(shard, ctx)) for shard in federation.shards]
    return method.server_phase(uploads, ctx).shared


if __name__ == "__main__":
    print(json.dumps(run(compute="collect" not in sys.argv), indent=1))
