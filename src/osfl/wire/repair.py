"""Repairs of a secure sum: what others shared with sites that stayed away, so that their masks can be taken out of the sum.

    request   JSON, signed by the server: whose uploads it has (with digests), and who is missing
    repair    a bundle of kind "repair", signed by a site: the seed that it shares with each missing site, U8 (32,)

A seed is asked for once: a request that contradicts the one before is refused, and so is a repair that no request asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from osfl.core.errors import Rejected
from osfl.core.names import is_client_id, is_digest, shown
from osfl.core.sums import FEWEST
from osfl.core.tensors import RawTensor
from osfl.core.types import ClientId, Contract, Field, Json, canonical, digest_of
from osfl.runtime.atomic import create_once, make_folder
from osfl.wire import strict_json
from osfl.wire.bundle import Bundle, pack
from osfl.wire.gate import AcceptancePolicy, open_signed
from osfl.wire.inbox import Inbox, Receipt
from osfl.wire.masks import COMMITMENTS, SEED, commitment
from osfl.wire.signing import SigningKey, VerifyKey
from osfl.wire.source import BytesLike

REQUEST, REPAIRS = "repair_request.json", "repairs"  # of a round folder
_FORMAT = 1
_SEED = "seed/"
_ANEW = "Make it again with `osfl repair` and the repair_request.json of this round."
_AGAIN = "Ask the coordinator for the repair_request.json of its round folder; one that was edited is not the server's."


class RequestRejected(Rejected):
    """A request for repairs that a site does not answer; nothing left the site."""

    title = "Repair request rejected from"


class RepairRejected(Rejected):
    """A repair that nobody asked for, or that does not fit its upload; nothing of it was used."""

    title = "Repair rejected from"


@dataclass(frozen=True)
class RepairRequest:
    """Who delivered what, and who is missing: together they are all sites of the plan."""

    plan: str
    delivered: Mapping[ClientId, str]  # digest of the upload
    missing: tuple[ClientId, ...]

    def as_json(self) -> dict[str, Json]:
        content = {"plan": self.plan, "delivered": dict(self.delivered), "missing": list(self.missing)}
        return {"format": _FORMAT, "what": "osfl repair request", **content}

    @property
    def digest(self) -> str:
        return digest_of(self.as_json())


def sign_request(request: RepairRequest, server_key: SigningKey) -> bytes:
    content = request.as_json()
    return json.dumps({"request": content, "signature": server_key.sign(canonical(content))}, indent=1, sort_keys=True).encode()


def read_request(data: bytes, server: str, plan: str, clients: Collection[ClientId]) -> RepairRequest:
    """The request, if the server signed it for this round and it names every site once."""
    try:
        found = strict_json.parse(data)
        content, signature = found["request"], found["signature"]
    except (ValueError, KeyError, TypeError):
        raise _not("request", "this is no request for repairs", "a signed request", data[:60], _AGAIN) from None
    if not isinstance(signature, str) or not VerifyKey(server).verify(canonical(content), signature):
        raise _not("signature", "the request is not signed by the server", f"a signature by {server}", signature, _AGAIN)
    request = _request_of(content)
    if request.plan != plan:
        raise _not("plan", "the request is for another round", plan, request.plan, "Give the request of this round.")
    named = sorted([*request.delivered, *request.missing])
    if named != sorted(clients):
        reason = "the request does not name every site of the plan once"
        raise _not("missing", reason, ", ".join(sorted(clients)), ", ".join(named), _AGAIN)
    if not request.missing or len(request.delivered) < FEWEST:
        reason = "with these sites the sum would be one site's upload" if request.missing else "nobody is missing"
        expected = f"a missing site, and at least {FEWEST} uploads"
        raise _not("delivered", reason, expected, ", ".join(request.delivered) or "nobody", "Answer no such request.")
    return request


def _request_of(content: Json) -> RepairRequest:
    try:
        request = RepairRequest(content["plan"], dict(content["delivered"]), tuple(content["missing"]))
        right = (
            content == request.as_json()
            and all(map(is_client_id, [*request.delivered, *request.missing]))
            and all(map(is_digest, [request.plan, *request.delivered.values()]))
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        right = False
    if not right:
        raise _not("request", "the request is malformed", "plan, delivered and missing", content, _AGAIN)
    return request


def pack_repair(request: RepairRequest, client: ClientId, seeds: Mapping[ClientId, bytes], key: SigningKey) -> bytes:
    """A site's answer: the seed that it shares with each missing site."""
    tensors = {f"{_SEED}{missing}": RawTensor("U8", (SEED,), seed) for missing, seed in seeds.items()}
    return pack("repair", client, request.plan, tensors, {"request": request.digest}, key)


