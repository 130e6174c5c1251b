"""A small round to attack: its coordinator, its keys, one good upload, and a way to take a bundle apart and lie in any
place."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Any

from osfl.core.tensors import RawTensor
from osfl.core.types import Field, Limits, canonical
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy
from osfl.wire.signing import SigningKey

CLIENT, OTHER = "st-mary", "st-john"
KEY, OTHER_KEY, UNKNOWN, SERVER = (SigningKey.from_seed(letter * 32) for letter in (b"m", b"j", b"x", b"s"))
PLAN, OTHER_PLAN = (hashlib.sha256(name).hexdigest() for name in (b"this round", b"another round"))
CONTRACTS = {
    "cnn": {
        "model/w": Field("F32", (2, 3)),
        "model/scale": Field("BF16", ()),
        "labels": Field("I64", ("n",), below=3),
        "tokens": Field("F16", ("n", 2), required=False),
        "mask": Field("BOOL", (4,), required=False),
    },
    "mlp": {"model/v": Field("F64", (2,))},
}
POLICY = AcceptancePolicy(
    PLAN,
    {CLIENT: KEY.public_hex, OTHER: OTHER_KEY.public_hex},
    CONTRACTS,
    classes=3,
    limits=Limits(upload_bytes=64 << 10, header_bytes=32 << 10, facts_bytes=1 << 10),
)


def tensors() -> dict[str, RawTensor]:
    return {
        "model/w": RawTensor("F32", (2, 3), struct.pack("<6f", *range(6))),
        "model/scale": RawTensor("BF16", (), b"\x80\x3f"),
        "labels": RawTensor("I64", (3,), struct.pack("<3q", 0, 1, 2)),
        "tokens": RawTensor("F16", (3, 2), struct.pack("<6e", *range(6))),
        "mask": RawTensor("BOOL", (4,), bytes([0, 1, 1, 0])),
    }


def facts() -> dict[str, Any]:
    return {"architecture": "cnn", "samples": 12, "class_counts": [3, 4, 5], "note": {"site": "é", "rate": 0.5}}


def upload(
    client: str = CLIENT,
    key: SigningKey = KEY,
    plan: str = PLAN,
    kind: Any = "upload",
    drop: str = "",
    facts_changed: dict[str, Any] | None = None,
    **changed: RawTensor,
) -> bytes:
    """A well-formed file: the good upload with other tensors (`__` stands for `/`) or facts (None removes one)."""
    parts = tensors() | {name.replace("__", "/"): tensor for name, tensor in changed.items()}
    parts.pop(drop, None)
    reported = {name: value for name, value in (facts() | (facts_changed or {})).items() if value is not None}
    return pack(kind, client, plan, parts, reported, key)


@dataclass
class Draft:
    """A bundle taken apart. What is not overridden in `build` is put together as an honest sender would."""

    manifest: dict[str, Any]
    entries: dict[str, Any]
    body: bytes

    def build(
        self,
        key: SigningKey = KEY,
        text: str | None = None,  # the manifest's spelling
        signature: Any = None,
        metadata: Any = None,
        header: bytes | None = None,
        length: int | None = None,
    ) -> bytes:
        text = canonical(self.manifest).decode() if text is None else text
        if signature is None:
            signature = key.sign(text.encode("utf-8", "surrogatepass"))
        if metadata is None:
            metadata = {"manifest": text, "signature": signature}
        if header is None:
            header = padded(json.dumps({"__metadata__": metadata, **self.entries}, sort_keys=True, separators=(",", ":")))
        return struct.pack("<Q", len(header) if length is None else length) + header + self.body


def draft(data: bytes | None = None) -> Draft:
    header, body = split(upload() if data is None else data)
    metadata = header.pop("__metadata__")
    return Draft(json.loads(metadata["manifest"]), header, body)


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and body, by a reader that believes everything."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def padded(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return raw + b" " * (-len(raw) % 8)
