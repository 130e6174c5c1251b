"""Kill a whole simulated round with SIGKILL, run the same command again, and see that nothing is lost.

    python -m benchmarks.run_faults

Children are forked from a process that has imported everything but computed nothing, so that a kill point costs a
fraction of a second. Points are numbered: the n-th durable write (fsync, link, rename) or reported step of the run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  torch.optim imports it anyway; once here instead of in every child

from osfl.core.result import read_result
from osfl.runtime.machine import Machine
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare

METHODS = ("fedavg", "ensemble", "local_only", "fedavg_rounds")


def federation(method: str) -> Federation:
    return prepare(Simulation(method, "digits", 3, "dirichlet:0.5", "smoke", samples=120, image_size=8))


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked child; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def attempt(made: Federation, folder: Path, die_at: int | None = None, die_after: float | None = None) -> None:
    """One run, which dies at its n-th numbered point or after some seconds."""
    lock, count = threading.Lock(), 0

    def point(*args: Any) -> None:
        nonlocal count
        with lock:
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    for name in ("fsync", "link", "replace", "rename"):
        original = getattr(os, name)

        def counted(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            point()
            return _original(*args, **kwargs)

        setattr(os, name, counted)
    if die_after is not None:
        signal.setitimer(signal.ITIMER_REAL, die_after)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    run_federation(made, folder, {"preset": "smoke", "command": ""}, progress=point, machine=Machine(workers=2))
    (folder.parent / f"{folder.name}.points").write_text(str(count))


def inbox_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "inbox").glob("*.safetensors")}


def client_notes(folder: Path) -> dict[str, int]:
    journal = folder / "journal.jsonl"
    counts: dict[str, int] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        try:
            note = json.loads(line)
        except json.JSONDecodeError:
            continue  # torn by the kill
        if note["phase"] == "client":
            counts[note["client"]] = counts.get(note["client"], 0) + 1
    return counts


def one_kill(made: Federation, root: Path, expected: tuple[str, str], **death: Any) -> dict[str, int]:
    """Kill, look, resume, look again."""
    folder = root / "round"
    shutil.rmtree(folder, ignore_errors=True)
    killed = in_child(lambda: attempt(made, folder, **death)) == -signal.SIGKILL
    before, notes = inbox_of(folder), client_notes(folder)
    resumed = in_child(lambda: attempt(made, folder)) == 0
    after, final = inbox_of(folder), read_result(folder) if resumed else None
    again = client_notes(folder)
    delivered = [name.removesuffix(".safetensors") for name in before]
    return {
        "killed": int(killed),
        "not_resumed": int(not resumed),
        "lost": sum(after.get(name) != data for name, data in before.items()),
        "repeated": sum(again.get(client, 0) != notes.get(client, 0) for client in delivered),
        "other_digest": int(final is None or (final["release_digest"], final["models_digest"]) != expected),
    }


def kill_points(method: str, numbered: int, timed: int, seed: int = 0) -> dict[str, int]:
    """Kill at numbered points spread over the whole run, and at random moments."""
    made, rng = federation(method), random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        start = time.perf_counter()
        assert in_child(lambda: attempt(made, root / "whole")) == 0
        seconds = time.perf_counter() - start
        whole = read_result(root / "whole")
        expected = (whole["release_digest"], whole["models_digest"])
        points = int((root / "whole.points").read_text())
        chosen = sorted({1 + i * (points - 1) // max(1, numbered - 1) for i in range(min(numbered, points))})
        deaths: list[dict[str, Any]] = [{"die_at": point} for point in chosen]
        deaths += [{"die_after": rng.uniform(0.01, seconds)} for _ in range(timed)]
        total = {"attempts": len(deaths), "points_in_run": points}
        for death in deaths:
            for key, value in one_kill(made, root, expected, **death).items():
                total[key] = total.get(key, 0) + value
    return total


def run(full: bool = True) -> dict[str, Any]:
    """Figures for the record: at least 200 kills in full."""
    numbered, timed = (60, 8) if full else (6, 1)
    by_method = {method: kill_points(method, numbered, timed) for method in METHODS}
    summed = {key: sum(row[key] for row in by_method.values()) for key in next(iter(by_method.values()))}
    return {"total": summed, "by_method": by_method}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
