"""How far a student goes: every method of a ViT cell at the same points between the clients' average and its last weights.

    python -m benchmarks.vit_shares                all cells of runs/grid that have such runs
    python -m benchmarks.vit_shares blood-vit-n10-a0.3

FedMITR's `cpu` preset releases a student at 0.6 of that interpolation (`student_share`), methods with generators release
where theirs ended. All began at the same average, so both points can be computed from finished runs, without any
training. Test images; the share itself was chosen on validation images, for FedMITR.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from benchmarks.grid import CELLS, FEDFTG, RECORDS, SEEDS, SPARING
from osfl.core.result import read_result, write_json
from osfl.core.types import Dataset
from osfl.ingredients.statistics.averaging import average
from osfl.models.inputs import to_input
from osfl.models.naming import load_named, named
from osfl.rounds.finished import load_model
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.workers import default_workers
from osfl.simulate.simulation import prepare

ENDED = ("fedmitr@student_share=1", "deepinversion_vit@student_share=1")
LABELS = ("fedmitr", "deepinversion_vit", *ENDED, FEDFTG, f"dense{SPARING}", f"coboosting{SPARING}")
SHARES = (0.6, 1.0)
RECORD = RECORDS / "vit-shares.json"


def main(names: list[str]) -> None:
    found = json.loads(RECORD.read_text(encoding="utf-8"))["cells"] if RECORD.exists() else {}
    for cell in names or [name for name in CELLS if "-vit-n" in name and (Path("runs/grid") / name).exists()]:
        test = prepare(CELLS[cell]).test
        rows = {label: row for label in LABELS if (row := _row(cell, label, test))}
        if rows:
            found[cell] = {**found.get(cell, {}), **rows}
            print(cell, {label: row["mean"] for label, row in found[cell].items()}, flush=True)
    write_json(
        RECORD,
        {
            "command": "python -m benchmarks.vit_shares",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "shares": list(SHARES),
            "seeds": list(SEEDS),
            "environment": describe_environment(Machine(), default_workers()),
            "cells": found,
        },
    )


def _row(cell: str, label: str, test: Dataset) -> dict[str, Any] | None:
    """Accuracy by share, over the seeds that are finished."""
    folders = [Path("runs/grid") / cell / label / f"seed{seed}" for seed in SEEDS]
    by_seed = {folder.name: _points(folder, test) for folder in folders if (folder / "results.json").exists()}
    if not by_seed:
        return None
    return {"mean": [round(mean(values), 4) for values in zip(*by_seed.values(), strict=True)], **by_seed}


def _points(folder: Path, test: Dataset) -> list[float]:
    """What a run's student has there; what was released must score as in the run's results."""
    result = read_result(folder)
    model, _ = load_model(folder)
    found = {at: _accuracy(model, weights, test) for at, weights in on_its_way(folder).items()}
    share, reported = float(result["settings"].get("student_share", 1.0)), result["scores"]["global"]["accuracy"]
    if abs(found[share] - reported) > 0.002:
        raise SystemExit(f"{folder}: the release has {found[share]}, and the run's results {reported}")
    return list(found.values())


@torch.no_grad()
def _accuracy(model: nn.Module, weights: Mapping[str, torch.Tensor], test: Dataset) -> float:
    load_named(model, weights, "model")
    predicted = torch.cat([model(to_input(images)).argmax(1) for images in test.images.split(256)])
    return round(float((predicted == test.labels).double().mean()), 4)


def on_its_way(folder: Path) -> dict[float, dict[str, torch.Tensor]]:
    """The student by share, from the average of the uploads (0) to its last weights (1)."""
    share = float(read_result(folder)["settings"].get("student_share", 1.0))
    begun, released = _start(folder), named(load_model(folder)[0], "model")
    return {at: average([begun, released], [1 - at / share, at / share]) for at in SHARES}


def _start(folder: Path) -> dict[str, torch.Tensor]:
    paths = sorted((folder / "inbox").glob("*.safetensors"))
    return average([load_file(path) for path in paths], [_samples(path) for path in paths])


def _samples(path: Path) -> float:
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["manifest"])["facts"]
    return float(facts["samples"])


if __name__ == "__main__":
    main(sys.argv[1:])
