"""Requests for repairs, and repairs: what is not signed, not asked for or not true is refused, with its name and field."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.core.types import ClientId, Field, canonical
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy, accept
from osfl.wire.inbox import Inbox
from osfl.wire.masks import COMMITMENTS, commitment, keys_digest, pair_seed
from osfl.wire.repair import (
    RepairRejected,
    RepairRequest,
    RequestRejected,
    pack_repair,
    read_request,
    receive_repair,
    sign_request,
)
from osfl.wire.signing import SigningKey

PLAN, OTHER = "ab" * 32, "cd" * 32
CLIENTS = ("east", "north", "south", "west")
KEYS = {name: SigningKey.from_seed(name.encode().ljust(32)) for name in (*CLIENTS, "server")}
PUBLIC = {name: KEYS[name].public_hex for name in CLIENTS}
CONTRACT = {"": {"x": Field("I64", (2,)), COMMITMENTS: Field("U8", (4, 32))}}
POLICY = AcceptancePolicy(PLAN, PUBLIC, CONTRACT, 2, server=KEYS["server"].public_hex, keys=keys_digest(PUBLIC))


def seeds(client: str, others: tuple[str, ...] = CLIENTS) -> dict[ClientId, bytes]:
    return {other: pair_seed(KEYS[client], client, other, PUBLIC[other], PLAN) for other in others if other != client}


def upload(client: str, **facts: object) -> bytes:
    own = seeds(client)
    rows = b"".join(commitment(own[other]) if other in own else bytes(32) for other in CLIENTS)
    tensors = {"x": RawTensor("I64", (2,), bytes(16)), COMMITMENTS: RawTensor("U8", (4, 32), rows)}
    return pack("upload", client, PLAN, tensors, {"keys": POLICY.keys, **facts}, KEYS[client])


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    """North and south have delivered; east and west have not."""
    found = Inbox(tmp_path / "inbox", POLICY)
    for client in ("north", "south"):
        found.receive(upload(client))
    return found


@pytest.fixture
def request_(inbox: Inbox) -> RepairRequest:
    return RepairRequest(PLAN, {client: inbox.digest(client) for client in ("north", "south")}, ("east", "west"))


# --- masked uploads ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "field"),
    [({"keys": OTHER}, "facts.keys"), ({"samples": 3}, "facts.samples"), ({"class_counts": [1, 2]}, "facts.class_counts")],
)
def test_a_masked_upload_names_the_keys_and_nothing_about_its_images(facts: Mapping[str, object], field: str) -> None:
    assert accept(upload("north"), POLICY).client == "north"
    with pytest.raises(Rejected) as caught:
        accept(upload("north", **facts), POLICY)
    assert caught.value.field == field and caught.value.client == "north"


def test_who_was_declared_missing_cannot_deliver(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path / "inbox", replace(POLICY, missing=("west",)))
    with pytest.raises(Rejected, match="asked to take this site's masks out") as caught:
        inbox.receive(upload("west"))
    assert caught.value.client == "west" and not inbox.delivered() and inbox.receive(upload("north"))


# --- requests ------------------------------------------------------------------------------------------------------------


def read(data: bytes) -> RepairRequest:
    return read_request(data, KEYS["server"].public_hex, PLAN, CLIENTS)


def signed(content: object) -> bytes:
    return json.dumps({"request": content, "signature": KEYS["server"].sign(canonical(content))}).encode()


def test_a_request_is_read_as_it_was_signed(request_: RepairRequest) -> None:
    assert read(sign_request(request_, KEYS["server"])) == request_


BAD_REQUESTS: dict[str, tuple[Callable[[RepairRequest], bytes], str]] = {
    "text": (lambda r: b"north is missing", "request"),
    "a list": (lambda r: b"[]", "request"),
    "another signer": (lambda r: sign_request(r, KEYS["north"]), "signature"),
    "tampered": (lambda r: sign_request(r, KEYS["server"]).replace(b'"west"', b'"vest"'), "signature"),
    "no signature": (lambda r: json.dumps({"request": r.as_json(), "signature": None}).encode(), "signature"),
    "another round": (lambda r: sign_request(replace(r, plan=OTHER), KEYS["server"]), "plan"),
    "somebody unnamed": (lambda r: sign_request(replace(r, missing=("east",)), KEYS["server"]), "missing"),
    "both here and missing": (lambda r: sign_request(replace(r, missing=("east", "north", "west")), KEYS["server"]), "missing"),
    "nobody missing": (
        lambda r: sign_request(RepairRequest(PLAN, dict.fromkeys(CLIENTS, OTHER), ()), KEYS["server"]),
        "delivered",
    ),
    "one upload": (
        lambda r: sign_request(RepairRequest(PLAN, {"north": OTHER}, ("east", "south", "west")), KEYS["server"]),
        "delivered",
    ),
    "another format": (lambda r: signed({**r.as_json(), "format": 2}), "request"),
    "no digests": (lambda r: signed({**r.as_json(), "delivered": {"north": "x", "south": "y"}}), "request"),
    "numbers": (lambda r: signed({**r.as_json(), "missing": 7}), "request"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused(request_: RepairRequest, case: str) -> None:
    make, field = BAD_REQUESTS[case]
    with pytest.raises(RequestRejected) as caught:
        read(make(request_))
    assert caught.value.field == field and caught.value.client == "server"


# --- repairs -------------------------------------------------------------------------------------------------------------


def test_a_repair_is_received_once_and_again(inbox: Inbox, request_: RepairRequest, tmp_path: Path) -> None:
    bundle = pack_repair(request_, "north", seeds("north", ("east", "west")), KEYS["north"])
    receipt = receive_repair(tmp_path / "repairs", bundle, inbox, request_)
    assert receipt.client == "north" and receipt.path.read_bytes() == bundle
    assert receive_repair(tmp_path / "repairs", receipt.path, inbox, request_) == receipt


def repair(
    request: RepairRequest, given: Mapping[ClientId, bytes] | None = None, client: str = "north", signer: str = ""
) -> bytes:
    return pack_repair(request, client, given or seeds(client, ("east", "west")), KEYS[signer or client])


def replayed(request: RepairRequest) -> bytes:
    """A good answer to an earlier request of this round."""
    return repair(replace(request, missing=("west",)), seeds("north", ("west",)))


BAD_REPAIRS: dict[str, tuple[Callable[[RepairRequest], bytes], str, str]] = {
    "of a site that delivered": (
        lambda r: repair(r, seeds("north", ("east", "south", "west"))),
        "seed/south",
        "south did deliver",
    ),
    "of a site that delivered only": (lambda r: repair(r, seeds("north", ("south",))), "seed/south", "south did deliver"),
    "wrong seed": (
        lambda r: repair(r, {**seeds("north", ("west",)), "east": bytes(32)}),
        "seed/east",
        "commits to another one",
    ),
    "seeds exchanged": (
        lambda r: repair(r, {"east": seeds("north")["west"], "west": seeds("north")["east"]}),
        "seed/east",
        "commits to another one",
    ),
    "another's seeds": (lambda r: repair(r, seeds("south", ("east", "west"))), "seed/east", "commits to another one"),
    "not all": (lambda r: repair(r, seeds("north", ("east",))), "seed/west", "is missing"),
    "by a missing site": (
        lambda r: repair(r, seeds("west", ("east",)), "west"),
        "client",
        "no upload that could be repaired",
    ),
    "signed by another": (lambda r: repair(r, signer="south"), "signature", "not by the key known for this name"),
    "of another round": (lambda r: repair(replace(r, plan=OTHER)), "plan", "made for another round"),
    "of another request": (replayed, "facts.request", "it answers another request"),
    "an upload": (lambda r: upload("north"), "kind", "another kind of bundle"),
    "tampered": (lambda r: repair(r)[:-1] + bytes([repair(r)[-1] ^ 1]), "seed/west.sha256", "not what was signed"),
}


@pytest.mark.parametrize("case", BAD_REPAIRS)
def test_a_bad_repair_is_refused(inbox: Inbox, request_: RepairRequest, tmp_path: Path, case: str) -> None:
    make, field, reason = BAD_REPAIRS[case]
    with pytest.raises(RepairRejected, match=reason) as caught:
        receive_repair(tmp_path / "repairs", make(request_), inbox, request_)
    assert caught.value.field == field and caught.value.client in ("north", "west")
    assert not (tmp_path / "repairs").exists()


def test_nobody_has_asked(inbox: Inbox, request_: RepairRequest, tmp_path: Path) -> None:
    with pytest.raises(RepairRejected, match="nobody has asked for repairs"):
        receive_repair(tmp_path / "repairs", repair(request_), inbox, None)


def test_a_repair_is_no_upload(inbox: Inbox, request_: RepairRequest) -> None:
    with pytest.raises(Rejected, match="another kind of bundle"):
        inbox.receive(repair(request_))
