"""What OneSum's open sums show to who receives them: the features of single images, by two attacks.

    python -m benchmarks.exact_sums

**Rows of G** (`alone`). Where one image alone has a feature j, G_jj is the square of a whole number s, which divides all of
row j, and G_j / s is that image's features, its thumbnail included. What was found is subtracted, and the search goes on. It
takes a second, nothing but G, and any number of images. Tried on each of five sites and on the sum of all.

**Lattice reduction** (`rows_of`), of few images.

G = F^T F, where F (n images, d features) holds whole numbers. A server that has G has the inner products of F's columns, which
are whole-number vectors of length n, and while there are fewer images than features they usually generate all of Z^n. LLL
finds a basis of the lattice that they generate; when its vectors have length 1, its inner products with the columns are F
itself, but for the order of the images and the signs of rows. Double precision carries this plain LLL to some 20 images;
better tools go further, so a 0 in the record is no promise. A case that is in the record is not repeated.
"""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.result import write_json
from osfl.ingredients.statistics.gaussians import unpacked
from osfl.runtime.machine import Machine
from osfl.runtime.workers import compute_threads
from osfl.simulate.simulation import Simulation, prepare

RECORD = Path(__file__).parent / "records" / "exact_sums.json"
SITES = 20
CASES = (
    ("digits", 300, "dirichlet:0.5"),
    ("digits", 600, "dirichlet:0.5"),
    ("bloodcells-28", 300, "dirichlet:0.5"),
)
ALONE = ("digits", "bloodcells-28", "retinamnist", "cifar10-subset")
SAMPLES = {"bloodcells-28": 4000, "cifar10-subset": 4000}
_DELTA = 0.99  # of Lovasz' condition
_ZERO = 0.3  # shorter vectors are rounding errors: whole-number vectors have length 1 at least
_ROUNDS = 3  # of subtracting, against rounding

Rows: TypeAlias = npt.NDArray[np.float64]
Whole: TypeAlias = npt.NDArray[np.int64]


def reduced(rows: Rows) -> Rows:
    """LLL; rows that depend on others vanish."""
    found, k = list(rows), 1
    while k < len(found):
        for _ in range(_ROUNDS):
            r: Rows = np.linalg.qr(np.array(found[: k + 1]).T)[1]
            times = _nearest(r, k)
            if not times.any():
                break
            found[k] = found[k] - times @ np.array(found[:k])
        if float(np.linalg.norm(found[k])) < _ZERO:
            del found[k]
            k = max(1, min(k, len(found) - 1))
            continue
        r = np.linalg.qr(np.array(found[: k + 1]).T)[1]
        length = float(r[k, k]) if k < len(r) else 0.0
        if length**2 + float(r[k - 1, k]) ** 2 >= _DELTA * float(r[k - 1, k - 1]) ** 2:
            k += 1
            continue
        found[k - 1], found[k] = found[k], found[k - 1]
        if float(np.linalg.norm(found[0])) < _ZERO:
            del found[0]
        k = max(1, k - 1)
    return np.array(found)


def _nearest(r: Rows, k: int) -> Rows:
    """Which whole multiples of the first k rows to subtract from row k, from the triangular factor of all of them."""
    left, times = r[:, k].copy(), np.zeros(k)
    for j in range(min(k, len(r)) - 1, -1, -1):
        if abs(r[j, j]) > _ZERO:
            times[j] = np.rint(left[j] / r[j, j])
            left[: j + 1] -= times[j] * r[: j + 1, j]
    return times


def rows_of(gram: Rows, images: int) -> Rows | None:
    """F (images, d) up to order and signs, of F^T F alone; None where it is not found."""
    if images >= len(gram):
        return None
    values, vectors = np.linalg.eigh(gram)
    columns = vectors[:, -images:] * np.sqrt(values[-images:])  # (d, images): F's columns in some rotation
    back = np.linalg.pinv(columns).T
    basis: Rows = np.zeros((0, images))
    for j in np.argsort(np.diagonal(gram)):
        column = columns[j]
        if len(basis) == images:
            column = column - np.rint(np.linalg.solve(basis.T, column)) @ basis
        if float(np.linalg.norm(column)) < _ZERO or len(basis) > images:
            continue
        basis = reduced(np.vstack([basis, column]))
        products = np.rint(basis @ columns.T)  # whole numbers, so rounding keeps errors from adding up
        basis = products @ back
        if len(basis) == images and bool((np.abs((basis**2).sum(1) - 1) < 0.01).all()):
            found: Rows = products * np.sign(products.sum(1, keepdims=True))
            return found
    return None


