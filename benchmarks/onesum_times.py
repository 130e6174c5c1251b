"""How many times OneSum is faster from images to release than a cell's fastest inversion or generator method, both in one run.

    python -m benchmarks.bench onesum_times        the pairs that the record lacks; delete it to begin anew

The rows of docs/results were made on machines that were more or less busy, as seconds of the wall show. Here both methods of a
pair run one after the other, one worker with one thread, seed 0, and processor seconds are compared: of all client phases, the
server phase and what clients do with the release, as in the rows. The pairs are the cells in which the rows alone do not show a
factor of ten.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.bench import kept_figures, write_record
from benchmarks.grid import CELLS
from osfl.runtime.machine import Machine
from osfl.runtime.workers import compute_threads
from osfl.simulate.compare import compare

# the fastest of the row's cell, by the wall
PAIRS: Mapping[str, str] = {
    "digits-vit-n5-a0.05": "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0",
    "digits-vit-n5-a0.1": "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0",
    "digits-vit-n5-a0.3": "fedmitr@lambda1=0",
    "digits-vit-n10-a0.1": "fedmitr@lambda2=0",
    "digits-vit-n10-c1": "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0",
    "digits-vit-n20-a0.1": "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0",
    "digits-silos": "federated_factory",
    "factory-cifar-n5-a0.1": "federated_factory",
    "factory-blood-n5-a0.1": "federated_factory@mode=peer",
    "factory-retina-n5-a0.1": "federated_factory@personalize=prior",
    "skin-n5-a0.1": "federated_factory@personalize=prior",
    "skin-n5-a0.3": "dafl",
    "skin-n5-a0.5": "dafl",
    "blood-meet-n70-a0.5": "dense@generators=1@server_epochs=4",
    "skin-meet-n70-a0.3": "dense@generators=1@server_epochs=4",
    "skin-meet-n70-a0.5": "dense@generators=1@server_epochs=4",
    "skin-meet-n70-a0.7": "dense@generators=1@server_epochs=4",
}


def run() -> dict[str, Any]:
    found, start = kept_figures("onesum_times"), time.perf_counter()
    for cell, label in PAIRS.items():
        if found.get(cell, {}).get("beside") != label:
            found[cell] = pair(cell, label)
            write_record("onesum_times", found, time.perf_counter() - start)
            print(cell, found[cell], flush=True)
    return found


def pair(cell: str, label: str) -> dict[str, Any]:
    """Both methods on the same shards."""
    with tempfile.TemporaryDirectory() as folder, compute_threads(1):
        alone = replace(CELLS[cell], topology=None)
        compare(alone, ["onesum", label], (0,), folder, machine=Machine(workers=1))
        own, other = (seconds_of(Path(folder) / name / "seed0" / "journal.jsonl") for name in ("onesum", label))
    return {
        "beside": label,
        "times": round(sum(other.values()) / sum(own.values()), 1),
        "onesum": own,
        "other": other,
        "load": round(os.getloadavg()[0], 1),
    }


def seconds_of(journal: Path) -> dict[str, float]:
    """Processor seconds of all client phases, of the server phase, and of personalization."""
    found = {"client": 0.0, "server": 0.0, "personalize": 0.0}
    for line in journal.read_text(encoding="utf-8").splitlines():
        note = json.loads(line)
        if note["phase"] in found:
            found[note["phase"]] += note.get("processor_seconds", 0.0)
    return {phase: round(seconds, 3) for phase, seconds in found.items()}
