"""kill -9 at every numbered call of a scenario, and at random moments of a longer one."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.faults.scenario import CLIENTS, Ack, judge, prepare, short_scenario, tell, upload
from tests.faults.traps import Spring, kill, tear, trapped, without_links

# Children are forked from a small clean process: quick to start, and free of what the test runner holds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([f"tests.faults.{name}" for name in ("scenario", "traps", "kills", "races", "network")])


def calls_in_scenario(folder: Path, links: bool) -> int:
    """How many numbered steps there are."""
    prepare(folder)
    with without_links(not links), trapped(0, kill) as trap:
        tell(folder, short_scenario(), lambda ack: None)
    return trap.count


def numbered(folder: Path, every: int = 1) -> dict[str, int]:
    """A kill before each step and in the middle of each step, with hard links and without."""
    total: Counter[str] = Counter()
    for links in (True, False):
        steps = calls_in_scenario(folder / f"count-{links}", links)
        for spring in (kill, tear):
            for step in range(1, steps + 1, every):
                place = prepare(folder / f"{spring.__name__}-{links}-{step}")
                code, acked = _child(_die_at, place, step, spring, links)
                total.update(points=1, not_killed=int(code != -signal.SIGKILL), **judge(place, acked, short_scenario()))
    return dict(total)


def at_random(folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """A kill at any moment while 24 clients send."""
    total: Counter[str] = Counter()
    rng = random.Random(seed)
    for number in range(count):
        place = prepare(folder / f"random-{number}")
        code, acked = _child(_send_all, place, number % 2 == 0, delay=rng.uniform(0.0, 0.04))
        total.update(points=1, killed=int(code == -signal.SIGKILL), **judge(place, acked, long_scenario()))
    return dict(total)


def long_scenario() -> list[bytes]:
    return [upload(client) for client in CLIENTS]


def _child(work: Callable[..., None], *args: Any, delay: float | None = None) -> tuple[int | None, list[Ack]]:
    """Run `work` in a process of its own, maybe kill it after `delay` seconds; its exit code and what it acknowledged."""
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=work, args=(sender, *args))
    child.start()
    sender.close()
    acked: list[Ack] = []
    try:
        receiver.recv()  # it is ready
        if delay is not None:
            time.sleep(delay)
            child.kill()
        while True:
            acked.append(receiver.recv())
    except EOFError:
        pass
    finally:
        child.join()
        receiver.close()
    return child.exitcode, acked


def _die_at(sender: Connection, folder: Path, step: int, spring: Spring, links: bool) -> None:
    sender.send("ready")
    with without_links(not links), trapped(step, spring):
        tell(folder, short_scenario(), sender.send)


def _send_all(sender: Connection, folder: Path, links: bool) -> None:
    scenario: Sequence[bytes] = long_scenario()
    sender.send("ready")
    with without_links(not links):
        tell(folder, scenario, sender.send)
