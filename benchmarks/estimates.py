"""What `osfl estimate` says before a run, against what the run then needs: each method's `cpu` preset on the embedded digits.

    python -m benchmarks.estimates                    every method; what the record already has is kept
    python -m benchmarks.estimates fedavg estimate    one method, only the estimate (or `measure`)

Five clients, Dirichlet 0.1, one seed, one worker; the estimate and the run are processes of their own. Seconds are seconds of
the processor, because other programs compute on the machine, too. Those slow each other down: a second holds up to twice the
work of another one. So both processes also time one and the same training before and after (`pace_seconds`), and the ratios of
seconds are those at equal pace; `seconds as they were` is without that. Memory is the most that is resident in any phase.
Evaluation, which `osfl estimate` leaves out, is not run. What is changed in a preset stands in `CHANGES`, for estimate and run
alike: digits have 8 x 8 pixels, which a pretrained encoder cannot see, and encoding all of them at its own size takes minutes.
Each process has an empty cache of its own: features that are kept would make the run, but not the estimate, cheaper. Seconds of
which a phase has few are told apart by chance: a difference of less than `NOTHING` at equal pace is not listed.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import kept_figures, write_record
from osfl.core.registry import names
from osfl.core.types import Dataset, Task
from osfl.ingredients.training.local import Training, fit
from osfl.models.build import build_model
from osfl.runtime.machine import Machine
from osfl.runtime.workers import compute_threads
from osfl.simulate.estimate import estimate_of
from osfl.simulate.rehearsal import PHASES, Costs, run_unevaluated
from osfl.simulate.simulation import Federation, Simulation, prepare

ENOUGH = 1.5  # times too much or too little: what is outside is listed
ENCODED: Mapping[str, Any] = {"image_size": 32, "samples": 300}
CHANGES: Mapping[str, Mapping[str, Any]] = dict.fromkeys(("centralized_tokens", "falcon", "fedcgs", "fedpft"), ENCODED)
NOTHING = 0.3  # seconds between estimate and measurement that are no difference
CHEAP = 0.02  # of the whole: a phase that takes a smaller part of the seconds is not judged by itself


def run() -> dict[str, Any]:
    kept = kept_figures("estimates")
    rows: dict[str, Any] = kept["methods"] if kept.get("or_seconds") == NOTHING else {}  # else made by other rules
    for method in names():
        if method not in rows:
            rows[method] = compared(*(in_own_process(method, what) for what in ("estimate", "measure")))
            write_record("estimates", figures(rows), 0.0)
    return figures(rows)


def figures(rows: Mapping[str, Any]) -> dict[str, Any]:
    outside = {name: row["outside"] for name, row in rows.items() if row["outside"]}
    return {"changes": CHANGES, "within": ENOUGH, "or_seconds": NOTHING, "outside": outside, "methods": rows}


def in_own_process(method: str, what: str) -> dict[str, Any]:
    """Memory that one run left behind must not hide what the next one needs."""
    command = [sys.executable, "-m", "benchmarks.estimates", method, what]
    with tempfile.TemporaryDirectory() as cache:
        alone = {**os.environ, "OMP_NUM_THREADS": "1", "OSFL_CACHE": cache}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=alone)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def compared(guess: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Both, their ratios (estimate by measurement), and which of them are not within `ENOUGH`."""
    pace = found["pace_seconds"] / guess["pace_seconds"]
    parts = {"": (guess, found)}
    parts |= {f"{phase} ": (guess["phases"][phase], found["phases"][phase]) for phase in PHASES}
    ratios, outside = dict[str, float | None](), list[str]()
    for name, (said, was) in parts.items():
        for key in ("flops", "seconds", *(() if name else ("memory_bytes", "upload_bytes"))):
            if name and was[key] <= CHEAP * found[key]:
                continue
            expected = said[key] * (pace if key == "seconds" else 1.0)
            ratio = ratios[name + key] = _ratio(expected, was[key])
            nothing = key == "seconds" and abs(expected - was[key]) < NOTHING
            if ratio is not None and not nothing and not 1 / ENOUGH <= ratio <= ENOUGH:
                outside.append(name + key)
    as_it_was = {"seconds as they were": _ratio(guess["seconds"], found["seconds"])}
    return {"estimate": dict(guess), "measured": dict(found), "ratios": {**ratios, **as_it_was}, "outside": outside}


def _ratio(guess: float, found: float) -> float | None:
    return round(guess / found, 3) if found else None


def federation_of(method: str) -> Federation:
    return prepare(Simulation(method, "digits", 5, **CHANGES.get(method, {})))


def guessed(method: str) -> dict[str, Any]:
    found = estimate_of(federation_of(method), Machine(workers=1))
    phases = {phase: {"flops": one.flops, "seconds": round(one.seconds, 2)} for phase, one in found.phases.items()}
    tensors = {phase: one.tensor_bytes for phase, one in found.phases.items()}
    return {
        **_together(phases),
        "memory_bytes": found.memory_bytes,
        "tensor_bytes": tensors,
        "upload_bytes": sum(found.upload_bytes.values()),
        "phases": phases,
        "rehearsed": list(found.rehearsed),
    }


def measured(method: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        costs = run_unevaluated(federation_of(method), Path(folder), Machine(workers=1))
    phases = {
        phase: {"flops": _summed(costs, phase, "flops"), "seconds": round(_summed(costs, phase, "processor_seconds"), 2)}
        for phase in PHASES
    }
    memory = max(row["peak_bytes"] for row in costs.rows.values())
    return {**_together(phases), "memory_bytes": memory, "upload_bytes": sum(costs.up.values()), "phases": phases}


def _summed(costs: Costs, phase: str, key: str) -> float:
    return sum(row[key] for (its, _), row in costs.rows.items() if its == phase)


def _together(phases: Mapping[Any, Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(one[key] for one in phases.values()) for key in ("flops", "seconds")}


def at_pace(work: Callable[[str], dict[str, Any]], method: str) -> dict[str, Any]:
    """What work gives, and the seconds of a fixed training before and after it."""
    before = pace()
    return {**work(method), "pace_seconds": round((before + pace()) / 2, 4)}


def pace() -> float:
    """Seconds of the processor that 20 steps of a small network take; the median of nine, after one that sets things up."""
    rng = torch.Generator().manual_seed(0)
    model = build_model("cnn-w16", Task("pace", tuple("abcdefghij"), (1, 8, 8)), rng)
    data = Dataset(torch.zeros((1280, 1, 8, 8), dtype=torch.uint8), torch.arange(1280) % 10)
    took = []
    with compute_threads(1):
        for _ in range(10):
            start = time.process_time()
            fit(model, data, Training("cnn-w16", epochs=1, batch_size=64, lr=1e-6), rng)
            took.append(time.process_time() - start)
    return statistics.median(took[1:])


def main(words: Sequence[str]) -> None:
    if words:
        method, what = words
        print(json.dumps(at_pace({"estimate": guessed, "measure": measured}[what], method)))
    else:
        print(json.dumps(run(), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
