"""TensorBoard's event files, one folder a run: `tensorboard --logdir DIR` shows them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorboard  # type: ignore[import-untyped, unused-ignore]  # noqa: F401  the writer of torch needs it
from PIL import Image
from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: Any = None

    def start(self, run: str, facts: Mapping[str, str]) -> None:
        self.writer = SummaryWriter(str(self.folder / run))  # type: ignore[no-untyped-call, unused-ignore]
        rows = "".join(f"| {key} | `{value}` |\n" for key, value in facts.items())
        self.writer.add_text("facts", f"| what | value |\n|---|---|\n{rows}")

    def scalar(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, step)

    def figure(self, name: str, png: bytes) -> None:
        with Image.open(io.BytesIO(png)) as image:
            self.writer.add_image(f"figures/{name}", np.asarray(image.convert("RGB")), dataformats="HWC")

    def finish(self) -> None:
        self.writer.close()
