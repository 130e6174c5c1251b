"""Where things are kept that can be made again: everything in it can be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """OSFL_CACHE, or the user's cache."""
    return Path(os.environ.get("OSFL_CACHE") or Path.home() / ".cache" / "osfl")
