"""Who may say what in whose name: attacks on identity, each refused with the field that gives it away.

The first table is about files (the gate, and a site that takes a release), the second about keys and names.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType

import pytest

from osfl.core.errors import OsflError, Rejected
from osfl.core.plan import check_plan
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.tensors import RawTensor
from osfl.core.types import Plan, Task, canonical
from osfl.roles import coordinator, site
from osfl.rounds.folder import contracts_of
from osfl.rounds.provenance import Known, examine
from osfl.rounds.state import read_policy
from osfl.wire.bundle import Kind, pack
from osfl.wire.signing import SigningKey

CLIENTS = ("north", "south")
NORTH, SOUTH, MALLORY, SERVER, OTHER_SERVER = (SigningKey.from_seed(letter * 32) for letter in (b"n", b"s", b"m", b"v", b"w"))
WIDTH = {"F32": 4, "I64": 8}


def plan(seed: int = 0, clients: tuple[str, ...] = CLIENTS) -> Plan:
    return Plan(Task("t", ("a", "b"), (1, 8, 8)), "fedavg", resolve_settings(load("fedavg"), "smoke"), clients, seed=seed)


@dataclass
class World:
    """A round that is open, and everything an attacker may have seen of it and of another one."""

    folder: Path

    def __post_init__(self) -> None:
        self.plan, self.other_plan = plan(), plan(seed=1)
        self.round = self.folder / "round"
        coordinator.open_new(self.round, self.plan, {"north": NORTH.public_hex, "south": SOUTH.public_hex}, SERVER.public_hex)
        self.tensors = _zeros(self.plan)

    def bundle(
        self,
        client: str = "north",
        key: SigningKey = NORTH,
        kind: Kind = "upload",
        of: Plan | None = None,
        made_from: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        facts = {"architecture": self.plan.settings.architecture, "samples": 4} if kind == "upload" else {}
        return pack(kind, client, (of or self.plan).digest, self.tensors, facts, key, made_from=made_from)

    def receive(self, data: bytes) -> None:
        coordinator.receive(self.round, data)

    def take(self, release: bytes, personal: bytes | None = None, client: str = "north") -> None:
        """A site is handed these files as the release."""
        paths = [self.folder / "release.safetensors", self.folder / "personal.safetensors"]
        paths[0].write_bytes(release)
        paths[1].write_bytes(personal or b"")
        site.take_release(self.plan, client, paths[0], paths[1] if personal else None, SERVER.public_hex, self.folder / "work")

    def personal(self, client: str, kind: Kind = "personal", of: Plan | None = None) -> tuple[bytes, str]:
        data = self.bundle(client, SERVER, kind, of)
        manifest = json.loads(_header(data)["__metadata__"]["manifest"])
        return data, sha256(canonical(manifest)).hexdigest()


def _zeros(agreed: Plan) -> dict[str, RawTensor]:
    method = load(agreed.method)(agreed.task, agreed.settings)
    contract = next(iter(contracts_of(method).values()))
    shapes = {name: tuple(int(n) for n in field.shape) for name, field in contract.items()}
    sizes = {name: WIDTH[contract[name].dtype] * _product(shape) for name, shape in shapes.items()}
    return {name: RawTensor(contract[name].dtype, shape, bytes(sizes[name])) for name, shape in shapes.items()}


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * _product(shape[1:]) if shape else 1


def _header(data: bytes) -> dict[str, dict[str, str]]:
    (length,) = struct.unpack("<Q", data[:8])
    header: dict[str, dict[str, str]] = json.loads(data[8 : 8 + length])
    return header


def changed(data: bytes, edit: Callable[[dict[str, str]], None]) -> bytes:
    """The same file with other metadata, in canonical form."""
    (length,) = struct.unpack("<Q", data[:8])
    header = _header(data)
    edit(header["__metadata__"])
    text = canonical(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def renamed(name: str) -> Callable[[dict[str, str]], None]:
    def edit(metadata: dict[str, str]) -> None:
        metadata["manifest"] = canonical({**json.loads(metadata["manifest"]), "client": name}).decode()

    return edit


def signature(edit: Callable[[str], str]) -> Callable[[dict[str, str]], None]:
    return lambda metadata: metadata.update(signature=edit(metadata["signature"]))


def _of_another_release(w: World) -> None:
    """Both files are the server's and of this round, but the personal part is not the one that the release names."""
    own, _ = w.personal("north")
    w.take(w.bundle("", SERVER, "release", made_from={"personal/north": "0" * 64}), own)


