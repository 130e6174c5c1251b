"""The egress check's attack (osfl.rounds.exposure) on what each method sends, with and without its safeguards.

    python -m benchmarks.egress_attack

Sites learn as in a round, and their uploads are attacked instead of sent. A row counts the classes of all sites, those with a
distance ratio below the bound (an upload with one does not leave; rows of second moments stop real sites alone), and the least
ratio of each kind of candidate. Rows with `least=1` or `least=2` are without safeguards. A case that is in the record is not
repeated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.grid import CELLS
from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.result import write_json
from osfl.rounds.exposure import BOUND, Ratio, attack
from osfl.simulate.simulation import Simulation, prepare

RECORD = Path(__file__).parent / "records" / "egress_attack.json"
SKEWED = {"dirichlet:0.1": 5, "dirichlet:0.3": 20, "dirichlet:0.5": 50}  # partition -> sites
IMAGES = {
    "digits": None,
    "bloodcells-28": 4000,
    "retinamnist": None,
    "cifar10-subset": 4000,
    "pneumoniamnist": None,
    "skinlesions-28": 4000,
}  # dataset -> images, None: all
OPEN: dict[str, dict[str, Any]] = {
    "mixture": {"least": 2, "mixture_prior": 1.0},
    "vae": {"least": 2},
}  # without safeguards: the least that a plan allows


def cases() -> Iterator[tuple[str, Simulation]]:
    for data, samples in IMAGES.items():
        for partition, sites in SKEWED.items():
            yield from _both("mixture", Simulation("federated_factory", data, sites, partition, "cpu", samples=samples))
    for data in ("digits", "retinamnist"):
        for kind in ("vae", "edm"):
            yield (
                f"{kind}, {data}, silos",
                Simulation("federated_factory", data, None, "silos", "cpu", changes={"factory": kind}),
            )
    yield from _both("vae", Simulation("federated_factory", "digits", 5, "dirichlet:0.1", "cpu", changes={"factory": "vae"}))
    yield from _sums()
    silos = replace(Simulation("federated_factory", "digits", None, "silos", "cpu"), changes={"factory": "edm", "least": 2})
    yield "edm, digits, silos, least=2", silos
    blood = Simulation(
        "federated_factory", "bloodcells-28", 5, "dirichlet:0.1", "cpu", samples=1000, changes={"factory": "edm"}
    )
    yield "edm, bloodcells-28, 1,000 images, 5 sites, dirichlet:0.1", blood
    for cell in ("digits-tokens", "brain-a0.1"):
        for method in ("fedcgs", "fedpft", "falcon"):
            yield from _both(method, replace(CELLS[cell], method=method, changes=_known(method, CELLS[cell].changes)))


def _sums() -> Iterator[tuple[str, Simulation]]:
    """Second moments, and full covariances of few images."""
    for data in ("digits", "bloodcells-28", "retinamnist", "cifar10-subset"):
        simulation = Simulation("onesum", data, 5, "dirichlet:0.1", "cpu", samples=IMAGES[data])
        yield f"onesum, {data}, 5 sites, dirichlet:0.1", simulation
    for method, changes in (("fedcgs", {}), ("fedpft", {"shape": "full", "components": 1})):
        few = replace(CELLS["digits-tokens"], method=method, samples=240, changes=changes)
        yield f"{method}{', full' if changes else ''}, digits, 240 images, 5 sites, dirichlet:0.1", few


def _both(kind: str, simulation: Simulation) -> Iterator[tuple[str, Simulation]]:
    """With the safeguards of the preset, and without."""
    name = f"{kind}, {simulation.dataset}, {simulation.clients} sites, {simulation.partition}"
    yield name, simulation
    without = OPEN.get(kind, {"least": 1})
    yield f"{name}, least={without['least']}", replace(simulation, changes={**simulation.changes, **without})


def _known(method: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """A cell's settings that the method has, too."""
    return {name: value for name, value in changes.items() if name in {field.name for field in fields(load(method).Settings)}}


def attacked(simulation: Simulation) -> list[list[Ratio]]:
    """For each site the ratios of its upload."""
    federation = prepare(simulation)
    plan = federation.plan
    method, ctx = load(plan.method)(plan.task, plan.settings), Context(plan, torch.device("cpu"))
    assert method.provides("exposed")
    return [attack(method.exposed(method.client_phase(shard, ctx), shard, ctx)) for shard in federation.shards]


def summary(sites: Sequence[Sequence[Ratio]]) -> dict[str, Any]:
    """How many classes there are at all sites, in how many an image can be read out, and the least ratio of each kind. Of
    second moments also the largest residual of training images and the least of held-out ones, off their span."""
    images = [[ratio for ratio in site if ratio.residuals is None] for site in sites]
    worst = [
        min(ratio.ratio for ratio in site if ratio.label == label)
        for site in images
        for label in sorted({ratio.label for ratio in site})
    ]
    kinds = sorted({ratio.what for site in images for ratio in site})
    least = {kind: round(min(ratio.ratio for site in images for ratio in site if ratio.what == kind), 3) for kind in kinds}
    found = {"classes": len(worst), "below_bound": sum(ratio < BOUND for ratio in worst), "least_ratio": least}
    spans = [ratio.residuals for site in sites for ratio in site if ratio.residuals is not None]
    if not spans:
        return found
    inside, outside = max(one[0] for one in spans), min(one[1] for one in spans)
    return {**found, "span": {"classes": len(spans), "training": float(f"{inside:.2g}"), "held_out": float(f"{outside:.2g}")}}


def main() -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["rows"] if RECORD.exists() else {}
    for name, simulation in cases():
        if name not in rows:
            rows[name] = summary(attacked(simulation))
            print(f"{time.strftime('%H:%M:%S')} {name}: {rows[name]}", flush=True)
            write_json(RECORD, {"bound": BOUND, "date": time.strftime("%Y-%m-%d", time.gmtime()), "rows": rows})


if __name__ == "__main__":
    main()
