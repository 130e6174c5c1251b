"""MLflow: a database file and a folder of figures, which `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db` shows."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import alembic  # noqa: F401  the database file needs it, and sqlalchemy
import sqlalchemy  # noqa: F401

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
from mlflow.entities import Metric, Param, RunTag
from mlflow.tracking import MlflowClient

EXPERIMENT = "osfl"
_AT_ONCE = 1000  # metrics of one call; as many as MLflow takes


class MLflow:
    def __init__(self, folder: Path) -> None:
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self.client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
        known = self.client.get_experiment_by_name(EXPERIMENT)
        place = (folder / "artifacts").as_uri()
        self.experiment = known.experiment_id if known else self.client.create_experiment(EXPERIMENT, artifact_location=place)
        self.run, self.metrics = "", list[Any]()

    def start(self, run: str, facts: Mapping[str, str]) -> None:
        self.run = self.client.create_run(self.experiment, run_name=run).info.run_id
        self.metrics = []
        short = [Param(key, value) for key, value in facts.items() if len(value) <= 500]
        long = [RunTag(key, value[:5000]) for key, value in facts.items() if len(value) > 500]
        self.client.log_batch(self.run, params=short[:100], tags=long)
        if short[100:]:
            self.client.log_batch(self.run, params=short[100:])

    def scalar(self, name: str, value: float, step: int) -> None:
        self.metrics.append(Metric(_allowed(name), value, int(time.time() * 1000), step))

    def figure(self, name: str, png: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{name}.png"
            path.write_bytes(png)
            self.client.log_artifact(self.run, str(path), "figures")

    def finish(self) -> None:
        for start in range(0, len(self.metrics), _AT_ONCE):
            self.client.log_batch(self.run, metrics=self.metrics[start : start + _AT_ONCE])
        self.metrics = []
        self.client.set_terminated(self.run)


def _allowed(name: str) -> str:
    """Letters, digits and a few signs are all that names of metrics may have."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]
