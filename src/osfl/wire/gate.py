"""The gate: checks every bundle, in a fixed order, and rejects it at the first failed check.

size → header length → header JSON → metadata keys → enrolled client → signature → version, client, round → contract →
offsets → hashes → finite values → facts → canonical form. Only the length and a bounded header are read before the
signature is known to be good.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from osfl.core.errors import Rejected, UsageError
from osfl.core.names import check_client_id, is_client_id, is_digest, shown
from osfl.core.tensors import WIDTH, RawTensor
from osfl.core.types import ClientId, Contract, Json, Limits, canonical
from osfl.wire.bundle import FORMAT, Bundle, TensorEntry, content_digest
from osfl.wire.contract import REPACK, check_contract, read_entries
from osfl.wire.envelope import Envelope, check_canonical, check_layout, read_envelope
from osfl.wire.facts import architecture_of, check_facts, check_masked, check_needed, check_well_known
from osfl.wire.signing import VerifyKey
from osfl.wire.source import BytesLike, Memory, Source, opened
from osfl.wire.values import check_hashes, check_values
from osfl.wire.withdrawn import NOTHING, Withdrawn

UNKNOWN = "unknown sender"
RELEASE_LIMITS = Limits(upload_bytes=1 << 40, header_bytes=64 << 20, facts_bytes=16 << 20)  # may hold every upload
_KEYS = {"format", "kind", "client", "plan", "tensors", "facts", "made_from"}


class ReleaseRejected(Rejected):
    """A release or personal part that the server did not sign for this round; nothing of it was used."""

    title = "Release rejected from"


@dataclass(frozen=True)
class AcceptancePolicy:
    """All that the receiving side has to know; worked out once, when the round opens."""

    plan: str  # digest of the plan: the round
    enrolled: Mapping[ClientId, str]  # client -> public key
    contracts: Mapping[str, Contract]  # architecture -> what its uploads hold; the single key "" needs no fact
    classes: int
    limits: Limits = field(default_factory=Limits)
    server: str = ""  # public key that signs releases, and what is left of an upload after a class was forgotten
    forgotten: Mapping[ClientId, str] = field(default_factory=dict)  # client -> digest of what is left of its upload, or ""
    withdrawn: Withdrawn = NOTHING  # what the round's certificates took back
    keys: str = ""  # of a secure sum: the digest of all enrolled keys, which every masked upload names
    several: bool = False  # an image may be of several classes, or of none
    missing: Collection[ClientId] = ()  # of a secure sum: whom a request for repairs says is missing, so they cannot deliver

    @property
    def gone(self) -> list[ClientId]:
        """Clients of whose uploads nothing is left."""
        return [client for client, left in self.forgotten.items() if not left]

    def __post_init__(self) -> None:
        for client, key in self.enrolled.items():
            check_client_id(client)
            VerifyKey(key)
        if len(set(self.enrolled.values())) != len(self.enrolled):
            raise UsageError("two clients share one key", field="enrolled", fix="Make a key for each with `osfl keys`.")
        for contract in self.contracts.values():
            if unknown := [name for name, promised in contract.items() if promised.dtype not in WIDTH]:
                raise UsageError(f"no bundle can hold the dtype of '{unknown[0]}'", field="contract", fix="Use F32.")


def accept(source: BytesLike | Path, policy: AcceptancePolicy) -> Bundle:
    """The upload, if it passes every check; `Rejected` otherwise."""
    return open_upload(source, policy)[0]


def open_upload(source: BytesLike | Path, policy: AcceptancePolicy, signer: str = "") -> tuple[Bundle, memoryview]:
    """The upload of a file that passes every check, and the bytes that were checked; `signer` is a key to expect instead of the
    client's."""
    return open_signed(source, policy, "upload", _upload_contract(policy), signer)


def _upload_contract(policy: AcceptancePolicy) -> Callable[[dict[str, Json]], Contract]:
    """Which contract an upload has, by its facts."""
    return lambda manifest: policy.contracts[architecture_of(manifest["facts"], policy.contracts)]


def open_signed(
    source: BytesLike | Path,
    policy: AcceptancePolicy,
    kind: str,
    contract_of: Callable[[dict[str, Json]], Contract],
    signer: str = "",
) -> tuple[Bundle, memoryview]:
    """What an enrolled client signed for this round: an upload, or a repair of a secure sum (osfl.wire.repair)."""
    with _blaming(UNKNOWN), opened(source) as file:
        head = _read_head(file, policy, kind, contract_of, signer)
        with _blaming(head.client):
            check_layout(head.envelope, head.entries)
            data = file.whole()
            tensors = _check_tensors(data, head.envelope, head.entries, head.contract)
            facts = head.envelope.manifest["facts"]
            check_facts(facts, policy.limits.facts_bytes)
            check_well_known(facts, policy.classes, policy.limits, policy.several)
            if policy.keys and kind == "upload":
                check_masked(facts, policy.keys)
            check_canonical(head.envelope, head.entries)
            return bundle_of(head.envelope, tensors), data


