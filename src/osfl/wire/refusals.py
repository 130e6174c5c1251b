"""The log of refusals, rejected.jsonl: who sent what was refused, and why; no sender can fill it.

A log that has grown too long keeps the newest lines of each sender and one line that counts the others. Refusals for a
signature are counted apart: somebody who writes a site's name on a file cannot push out what that site itself did.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from osfl.core.errors import Rejected
from osfl.core.types import ClientId, Json
from osfl.runtime import atomic

JOURNAL = "rejected.jsonl"
HEAD = "head.json"  # what the server has signed of the round folder (osfl.rounds.head)
MOST_BYTES = 1 << 20  # of the log, beyond what the server has signed; a longer one is shortened
KEPT = 20  # newest lines of a sender that stay
OTHERS = "other senders"


def note(path: Path, no: Rejected, enrolled: Collection[ClientId]) -> None:
    """Add a refusal, durably, and shorten the log if it has grown too long."""
    entry = {"time": round(time.time(), 3), **no.as_json()}
    with atomic.locked(path.with_name(f".{path.name}.lock")):
        atomic.append_line(path, json.dumps(entry, ensure_ascii=True).encode())
        signed = _signed_bytes(path)
        if path.stat().st_size - signed > MOST_BYTES:
            data = path.read_bytes()
            lines = _shortened(_parsed(data[signed:].splitlines()), enrolled)
            shorter = (json.dumps(line, ensure_ascii=True).encode() + b"\n" for line in lines)
            atomic.replace_in_pieces(path, [data[:signed], *shorter])


def entries(path: Path) -> Iterator[Mapping[str, Json]]:
    """The lines, oldest first; one that a crash tore is passed over."""
    return _parsed(path.read_bytes().splitlines() if path.exists() else [])


def _parsed(lines: Iterable[bytes]) -> Iterator[Mapping[str, Json]]:
    for line in lines:
        with suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict):
                yield entry


def _signed_bytes(path: Path) -> int:
    """How much of the log the server has signed, which stays as it is."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads((path.parent / HEAD).read_bytes())["head"]["logs"][path.name]["bytes"])
    return 0


def times(entry: Mapping[str, Json]) -> int:
    """How many refusals a line stands for."""
    count = entry.get("count", 1)
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else 1


def _shortened(lines: Iterable[Mapping[str, Json]], enrolled: Collection[ClientId]) -> list[Mapping[str, Json]]:
    """The newest lines of each sender, before them one that counts the older ones; sorted by time."""
    by_sender: dict[tuple[str, bool], list[Mapping[str, Json]]] = defaultdict(list)
    for entry in lines:
        client = str(entry.get("client"))
        by_sender[client if client in enrolled else OTHERS, bool(entry.get("field") == "signature")].append(entry)
    kept: list[Mapping[str, Json]] = []
    for (client, forged), found in by_sender.items():
        single = [entry for entry in found if "count" not in entry]
        older = [entry for entry in found if "count" in entry] + single[:-KEPT]
        if older:
            what = "signatures that are not by the key known for this name" if forged else "refused for several reasons"
            total = sum(map(times, older))
            field = "signature" if forged else "several"
            kept.append({"time": _moment(older[-1]), "client": client, "field": field, "reason": what, "count": total})
        kept += single[-KEPT:]
    return sorted(kept, key=_moment)


def _moment(entry: Mapping[str, Json]) -> float:
    when = entry.get("time")
    return float(when) if isinstance(when, int | float) else 0.0
