"""Where things are kept that can be made again: everything in it can be deleted at any time.

What was made of images (decoded pixels, features) is kept up to a limit; what was used longest ago goes first.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from osfl.core.errors import UsageError

FROM_IMAGES = ("decoded", "features")  # folders with what was made of somebody's images; `datasets` holds downloads
LIMIT = "OSFL_CACHE_LIMIT"
DEFAULT_LIMIT = 20.0  # GB
IN_USE = 3600.0  # seconds for which features are not deleted: another process may be about to read them


def data_root() -> Path:
    """OSFL_DATA, or ../shared/data where that is not set or empty: datasets, and files of weights."""
    return Path(os.environ.get("OSFL_DATA") or Path("..") / "shared" / "data")


def cache_folder() -> Path:
    """OSFL_CACHE, or the user's cache."""
    if named := os.environ.get("OSFL_CACHE"):
        return Path(named)
    try:
        return Path.home() / ".cache" / "osfl"
    except RuntimeError:  # neither HOME nor an entry for this user, as in some containers
        raise UsageError(
            "this user has no home folder, which would hold the cache", field="cache", fix="Set OSFL_CACHE to a folder."
        ) from None


def cache_limit() -> int:
    """Bytes that what was made of images may take; 0: nothing is kept. OSFL_CACHE_LIMIT states it in GB."""
    text = os.environ.get(LIMIT, str(DEFAULT_LIMIT))
    try:
        limit = float(text)
    except ValueError:
        limit = math.nan
    if not (math.isfinite(limit) and limit >= 0):
        raise UsageError(
            f"{LIMIT} is {text!r}, expected gigabytes such as 5, or 0", field="cache", fix=f"Correct or unset {LIMIT}."
        )
    return int(limit * 1e9)


def without_cache() -> None:
    """Nothing that is made of images is kept by this process, nor by those that it starts."""
    os.environ[LIMIT] = "0"


def used(path: Path) -> None:
    """Mark a file as used now, so that it is deleted later than others."""
    with contextlib.suppress(OSError):
        os.utime(path)


def trim(limit: int | None = None) -> int:
    """Delete what was used longest ago until the rest fits; the number of bytes that were deleted."""
    files = sorted(_files(FROM_IMAGES), key=lambda found: found[2])
    excess = sum(size for _, size, _ in files) - (cache_limit() if limit is None else limit)
    recent = (time.time() - IN_USE) * 1e9
    features = cache_folder() / "features"
    files = [found for found in files if found[2] < recent or not found[0].is_relative_to(features)]
    deleted = 0
    for path, size, _ in files:
        if deleted >= excess:
            break
        with contextlib.suppress(OSError):  # another process was faster
            path.unlink()
        deleted += size
    return deleted


def contents() -> dict[str, tuple[int, int]]:
    """(files, bytes) of each folder of the cache."""
    found = {}
    for folder in (*FROM_IMAGES, "datasets"):
        sizes = [size for _, size, _ in _files((folder,))]
        found[folder] = (len(sizes), sum(sizes))
    return found


def clear(downloads: bool = False) -> None:
    """Delete what was made of images, and downloads if asked to."""
    for folder in (*FROM_IMAGES, "datasets")[: None if downloads else len(FROM_IMAGES)]:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(cache_folder() / folder)


def _files(folders: tuple[str, ...]) -> Iterator[tuple[Path, int, int]]:
    """(path, bytes, time of last use). Files of one name with other endings are used together; only one of them is marked."""
    found, last = [], dict[Path, int]()
    for folder in folders:
        for path in (cache_folder() / folder).rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.is_symlink():
                    stat = path.stat()
                    found.append((path, stat.st_size))
                    last[path.with_suffix("")] = max(last.get(path.with_suffix(""), 0), stat.st_mtime_ns)
    yield from ((path, size, last[path.with_suffix("")]) for path, size in found)
