"""Every one-shot method through memory, files and Flower: one plan, three ways, one digest.

    python -m benchmarks.three_ways                  # ten to twenty minutes on two cores
    python -m benchmarks.three_ways fedavg dense     # some of them

All rounds share one deployment; two are under way over Flower at a time. Then 200 simulated clients, embedded and on Ray.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osfl.core.errors import UsageError
from osfl.core.registry import names, one_shot
from osfl.deploy.flower.app import DONE
from osfl.runtime.machine import Machine
from osfl.simulate.run import run as run_simulation
from osfl.simulate.simulation import Simulation
from tests.faults.machines import CLIENTS, Machines, machines, make_plan
from tests.faults.ways import by_files, by_memory, released

AT_ONCE = 2
SETTINGS = {"chunk": 16 << 20, "again": 20.0}


def one_shot_methods() -> list[str]:
    """Baselines that need many rounds, or all data in one place, cannot run between sites."""
    found = []
    for name in names():
        try:
            one_shot(make_plan(name))
            found.append(name)
        except UsageError:
            continue
    return found


def run(methods: Sequence[str] = ()) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        chosen = list(methods) or one_shot_methods()
        with machines(folder, chosen, settings=SETTINGS) as (net, plans):
            net.link()
            rounds = {plan.method: net.round(f"{plan.method}-{plan.digest[:8]}") for plan in plans}
            seconds = _over_flower(net, list(rounds.values()))
            net.stop()
            rows = {}
            for plan in plans:
                ways = {
                    "memory": by_memory(folder / "memory" / plan.method, plan, net.data),
                    "files": by_files(folder / "files" / plan.method, plan, net.data),
                    "flower": released(rounds[plan.method], plan),
                }
                same = sum(digest == ways["memory"] for digest in ways.values())
                rows[plan.method] = {"same": f"{same}/3", **{way: digest[:16] for way, digest in ways.items()}}
                print(plan.method, json.dumps(rows[plan.method]), flush=True)
        good = sum(row["same"] == "3/3" for row in rows.values())
        found = {"methods": len(rows), "three_of_three": good, "flower_seconds": seconds, "digests": rows}
        return found if methods else {**found, "ray": many_on_ray(folder)}


def many_on_ray(folder: Path, clients: int = 200) -> dict[str, Any]:
    """Hundreds of simulated clients, in this process and on a Ray cluster of this machine: the same digests?"""
    simulation = Simulation("fedavg", preset="smoke", image_size=8, clients=clients, partition="iid")
    digests, seconds = [], []
    for engine in ("local", "ray"):
        start = time.perf_counter()
        result = run_simulation(simulation, folder / engine, machine=Machine(engine=engine))
        seconds.append(round(time.perf_counter() - start, 1))
        digests.append((result["release_digest"], result["models_digest"]))
    same = int(digests[0] == digests[1])
    return {"clients": clients, "same": same, "embedded_seconds": seconds[0], "ray_seconds": seconds[1]}


def _over_flower(net: Machines, rounds: Sequence[Path]) -> float:
    start, waiting = time.perf_counter(), list(rounds)
    under_way = [waiting.pop(0)]
    net.run(under_way[0].name)
    net.wait_registered()
    for client in CLIENTS:
        net.site(client)
    while under_way:
        while waiting and len(under_way) < AT_ONCE:
            under_way.append(waiting.pop(0))
            net.run(under_way[-1].name)
        net.wait_for("a round", lambda now=under_way: any((fl_round / DONE).exists() for fl_round in now), 900)  # type: ignore[misc]
        under_way = [fl_round for fl_round in under_way if not (fl_round / DONE).exists()]
    return round(time.perf_counter() - start, 1)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:]), indent=1))
