"""A cache of their own for all tests of this room, and the real files where they are."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees the user's cache or another test's, nor data that happens to be on this machine."""
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OSFL_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("osfl.data.places.SYSTEM", tmp_path / "system")
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The folder of real datasets; tests that need it are skipped where it is not."""
    folder = Path(os.environ.get("OSFL_DATA") or REAL)
    if not (folder / "bloodcells-28.npz").is_file():
        pytest.skip(f"the real datasets are not in {folder}; set OSFL_DATA to their folder")
    return folder.resolve()


@pytest.fixture
def picture() -> Callable[..., Image.Image]:
    """A small image of any mode, with content that depends on a number."""

    def make(mode: str = "RGB", number: int = 0, size: tuple[int, int] = (12, 12)) -> Image.Image:
        rng = np.random.default_rng(number)
        colors = Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8))
        return colors.convert(mode)

    return make


@pytest.fixture
def image_folder(tmp_path: Path, picture: Callable[..., Image.Image]) -> Callable[..., Path]:
    """Writes images to the given names and returns their folder."""

    def write(*names: str, mode: str = "RGB", root: str = "images") -> Path:
        for number, name in enumerate(names):
            target = tmp_path / root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            picture(mode, number).save(target)
        return tmp_path / root

    return write
