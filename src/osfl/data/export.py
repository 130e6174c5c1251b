"""Images as files, one folder a class, or multi-label one .npz: what a site's data look like, for rehearsals and examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from osfl.core.errors import DataError
from osfl.core.types import Dataset


def write_images(folder: Path, dataset: Dataset, classes: Sequence[str]) -> None:
    """`folder/class/0000.png`, lossless. The same images again are written over; a folder with other files is refused.

    Multi-label images, which belong to several folders or to none, become `folder.npz`.
    """
    from PIL import Image

    if dataset.labels.ndim == 2:
        pixels, given = np.moveaxis(dataset.images.numpy(), 1, -1), dataset.labels.numpy().astype(np.uint8)
        folder.parent.mkdir(parents=True, exist_ok=True)
        np.savez(folder.with_name(f"{folder.name}.npz"), train_images=pixels, train_labels=given)
        return

    if bad := [name for name in classes if Path(name).name != name]:
        raise DataError(
            f"the class {bad[0]!r} cannot be the name of a folder",
            field="classes",
            fix="Choose a dataset whose classes can, or export .npz files yourself.",
        )
    images, labels = dataset.images.numpy(), dataset.labels.numpy()
    wanted = {folder / classes[label] / f"{number:05}.png": images[number] for number, label in enumerate(labels)}
    strange = sorted({path for path in folder.rglob("*") if not path.is_dir()} - set(wanted))
    if strange:
        raise DataError(
            f"{folder} holds other files, such as {strange[0].name}",
            field="sites",
            fix="Choose another folder, or move away what is there.",
        )
    for path, pixels in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        gray = pixels.shape[0] == 1
        Image.fromarray(pixels[0] if gray else np.moveaxis(pixels, 0, -1)).save(path)
