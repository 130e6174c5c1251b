"""How the server's work grows with the clients: 5, 20 and 80 of them, every method with a server phase of its own.

    python -m benchmarks.bench server_growth            all, in one process; about a minute of one core

Sites of the benchmark thousand_sites (48 digits of two classes each) with the smoke presets, whose fixed part is small; what
the server makes is the same whatever the number of sites, but where a paper has each client inverted by itself. Processor
time of one thread, once, after a turn with five clients that warms up. `exponent` is the slope of log seconds over log clients
from 20 to 80, where the fixed part counts least; 1 is linear. What the paper compares with all others is named in PAIRS, and
has no aim. FOL is not here: its server passes models on.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.thousand_sites import with_sites
from osfl.core.method import quiet
from osfl.core.registry import load
from osfl.core.types import Plan, Upload
from osfl.rounds.phases import computing
from osfl.runtime.machine import Machine
from osfl.simulate.simulation import Simulation, prepare

CLIENTS, AIM = (5, 20, 80), 1.1
PAIRS: Mapping[str, str] = {  # methods whose paper has work for every pair
    "fedbicross": "ceil(sqrt(n)) clusters, each of whose students learns from the images of all clusters",
    "falcon": "every client's classifier answers every client's sequences (Eq. 10)",
    "fedmitr": "every client's ViT answers every client's images (Algorithm 1)",
    "deepinversion_vit": "as FedMITR",
}
_STEPS: Mapping[str, Any] = {"steps": 10}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {},
    "ensemble": {},
    "fedcgs": {},
    "onesum": {},
    "fedpft": {},
    "falcon": {},
    "federated_factory": {"least": 20},
    "fedlmg": {},
    "dafl": {},
    "dense": {},
    "coboosting": {},
    "fedftg": {},
    "deepinversion": {**_STEPS, "rounds": 1, "adi": 0.0},
    "fedisca": {**_STEPS, "repetitions": 1},
    "fedbicross": {},
    "deepinversion_vit": {},
    "fedmitr": {},
}


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    rows = {}
    for method in METHODS:
        rows[method] = measure(method)
        print(method, rows[method], round(time.process_time(), 1), flush=True)
    return _figures(rows)


def _figures(rows: Mapping[str, Any]) -> dict[str, Any]:
    above = [method for method, row in rows.items() if row["exponent"] > AIM and method not in PAIRS]
    return {"aim": AIM, "compare_all_pairs": dict(PAIRS), "above_aim": above, "methods": rows}


def measure(name: str) -> dict[str, Any]:
    """Processor seconds of the server phase by number of clients, and the exponent of their growth."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["OSFL_CACHE"] = f"{place}/cache"
        prepared = prepare(Simulation(name, "digits", 2, "iid", "smoke", changes=METHODS[name], test_samples=50))
        made = {count: _uploads(prepared, count, Path(place)) for count in CLIENTS}
        _server(*made[CLIENTS[0]], Path(place) / "first")
        seconds = {str(count): _server(*made[count], Path(place) / str(count)) for count in CLIENTS}
    few, many = (str(count) for count in CLIENTS[-2:])
    slope = math.log(seconds[many] / seconds[few]) / math.log(CLIENTS[-1] / CLIENTS[-2])
    return {"cpu_seconds": {n: round(s, 3) for n, s in seconds.items()}, "exponent": round(slope, 2)}


def _uploads(prepared: Any, count: int, place: Path) -> tuple[Plan, Sequence[Upload]]:
    federation = with_sites(prepared, count)
    method = load(federation.plan.method)(federation.plan.task, federation.plan.settings)
    with computing(federation.plan, Machine(workers=1), quiet, place / "clients") as ctx:
        found = [Upload(s.client, federation.plan.digest, method.client_phase(s, ctx)) for s in federation.shards]
    return federation.plan, found


def _server(plan: Plan, uploads: Sequence[Upload], scratch: Path) -> float:
    method = load(plan.method)(plan.task, plan.settings)
    with computing(plan, Machine(workers=1), quiet, scratch) as ctx:
        start = time.process_time()
        method.server_phase(uploads, ctx)
        return time.process_time() - start
