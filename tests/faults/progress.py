"""Waiting for programs that were started: on a busy machine they are slow, so what counts is whether they still get on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PATIENCE = 600.0  # seconds in which nothing new has happened
LOOK = 2.0  # seconds between two looks at logs and files
_NUMBERS = re.compile(r"[0-9a-f]{6,}|\d+")  # addresses, times, ports and ids: new ones are no progress


def signs(logs: Iterable[Path], state: Iterable[Path]) -> frozenset[str]:
    """What has happened so far: lines of logs, without their numbers, so that what is repeated counts once; files and sizes."""
    lines = {_NUMBERS.sub("#", line) for path in logs for line in path.read_text(errors="replace").splitlines()}
    files = {f"{path} {path.stat().st_size}" for path in state if path.is_file()}
    return frozenset(lines | files)


def wait_until(
    what: str,
    true: Callable[[], bool],
    seen: Callable[[], frozenset[str]],
    explain: Callable[[], str],
    patience: float = PATIENCE,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return when it is true, however long that takes; give up when nothing new has been seen for `patience` seconds."""
    known, since, looked = frozenset[str](), clock(), float("-inf")
    while not true():
        now = clock()
        if now >= looked + LOOK:
            looked, fresh = now, _quietly(seen)
            if fresh - known:
                known, since = known | fresh, now
        if now > since + patience:
            raise TimeoutError(f"{what}: nothing new for {patience} s\n{explain()}")
        sleep(0.1)


def _quietly(seen: Callable[[], frozenset[str]]) -> frozenset[str]:
    """A file may go while it is looked at."""
    try:
        return seen()
    except FileNotFoundError:
        return frozenset()
