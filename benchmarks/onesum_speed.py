"""What OneSum costs: features against the convolution in them, sums, the server's eigendecomposition, and forgetting.

    python -m benchmarks.bench onesum_speed
    python -m benchmarks.onesum_speed --cells     one upload, and what is read from other records, anew in the record

Everything on one core. Seconds are those of the processor, not of the wall, so that neighbors on the machine matter less; what
is compared is measured in turns. Accuracy and seconds of other methods are read from the committed records of the same cells.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.bench import kept_figures
from benchmarks.grid import CELLS
from benchmarks.measuring import medians
from osfl.core.method import Context, add_up
from osfl.core.result import write_json
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Limits, Plan, Shard, Task, Upload
from osfl.ingredients.statistics.gaussians import Statistics, folded_statistics
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.onesum import OneSum
from osfl.methods.onesum.features import RandomConvolutions, RandomMap, draw_filters
from osfl.methods.onesum.head import lda, moments
from osfl.roles import coordinator
from osfl.rounds.folder import Round, simulated_key
from osfl.rounds.forgetting import forget
from osfl.rounds.phases import run_server_phase
from osfl.rounds.state import read_policy
from osfl.rounds.total import keep_total, read_total
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import to_raw
from osfl.runtime.workers import compute_threads
from osfl.wire.bundle import pack

RECORDS = Path(__file__).parent / "records"
SITES = 20
TIMES = 10  # how much faster than every method of SLOWER
# invert or distil uploaded models, or train generators
SLOWER = ("dafl", "dense", "coboosting", "fedftg", "deepinversion", "fedisca", "fedbicross", "federated_factory", "fedmitr")


def run() -> dict[str, Any]:
    with compute_threads(1):
        return {
            "load": round(os.getloadavg()[0], 1),
            "features": features(),
            "sums": sums(),
            "one_upload": one_upload(),
            "server": {str(d): server(d, turns) for d, turns in ((1299, 3), (5000, 1))},
            "forgetting": forgetting(),
            "cells": (found := cells()),
            "ten_times_faster": ten_times_faster(found, kept_figures("onesum_times")),
        }


def features() -> dict[str, Any]:
    """RGB images of 28 pixels, 64 filters: beside the same convolution alone, and a convolution of the size of U-Nets'."""
    settings = RandomMap()
    network = RandomConvolutions(draw_filters(settings.filters, 3, torch_generator(0, "filters")), settings, 8.0)
    images = torch.rand(256, 3, 28, 28, generator=torch_generator(0, "images")) * 2 - 1
    filters, wide = network.get_buffer("filters"), images.double()
    other = torch.randn(8, 64, 16, 16, dtype=torch.float64), torch.randn(64, 64, 3, 3, dtype=torch.float64)

    def alone() -> None:
        for part in torch.split(wide, 16):
            functional.conv2d(part, filters)

    with torch.inference_mode():
        variants = {"all": lambda: network(images), "alone": alone, "other": lambda: functional.conv2d(*other, padding=1)}
        seconds = medians(variants, 9, time.process_time)
    work, peak = 2.0 * 64 * 75 * 24 * 24 * len(images), 2.0 * 64 * 64 * 9 * 16 * 16 * 8 / seconds["other"]
    return {
        "images_per_second": round(len(images) / seconds["all"]),
        "seconds_for_10000_images": round(10_000 * seconds["all"] / len(images), 2),
        "share_of_the_same_convolution_alone": round(seconds["alone"] / seconds["all"], 3),
        "convolution_gflops": round(work / seconds["all"] / 1e9, 2),
        "share_of_a_64_channel_convolution": round(work / seconds["all"] / peak, 3),
    }


def sums() -> dict[str, Any]:
    """A_c, n_c and the triangle of G of 1,024 images, beside the whole square product."""
    rows = torch.randint(-LEVELS, LEVELS, (1024, 1299), generator=torch_generator(0, "rows")).double()
    labels, square = torch.arange(1024) % 8, torch.zeros(1299, 1299, dtype=torch.float64)
    variants = {"folded": lambda: folded_statistics(rows, labels, 8), "square": lambda: square.addmm_(rows.T, rows)}
    seconds = medians(variants, 9, time.process_time)
    return {
        "seconds_for_1024_images": round(seconds["folded"], 4),
        "times_the_square_product": round(seconds["folded"] / seconds["square"], 2),
    }


