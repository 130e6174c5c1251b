"""Is the audit able to see, and what does differential privacy leave of what it finds?

    python -m benchmarks.audit canaries     mislabeled images in ten overfitted rounds: how many are found, how often falsely
    python -m benchmarks.audit epsilon      accuracy over epsilon beside the best attack, on a medical cell
    python -m benchmarks.audit epsilon fedavg   one method; what the record has is not made again

Both write benchmarks/records/audit.json. Accuracy is on test images; nothing was chosen by it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from osfl.core.result import Audit, Result, write_json
from osfl.core.types import Privacy
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.simulate.audit import Attempt, audit
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare

RECORD = Path(__file__).parent / "records" / "audit.json"
SEEDS, DELTA, EPSILONS = range(10), 1e-4, (1.0, 8.0, None)
LEARNED_BY_HEART = {"architecture": "cnn-w16", "epochs": 40, "weight_decay": 0.0, "schedule": "constant"}
OVERFITTED = Simulation("fedavg", "digits", 2, "iid", "smoke", changes=LEARNED_BY_HEART, samples=400, image_size=8)
LOOKING = Attempt(shadows=2, canaries=10, images=20, inversion=1)  # for canaries: the other attacks as small as they go
TRAINED = {"architecture": "cnn-w8-g4", "epochs": 8, "batch_size": 128, "clip": 1.0, "weight_decay": 0.0, "lr": 0.1}
CELL = Simulation("fedavg", "bloodcells-28", 5, "dirichlet:0.5", "cpu", samples=3000)
METHODS: Mapping[str, Mapping[str, Any]] = {"fedavg": TRAINED, "ensemble": TRAINED, "onesum": {"dimensions": 256}}


def one(simulation: Simulation, attempt: Attempt) -> Result:
    """A round and its audit, in a folder that is then deleted."""
    with tempfile.TemporaryDirectory() as folder:
        run(simulation, folder)
        return audit(Path(folder), prepare(simulation), attempt=attempt)


def canaries(seed: int) -> dict[str, Any]:
    start, result = time.perf_counter(), one(replace(OVERFITTED, seed=seed), LOOKING)
    return {"seconds": round(time.perf_counter() - start), "canaries": result["audit"]["canaries"]}


def counted(rounds: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Over all rounds: planted and found, and how many of the same canaries were found before they were planted."""
    rows = [row for one in rounds.values() for row in one["canaries"]]
    totals = {key: sum(row[key] for row in rows) for key in ("planted", "found", "found_unplanted")}
    rates = [row["false_alarms"]["value"] for row in rows]
    return {
        "rounds": len(rows),
        **totals,
        "least_found": min(row["found"] for row in rows),
        "false_alarms": sum(rates) / len(rates),
    }


def accuracy(method: str, epsilon: float | None) -> dict[str, Any]:
    """Without noise the training is the same otherwise."""
    privacy = None if epsilon is None else Privacy(epsilon, DELTA)
    simulation = replace(CELL, method=method, changes=METHODS[method], privacy=privacy)
    result = one(simulation, Attempt(shadows=2, canaries=0, inversion=1, images=200))
    stated = {"stated": result["privacy"]["epsilon"]} if "privacy" in result else {}
    scores = result["scores"]["global"]
    exceeded = [row for row in result["audit"]["membership"] if row.get("exceeds_bound")]
    return {
        "accuracy": round(100 * (scores["accuracy"] or 0.0), 1),
        **stated,
        "best": best(result["audit"]),
        "attacks_beyond_the_bound": len(exceeded),
    }


def best(found: Audit) -> dict[str, Any]:
    """For each party the attack with the largest area, and the largest share of members found at 1 % false positives."""
    whole: dict[str, Any] = {}
    for party in ("server", "outsider"):
        rows = [row for row in found["membership"] if row["party"] == party and row["of"] == "all"]
        row = max(rows, key=lambda row: row["auc"]["value"])
        rates = [(rate["value"], one["attack"]) for one in rows if (rate := one["tpr"]["0.01"]) is not None]
        whole[party] = {
            "members": row["members"],
            "attack": f"{row['attack']} on {row['signal']}",
            "auc": row["auc"],
            "tpr_at_0.01": max(rates, default=None),
        }
    return whole


def main(arguments: Sequence[str]) -> None:
    what, only = (arguments[0] if arguments else "canaries"), set(arguments[1:]) or set(METHODS)
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    record |= {"environment": describe_environment(Machine(), 2), "cell": CELL.command("DIR"), "delta": DELTA}
    record |= {"overfitted": OVERFITTED.command("DIR"), "command": f"python -m benchmarks.audit {what}"}
    write_json(RECORD, record)
    if what == "canaries":
        for seed in SEEDS:
            if str(seed) not in record.setdefault("canaries", {}):
                record["canaries"][str(seed)] = canaries(seed)
                record["canaries_in_all"] = counted(record["canaries"])
                write_json(RECORD, record)
    for method in [name for name in METHODS if what == "epsilon" and name in only]:
        for epsilon in EPSILONS:
            name = "inf" if epsilon is None else f"{epsilon:g}"
            if name not in record.setdefault("epsilon", {}).setdefault(method, {}):
                record["epsilon"][method][name] = accuracy(method, epsilon)
                write_json(RECORD, record)
                print(method, name, record["epsilon"][method][name], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
