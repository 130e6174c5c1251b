"""Weights & Biases, offline: folders that `wandb sync` would upload if somebody ran it. We never do."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

os.environ["WANDB_ERROR_REPORTING"] = "false"  # its reports of errors would leave the machine; read when wandb is imported
import wandb  # type: ignore[import-not-found, import-untyped, unused-ignore]

PROJECT = "osfl"


class WeightsAndBiases:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.run: Any = None
        self.curves: dict[int, dict[str, float]] = {}

    def start(self, run: str, facts: Mapping[str, str]) -> None:
        """Offline whatever the environment says, and without what wandb notes of the machine: packages, git, terminal."""
        quiet = wandb.Settings(
            mode="offline",
            console="off",
            silent=True,
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
        )
        self.curves = {}
        self.run = wandb.init(
            project=PROJECT,
            name=run,
            dir=str(self.folder),
            config=dict(facts),
            mode="offline",
            reinit="create_new",
            settings=quiet,
        )
        if not self.run.offline:
            raise RuntimeError("wandb did not stay offline")

    def scalar(self, name: str, value: float, step: int) -> None:
        """Final numbers are the run's summary; what has steps is logged step by step, in order, at the end."""
        if name.startswith("curves/"):
            self.curves.setdefault(step, {})[name] = value
        else:
            self.run.summary[name] = value

    def figure(self, name: str, png: bytes) -> None:
        with Image.open(io.BytesIO(png)) as image:
            self.run.log({f"figures/{name}": wandb.Image(image.convert("RGB"))}, commit=False)

    def finish(self) -> None:
        if self.run is None:
            return
        self.run.define_metric("curves/*", step_metric="step")
        for step, values in sorted(self.curves.items()):
            self.run.log({"step": step, **values})
        self.run.log({}, commit=True)
        self.run.finish()