def open_repair(
    source: BytesLike | Path,
    policy: AcceptancePolicy,
    request: RepairRequest | None,
    committed: Callable[[ClientId], Mapping[ClientId, bytes]],
) -> tuple[Bundle, memoryview]:
    """A repair that this request asks for, with its bytes as checked; `committed`: the commitments of a site's upload."""
    try:
        bundle, data = open_signed(source, policy, "repair", lambda manifest: _contract(manifest, request))
        known = committed(bundle.client)
        for missing, seed in seeds_of(bundle).items():
            if commitment(seed) != known[missing]:
                reason = f"this is not the seed that {bundle.client} and {missing} share: its upload commits to another one"
                raise _no(f"{_SEED}{missing}", reason, known[missing].hex(), commitment(seed).hex(), client=bundle.client)
        return bundle, data
    except Rejected as no:
        raise RepairRejected(no.reason, client=no.client, field=no.field, expected=no.expected, got=no.got, fix=_ANEW) from None


def _contract(manifest: dict[str, Json], request: RepairRequest | None) -> Contract:
    """What a repair holds in this round: a seed for each missing site and nothing about the others."""
    client = manifest["client"]
    if request is None:
        raise _no("request", "nobody has asked for repairs in this round", "a request by the server", "none")
    if client not in request.delivered:
        raise _no("client", "this site has no upload that could be repaired", " or ".join(request.delivered), client)
    if manifest["facts"] != {"request": request.digest}:
        raise _no("facts.request", "it answers another request", request.digest, manifest["facts"])
    tensors = manifest["tensors"] if isinstance(manifest["tensors"], dict) else {}
    present = [name for name in sorted(tensors) if name.removeprefix(_SEED) in request.delivered]
    if present:
        other = present[0].removeprefix(_SEED)
        reason = f"{other} did deliver: its masks cancel in the sum, and a seed of it would uncover its upload"
        raise _no(present[0], reason, f"seeds of {', '.join(request.missing)}", f"one of {other}")
    return {f"{_SEED}{missing}": Field("U8", (SEED,)) for missing in request.missing}


def receive_repair(folder: Path, source: BytesLike | Path, inbox: Inbox, request: RepairRequest | None) -> Receipt:
    """Check a repair, store it durably, then acknowledge; the same again changes nothing, and there is no other good one."""
    try:
        bundle, data = open_repair(source, inbox.policy, request, lambda client: _committed(inbox, client))
    except Rejected as no:
        inbox.note(no)
        raise
    path = folder / f"{bundle.client}.safetensors"
    make_folder(folder)
    create_once(path, data)
    return Receipt(bundle.client, bundle.digest, data.nbytes, path)


def stored_seeds(folder: Path, inbox: Inbox, request: RepairRequest | None, client: ClientId) -> dict[ClientId, bytes]:
    """The seeds of a repair that was received, checked again, by missing site."""
    path = folder / f"{client}.safetensors"
    return seeds_of(open_repair(path, inbox.policy, request, lambda name: _committed(inbox, name))[0])


def _committed(inbox: Inbox, client: ClientId) -> dict[ClientId, bytes]:
    return commitments_of(bytes(inbox.bundle(client).tensors[COMMITMENTS].data), inbox.policy.enrolled)


def commitments_of(rows: bytes, clients: Collection[ClientId]) -> dict[ClientId, bytes]:
    """What a masked upload commits to: of each client of the plan the seed that the sender shares with it."""
    return {client: rows[SEED * i : SEED * (i + 1)] for i, client in enumerate(sorted(clients))}


def seeds_of(bundle: Bundle) -> dict[ClientId, bytes]:
    """The seeds of a repair, by missing site."""
    return {name.removeprefix(_SEED): bytes(tensor.data) for name, tensor in bundle.tensors.items()}


def _no(field: str, reason: str, expected: object, got: object, client: ClientId | None = None) -> Rejected:
    return Rejected(reason, client=client, field=field, expected=expected, got=shown(got))


def _not(field: str, reason: str, expected: object, got: object, fix: str) -> RequestRejected:
    return RequestRejected(reason, client="server", field=field, expected=expected, got=shown(got), fix=fix)
