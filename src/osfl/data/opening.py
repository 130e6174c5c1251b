"""From a name or a path to images in memory. The only file that knows every kind of dataset."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from osfl.core.errors import UsageError
from osfl.core.method import quiet
from osfl.core.types import Progress
from osfl.data.arrays import open_npz
from osfl.data.catalog import Sheet, nearest, sheets
from osfl.data.classic import open_classic
from osfl.data.folders import open_images, open_table
from osfl.data.geometry import check_geometry, reshape
from osfl.data.places import data_folder, obtain, obtain_folder
from osfl.data.reading import Reading, check_reading
from osfl.data.source import Problem, Source, finish, part_of
from osfl.data.split import hold_out_mask

SUFFIXES = (".npz", ".zip", ".csv")


def open_dataset(
    name_or_path: str,
    *,
    size: int | None = None,
    channels: int | None = None,
    progress: Progress = quiet,
    reading: Reading = Reading(),
) -> Source:
    """Open a named dataset (`osfl ls datasets`) or a path to .npz, a folder, .zip or .csv."""
    check_geometry(size, channels)
    check_reading(reading)
    sheet = sheets().get(name_or_path)
    if sheet is not None:
        _only_tables(reading, name_or_path)
        return _open_named(sheet, size, channels, progress)
    return _open_path(_resolve(name_or_path), size, channels, progress, reading)


def _open_named(sheet: Sheet, size: int | None, channels: int | None, progress: Progress) -> Source:
    if sheet.layout == "embedded":
        return _open_digits(sheet, size, channels)
    if sheet.layout == "folder":
        doubts = [
            Problem(sheet.name, "no checksum is known, so nobody knows if these are the published images", "used all the same")
        ]
        return open_images(obtain_folder(sheet), sheet, size, channels, progress, doubts)
    if sheet.layout not in ("npz", "zip"):
        return open_classic(sheet, size, channels, progress)
    path, doubts = obtain(sheet, sheet.files[0], progress)
    if sheet.layout == "zip":
        return open_images(path, sheet, size, channels, progress, doubts)
    return open_npz(path, sheet, size, channels, doubts)


def _only_tables(reading: Reading, name: str) -> None:
    """Columns are those of a table; elsewhere an option that names one would do nothing."""
    named = [reading.group and f"--group {reading.group}", reading.by and f"--partition by:{reading.by}"]
    if any(named):
        raise UsageError(
            f"{' and '.join(filter(None, named))}: '{name}' is no table, so it has no columns",
            field="group" if reading.group else "partition",
            fix="Give a CSV of path,label and such columns; in folders, class/patient/* keeps people together.",
        )


def _open_path(path: Path, size: int | None, channels: int | None, progress: Progress, reading: Reading) -> Source:
    if path.is_dir() or path.suffix.lower() != ".csv":
        _only_tables(reading, path.name)
    if path.is_dir() or path.suffix.lower() == ".zip":
        return open_images(path, None, size, channels, progress, [], reading)
    if path.suffix.lower() == ".csv":
        return open_table(path, size, channels, progress, reading)
    if path.suffix.lower() == ".npz":
        return open_npz(path, None, size, channels)
    sheet = path.suffix.lower() in (".xlsx", ".xls", ".ods")
    raise UsageError(
        f"'{path.name}' is no kind of dataset that is known",
        field="dataset",
        fix="Save the table as CSV, and give that." if sheet else "Give .npz, .zip, .csv or a folder.",
    )


def _resolve(name: str) -> Path:
    """A path as given, or a file or folder of that name under OSFL_DATA."""
    folder = data_folder()
    under = [folder / f"{name}{suffix}" for suffix in ("", *SUFFIXES)] if folder and name else []
    for path in (Path(name), *under):
        if name and path.exists():
            return path
    raise _unknown(name)


def _unknown(name: str) -> UsageError:
    if "/" in name or name.endswith(SUFFIXES):
        return UsageError(f"there is no file or folder '{name}'", field="dataset", fix="Check the path.")
    folder = data_folder()
    held = [path.stem for path in sorted(folder.iterdir()) if path.suffix in SUFFIXES] if folder else []
    close = nearest(name, list(dict.fromkeys([*sheets(), *held])))
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    return UsageError(
        f"there is no dataset '{name}'",
        field="dataset",
        fix=f"{meant}See osfl ls datasets, or give a path: ./images, data.npz, data.zip, table.csv.",
    )


def _open_digits(sheet: Sheet, size: int | None, channels: int | None) -> Source:
    """The dataset that needs no file: scikit-learn's handwritten digits, 1,797 gray images of 8 × 8 pixels.

    Scaled to 0..255 and to the size asked for; a quarter of each class is the test part, always the same one.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    labels = digits.target.astype(np.int64)
    gray = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0..16
    images = reshape(gray, size or sheet.size, channels or sheet.channels)
    held = hold_out_mask(labels, 0.25, 0, "test", sheet.name)
    train, test = part_of(images[~held], labels[~held]), part_of(images[held], labels[held])
    return finish(sheet.name, sheet.classes, train, None, test, sheet, native=8)
