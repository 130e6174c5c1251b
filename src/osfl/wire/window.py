"""Read a bundle without trusting it, to show its contents before it is used or sent.

The same readers as the gate's. What would make the file unreadable is refused; what would merely make the gate say no is
noted, so that a damaged, unsigned or foreign bundle can still be looked at. Nothing here lets anything into a round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import OsflError, Rejected
from osfl.core.names import is_client_id, is_digest, shown
from osfl.core.types import Json, Limits
from osfl.wire.bundle import Bundle
from osfl.wire.contract import REPACK, read_entries
from osfl.wire.envelope import Envelope, check_canonical, check_layout, read_envelope
from osfl.wire.facts import check_facts
from osfl.wire.gate import bundle_of, check_receiver, check_round
from osfl.wire.signing import VerifyKey
from osfl.wire.source import BytesLike, opened
from osfl.wire.values import check_hashes

WINDOW_LIMITS = Limits(upload_bytes=16 << 30, header_bytes=64 << 20, facts_bytes=1 << 20)


class FileRejected(Rejected):
    """A file of which not even the kind is known: perhaps an upload, perhaps a release, perhaps no bundle at all."""

    title = "File rejected"

    def __str__(self) -> str:
        return OsflError.__str__(self)  # nobody is blamed for it


@contextlib.contextmanager
def of_unknown_kind() -> Iterator[None]:
    """Error messages inside name a file, not an upload."""
    try:
        yield
    except Rejected as no:
        raise FileRejected(no.reason, field=no.field, expected=no.expected, got=no.got, fix=no.fix) from None


@dataclass(frozen=True)
class Seen:
    """The contents of a file. `bundle` is no more trusted than the file: ask `signed_by`."""

    bundle: Bundle
    size: int  # of the file, in bytes
    envelope: Envelope
    doubts: tuple[Rejected, ...]  # what the gate would refuse it for, whoever signed it

    def signed_by(self, public_hex: str) -> bool:
        return VerifyKey(public_hex).verify(self.envelope.manifest_text.encode(), self.envelope.signature)


def look_at(source: BytesLike | Path, limits: Limits = WINDOW_LIMITS) -> Seen:
    """All contents of the file; `Rejected` if it is no bundle at all."""
    with of_unknown_kind(), opened(source) as file:
        envelope = read_envelope(file, limits)
        manifest = _check_form(envelope.manifest)
        entries = read_entries(manifest["tensors"])
        check_layout(envelope, entries)
        check_facts(manifest["facts"], limits.facts_bytes)
        bundle = bundle_of(envelope, envelope.slices(file.whole(), entries))
    checks: list[Callable[[], None]] = [
        lambda: check_hashes(bundle.tensors, entries),
        lambda: check_canonical(envelope, entries),
    ]
    return Seen(bundle, envelope.size, envelope, tuple(no for check in checks if (no := _refusal(check)) is not None))


def _check_form(manifest: dict[str, Json]) -> dict[str, object]:
    """Version, keys and kind as the gate wants them, and names that are names; of whichever round."""
    kinds = {"upload"} if manifest.get("kind") == "upload" else {"release", "personal"}
    manifest = dict(check_round(manifest, kinds, manifest.get("plan", "")))
    if not is_digest(manifest["plan"]):
        raise Rejected(
            "it does not name its round",
            field="plan",
            expected="64 lower-case hex digits",
            got=shown(manifest["plan"]),
            fix=REPACK,
        )
    if manifest["kind"] != "upload":
        check_receiver(manifest, None)
    elif not is_client_id(manifest["client"]):
        raise Rejected(
            "it does not name its sender", field="client", expected="a client's name", got=shown(manifest["client"]), fix=REPACK
        )
    return manifest


def _refusal(check: Callable[[], None]) -> Rejected | None:
    try:
        check()
    except Rejected as no:
        return no
    return None