def check_head(start: BytesLike, size: int, policy: AcceptancePolicy) -> None:
    """Raise `Rejected` for an upload of `size` bytes of which only the start, with its header, has arrived: another sender's,
    another round's, or not what the contract announces."""
    with _blaming(UNKNOWN):
        _read_head(Memory(memoryview(start), size), policy, "upload", _upload_contract(policy))


@dataclass(frozen=True)
class _Head:
    """What a header says that an enrolled client has signed."""

    envelope: Envelope
    client: ClientId
    contract: Contract
    entries: Mapping[str, TensorEntry]


def _read_head(
    file: Source, policy: AcceptancePolicy, kind: str, contract_of: Callable[[dict[str, Json]], Contract], signer: str = ""
) -> _Head:
    envelope = read_envelope(file, policy.limits)
    client = _enrolled(envelope.manifest, policy)
    with _blaming(client):
        _check_signature(envelope, VerifyKey(signer or policy.enrolled[client]))
        manifest = check_round(envelope.manifest, {kind}, policy.plan)
        contract = contract_of(manifest)
        entries = read_entries(manifest["tensors"])
        check_contract(entries, contract)
        check_needed(manifest["facts"], entries, contract)
        return _Head(envelope, client, contract, entries)


def open_stored(source: BytesLike | Path, policy: AcceptancePolicy, client: ClientId) -> tuple[Bundle, memoryview]:
    """An upload that was received: signed by its client, or, where a class of it was forgotten, by the server."""
    with _blaming(client):
        policy.withdrawn.check(read_manifest(source, policy.limits))
    left = policy.forgotten.get(client)
    bundle, data = open_upload(source, policy, policy.server if left else "")
    if left and bundle.digest != left:
        fix = "Restore what the certificate of forgetting names."
        raise _no("upload", "it is not what was left of this upload", left, bundle.digest, fix)
    return bundle, data


def verify_release(
    source: BytesLike | Path,
    server_public_hex: str,
    plan: str,
    client: ClientId | None = None,
    limits: Limits = RELEASE_LIMITS,
    withdrawn: Withdrawn = NOTHING,
) -> Bundle:
    """A release, or the personal part of `client`, if the server signed it for this round; else `ReleaseRejected`.

    `withdrawn`: what certificates of forgetting took back, where they are at hand.
    """
    try:
        with _blaming("server"):
            return _signed_by_server(source, server_public_hex, plan, {"release", "personal"}, client, limits, withdrawn)
    except Rejected as no:
        raise ReleaseRejected(
            no.reason, client=no.client, field=no.field, expected=no.expected, got=no.got, fix=_release_fix(no)
        ) from None


def verify_total(source: BytesLike | Path, server_public_hex: str, plan: str) -> Bundle:
    """A sum of uploads that the server keeps for itself, if it signed it for this round; `Rejected` otherwise."""
    with _blaming("server"):
        return _signed_by_server(source, server_public_hex, plan, {"total"})


def _signed_by_server(
    source: BytesLike | Path,
    server_public_hex: str,
    plan: str,
    kinds: Collection[str],
    client: ClientId | None = None,
    limits: Limits = RELEASE_LIMITS,
    withdrawn: Withdrawn = NOTHING,
) -> Bundle:
    with opened(source) as file:
        envelope = read_envelope(file, limits)
        _check_signature(envelope, VerifyKey(server_public_hex))
        manifest = check_round(envelope.manifest, kinds, plan)
        check_receiver(manifest, client)
        entries = read_entries(manifest["tensors"])
        check_layout(envelope, entries)
        tensors = _check_tensors(file.whole(), envelope, entries, {})
        check_facts(manifest["facts"], limits.facts_bytes)
        check_canonical(envelope, entries)
        withdrawn.check(manifest)
        return bundle_of(envelope, tensors)


def read_manifest(source: BytesLike | Path, limits: Limits = RELEASE_LIMITS) -> Json:
    """The header of a bundle; nothing of it is checked."""
    with opened(source) as file:
        return read_envelope(file, limits).manifest


@contextlib.contextmanager
def _blaming(client: str) -> Iterator[None]:
    """Refusals inside name this client, unless they already name one."""
    try:
        yield
    except Rejected as no:
        no.client = no.client or client
        raise


