"""The lock of a round folder: one process at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from osfl.core.errors import RoundError
from osfl.runtime.atomic import locked


@contextlib.contextmanager
def folder_lock(folder: Path, lock: str = ".lock", fix: str = "Wait for it, or choose another --out.") -> Iterator[None]:
    """Two processes in one folder would do everything twice; the second gets an error."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / lock, wait=False))
        except BlockingIOError:
            raise RoundError(f"another process is working in {folder}", fix=fix) from None
        yield
