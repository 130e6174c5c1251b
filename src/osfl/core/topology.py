"""Topologies: which clients exchange with which and when, from options, plans or contact schedules.

    contacts.csv   a,b,start,seconds,bytes_per_second[,encounter]   one window a line, such as a satellite's pass

What fits into a window is computed in osfl.rounds.contacts. No torch here.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import get_args, get_type_hints

from osfl.core.errors import UsageError, nearest
from osfl.core.types import ClientId, Contact, Json, Plan, Topology

KINDS = get_args(get_type_hints(Topology)["kind"])
COLUMNS = ("a", "b", "start", "seconds", "bytes_per_second")
EXPECTED = "mesh, ring or random:K"
MOST = 1000  # encounters; each is a whole round


# --- options, files and plans as a topology ---------------------------------------------------------------------------


def parse_topology(text: str, encounters: int = 1) -> Topology:
    """`mesh`, `ring` or `random:5`."""
    kind, colon, count = text.strip().partition(":")
    if kind == "random" and count.isdecimal() and int(count) > 0:
        return Topology("random", peers=int(count), encounters=encounters)
    if kind == "contacts":
        raise UsageError("a contact schedule is read from a file", field="topology", fix="Use --contacts contacts.csv instead.")
    if kind not in ("mesh", "ring") or colon:
        raise UsageError(
            f"--topology {text!r}: expected {EXPECTED}",
            field="topology",
            fix="For example --topology random:5, or --contacts contacts.csv for a schedule.",
        )
    return Topology(kind, encounters=encounters)  # type: ignore[arg-type]


def topology_options(topology: Topology) -> list[str]:
    """The command-line options of this topology; a schedule has none, it is in its plan or file."""
    summary = topology_summary(topology)
    return [
        "--topology",
        summary["topology"],
        *(["--encounters", str(summary["encounters"])] if summary["encounters"] > 1 else []),
    ]


def topology_summary(topology: Topology) -> dict[str, Json]:
    """Topology and number of encounters, for results and their pages."""
    kind = f"random:{topology.peers}" if topology.kind == "random" else topology.kind
    return {"topology": kind, "encounters": topology.encounters}


def is_contact(value: Json) -> bool:
    """Whether a plan's table has the form of a contact; its values are checked later."""
    kinds: dict[str, Json] = {
        "a": str,
        "b": str,
        "start": str,
        "seconds": (int, float),
        "bytes_per_second": (int, float),
        "encounter": int,
    }
    if not isinstance(value, Mapping) or not {*COLUMNS} <= value.keys() <= kinds.keys():
        return False
    return all(isinstance(item, kinds[key]) and not isinstance(item, bool) for key, item in value.items())


def topology_from(table: Mapping[str, Json]) -> Topology:
    """The part [topology] of a plan, whose keys were checked."""
    contacts = tuple(Contact(**contact) for contact in table.get("contacts", ()))
    return Topology(**{**table, "contacts": contacts})


def read_contacts(path: Path) -> Topology:
    """A contact schedule from a CSV file, in the order of time; every mistake in one message, each with its line."""
    contacts, problems = [], []
    lines = _lines(path)
    for number, row in lines:
        try:
            contacts.append(_contact(row))
        except ValueError as error:
            problems.append(f"{path} line {number}: {error}")
    if not lines:
        problems.append(f"{path} holds no contact")
    if problems:
        raise UsageError(problems, field="contacts", fix=f"Columns: {','.join(COLUMNS)}, and encounter if there are several.")
    ordered = sorted(contacts, key=lambda contact: (opens(contact), contact.a, contact.b))
    return Topology("contacts", contacts=tuple(ordered), encounters=max(contact.encounter for contact in ordered))


