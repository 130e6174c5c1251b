"""The server phase as a process of its own: it outlives pages, and what it finished outlives itself (scratch/).

.dashboard/phase.json   how far it is, written by the process
.dashboard/phase.lock   held while the process lives: the kernel lets go of it, whatever kills it
.dashboard/phase.log    what it printed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from osfl.core.errors import OsflError, RoundError
from osfl.core.types import Json
from osfl.runtime.atomic import replace_atomically

EVERY = 0.4  # seconds between two progress messages


@contextlib.contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Whether nobody else holds this lock; it is ours meanwhile."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


# --- at the dashboard -------------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """The server phase as the dashboard sees it, whichever dashboard started it."""

    round: Path
    folder: Path  # ROUND/.dashboard
    key: Path | None = None
    machine: Sequence[str] = ()  # workers, threads, device as text
    _child: subprocess.Popen[bytes] | None = None
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Start it, or go on where it was killed; nothing happens if it runs."""
        if self.key is None:
            raise RoundError(
                "this dashboard was started without the server's key",
                field="key",
                fix="Start it again with --key server.key, or run `osfl server`.",
            )
        with self._guard:
            if self.alive():
                return
            _write(self.folder, {"state": "running", "begun": time.time(), "steps": []})
            command = [sys.executable, "-m", "osfl.dashboard.phase", str(self.round), str(self.key), *self.machine]
            with (self.folder / "phase.log").open("wb") as log:
                self._child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def alive(self) -> bool:
        if self._child is not None and self._child.poll() is None:
            return True
        with try_lock(self.folder / "phase.lock") as free:
            return not free

    def state(self) -> dict[str, Json]:
        """`none`, `running`, `interrupted`, `failed` or `finished`, and how far it is."""
        try:
            status: dict[str, Json] = json.loads((self.folder / "phase.json").read_bytes())
        except (OSError, ValueError):
            return {"state": "none", "steps": []}
        if status["state"] == "running" and not self.alive():
            return {**self._last_error(), "steps": status["steps"]}
        return status

    def _last_error(self) -> dict[str, Json]:
        """It has ended meanwhile and recorded how, or something killed it."""
        status: dict[str, Json] = json.loads((self.folder / "phase.json").read_bytes())
        return {**status, "state": "interrupted"} if status["state"] == "running" else status

    def stop(self) -> None:
        """With the dashboard; starting again continues."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            try:
                self._child.wait(timeout=10)
            except subprocess.TimeoutExpired:  # deep in a computation that handles no signal
                self._child.kill()
                self._child.wait()


def _write(folder: Path, status: dict[str, Json]) -> None:
    replace_atomically(folder / "phase.json", json.dumps(status).encode())


# --- in the process itself ---------------------------------------------------------------------------------------------


@dataclass
class ProgressFile:
    """`progress(what, done, total)` as a file that the page reads; called from worker threads too."""

    folder: Path
    begun: float = field(default_factory=time.time)
    written: float = 0.0
    _steps: dict[str, dict[str, Json]] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._guard:
            now = time.time()
            step = self._steps.setdefault(what, {"what": what, "since": now, "from": done})
            step |= {"done": done, "total": total, "left": _left(now - step["since"], done - step["from"], total - done)}
            if done >= total:  # finished steps are dropped
                self._steps.pop(what)
            if now - self.written >= EVERY:
                self.written = now
                _write(self.folder, {"state": "running", "begun": self.begun, "steps": list(self._steps.values())})


def _left(seconds: float, done: int, waiting: int) -> float | None:
    return seconds / done * waiting if done > 0 else None


def run(fl_round: Path, key: Path, workers: str = "", threads: str = "1", device: str = "cpu") -> int:
    """The process: run the server phase, and record how it ended."""
    from osfl.roles.coordinator import make_release
    from osfl.runtime.machine import Machine
    from osfl.wire.signing import SigningKey

    folder = fl_round / ".dashboard"
    with try_lock(folder / "phase.lock") as free:
        if not free:
            return 1
        progress_file = ProgressFile(folder)
        ended: dict[str, Json] = {"begun": progress_file.begun, "steps": []}
        try:
            machine = Machine(workers=int(workers) if workers else None, threads=int(threads), device=device)
            digest = make_release(fl_round, SigningKey.load(key), machine=machine, progress=progress_file)
        except OsflError as error:
            _write(folder, {**ended, "state": "failed", "error": error.as_json()})
            return 1
        except Exception as error:
            traceback.print_exc()
            reason = f"the server phase broke: {type(error).__name__}"
            _write(
                folder,
                {
                    **ended,
                    "state": "failed",
                    "error": {
                        "reason": reason,
                        "fix": "This is a mistake of ours; please report it with .dashboard/phase.log.",
                    },
                },
            )
            return 1
        _write(folder, {**ended, "state": "finished", "release": digest, "seconds": time.time() - progress_file.begun})
        return 0


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:]))
