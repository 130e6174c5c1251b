"""Uploads, releases and personal parts that certificates of forgetting withdrew: well signed, but not to be used.

A certificate (docs/forgetting.md) names digests. Whoever reads a bundle where certificates are at hand asks here first, because
a signature does not expire: the old release stays signed by the server, the old upload by its client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from osfl.core.errors import Rejected
from osfl.core.types import ClientId, Json, digest_of


@dataclass(frozen=True)
class Withdrawal:
    """Why something must not be used any more."""

    certificate: str  # the file: forgotten/0001.json
    forgotten: str  # who or what, as text
    time: str
    instead: str  # what takes its place, as text

    def __str__(self) -> str:
        return f"withdrawn by {self.certificate} of {self.time}: {self.forgotten} was forgotten; {self.instead}"


@dataclass(frozen=True)
class Withdrawn:
    """All that some certificates took back."""

    digests: Mapping[str, Withdrawal] = field(default_factory=dict)  # of uploads and releases
    personal: Mapping[str, Withdrawal] = field(default_factory=dict)  # parts of old releases; a new one may name the same part
    clients: Mapping[ClientId, Withdrawal] = field(default_factory=dict)  # of whom nothing is left
    release: str = ""  # what takes the place of every withdrawn release, as text
    certificates: int = 0  # how many were read

    def of(self, manifest: Json) -> Withdrawal | None:
        """Why an upload or a release must not be used; its manifest need not be verified for that."""
        if not isinstance(manifest, dict):
            return None
        if manifest.get("kind") == "upload":
            return self.digests.get(digest_of(manifest)) or self.clients.get(str(manifest.get("client")))
        if manifest.get("kind") != "release":
            return None
        # a release without any content (methods whose clients send nothing) is the same before and after
        by_digest = self.digests.get(digest_of(manifest)) if manifest.get("tensors") else None
        return by_digest or next(self._origins(manifest.get("made_from")), None)

    def _origins(self, made_from: Json) -> Iterator[Withdrawal]:
        """Withdrawn uploads that a release was made from."""
        for name, digest in sorted(made_from.items()) if isinstance(made_from, dict) else ():
            kind, _, client = str(name).partition("/")
            found = (self.digests.get(str(digest)) or self.clients.get(client)) if kind == "upload" else None
            if found is not None:
                yield replace(found, instead=self.release)

    def check(self, manifest: Json) -> None:
        """Refuse what was withdrawn."""
        found = self.of(manifest)
        if found is not None:
            kind = manifest["kind"]
            raise Rejected(
                f"this {kind} was {found}",
                field="certificate",
                expected=f"a valid {kind}",
                got=digest_of(manifest),
                fix="Delete this copy, and use what takes its place.",
            )


NOTHING = Withdrawn()


def withdrawn_by(known: Sequence[Mapping[str, Json]], intent: Mapping[str, Json] | None = None) -> Withdrawn:
    """What these certificates took back, oldest first. An unfinished forgetting has taken uploads so far."""
    after = str(known[-1]["release"]["after"]) if known else ""
    release = f"use the release {after}" if after else "no release takes its place"
    digests: dict[str, Withdrawal] = {}
    personal: dict[str, Withdrawal] = {}
    clients: dict[ClientId, Withdrawal] = {}
    entries = [*known, *([intent] if intent is not None else [])]
    left = {client: str(upload["after"]) for entry in entries for client, upload in entry["uploads"].items()}
    for entry in entries:
        why = Withdrawal(_name(entry), _forgotten(entry), str(entry.get("time", "now (not finished)")), release)
        before, then = (entry["release"]["before"], entry["release"]["after"]) if entry is not intent else ("", "")
        if before and before != then:
            digests[before] = why
            personal |= {row["delete_personal"]: why for row in entry["replace"] if "delete_personal" in row}
        for client, upload in entry["uploads"].items():
            rest = f"what is left of it is {left[client]}, signed by the server" if left[client] else "nothing is left of it"
            digests[upload["before"]] = replace(why, instead=rest)
            if not left[client]:
                clients.setdefault(client, replace(why, instead=rest))
    valid = {"", after, *left.values()}
    return Withdrawn({d: why for d, why in digests.items() if d not in valid}, personal, clients, release, len(known))


def missing_numbers(known: Iterable[Mapping[str, Json]]) -> list[int]:
    """Numbers of certificates that were deleted: those before the last one that is there."""
    there = {int(entry["number"]) for entry in known}
    return sorted(set(range(1, max(there, default=0) + 1)) - there)


def _name(entry: Mapping[str, Json]) -> str:
    return f"forgotten/{int(entry['number']):04}.json" if "time" in entry else "forgetting.json"


def _forgotten(entry: Mapping[str, Json]) -> str:
    """Who or what, as it was asked for."""
    named = ", ".join(repr(client) for client in entry["asked"]["clients"])
    clients = f"client{'s' if len(entry['asked']['clients']) > 1 else ''} {named}" if named else "every client"
    return f"class {entry['asked']['class']!r} of {clients}" if entry["asked"]["class"] else clients
