"""A published checkpoint as the start of every client: ViT-S/14 on a few PACS pictures, through the whole round.

It proves that a real file goes through (read, positions resized, normalization folded in, a new head, trained, uploaded,
inverted, distilled), and shows what the start is worth beside the same network from random weights. It is no table: three
clients, two epochs, a budget of minutes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from osfl.core.result import read_result
from osfl.models.weights_table import KNOWN
from osfl.simulate.compare import compare
from osfl.simulate.simulation import Simulation

WEIGHTS = "vit_small_patch14_dinov2_saliency"
CLIENTS = {
    "architecture": KNOWN[WEIGHTS].architecture,
    "pretrained": WEIGHTS,
    "epochs": 2,
    "batch_size": 16,
    "optimizer": "adam",
    "lr": 1e-4,
    "weight_decay": 0.0,
    "schedule": "cosine",
    "augment": "none",
    "clip": 1.0,
}
SERVER = {  # of FedMITR: two epochs of seven images a client
    "images": 7,
    "steps": 10,
    "server_epochs": 2,
    "student_batch": 14,
    "student_lr": 1e-3,
    "probe": 2,
}
METHODS = ("fedavg@pretrained=", "fedavg", "ensemble", "fedmitr")


def run() -> dict[str, Any]:
    federation = Simulation(
        "fedmitr", "pacs-subset", 3, "dirichlet:0.5", "cpu", samples=140, image_size=70, changes={**CLIENTS, **SERVER}
    )
    with tempfile.TemporaryDirectory(prefix="osfl-clients-") as folder:
        compare(federation, METHODS, [0], folder)
        return {label: _figures(Path(folder) / label / "seed0") for label in METHODS}


def _figures(folder: Path) -> dict[str, Any]:
    result = read_result(folder)
    costs = result["costs"]
    return {
        "accuracy": round(result["scores"]["global"]["accuracy"], 4),
        "majority": round(result["scores"]["majority"], 4),
        "course": result.get("course"),
        "upload_bytes": costs["upload_bytes"],
        "client_seconds": costs["client_seconds"],
        "server_seconds": costs["server_seconds"],
        "release_digest": result["release_digest"],
    }