def _foreign_part(w: World) -> None:
    theirs, digest = w.personal("south")
    w.take(w.bundle("", SERVER, "release", made_from={"personal/north": digest}), theirs)


def _upload_as_part(w: World) -> None:
    w.take(w.bundle("", SERVER, "release", made_from={"personal/north": "0" * 64}), w.bundle())


def _unsigned(w: World) -> None:
    def strip(metadata: dict[str, str]) -> None:
        del metadata["signature"]

    w.receive(changed(w.bundle(), strip))


def _borrowed_signature(w: World) -> None:
    borrowed = _header(w.bundle(of=w.other_plan))["__metadata__"]["signature"]
    w.receive(changed(w.bundle(), signature(lambda s: borrowed)))


def _second_thoughts(w: World) -> None:
    w.receive(w.bundle())
    facts = {"architecture": w.plan.settings.architecture, "samples": 5}
    w.receive(pack("upload", "north", w.plan.digest, w.tensors, facts, NORTH))


def _upload_as_client(w: World) -> None:
    coordinator.make_release(w.round, NORTH)


Attack = Callable[[World], None]
FILES: dict[str, tuple[str, Attack]] = {
    # in the name of a client
    "another client's key": ("signature", lambda w: w.receive(w.bundle("north", SOUTH))),
    "an unknown key": ("signature", lambda w: w.receive(w.bundle("north", MALLORY))),
    "the server's key": ("signature", lambda w: w.receive(w.bundle("north", SERVER))),
    "a name that is not enrolled": ("client", lambda w: w.receive(w.bundle("mallory", MALLORY))),
    "a name that is not enrolled, with a client's key": ("client", lambda w: w.receive(w.bundle("mallory", NORTH))),
    "the name exchanged in a good manifest": ("signature", lambda w: w.receive(changed(w.bundle(), renamed("south")))),
    "the server as a client": ("client", lambda w: w.receive(w.bundle("server", SERVER))),
    "an empty name": ("client", lambda w: w.receive(w.bundle("", NORTH))),
    "a path as a name": ("client", lambda w: w.receive(w.bundle("../north", NORTH))),
    "an absolute path as a name": ("client", lambda w: w.receive(w.bundle("/etc/north", NORTH))),
    "a Cyrillic letter that looks the same": ("client", lambda w: w.receive(w.bundle("n\u043erth", NORTH))),
    "a full-width spelling": ("client", lambda w: w.receive(w.bundle("\uff4eorth", NORTH))),
    "an invisible character": ("client", lambda w: w.receive(w.bundle("north\u200b", NORTH))),
    "capital letters": ("client", lambda w: w.receive(w.bundle("North", NORTH))),
    "a name with a NUL behind it": ("client", lambda w: w.receive(w.bundle("north\0", NORTH))),
    "no signature": ("metadata", _unsigned),
    "an empty signature": ("signature", lambda w: w.receive(changed(w.bundle(), signature(lambda s: "")))),
    "the signature in capitals": ("signature", lambda w: w.receive(changed(w.bundle(), signature(str.upper)))),
    "the signature of another message": (
        "signature",
        lambda w: w.receive(changed(w.bundle(), signature(lambda s: NORTH.sign(b"other words")))),
    ),
    # in the name of another round
    "an upload of another round": ("plan", lambda w: w.receive(w.bundle(of=w.other_plan))),
    "another round's signature under this round's words": ("signature", _borrowed_signature),
    "a release as an upload": ("kind", lambda w: w.receive(w.bundle(kind="release"))),
    "a personal part as an upload": ("kind", lambda w: w.receive(w.bundle(kind="personal"))),
    "a second, different upload": ("upload", _second_thoughts),
    # in the name of the server
    "a release signed by a client": ("signature", lambda w: w.take(w.bundle("", NORTH, "release"))),
    "a release signed by another round's server": ("signature", lambda w: w.take(w.bundle("", OTHER_SERVER, "release"))),
    "a release of another round by the same server": ("plan", lambda w: w.take(w.bundle("", SERVER, "release", w.other_plan))),
    "a client's upload as the release": ("signature", lambda w: w.take(w.bundle())),
    "an upload signed by the server as the release": ("kind", lambda w: w.take(w.bundle("north", SERVER))),
    "a release that names a receiver": ("client", lambda w: w.take(w.bundle("north", SERVER, "release"))),
    "a personal part as the release": ("release", lambda w: w.take(w.bundle("north", SERVER, "personal"))),
    "the personal part of another client": ("client", _foreign_part),
    "a personal part of another release": ("personal", _of_another_release),
    "an upload as the personal part": ("signature", _upload_as_part),
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("name", FILES)
def test_a_false_identity_is_refused(name: str, world: World) -> None:
    field, attack = FILES[name]
    with pytest.raises(OsflError) as caught:
        attack(world)
    no = caught.value
    assert no.field == field and no.fix and no.exit_code in (1, 2)
    if isinstance(no, Rejected):
        assert no.client and no.expected is not None and no.got is not None
    kept = {path.name for path in (world.round / "inbox").iterdir()}
    assert kept == ({"north.safetensors"} if "second" in name else set()), "nothing of it was kept"
    assert not list((world.folder / "work").rglob("model.safetensors"))


def test_the_honest_ones_get_through(world: World) -> None:
    """Else the table above would show nothing."""
    world.receive(world.bundle())
    world.receive(world.bundle("south", SOUTH))
    assert list(coordinator.status(world.round).missing) == []
    world.take(world.bundle("", SERVER, "release"))
    own, digest = world.personal("north")
    world.take(world.bundle("", SERVER, "release", made_from={"personal/north": digest}), own)


def _enroll(w: World, north: str, south: str, server: str = SERVER.public_hex, **more: str) -> None:
    coordinator.open_new(w.folder / "new", w.plan, {"north": north, "south": south, **more}, server)


KEYS: dict[str, tuple[str, Attack]] = {
    "two clients with one key": ("enrolled", lambda w: _enroll(w, NORTH.public_hex, NORTH.public_hex)),
    "a client with the server's key": ("enrolled", lambda w: _enroll(w, SERVER.public_hex, SOUTH.public_hex)),
    "a client that the plan does not know": (
        "enrolled",
        lambda w: _enroll(w, NORTH.public_hex, SOUTH.public_hex, mallory=MALLORY.public_hex),
    ),
    "a key in capitals": ("key", lambda w: _enroll(w, NORTH.public_hex.upper(), SOUTH.public_hex)),
    "a key that is none": ("key", lambda w: _enroll(w, "north", SOUTH.public_hex)),
    "no server key": ("key", lambda w: _enroll(w, NORTH.public_hex, SOUTH.public_hex, "")),
    "other keys for a round that is open": (
        "enrolled",
        lambda w: coordinator.open_new(
            w.round, w.plan, {"north": MALLORY.public_hex, "south": SOUTH.public_hex}, SERVER.public_hex
        ),
    ),
    "another server for a round that is open": (
        "enrolled",
        lambda w: coordinator.open_new(
            w.round, w.plan, {"north": NORTH.public_hex, "south": SOUTH.public_hex}, OTHER_SERVER.public_hex
        ),
    ),
    "a client's key to run the server phase": ("key", _upload_as_client),
    "a client called server": ("plan", lambda w: check_plan(plan(clients=("north", "server")))),
    "a client called like a path": ("plan", lambda w: check_plan(plan(clients=("north", "../south")))),
    "a client called nothing": ("plan", lambda w: check_plan(plan(clients=("north", "")))),
    "a client that looks like another": ("plan", lambda w: check_plan(plan(clients=("north", "n\u043erth")))),
    "a device's name": ("plan", lambda w: check_plan(plan(clients=("north", "con")))),
}


@pytest.mark.parametrize("name", KEYS)
def test_no_round_opens_with_confused_identities(name: str, world: World) -> None:
    field, attack = KEYS[name]
    with pytest.raises(OsflError) as caught:
        attack(world)
    assert caught.value.field == field
    assert not (world.folder / "new").exists()
    assert read_policy(world.round).enrolled == {"north": NORTH.public_hex, "south": SOUTH.public_hex}, "it still stands"


def test_a_release_that_lies_about_its_origin_is_traced(world: World) -> None:
    """Even the server cannot claim uploads that are not there."""
    paths = {name: world.folder / f"{name}.safetensors" for name in ("north", "release")}
    paths["north"].write_bytes(world.bundle())
    claimed = {"upload/north": "0" * 64, "upload/south": "1" * 64}
    paths["release"].write_bytes(world.bundle("", SERVER, "release", made_from=claimed))
    known = Known(world.plan.digest, SERVER.public_hex, read_policy(world.round))
    release = examine([paths["release"], paths["north"]], known)[0]
    assert [check.answer for check in release.checks] == ["yes", "no", "not checked", "not checked"] and not release.good


def test_the_tables_are_large() -> None:
    assert len(FILES) >= 20 and len(FILES) + len(KEYS) >= 40
