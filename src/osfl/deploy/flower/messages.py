"""Messages between the coordinator's app and a site's: six requests, all sent by the coordinator.

    announce round, plan, nonce, wanted      → client, proof; the upload's size, hash and first piece; or a refusal
    chunk    round, client, offset, length   → that piece of the upload
    repair   round, client, plan, request → the site's repair of a secure sum, sealed to the server
    receipt  round, client, digest | refused → noted at the site: the upload is in the inbox, or why it is not
    put      round, client, part, offset ... → how much of the release the site has now
    take     round, client, plan             → the site verified the release and made its model of it

No message holds the location of a site's data: paths and keys are the site's own configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from osfl.core.types import ClientId, canonical
from osfl.deploy.flower.chunks import Chunk

MessageBody: TypeAlias = Mapping[str, str | int | bytes]  # the content of one message; flat, so that any network can carry it

ANNOUNCE, CHUNK, RECEIPT, PUT, TAKE, REPAIR = "announce", "chunk", "receipt", "put", "take", "repair"
KINDS = (ANNOUNCE, CHUNK, RECEIPT, PUT, TAKE, REPAIR)
LONG = (ANNOUNCE, TAKE)  # a site may learn before it answers


@dataclass(frozen=True)
class Reply:
    """An answer, or the network's error that there will be none."""

    node: int
    ticket: str  # of the question
    body: MessageBody | None
    error: str = ""


def statement(fl_round: str, client: ClientId, nonce: str) -> bytes:
    """What a site signs to show that it is this client, now, in this round."""
    return canonical(["osfl site at the network", fl_round, client, nonce])


def chunk_body(chunk: Chunk) -> dict[str, str | int | bytes]:
    return {"offset": chunk.offset, "data": chunk.data, "sha256": chunk.sha256}


def chunk_in(body: MessageBody) -> Chunk | None:
    """The piece that a message carries, if it has the right form."""
    offset, data, sha256 = body.get("offset"), body.get("data"), body.get("sha256")
    if isinstance(offset, int) and isinstance(data, bytes) and isinstance(sha256, str):
        return Chunk(offset, data, sha256)
    return None


def text(body: MessageBody, key: str) -> str:
    value = body.get(key, "")
    return value if isinstance(value, str) else ""


def number(body: MessageBody, key: str) -> int:
    value = body.get(key, -1)
    return value if isinstance(value, int) else -1


def plan_text(plan: object) -> str:
    return json.dumps(plan, sort_keys=True)
