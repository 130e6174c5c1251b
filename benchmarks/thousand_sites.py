"""Processor time of whole simulated rounds with 100 and 1,000 sites, each site with images of its own, at smoke size.

    python -m benchmarks.bench thousand_sites          every method that the budget allows; the rest is named. It goes on
                                                   where it stopped; delete the record to begin anew
    python -m benchmarks.bench thousand_sites=100      only up to so many sites
    python -m benchmarks.thousand_sites onesum 100     one round, in a process of its own

Each site draws 24 handwritten digits of each of two classes, and 6 for validation, so that a site's work does not depend on how
many sites there are. FOL's clients have 2 random neighbors: with all others its work, which trains each neighbor's model on
each client's own images, is quadratic by its definition (`fol, all neighbors`, with few sites). FedMITR's server makes 2 images
of each client in an epoch, not 8: each client's network answers all of them. `times_linear` is the time of the most sites over
that of 100, times how many more they are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import kept_figures, write_record
from osfl.core.seeds import torch_generator
from osfl.core.topology import parse_topology
from osfl.core.types import Shard
from osfl.runtime.machine import Machine
from osfl.runtime.meter import peak_memory
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare

SITES = (100, 1000)
BETWEEN = (100, 300, 1000)
COUNTS: Mapping[str, Sequence[int]] = {  # where others than SITES
    "falcon": BETWEEN,
    "fedbicross": BETWEEN,
    "fedmitr": BETWEEN,
    "fol": (10, 30, *BETWEEN),
    "fol, all neighbors": (10, 30),
}
IMAGES = 24  # of each of a site's two classes
BUDGET = 2700.0  # seconds of processor time for all; a round that would exceed it is not begun
METHODS: Mapping[str, Mapping[str, Any]] = {
    "onesum": {},
    "federated_factory": {"least": 20},
    "falcon": {},
    "fedbicross": {},
    "fedmitr": {"images": 2},
    "fol": {},
    "fol, all neighbors": {},
}


def run(most: int = SITES[-1]) -> dict[str, Any]:
    """Few sites of all methods first, then many."""
    start, rows = time.perf_counter(), dict[str, Any](kept_figures("thousand_sites").get("methods", {}))
    figures = {"images_a_site": 2 * IMAGES, "methods": rows}
    wanted = [(sites, method) for method in METHODS for sites in COUNTS.get(method, SITES) if sites <= most]
    for sites, method in sorted(wanted, key=lambda pair: pair[0]):
        row = rows.setdefault(method, {})
        row.pop("not_run", None)
        if str(sites) in row:
            continue
        spent = sum(each["cpu_seconds"] for other in rows.values() for each in other.values() if isinstance(each, dict))
        expected = row[str(SITES[0])]["cpu_seconds"] * sites / SITES[0] if str(SITES[0]) in row else 0.0
        if spent + expected > BUDGET:
            row["not_run"] = f"{sites} sites: {expected:.0f} s if linear, beyond what is left of {BUDGET:.0f} s"
            continue
        row[str(sites)] = in_own_process(method, sites)
        print(method, sites, row[str(sites)]["cpu_seconds"], flush=True)
        if str(SITES[0]) in row and sites > SITES[0]:
            few, many = (row[str(count)]["cpu_seconds"] for count in (SITES[0], sites))
            row["times_linear"] = round(many / few * SITES[0] / sites, 3)
        write_record("thousand_sites", figures, time.perf_counter() - start)
    return figures


def in_own_process(method: str, sites: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.thousand_sites", method, str(sites)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(case: str, sites: int) -> dict[str, float]:
    """A whole round; seconds of processor time, without what starting costs, and megabytes."""
    torch.set_num_threads(1)
    method, _, everyone = case.partition(",")
    with tempfile.TemporaryDirectory() as place:
        os.environ["OSFL_CACHE"] = f"{place}/cache"
        simulation = Simulation(method, "digits", 2, "iid", "smoke", changes=METHODS[case], test_samples=50)
        prepared, machine = prepare(simulation), Machine(workers=1)
        about = {"preset": "smoke", "command": ""}
        neighbors = sites - 1 if everyone else 2
        run_federation(with_sites(prepared, 3), Path(place) / "first", about, machine=machine)  # imports, and what is kept
        start = time.process_time()
        result = run_federation(with_sites(prepared, sites, neighbors), Path(place) / "run", about, machine=machine)
        seconds = time.process_time() - start
    phases = {name: phase["seconds"] for name, phase in result["costs"]["phases"].items()}
    return {
        "cpu_seconds": round(seconds, 2),
        "peak_mb": round(peak_memory() / 1e6, 1),
        **{f"{k}_wall": v for k, v in phases.items()},
    }


def with_sites(prepared: Federation, sites: int, neighbors: int = 2) -> Federation:
    """The same data at so many sites; in FOL each has so many neighbors."""
    clients = tuple(f"site-{number:04}" for number in range(sites))
    whole, classes = prepared.shards[0].train, len(prepared.plan.task.classes)
    shards, counts = [], {}
    for number, client in enumerate(clients):
        rng = torch_generator(0, "thousand sites", client)
        own = [(whole.labels == (number + step) % classes).nonzero().flatten() for step in (0, 1)]
        mixed = [of[torch.randperm(len(of), generator=rng)] for of in own]
        train, val = (torch.cat([one[part] for one in mixed]) for part in (slice(IMAGES), slice(IMAGES, IMAGES + 3)))
        shards.append(Shard(client, whole.subset(train), whole.subset(val), digest=client))
        counts[client] = [(IMAGES + 3) * (c in (number % classes, (number + 1) % classes)) for c in range(classes)]
    topology = parse_topology(f"random:{neighbors}") if prepared.plan.method == "fol" else None
    return replace(prepared, plan=replace(prepared.plan, clients=clients, topology=topology), shards=shards, counts=counts)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
