"""How the server's work grows with the clients: 5, 20 and 80 of them, every method with a server phase of its own.

    python -m benchmarks.bench server_growth            it goes on where it stopped; delete the record to begin anew
    python -m benchmarks.server_growth dense            one method, in a process of its own

Sites of the benchmark thousand_sites (48 digits of two classes each) with the smoke presets, whose fixed part is small; what
the server makes is the same whatever the number of sites, but where a paper has each client inverted by itself. Processor
time of one thread, the less of two turns. `exponent` is the slope of log seconds over log clients from 20 to 80, where the
fixed part counts least; 1 is linear. What the paper compares with all others is named in PAIRS, and has no aim.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import kept_figures, write_record
from benchmarks.thousand_sites import with_sites
from osfl.core.method import quiet
from osfl.core.registry import load
from osfl.core.types import Plan, Upload
from osfl.rounds.phases import computing
from osfl.runtime.machine import Machine
from osfl.simulate.simulation import Simulation, prepare

CLIENTS, AIM, TURNS = (5, 20, 80), 1.1, 2
PAIRS: Mapping[str, str] = {  # methods whose paper has work for every pair
    "fedbicross": "ceil(sqrt(n)) clusters, each of whose students learns from the images of all clusters",
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
    "fedisca": {**_STEPS, "images": 160},
    "fedbicross": {},
    "deepinversion_vit": {},
    "fedmitr": {},
}


def run() -> dict[str, Any]:
    start, rows = time.perf_counter(), dict[str, Any](kept_figures("server_growth").get("methods", {}))
    for method in METHODS:
        if method not in rows:
            rows[method] = in_own_process(method)
            print(method, rows[method], flush=True)
            write_record("server_growth", _figures(rows), time.perf_counter() - start)
    return _figures(rows)


def _figures(rows: Mapping[str, Any]) -> dict[str, Any]:
    above = [method for method, row in rows.items() if row["exponent"] > AIM and method not in PAIRS]
    return {"aim": AIM, "compare_all_pairs": dict(PAIRS), "above_aim": above, "methods": rows}


def in_own_process(method: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.server_growth", method]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(name: str) -> dict[str, Any]:
    """Processor seconds of the server phase by number of clients, and the exponent of their growth."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["OSFL_CACHE"] = f"{place}/cache"
        prepared = prepare(Simulation(name, "digits", 2, "iid", "smoke", changes=METHODS[name], test_samples=50))
        made = {count: _uploads(prepared, count, Path(place)) for count in CLIENTS}
        seconds: dict[str, float] = {}
        for turn in range(TURNS + 1):  # the first one warms up
            for count, (plan, uploads) in made.items():
                spent = _server(plan, uploads, Path(place) / f"{turn}-{count}")
                if turn:
                    seconds[str(count)] = min(spent, seconds.get(str(count), math.inf))
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[1])))