def one_upload() -> dict[str, Any]:
    """What a server does with one site's upload, d = 1,299: checks and sum; beside the Cholesky factor of the check."""
    method, ctx, _ = _round(("site-00", "site-01"))
    upload = Upload("site-00", ctx.plan.digest, method.client_phase(_shard("site-00", 0), ctx))
    start, square = method.term(upload), torch.randn(2600, 1299, dtype=torch.float64, generator=torch_generator(0, "square"))
    square = square.T @ square
    variants = {
        "all": lambda: add_up(method, [upload], ctx, start),
        "alone": lambda: torch.linalg.cholesky_ex(square),
    }
    seconds = medians(variants, 9, time.process_time)
    return {
        "seconds": round(seconds["all"], 4),
        "times_the_cholesky_factor_alone": round(seconds["all"] / seconds["alone"], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "load": round(os.getloadavg()[0], 1),
    }


def server(d: int, turns: int) -> dict[str, float]:
    """From the total to the classifier: one eigendecomposition, which is GCV, and one Cholesky factor."""
    rows = torch.randn(2 * d, d, dtype=torch.float64, generator=torch_generator(0, "server", d))
    labels = torch.arange(len(rows)) % 8
    rows[:, :8] += functional.one_hot(labels, 8)
    per_class = torch.stack([rows[labels == c].sum(0) for c in range(8)])
    total = Statistics(per_class, rows.T @ rows, torch.bincount(labels).double())
    found = moments(total)
    eigen = medians({"gcv": found.curve}, turns, time.process_time)["gcv"]
    solve = medians({"solve": lambda: lda(found, 0.1)}, turns, time.process_time)["solve"]
    return {"eigendecomposition_seconds": round(eigen, 2), "solve_seconds": round(solve, 2)}


def forgetting() -> dict[str, Any]:
    """Twenty sites of d = 1,299: the subtraction, the release of what is left, and the release made of all uploads again."""
    clients = tuple(f"site-{number:02}" for number in range(SITES))
    method, ctx, plan = _round(clients)
    keys = _keys(clients)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "round"
        coordinator.open_new(folder, plan, {c: keys[c].public_hex for c in clients}, keys["server"].public_hex)
        for number, client in enumerate(clients):
            payload = method.client_phase(_shard(client, number), ctx)
            coordinator.receive(
                folder, pack("upload", client, plan.digest, to_raw(payload.tensors), dict(payload.facts), keys[client])
            )
        fl_round = Round(folder, plan, read_policy(folder), keys["server"].public_hex, keys["server"])
        run_server_phase(method, fl_round, ctx)
        seconds = _parts_of_forgetting(method, fl_round, ctx)
        start = time.process_time()
        forget(folder, keys["server"], clients=[clients[-1]], machine=Machine(workers=1))
        seconds["forget_with_search_and_certificate"] = time.process_time() - start
    return {"sites": SITES, "seconds": {name: round(value, 4) for name, value in seconds.items()}}


def _parts_of_forgetting(method: OneSum, fl_round: Round, ctx: Context) -> dict[str, float]:
    uploads, made_from = fl_round.uploads()
    kept = read_total(fl_round)
    assert kept is not None
    upload, total = uploads[0], kept.total
    term, digest = method.term(upload), made_from[upload.client]
    left = kept.without(term)
    variants = {
        "read_one_upload": lambda: fl_round.inbox.bundle(upload.client),
        "read_the_total": lambda: read_total(fl_round),
        "subtract": lambda: total - term,
        "keep_the_total": lambda: keep_total(fl_round, left),
        "release_of_the_total": lambda: method.release_of(left.total, uploads[1:], ctx),
        "add_up_all_uploads": lambda: add_up(method, fl_round.uploads()[0], ctx),
    }
    found = medians(variants, 3, time.process_time)
    keep_total(fl_round, left.with_upload(term, digest))
    return found


def _round(clients: tuple[str, ...]) -> tuple[OneSum, Context, Plan]:
    plan = Plan(Task("cells", tuple("abcdefgh"), (3, 28, 28)), "onesum", resolve_settings(OneSum, "cpu", {}), clients, Limits())
    return OneSum(plan.task, plan.settings), Context(plan, torch.device("cpu")), plan


def _keys(clients: tuple[str, ...]) -> dict[str, Any]:
    return {name: simulated_key(0, name) for name in (*clients, "server")}


def _shard(client: str, number: int) -> Shard:
    images = torch.randint(0, 256, (64, 3, 28, 28), generator=torch_generator(number, "site"), dtype=torch.uint8)
    data = Dataset(images, torch.arange(64) % 8)
    return Shard(client, data, data.subset(torch.arange(8)))


def cells() -> dict[str, Any]:
    """From images to release, all clients and the server: seconds of every slower method over OneSum's, from the records.

    Of the cells, not of the demo, which repeats one of them with one seed.
    """
    found = dict[str, Any]()
    for path in sorted(path for path in RECORDS.glob("*.json") if path.stem in CELLS):
        rows = json.loads(path.read_text(encoding="utf-8")).get("methods", {})
        own = rows.get("onesum") or rows.get("onesum@features=encoder")
        if own is None:
            continue
        times = {label: _seconds(row) / _seconds(own) for label, row in rows.items() if label.split("@")[0] in SLOWER}
        found[path.stem] = entry = dict[str, Any]()
        entry |= {
            "onesum_seconds": round(_seconds(own), 2),
            "onesum_accuracy_points_per_server_second": round(_per_second(own), 1),
        }
        if times:
            least = min(times, key=lambda label: times[label])
            entry |= {
                "least_times": round(times[least], 1),
                "least_is": least,
                "median_times": round(statistics.median(times.values()), 1),
                "accuracy_points_per_server_second": {label: round(_per_second(rows[label]), 1) for label in times},
            }
    return found


def ten_times_faster(found: Mapping[str, Any], pairs: Mapping[str, Any]) -> dict[str, Any]:
    """In how many cells every inversion or generator method takes ten times as long.

    By seconds of the wall in the rows; where these do not show it, by processor seconds of OneSum and the fastest of them in
    one run (benchmarks/onesum_times.py).
    """
    rows = {cell: (entry["least_times"], entry["least_is"]) for cell, entry in found.items() if "least_times" in entry}
    slower = {cell: row for cell, row in rows.items() if row[0] < TIMES}
    again = {cell: pairs[cell]["times"] for cell, (_, label) in slower.items() if pairs.get(cell, {}).get("beside") == label}
    missed = {cell: {"rows": row[0], "fastest": row[1], "in_one_run": again.get(cell)} for cell, row in slower.items()}
    return {
        "cells": len(rows),
        "by_rows": len(rows) - len(slower),
        "in_one_run": {cell: times for cell, times in again.items() if times >= TIMES},
        "missed": {cell: one for cell, one in missed.items() if (one["in_one_run"] or 0) < TIMES},
    }


def _seconds(row: Mapping[str, Any]) -> float:
    return float(row["costs.client_seconds"]["mean"] + row["costs.server_seconds"]["mean"])


def _per_second(row: Mapping[str, Any]) -> float:
    return 100 * float(row["scores.global.accuracy"]["mean"]) / max(float(row["costs.server_seconds"]["mean"]), 1e-3)


def update() -> None:
    """The record with the seconds of the runs that there are by now; what needs a quiet machine is not measured again."""
    path = RECORDS / "onesum_speed.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    with compute_threads(1):
        record["figures"] |= {"one_upload": one_upload(), "cells": (found := cells())}
    record["figures"]["ten_times_faster"] = ten_times_faster(found, kept_figures("onesum_times"))
    write_json(path, record)
    print(json.dumps({name: record["figures"][name] for name in ("one_upload", "ten_times_faster")}, indent=1))


if __name__ == "__main__":
    update() if "--cells" in sys.argv else print(json.dumps(run(), indent=1))
