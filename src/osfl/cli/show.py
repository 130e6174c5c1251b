"""`osfl show`: the state of a round."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.cli import options
from osfl.cli.terminal import echo, escape, put_json
from osfl.core.types import Json

if TYPE_CHECKING:
    from osfl.roles.coordinator import Status

EXAMPLES = (
    "osfl run --method ensemble --smoke --out runs/first",
    "osfl show runs/first",
    "osfl show runs/first --format json",
)


MOST_REFUSALS = 20  # shown; the log has more


def show(fl_round: options.RoundFolder, output_format: options.Format = "text") -> None:
    """Who has delivered, who is missing, what was refused and why, and what comes next. Works for simulated rounds, too."""
    from osfl.roles.coordinator import status

    now = datetime.now(UTC)
    found = status(fl_round, now)
    if output_format == "json":
        put_json(facts(found, now))
    else:
        _show(fl_round, found, now)


def facts(found: Status, now: datetime) -> dict[str, Json]:
    return {
        "round": found.plan,
        "method": found.method,
        "delivered": [
            {"client": c, "bytes": size, "digest": found.digests[c], "late": c in found.late, "left_out": c in found.left_out}
            for c, size in found.delivered.items()
        ],
        "missing": list(found.missing),
        "forgotten": list(found.forgotten),
        "suspicions": [dict(one) for one in found.suspicions],
        "kept": list(found.kept),
        "failed": dict(found.failed) if found.failed else None,
        "refused": [dict(entry) for entry in found.refused],
        "refusals": found.refusals,
        "quorum": found.quorum,
        "deadline": found.deadline.isoformat() if found.deadline else None,
        "now": now.isoformat(timespec="seconds"),
        "ready": found.ready,
        "waits_for": found.waits_for,
        "release": found.release or None,
        "content": found.content or None,
        "supersedes": found.supersedes or None,
        "joining": list(found.joining),
        "repaired": list(found.repaired),
        "repairs_due": list(found.repairs_due),
        "personal": list(found.personal),
    }


def _show(fl_round: Path, found: Status, now: datetime) -> None:
    clients = [*found.delivered, *found.missing]
    no_uploads = found.released and not found.delivered  # a simulated reference that pooled images or ran many rounds
    summary = "simulated without uploads" if no_uploads else f"{len(found.delivered)} of {len(clients)} have delivered"
    echo(f"[bold]{escape(found.method)}[/], round {found.plan[:12]}: {summary}")
    for client in sorted([] if no_uploads else clients):
        if client in found.delivered:
            late = "  [yellow]too late for the release[/]" if client in found.late else ""
            late = "  [yellow]came after the release[/], joins the next one" if client in found.joining else late
            late = "  [yellow]left out of the release[/]" if client in found.left_out else late
            echo(f"  [green]delivered[/]  {client:<16} {found.delivered[client]:>13,} bytes  {found.digests[client]}{late}")
        else:
            final = "  and cannot deliver any more: repairs were asked for" if found.repairs_due or found.repaired else ""
            echo(f"  [yellow]missing[/]    {client}{final}")
    for client in (*found.repaired, *found.repairs_due):
        echo(f"  repair     {client:<16} {'received' if client in found.repaired else '[yellow]not received[/]'}")
    for client in found.forgotten:
        echo(f"  forgotten  {client}")
    if found.refused:
        _show_refused(fl_round, found)
    if not no_uploads:
        echo(f"Needed     {found.quorum} uploads")
    if found.deadline:
        echo(f"Deadline   {found.deadline.isoformat()} (this clock says {now.isoformat(timespec='seconds')})")
    undecided = sorted({str(one["client"]) for one in found.suspicions} - {*found.left_out, *found.kept})
    for one in found.suspicions:
        decided = "left out" if one["client"] in found.left_out else "kept" if one["client"] in found.kept else "to decide"
        echo(f"[yellow]Suspected[/]  {one['client']}, {decided}: {escape(str(one['text']))} ({one['rule']})")
    if found.failed:
        echo(f"[red]Failed[/]     the server phase: {_failure(found.failed)}")
    if found.released:
        echo(f"Release    {found.release}  {escape(str(fl_round / 'release.safetensors'))}")
        echo(f"           {found.content}  its content alone")
        if found.supersedes:
            echo(f"           takes the place of {found.supersedes}")
        if found.personal:
            echo(f"           and a part of its own for {', '.join(found.personal)} in {escape(str(fl_round / 'personal'))}")
    if found.joining:
        who = ", ".join(found.joining)
        echo(f"Next       `osfl server {escape(str(fl_round))} --key server.key` makes the next release, with {who}.")
    elif found.released:
        return
    elif found.asks:
        again = f"`osfl server {escape(str(fl_round))} --key server.key --without-missing`"
        echo(f"Next       wait for the missing, or ask the others for repairs: {again}.")
    elif undecided:
        again = f"`osfl server {escape(str(fl_round))} --key server.key --exclude {undecided[0]}`"
        echo(f"Next       decide about {', '.join(undecided)}: leave it out, {again}, or keep it, --keep {undecided[0]}.")
    elif found.ready:
        echo(f"Next       `osfl server {escape(str(fl_round))} --key server.key` may begin.")
    else:
        echo(f"Next       waiting: {escape(found.waits_for)}.")


def _show_refused(fl_round: Path, found: Status) -> None:
    """The last refusals, and how many there were."""
    from osfl.wire.refusals import JOURNAL

    total, last = found.refusals, found.refused[-MOST_REFUSALS:]
    more = f"; the last of them, the others are in {escape(str(fl_round / JOURNAL))}" if len(last) < len(found.refused) else ""
    echo(f"Refused, {'once' if total == 1 else f'{total:,} times'}{more}:")
    for entry in last:
        echo(f"  {_refusal(entry)}")


def _failure(note: Mapping[str, object]) -> str:
    """Why the last server phase failed, and how to go on."""
    who = f"{note['client']}: " if note.get("client") else ""
    return escape(f"{_stamp(note)}  {who}{note.get('reason', '')}. {note.get('fix', '')}".replace("\n", " "))


def _stamp(entry: Mapping[str, object]) -> str:
    when = entry.get("time")
    return datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if isinstance(when, (int, float)) else ""


def _refusal(entry: Mapping[str, object]) -> str:
    """One line of rejected.jsonl; untrusted text in it is escaped."""
    against = f" (expected {entry['expected']}, got {entry.get('got', '')})" if "expected" in entry else ""
    texts = {key: entry.get(key, "") for key in ("client", "field", "reason", "fix")}
    counted = f" ({entry['count']} times)" if "count" in entry else ""
    text = f"{_stamp(entry)}  {texts['client']}  {texts['field']}: {texts['reason']}{counted}{against}. {texts['fix']}"
    return escape(text.replace("\n", " "))
