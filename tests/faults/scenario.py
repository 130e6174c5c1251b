"""What happens at the coordinator in all fault tests, and what must be true whatever interrupted it."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.core.types import Field
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy
from osfl.wire.inbox import Inbox
from osfl.wire.refusals import JOURNAL
from osfl.wire.signing import SigningKey
from tests.wire.forge import PLAN

CLIENTS = tuple(f"site-{number:02d}" for number in range(24))
_KEYS = {client: SigningKey.from_seed(client.encode().ljust(32)) for client in CLIENTS}
POLICY = AcceptancePolicy(
    PLAN, {client: key.public_hex for client, key in _KEYS.items()}, {"": {"w": Field("U8", (4000,))}}, classes=2
)
INCOMING = "incoming.safetensors"
Ack = tuple[str, str]  # client, digest


@functools.cache
def upload(client: str, version: int = 0) -> bytes:
    return pack("upload", client, PLAN, {"w": RawTensor("U8", (4000,), bytes(4000))}, {"version": version}, _KEYS[client])


def short_scenario() -> list[bytes]:
    """Two clients upload, one of them twice; then it sends another upload, and somebody unknown sends bytes."""
    first, second = CLIENTS[:2]
    return [upload(first), upload(second), upload(first), upload(first, version=1), b"\0" * 50]


def tell(folder: Path, scenario: Iterable[bytes], acknowledge: Callable[[Ack], None]) -> None:
    """Receive everything; refusals are part of the scenario, other errors end it."""
    inbox = Inbox(folder / "inbox", POLICY)
    for number, data in enumerate(scenario):
        with contextlib.suppress(Rejected):
            receipt = inbox.receive(data if number else folder / INCOMING)  # once as a file
            acknowledge((receipt.client, receipt.digest))


def prepare(folder: Path) -> Path:
    """A folder with the first upload of every scenario as a file."""
    folder.mkdir(parents=True)
    (folder / INCOMING).write_bytes(upload(CLIENTS[0]))
    return folder


def judge(folder: Path, acked: Sequence[Ack], scenario: Sequence[bytes]) -> dict[str, int]:
    """After the interruption: what was acknowledged is there, nothing is torn, and telling it again completes it."""
    found = {"lost": 0, "torn": 0, "not_resumed": 0}
    try:
        stored = {receipt.client: receipt.digest for receipt in Inbox(folder / "inbox", POLICY).uploads()}
    except Exception:
        return {**found, "torn": 1}
    found["lost"] = sum(stored.get(client) != digest for client, digest in acked)
    again: list[Ack] = []
    tell(folder, scenario, again.append)
    clients = {client for client, _ in again}
    complete = {receipt.client for receipt in Inbox(folder / "inbox", POLICY).uploads()} == clients
    same = all(dict(again).get(client) == digest for client, digest in {**stored, **dict(acked)}.items())
    found["not_resumed"] = int(not (clients and complete and same and _journal_is_readable(folder)))
    return found


def _journal_is_readable(folder: Path) -> bool:
    """Whole lines, but for at most one that the crash tore."""
    path = folder / JOURNAL
    torn = 0
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            json.loads(line)
        except ValueError:
            torn += 1
    return torn <= 1