def _lines(path: Path) -> list[tuple[int, dict[str, Json]]]:
    """Every line after the first with its number, as texts by column."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file, skipinitialspace=True)
            _check_header([str(name).strip() for name in rows.fieldnames or ()], path)
            return [(rows.line_num, {str(key).strip(): value for key, value in row.items()}) for row in rows]
    except FileNotFoundError:
        raise UsageError(
            f"there is no contact schedule at {path}", field="contacts", fix=f"Write one line a window: {','.join(COLUMNS)}."
        ) from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(
            f"{path} cannot be read as a CSV file: {error}",
            field="contacts",
            fix="Save it as plain text in UTF-8, with commas.",
        ) from None


def _check_header(header: Sequence[str], path: Path) -> None:
    missing = [name for name in COLUMNS if name not in header]
    unknown = [name for name in header if name not in (*COLUMNS, "encounter")]
    twice = [name for name in (*COLUMNS, "encounter") if header.count(name) > 1]
    if missing or unknown or twice:
        raise UsageError(
            [f"{path} line 1: there is no column {name!r}" for name in missing]
            + [f"{path} line 1: unknown column {name!r}" for name in unknown]
            + [f"{path} line 1: column {name!r} is there {header.count(name)} times" for name in twice],
            field="contacts",
            fix=f"The first line names the columns: {','.join(COLUMNS)}.",
        )


def _contact(row: Mapping[str, Json]) -> Contact:
    """One line; a ValueError names what is wrong with it."""
    texts = {name: (row.get(name) or "").strip() for name in (*COLUMNS, "encounter")}
    if "None" in row:  # how the reader calls values without a column
        raise ValueError("it has more values than there are columns")
    if empty := [name for name in COLUMNS if not texts[name]]:
        raise ValueError(f"{', '.join(empty)} is empty")
    contact = Contact(
        texts["a"],
        texts["b"],
        texts["start"],
        _number(texts, "seconds"),
        _number(texts, "bytes_per_second"),
        int(_number({"encounter": texts["encounter"] or "1"}, "encounter")),
    )
    if problems := _contact_problems(contact):
        raise ValueError("; ".join(problems))
    return contact


def _number(texts: Mapping[str, str], name: str) -> float:
    try:
        value = float(texts[name])
    except ValueError:
        raise ValueError(f"{name}: expected a number, got {texts[name]!r}") from None
    if name == "encounter" and not value.is_integer():
        raise ValueError(f"encounter: expected a whole number, got {texts[name]!r}")
    return int(value) if value.is_integer() else value  # one spelling of a number, so that the plan has one digest


def _contact_problems(contact: Contact) -> list[str]:
    problems = [] if contact.a != contact.b else [f"{contact.a!r} cannot be its own neighbor"]
    for name in ("seconds", "bytes_per_second"):
        value = getattr(contact, name)
        if not (math.isfinite(value) and value > 0):
            problems.append(f"{name}: expected a finite number above 0, got {value}")
    try:
        if datetime.fromisoformat(contact.start).tzinfo is None:
            raise ValueError
        opens(contact)
        if math.isfinite(contact.seconds):
            closes(contact)
    except OverflowError:
        problems.append(f"start and seconds: expected a window between the years 1 and 9999 of UTC, got {contact.start!r}")
    except (TypeError, ValueError):
        problems.append(f'start: expected a time with its zone such as "2026-12-24T18:00:00Z", got {contact.start!r}')
    if not problems and not math.isfinite(contact.seconds * contact.bytes_per_second):
        problems.append(f"bytes_per_second: expected a rate whose window can be counted, got {contact.bytes_per_second}")
    if not 1 <= contact.encounter <= MOST:
        problems.append(f"encounter: expected 1 to {MOST}, got {contact.encounter}")
    return problems


# --- what is wrong with a topology --------------------------------------------------------------------------------------


def topology_problems(topology: Topology, clients: Sequence[ClientId]) -> list[str]:
    """What no round can start with, a sentence each."""
    problems = []
    if topology.encounters > MOST:
        problems.append(f"topology.encounters: expected at most {MOST}, got {topology.encounters}")
    if not 1 <= topology.encounter <= topology.encounters:
        problems.append(f"topology.encounter: expected 1 to {topology.encounters}, got {topology.encounter}")
    if (topology.encounter > 1) != bool(topology.after):
        problems.append("topology.after: from the second encounter on, and only then, the digest of the plan before is named")
    if topology.kind == "random" and not 1 <= topology.peers < max(2, len(clients)):
        problems.append(f"topology.peers: expected 1 to {len(clients) - 1}, the number of other clients, got {topology.peers}")
    if (topology.kind == "contacts") != bool(topology.contacts):
        problems.append(f"topology.contacts: a schedule belongs to kind 'contacts', and the kind is {topology.kind!r}")
    for number, contact in enumerate(topology.contacts, 1):
        found = _contact_problems(contact)
        found += [
            f"{name!r} is no client of this plan.{nearest(name, list(clients))}"
            for name in (contact.a, contact.b)
            if name not in clients
        ]
        if contact.encounter > topology.encounters:
            found.append(f"encounter: expected at most {topology.encounters}, got {contact.encounter}")
        problems += [f"topology.contacts, number {number} ({contact.a} and {contact.b}): {problem}" for problem in found]
    problems = problems or _at_once(topology)
    met = {contact.encounter for contact in topology.contacts}
    if met and not problems:
        problems += [
            f"topology.contacts: no window belongs to encounter {number}"
            for number in range(1, topology.encounters + 1)
            if number not in met
        ][:3]
    return problems or _out_of_order(topology)


def _at_once(topology: Topology) -> list[str]:
    """A line that was written twice would count twice: two windows of one pair cannot be open at the same time."""
    problems = []
    latest: dict[frozenset[ClientId], tuple[int, Contact]] = {}  # of each pair, the window that closes last so far
    for number, contact in sorted(enumerate(topology.contacts, 1), key=lambda entry: opens(entry[1])):
        pair = frozenset((contact.a, contact.b))
        before = latest.get(pair)
        if before is not None and opens(contact) < closes(before[1]):
            problems.append(
                f"topology.contacts, numbers {before[0]} and {number} ({contact.a} and {contact.b}): the window at "
                f"{before[1].start} is still open at {contact.start}"
            )
        if before is None or closes(contact) > closes(before[1]):
            latest[pair] = number, contact
    return problems


def _out_of_order(topology: Topology) -> list[str]:
    """A site needs all of one encounter before it can upload in the next."""
    problems: dict[ClientId, str] = {}
    latest: dict[ClientId, Contact] = {}  # of each client, the window that closes last in the encounters before
    for number in range(1, topology.encounters + 1):
        own = [contact for contact in topology.contacts if contact.encounter == number]
        for contact in own:
            for client in (contact.a, contact.b):
                before = latest.get(client)
                if before is not None and opens(contact) < closes(before):
                    problems.setdefault(
                        client,
                        f"topology.contacts: {client!r} begins encounter {number} at {contact.start}, "
                        f"before its window of encounter {before.encounter} at {before.start} has closed",
                    )
        for contact in own:
            for client in (contact.a, contact.b):
                if client not in latest or closes(contact) > closes(latest[client]):
                    latest[client] = contact
    return [problems[client] for client in sorted(problems)]


# --- one encounter after the other --------------------------------------------------------------------------------------


def is_last(plan: Plan) -> bool:
    """Whether no encounter follows this one."""
    return plan.topology is None or plan.topology.encounter == plan.topology.encounters


def next_encounter(plan: Plan) -> Plan:
    """The plan of the encounter after this one; anybody who has this plan can write the same."""
    topology = plan.topology
    if topology is None or is_last(plan):
        count = topology.encounters if topology else 1
        raise UsageError(
            f"this plan has {count} encounter(s), and this is encounter {count}",
            field="after",
            fix="The plan sets the number of encounters: write it with `osfl new --encounters E`.",
        )
    return replace(plan, topology=replace(topology, encounter=topology.encounter + 1, after=plan.digest))


def all_encounters(plan: Plan) -> list[Plan]:
    """The plans of all encounters from the first one on; one plan where clients exchange once."""
    if plan.topology is not None and plan.topology.encounter > 1:
        raise UsageError(
            f"this is the plan of encounter {plan.topology.encounter}",
            field="plan",
            fix="A simulation runs all encounters: give it the plan of the first one.",
        )
    plans = [plan]
    for _ in range(1, plan.topology.encounters if plan.topology else 1):
        plans.append(next_encounter(plans[-1]))
    return plans


# --- when a contact opens and closes ---------------------------------------------------------------------------------------


def opens(contact: Contact) -> datetime:
    return datetime.fromisoformat(contact.start).astimezone(UTC)


def closes(contact: Contact) -> datetime:
    return opens(contact) + timedelta(seconds=contact.seconds)


# --- neighbors -------------------------------------------------------------------------------------------------------------


def neighbors(plan: Plan, client: ClientId) -> tuple[ClientId, ...]:
    """The neighbors of this client in this round, sorted; without a topology everybody else.

    Random neighbors are the `peers` others with the smallest hash of seed, encounter and both names: in a new plan
    without a client the next one takes its place and nothing else changes; `osfl forget` fills no place in a standing round.
    """
    others = sorted(set(plan.clients) - {client})
    topology = plan.topology
    if topology is None or topology.kind == "mesh":
        return tuple(others)
    if topology.kind == "ring":
        ring = sorted({*plan.clients, client})
        here = ring.index(client)
        return tuple(sorted({ring[here - 1], ring[(here + 1) % len(ring)]} - {client}))
    if topology.kind == "random":
        from osfl.core.seeds import derive

        # the label keeps its spelling: another one would draw other neighbors in every plan
        drawn = sorted(others, key=lambda other: derive(plan.seed, "neighbours", topology.encounter, client, other))
        return tuple(sorted(drawn[: topology.peers]))
    pairs = [(contact.a, contact.b) for contact in topology.contacts if contact.encounter == topology.encounter]
    return tuple(sorted({b if a == client else a for a, b in pairs if client in (a, b)}))
