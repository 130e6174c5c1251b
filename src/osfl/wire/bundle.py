"""A bundle: one ordinary .safetensors file with a signed manifest: sender, round, tensors and facts.

Its metadata holds two strings. `manifest` is canonical JSON that lists everything, the sha256 of each tensor included;
`signature` signs those bytes. The manifest's digest is the identity of the contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias

from osfl.core.names import is_tensor_name
from osfl.core.tensors import WIDTH, RawTensor, nbytes
from osfl.core.types import ClientId, Facts, Json, canonical, digest_of
from osfl.wire import strict_json
from osfl.wire.signing import SIGNATURE_DIGITS, SigningKey

FORMAT = 1
FACTS_DEPTH = 4
Kind: TypeAlias = Literal["upload", "release", "personal", "total", "repair"]
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Bundle:
    """The contents of a file that passed its checks."""

    kind: Kind
    client: ClientId  # the sender of an upload, the receiver of a personal part, "" for a release to all and for a total
    plan: str  # digest: the round
    tensors: Mapping[str, RawTensor]
    facts: Facts
    made_from: Mapping[str, str]  # digests of what a release or a total was made from, by client; empty for uploads
    digest: str  # sha256 of the manifest: equal digests mean equal contents
    content: str  # sha256 of its tensors and facts alone, without the plan and the uploads that it names


@dataclass(frozen=True)
class TensorEntry:
    """The entry of one tensor in a manifest."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def as_json(self) -> Json:
        return {"dtype": self.dtype, "shape": list(self.shape), "sha256": self.sha256}


def pack(
    kind: Kind,
    client: ClientId,
    plan: str,
    tensors: Mapping[str, RawTensor],
    facts: Facts,
    key: SigningKey,
    *,
    made_from: Mapping[str, str] = _NOTHING,
) -> bytes:
    """The file. The same message and key give the same bytes."""
    lines = {name: TensorEntry(t.dtype, t.shape, hashlib.sha256(t.data).hexdigest()) for name, t in tensors.items()}
    manifest = manifest_bytes(kind, client, plan, lines, facts, made_from)
    head = header_bytes(manifest.decode(), key.sign(manifest), lines)
    return b"".join([head, *(tensors[name].data for name in data_order(lines))])


def size_of(
    kind: Kind,
    client: ClientId,
    plan: str,
    tensors: Mapping[str, RawTensor],
    facts: Facts,
    *,
    made_from: Mapping[str, str] = _NOTHING,
) -> int:
    """The exact length of the packed file, without hashing or copying a tensor."""
    return promised_size(kind, client, plan, {name: (t.dtype, t.shape) for name, t in tensors.items()}, facts, made_from)


def promised_size(
    kind: Kind,
    client: ClientId,
    plan: str,
    kinds: Mapping[str, tuple[str, tuple[int, ...]]],
    facts: Facts,
    made_from: Mapping[str, str] = _NOTHING,
) -> int:
    """The same before there is any tensor, from dtypes and shapes only: digests have a fixed length."""
    lines = {name: TensorEntry(dtype, shape, "0" * 64) for name, (dtype, shape) in kinds.items()}
    manifest = manifest_bytes(kind, client, plan, lines, facts, made_from)
    head = header_bytes(manifest.decode(), "0" * SIGNATURE_DIGITS, lines)
    return len(head) + sum(nbytes(line.dtype, line.shape) for line in lines.values())


def manifest_bytes(
    kind: str, client: str, plan: str, lines: Mapping[str, TensorEntry], facts: Facts, made_from: Mapping[str, str]
) -> bytes:
    if bad := [name for name in lines if not is_tensor_name(name)]:
        raise ValueError(f"tensor names are 1 to 200 printable ASCII characters, not {bad[0]!r}")
    strict_json.check(plain := dict(facts), depth=FACTS_DEPTH)  # else canonical() would rewrite what it does not know
    return canonical(
        {
            "format": FORMAT,
            "kind": kind,
            "client": client,
            "plan": plan,
            "tensors": {name: line.as_json() for name, line in lines.items()},
            "facts": plain,
            "made_from": dict(made_from),
        }
    )


def content_digest(manifest: Mapping[str, Json]) -> str:
    """Of the tensors and facts in a manifest: two rounds that came to the same model have it in common, to the last bit."""
    return digest_of({name: manifest[name] for name in ("tensors", "facts")})


def header_bytes(manifest: str, signature: str, lines: Mapping[str, TensorEntry]) -> bytes:
    """The beginning of the file up to the first tensor: a length and JSON, padded with spaces to 8 bytes."""
    entries: dict[str, Json] = {
        name: {"dtype": lines[name].dtype, "shape": list(lines[name].shape), "data_offsets": list(span)}
        for name, span in offsets(lines).items()
    }
    text = canonical({"__metadata__": {"manifest": manifest, "signature": signature}, **entries})
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def data_order(lines: Mapping[str, TensorEntry]) -> list[str]:
    """Widest elements first, then by name: every tensor starts at a multiple of its width, as fast readers wish."""
    return sorted(lines, key=lambda name: (-WIDTH[lines[name].dtype], name))


def offsets(lines: Mapping[str, TensorEntry]) -> dict[str, tuple[int, int]]:
    """Where each tensor lies after the header, without gaps."""
    spans, end = {}, 0
    for name in data_order(lines):
        start, end = end, end + nbytes(lines[name].dtype, lines[name].shape)
        spans[name] = (start, end)
    return spans
