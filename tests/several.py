"""Generated images of which each may have several of three classes, or none: a bright row, a bright column, a bright square."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

CLASSES = ("row", "column", "square")
HOW_OFTEN = (0.4, 0.25, 0.15)


def several(n: int, seed: int = 0, side: int = 8) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Images (n, side, side) and labels (n, 3) of 0 and 1."""
    rng = np.random.default_rng(seed)
    labels = (rng.random((n, 3)) < HOW_OFTEN).astype(np.uint8)
    images = rng.integers(0, 120, (n, side, side))
    row, column, square = (70 * labels[:, c, None, None].astype(int) for c in range(3))
    images[:, 1:3, :] += row
    images[:, :, 5:7] += column
    images[:, 5:8, 0:3] += square
    return np.clip(images, 0, 255).astype(np.uint8), labels


def several_npz(path: Path, train: int = 240, test: int = 120) -> Path:
    images, labels = several(train, 1)
    others, truth = several(test, 2)
    np.savez(path, train_images=images, train_labels=labels, test_images=others, test_labels=truth)
    return path
