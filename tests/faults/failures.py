"""Disks that fail and power that is cut: nothing may be acknowledged that is not safe."""

from __future__ import annotations

import errno
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

from osfl.core.errors import OsflError
from osfl.wire.gate import accept
from tests.faults.disks import Disk
from tests.faults.kills import calls_in_scenario
from tests.faults.scenario import POLICY, Ack, judge, prepare, short_scenario, tell
from tests.faults.traps import Trap, fail, kill, trapped, without_links


def failing_calls(folder: Path, every: int = 1) -> dict[str, int]:
    """Each call in turn fails, once or for good, with a full disk or a broken one, with hard links and without."""
    total: Counter[str] = Counter()
    for links in (True, False):
        steps = range(1, 1 + calls_in_scenario(folder / f"count-{links}", links), every)
        for number, stays, step in itertools.product((errno.ENOSPC, errno.EIO), (False, True), steps):
            total.update(_one_failure(folder / f"{links}-{number}-{stays}-{step}", links, number, stays, step))
    return dict(total)


def _one_failure(folder: Path, links: bool, number: int, stays: bool, step: int) -> dict[str, int]:
    """Told twice: the sender tries again, and what the first attempt left half done is made safe or refused."""
    prepare(folder)
    acked: list[Ack] = []
    unhandled = 0
    with without_links(not links), trapped(step, fail(number), stays) as trap:
        for _ in range(2):
            try:
                tell(folder, short_scenario(), acked.append)
            except OsflError:
                continue
            except Exception:
                unhandled = 1
    return {"calls": 1, "unhandled": unhandled, "false_acks": _unsafe(trap, acked), **judge(folder, acked, short_scenario())}


def _unsafe(trap: Trap, acked: list[Ack]) -> int:
    """How many acknowledged uploads a power cut right now could take away."""
    safe = {accept(data, POLICY).digest for path, data in Disk().replay(trap.log).survivors().items() if _final(path)}
    return sum(digest not in safe for _, digest in acked)


def _final(path: Path) -> bool:
    return path.suffix == ".safetensors" and not path.name.startswith(".")


def power_cuts(folder: Path, count: int, seed: int = 0) -> dict[str, int]:
    """Cut the power at random moments of a recorded scenario, and continue with what such a disk may hold."""
    total: Counter[str] = Counter()
    logs = [_record(folder / f"recorded-{links}", links) for links in (True, False)]
    rng = random.Random(seed)
    for number in range(count):
        root, log = rng.choice(logs)
        cut = rng.randint(0, len(log))
        acked = [args for name, args, _ in log[:cut] if name == "ack"]
        place = prepare(folder / f"cut-{number}")
        for path, data in Disk().replay(log[:cut]).survivors(rng).items():
            target = place / path.relative_to(root)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
        total.update(cuts=1, **judge(place, acked, short_scenario()))
    return dict(total)


def _record(root: Path, links: bool) -> tuple[Path, list[Any]]:
    prepare(root)
    with without_links(not links), trapped(0, kill) as trap:
        tell(root, short_scenario(), lambda ack: trap.log.append(("ack", ack, None)))
    return root, trap.log
