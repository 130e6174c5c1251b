"""From a name or a path to images in memory. The only file that knows every kind of dataset."""

from __future__ import annotations

import os
from pathlib import Path

from osfl.data.arrays import open_npz
from osfl.data.catalog import Sheet, nearest, sheets
from osfl.data.embedded import open_digits
from osfl.data.geometry import check_geometry
from osfl.data.source import Source
from osfl.errors import DataError, UsageError


def open_dataset(name_or_path: str, *, size: int | None = None, channels: int | None = None) -> Source:
    """Open a named dataset (`osfl ls datasets`) or a path to .npz, a folder, .zip or .csv."""
    check_geometry(size, channels)
    sheet = sheets().get(name_or_path)
    if sheet is not None and sheet.layout == "embedded":
        return open_digits(sheet, size, channels)
    path = _find(name_or_path, sheet)
    return open_npz(path, sheet, size, channels)


def data_folder() -> Path | None:
    """OSFL_DATA, or ../shared/data where that exists."""
    folder = Path(os.environ.get("OSFL_DATA") or Path("..") / "shared" / "data")
    return folder if folder.is_dir() else None


def _find(name: str, sheet: Sheet | None) -> Path:
    folder = data_folder()
    candidates = [Path(name)] + ([folder / f"{name}.npz"] if folder else [])
    for path in candidates:
        if path.is_file():
            return path
    if sheet:
        raise DataError(f"'{name}' is not here")
    raise UsageError(f"no dataset '{name}'", field="dataset", fix=", ".join(nearest(name, list(sheets()))))
