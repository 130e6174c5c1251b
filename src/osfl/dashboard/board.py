"""The state of a round that the page shows, read from its folder again only when something there has changed."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from osfl.core.errors import OsflError
from osfl.core.types import Json
from osfl.roles.coordinator import Status, status
from osfl.rounds.state import read_json, read_policy

MOST_REFUSALS = 30


@dataclass
class Board:
    """The state of one round for people."""

    round: Path
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _kept: tuple[object, dict[str, Json]] | None = None

    def state(self, phase: dict[str, Json], may_start: bool) -> dict[str, Json]:
        """Everything the page shows, as plain values."""
        try:
            known = self._known()
        except OsflError as error:
            return {"trouble": str(error), "phase": phase}
        released = known["released"]
        can_start = may_start and known["ready"] and not released and phase["state"] != "running"
        return {
            **known,
            "trouble": "",
            "phase": phase,
            "may_start": may_start,
            "can_start": can_start,
            "headline": _headline(known, phase),
        }

    def _known(self) -> dict[str, Json]:
        """From the folder. A release is verified whole, which for a large one is too much to do every second."""
        with self._guard:
            stamp = _stamp(self.round)
            if self._kept is None or self._kept[0] != stamp:
                self._kept = (stamp, _facts(self.round, status(self.round)))
            return self._kept[1]


def _stamp(fl_round: Path) -> list[object]:
    """Changes whenever the state does; the minute is there for the deadline."""
    names = ("rejected.jsonl", "judgment.json", "release.safetensors", "forgetting.json", "forgotten")
    fixed = ("plan.json", "enrolled.json")
    paths = [*(fl_round / name for name in (*names, *fixed)), *sorted((fl_round / "inbox").glob("*.safetensors"))]
    stats = [(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in paths if path.exists()]
    return [*stats, int(time.time() // 60)]


def _facts(fl_round: Path, found: Status) -> dict[str, Json]:
    plan, now = read_json(fl_round / "plan.json"), datetime.now(UTC)
    deadline = found.deadline
    return {
        "round": found.plan,
        "method": found.method,
        "task": plan["task"]["name"],
        "clients": _clients(fl_round, found),
        "delivered": len(found.delivered),
        "expected": len(found.delivered) + len(found.missing),
        "quorum": found.quorum,
        "missing": list(found.missing),
        "deadline": "" if deadline is None else f"{deadline.astimezone(UTC):%d %b %Y %H:%M} UTC",
        "overdue": deadline is not None and deadline <= now,
        "ready": found.ready,
        "waits_for": found.waits_for,
        "released": found.released,
        "suspicions": [
            {**{key: _shorter(str(one[key])) for key in ("client", "text", "rule")}, "decided": _decided(found, one["client"])}
            for one in found.suspicions
        ],
        "refusals": found.refusals,
        "refused": [_refusal(entry) for entry in reversed(list(found.refused)[-MOST_REFUSALS:])],
        "downloads": _downloads(fl_round, found),
        "most_bytes": read_policy(fl_round).limits.upload_bytes,
    }


def _clients(fl_round: Path, found: Status) -> list[dict[str, Json]]:
    rows: list[dict[str, Json]] = []
    for client in sorted([*found.delivered, *found.missing, *found.forgotten]):
        if client in found.delivered:
            path = fl_round / "inbox" / f"{client}.safetensors"
            rows.append(
                {
                    "client": client,
                    "state": "late" if client in found.late else "delivered",
                    "bytes": found.delivered[client],
                    "when": _when(path.stat().st_mtime),
                }
            )
        else:
            state = "missing" if client in found.missing else "forgotten"
            rows.append({"client": client, "state": state, "bytes": 0, "when": ""})
    return rows


def _decided(found: Status, client: str) -> str:
    return "left out" if client in found.left_out else "kept" if client in found.kept else ""


def _refusal(entry: Any) -> dict[str, str]:
    """A line of rejected.jsonl; untrusted text in it is escaped."""
    texts = {key: _shorter(str(entry.get(key, ""))) for key in ("client", "field", "reason", "expected", "got", "fix")}
    moment = entry.get("time")
    return {**texts, "when": _when(moment) if isinstance(moment, int | float) else ""}


def _shorter(text: str) -> str:
    """Keys, digests and signatures by their beginning: people compare no more than that."""
    return re.sub(r"\b([0-9a-f]{16})[0-9a-f]{48,}\b", r"\1…", text)[:500]


def _downloads(fl_round: Path, found: Status) -> list[dict[str, Json]]:
    if not found.released:
        return []
    names = {
        "release.safetensors": "for every site",
        **{f"personal/{client}.safetensors": f"for {client} only" for client in sorted(found.personal)},
    }
    return [{"name": name, "what": what, "bytes": (fl_round / name).stat().st_size} for name, what in names.items()]


def _when(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%d %b %H:%M} UTC"


def _headline(known: dict[str, Json], phase: dict[str, Json]) -> str:
    if known["released"]:
        return "The release is ready. Give it to the sites."
    if phase["state"] == "running":
        return "The server phase is running."
    if phase["state"] == "interrupted":
        return "The server phase was interrupted. It can go on where it was."
    if known["ready"]:
        some = f" {len(known['missing'])} would be left out." if known["missing"] else ""
        return f"Enough has been delivered: the server phase can start.{some}"
    return f"{known['delivered']} of {known['expected']} sites {'has' if known['delivered'] == 1 else 'have'} delivered."
