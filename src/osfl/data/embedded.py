"""The dataset that needs no file: scikit-learn's handwritten digits, 1,797 gray images of 8 × 8 pixels."""

from __future__ import annotations

import numpy as np

from osfl.data.catalog import Sheet
from osfl.data.geometry import reshape
from osfl.data.source import Source, finish, part_of
from osfl.data.split import hold_out_mask


def open_digits(sheet: Sheet, size: int | None, channels: int | None) -> Source:
    """Scaled to 0..255 and to the size asked for; a quarter of each class is the test part, always the same one."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    gray = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0..16
    images = reshape(gray, size or sheet.size, channels or sheet.channels)
    held = hold_out_mask(labels, 0.25, 0, "test", sheet.name)
    train, test = part_of(images[~held], labels[~held]), part_of(images[held], labels[held])
    return finish(sheet.name, sheet.classes, train, None, test, sheet, native=8)
