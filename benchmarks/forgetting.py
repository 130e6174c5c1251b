"""Forget every client of a five-client round of every method, and classes where uploads can be taken apart.

    python -m benchmarks.forgetting

The release after forgetting is compared with that of a new folder in which the client never delivered (references, which
learn from images: with a run on the shards without it), and every byte under the folder is searched for what it sent.
Then a forgetting is killed with SIGKILL before each of its durable calls, and repeated.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.run_faults import in_child
from osfl.core.registry import load, names
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.state import INTENT
from osfl.runtime.machine import Machine
from osfl.simulate.checks import APART, files_with, never_joined, released, send_without, windows_of
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare

ABOUT = {"preset": "smoke", "command": ""}
DURABLE = ("fsync", "link", "replace", "rename", "unlink", "rmdir", "chmod")


def federation(method: str, clients: int = 5) -> Federation:
    changes = APART.get(method, {})
    return prepare(Simulation(method, "digits", clients, "dirichlet:0.5", "smoke", changes=changes, samples=200, image_size=8))


def every_client(method: str, root: Path) -> dict[str, Any]:
    """Each client forgotten by itself, in a copy of the finished round."""
    made = federation(method)
    run_federation(made, root / "round", ABOUT)
    rows = [one_client(made, client, root) for client in made.plan.clients]
    return summed(rows) | {"forget_seconds": round(statistics.median(row["seconds"] for row in rows), 3)}


def one_client(made: Federation, client: str, root: Path) -> dict[str, Any]:
    folder = Path(shutil.copytree(root / "round", root / f"without-{client}"))
    windows = windows_of(client, folder)
    start = time.perf_counter()
    certificate = forget(folder, clients=[client])
    seconds = time.perf_counter() - start
    if certificate["release"]["after"]:
        same = certificate["release"]["after"] == never_joined(made, folder / "inbox", root / f"never-{client}")
    else:
        run_federation(made, folder, ABOUT)
        left = [shard for shard in made.shards if shard.client != client]
        other = replace(made, shards=left, plan=replace(made.plan, clients=tuple(shard.client for shard in left)))
        run_federation(other, root / f"never-{client}", ABOUT)
        same = released(made, folder) == released(other, root / f"never-{client}")
    return {
        "forgotten": 1,
        "same_release": int(same),
        "files_with_its_bytes": len(files_with(windows, folder)),
        "windows_searched": len(windows),
        "verified": int(all(f.good for f in verify(folder))),
        "fingerprints": len(certificate["traces"]),
        "seconds": seconds,
    }


def every_class(method: str, root: Path) -> dict[str, Any]:
    """Each class of everybody, and each cell of one client, compared with clients who never sent it."""
    made = federation(method)
    instance = load(method)(made.plan.task, made.plan.settings)
    run_federation(made, root / "round", ABOUT)
    held = [label for label in range(len(made.plan.task.classes)) if any(made.counts[c][label] >= 4 for c in made.counts)]
    one = max(made.plan.clients, key=lambda client: sum(n >= 4 for n in made.counts[client]))
    cells = [label for label in held if made.counts[one][label] >= 4]
    asked: list[tuple[Sequence[str], int]] = [((), label) for label in held] + [((one,), label) for label in cells]
    return summed([_one_class(instance, made, clients, label, root) for clients, label in asked])


def _one_class(instance: Any, made: Federation, clients: Sequence[str], label: int, root: Path) -> dict[str, Any]:
    place = root / f"{'-'.join(clients) or 'all'}-{label}"
    folder = Path(shutil.copytree(root / "round", place / "round"))
    send_without(instance, made, clients or made.plan.clients, label, folder, place / "sent")
    certificate = forget(folder, clients=clients, class_name=made.plan.task.classes[label])
    never = never_joined(made, place / "sent", place / "never")
    found = {
        "forgotten": 1,
        "same_release": int(certificate["release"]["after"] == never),
        "verified": int(all(f.good for f in verify(folder))),
        "cells": len(clients),
    }
    shutil.rmtree(place)
    return found


def summed(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: sum(row[key] for row in rows) for key in rows[0] if key != "seconds"}


def kills(method: str, root: Path) -> dict[str, int]:
    """SIGKILL before every durable call of a forgetting; the same call again must end as if nothing had happened."""
    made = federation(method, 3)
    in_child(lambda: run_federation(made, root / "round", ABOUT))
    whole = Path(shutil.copytree(root / "round", root / "whole"))
    in_child(partial(_dying, partial(_forget, whole), 0, root / "count"))
    points, expected = int((root / "count").read_text()), released(made, whole)
    total = {"points": points, "killed": 0, "not_resumed": 0, "other_release": 0, "not_verified": 0}
    for point in range(1, points + 1):
        folder = Path(shutil.copytree(root / "round", root / "killed"))
        killed = in_child(partial(_dying, partial(_forget, folder), point, root / "x"))
        total["killed"] += killed == -signal.SIGKILL
        if (folder / INTENT).exists() or not (folder / "forgotten").exists():
            total["not_resumed"] += in_child(partial(_forget, folder)) != 0
        total["other_release"] += released(made, folder) != expected
        total["not_verified"] += in_child(partial(_must_hold, folder)) != 0
        shutil.rmtree(folder)
    return total


def _forget(folder: Path) -> None:
    forget(folder, clients=["client-02"], machine=Machine(workers=1))


def _must_hold(folder: Path) -> None:
    assert all(finding.good for finding in verify(folder))


def _dying(work: Callable[[], object], at: int, counted: Path) -> None:
    count = 0

    def through(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)

        return call

    for name in DURABLE:
        setattr(os, name, through(getattr(os, name)))
    work()
    counted.write_text(str(count))


def run(methods: Sequence[str] = ()) -> dict[str, Any]:
    """Figures for the record. Kills first: children are forked from a process that has not computed anything yet."""
    with tempfile.TemporaryDirectory() as scratch:
        killed = kills("fedavg", Path(scratch))
    by_method, by_class = {}, {}
    for method in methods or names():
        with tempfile.TemporaryDirectory() as scratch:
            by_method[method] = every_client(method, Path(scratch))
        print(method, by_method[method], flush=True)
        if load(method).provides("without_class"):
            with tempfile.TemporaryDirectory() as scratch:
                by_class[method] = every_class(method, Path(scratch))
            print(method, "by class", by_class[method], flush=True)
    totals = [{k: v for k, v in row.items() if k != "forget_seconds"} for row in by_method.values()]
    return {"clients": {"total": summed(totals), "by_method": by_method}, "classes": by_class, "kills": killed}


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