def attacked(data: str, samples: int, partition: str) -> list[dict[str, Any]]:
    """For the first three sites: images, how many of them have features that the attack found exactly, and seconds."""
    federation = prepare(Simulation("onesum", data, SITES, partition, "cpu", samples=samples))
    plan, found = federation.plan, []
    method: Any = load(plan.method)(plan.task, plan.settings)
    ctx = Context(plan, torch.device("cpu"))
    for shard in federation.shards[:3]:
        payload = method.client_phase(shard, ctx)
        images, gram = int(payload.tensors["counts"].sum()), unpacked(payload.tensors["gram"].double()).numpy()
        begun = time.monotonic()
        rows = rows_of(gram, images) if images else None
        true = {
            row.tobytes() for row in (method._features(shard.train, shard, ctx) / method._step()).round().double().numpy() + 0.0
        }
        exact = 0 if rows is None else sum((row + 0.0).tobytes() in true for row in rows)
        found.append({"images": images, "features": len(gram), "exact": exact, "seconds": round(time.monotonic() - begun, 1)})
    return found


def alone(gram: Whole) -> list[Whole]:
    """Features of single images, of G in whole numbers alone."""
    gram, found = gram.copy(), list[Whole]()
    while True:
        row = next((row for row in map(partial(_alone, gram), range(len(gram))) if row is not None), None)
        if row is None:
            return found
        found.append(row)
        gram -= np.outer(row, row)


def _alone(gram: Whole, j: int) -> Whole | None:
    root = math.isqrt(max(0, int(gram[j, j])))
    if not root or root**2 != int(gram[j, j]) or (gram[j] % root).any():
        return None
    row = gram[j] // root
    return row if bool((row**2 <= np.diagonal(gram)).all()) else None


def read_alone(data: str) -> dict[str, Any]:
    """For each of five sites, and for the sum of all: images, and of how many the features were found exactly."""
    federation = prepare(Simulation("onesum", data, 5, "dirichlet:0.1", "cpu", samples=SAMPLES.get(data)))
    plan = federation.plan
    method: Any = load(plan.method)(plan.task, plan.settings)
    ctx = Context(plan, torch.device("cpu"))
    sites, total, everybody, every = [], np.zeros(0, np.int64), set[bytes](), 0
    for shard in federation.shards:
        payload = method.client_phase(shard, ctx)
        images, gram = int(payload.tensors["counts"].sum()), unpacked(payload.tensors["gram"]).numpy()
        true = {row.tobytes() for row in (method._features(shard.train, shard, ctx) / method._step()).round().long().numpy()}
        sites.append({"images": images, "exact": sum(row.tobytes() in true for row in alone(gram))})
        total, everybody, every = gram if not len(total) else total + gram, everybody | true, every + images
    found = sum(row.tobytes() in everybody for row in alone(total))
    return {"features": len(total), "sites": sites, "sum of all sites": {"images": every, "exact": found}}


def main() -> None:
    rows = json.loads(RECORD.read_text("utf-8"))["rows"] if RECORD.exists() else {}
    for data, samples, partition in CASES:
        name = f"{data}, {samples} images, {SITES} sites, {partition}"
        if name not in rows:
            with compute_threads(Machine().threads):
                rows[name] = attacked(data, samples, partition)
            print(name, rows[name], flush=True)
            _keep(rows)
    for data in ALONE:
        name = f"rows of G, {data}, 5 sites, dirichlet:0.1"
        if name not in rows:
            with compute_threads(Machine().threads):
                rows[name] = read_alone(data)
            print(name, rows[name], flush=True)
            _keep(rows)


def _keep(rows: dict[str, Any]) -> None:
    write_json(RECORD, {"command": "python -m benchmarks.exact_sums", "date": time.strftime("%Y-%m-%d"), "rows": rows})


if __name__ == "__main__":
    main()