def _enrolled(manifest: Json, policy: AcceptancePolicy) -> ClientId:
    client = manifest.get("client") if isinstance(manifest, dict) else None
    if isinstance(client, str) and client in policy.enrolled:
        return client
    raise Rejected(
        "no such client is enrolled in this round",
        client=client if is_client_id(client) else UNKNOWN,
        field="client",
        expected="an enrolled client",
        got=shown(client),
        fix="Enroll the client's public key before the round opens, or send this to the round that it was made for.",
    )


def _check_signature(envelope: Envelope, key: VerifyKey) -> None:
    if not key.verify(envelope.manifest_text.encode(), envelope.signature):
        raise Rejected(
            "the signature is not by the key known for this name",
            field="signature",
            expected=f"a signature by {key.hex}",
            got=shown(envelope.signature),
            fix="Sign with the key whose public half is enrolled; a copy of the file may also have been changed.",
        )


def check_round(manifest: Json, kinds: Collection[str], plan: str) -> dict[str, Json]:
    """Version, form, kind and round, in this order; the manifest is an object, or there would be no client in it."""
    if not isinstance(manifest, dict) or type(version := manifest.get("format")) is not int or version != FORMAT:
        got = manifest.get("format") if isinstance(manifest, dict) else manifest
        raise _no("format", "the format version is another", FORMAT, got, "Use the same version of osfl on both sides.")
    if manifest.keys() != _KEYS:
        raise _no("manifest", "the manifest has other keys", ", ".join(sorted(_KEYS)), sorted(manifest), REPACK)
    if manifest["kind"] not in sorted(kinds):
        fix = "Clients send uploads, the server sends releases; give the other file."
        raise _no("kind", "it is another kind of bundle", " or ".join(sorted(kinds)), manifest["kind"], fix)
    if manifest["plan"] != plan:
        fix = "Train with the plan.toml of this round; a plan that changed in any way is another round."
        raise _no("plan", "it was made for another round", plan, manifest["plan"], fix)
    _check_made_from(manifest["made_from"], empty={"release", "total"}.isdisjoint(kinds))
    return manifest


def _check_made_from(value: Json, empty: bool) -> None:
    if not isinstance(value, dict) or not all(map(is_digest, value.values())) or (empty and value):
        expected = "{}" if empty else "digests by name"
        raise _no("made_from", "the list of what it was made from is wrong", expected, value, REPACK)


def check_receiver(manifest: dict[str, Json], client: ClientId | None) -> None:
    """A release is for all, a total for nobody; a personal part names its one receiver."""
    receiver, nameless = manifest["client"], manifest["kind"] != "personal"
    right = receiver == "" if nameless else is_client_id(receiver) and client in (None, receiver)
    if not right:
        expected = "''" if nameless else client or "a client's name"
        fix = "Ask the server for the part that was made for this client."
        raise _no("client", "it was made for another receiver", expected, receiver, fix)


def _check_tensors(
    data: memoryview, envelope: Envelope, entries: Mapping[str, TensorEntry], contract: Contract
) -> dict[str, RawTensor]:
    tensors = envelope.slices(data, entries)
    check_hashes(tensors, entries)
    check_values(tensors, contract)
    return tensors


def bundle_of(envelope: Envelope, tensors: Mapping[str, RawTensor]) -> Bundle:
    named = envelope.manifest
    digest, content = hashlib.sha256(canonical(named)).hexdigest(), content_digest(named)
    return Bundle(named["kind"], named["client"], named["plan"], tensors, named["facts"], named["made_from"], digest, content)


def _no(field: str, reason: str, expected: object, got: object, fix: str) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=shown(got), fix=fix)


# --- what to do about a release that was refused: it is the coordinator's, and the gate's own advice is about uploads -----

_AS_MADE = "Another copy will not help: ask the coordinator to make it again with `osfl server` and this version of osfl."
_FIXES = MappingProxyType(  # by the last part of the field
    {
        "file": "Give the path of the .safetensors file that you got from the coordinator, who makes it with `osfl server`.",
        "seal": "This is a site's upload: a release is never sealed. Give the file that you got from the coordinator.",
        "signature": "Check that server.pub is the public key of this round's coordinator, who signs with the other half; "
        "if it does, the file was changed: get it again from the coordinator.",
        "plan": "Ask the coordinator for the release of this round, or give the plan.toml that it was made with; "
        "a plan that changed in any way is another round.",
        "sha256": "The file was damaged in transit; copy it again from the coordinator's round folder.",
        "values": _AS_MADE,
        "facts": _AS_MADE,
    }
)


def _release_fix(no: Rejected) -> str | None:
    """The remedy for whoever holds a release; the gate's own where that does not mention uploads."""
    return _FIXES.get((no.field or "").rpartition(".")[2], no.fix)
