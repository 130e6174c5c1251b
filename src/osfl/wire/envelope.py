"""Read the length, header and manifest of a bundle, and check that they agree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from osfl.core.errors import Rejected
from osfl.core.names import shown
from osfl.core.tensors import RawTensor
from osfl.core.types import Json, Limits, canonical
from osfl.wire import strict_json
from osfl.wire.bundle import TensorEntry, header_bytes, offsets
from osfl.wire.contract import REPACK
from osfl.wire.sealing import MAGIC
from osfl.wire.source import Source

INCOMPLETE = "incomplete copy"
SEALED = "The site keeps one that is not sealed in its work folder. Whoever it is for gives --key, such as --key server.key."
OTHER_FILE = "Give a .safetensors file that `osfl client` or `osfl server` wrote."
AGAIN = "Copy it again from where it was made, and wait until that has finished."


@dataclass(frozen=True)
class Envelope:
    """A header that could be read; nothing in it is verified yet."""

    size: int  # of the whole file
    head: bytes  # length and header exactly as they came
    entries: dict[str, Json]  # the header without its metadata: what safetensors readers see
    manifest_text: str
    manifest: Json
    signature: str

    def slices(self, data: memoryview, lines: Mapping[str, TensorEntry]) -> dict[str, RawTensor]:
        """The tensors as windows on `data`."""
        body, spans = data[len(self.head) :], offsets(lines)
        return {name: RawTensor(line.dtype, line.shape, body[slice(*spans[name])]) for name, line in sorted(lines.items())}


def read_envelope(file: Source, limits: Limits) -> Envelope:
    """Size, header length, header JSON, metadata keys; a manifest that is JSON."""
    if file.size < 8:
        raise _no("size", INCOMPLETE, "at least 8 bytes", file.size, AGAIN)
    if file.size > limits.upload_bytes:
        expected, fix = f"at most {limits.upload_bytes} bytes", "The plan sets the limit; give the file as it was made."
        raise _no("size", "the file is too large", expected, file.size, fix)
    start = file.head(8)
    if start == MAGIC[:8]:  # no header is that long
        raise _no("seal", "the bundle is sealed: only who has the key can open it", "a bundle", "a sealed bundle", SEALED)
    length = int.from_bytes(start, "little")
    if length > limits.header_bytes and length > file.size - 8:  # text, an image, an archive: letters read as a length
        raise _no("header length", "this is not a bundle", "a header's length at the beginning", start, OTHER_FILE)
    if length > limits.header_bytes:
        raise _no("header length", "the header is too long", f"at most {limits.header_bytes} bytes", length, REPACK)
    if length > file.size - 8:
        raise _no("header length", INCOMPLETE, f"more than {8 + length} bytes", file.size, AGAIN)
    head = file.head(8 + length)
    if not any(head):  # space that a copying program reserved and did not fill
        raise _no("header", INCOMPLETE, "a header", "zeros", AGAIN)
    header = _parsed(head[8:], "header")
    manifest, signature = _metadata(header)
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return Envelope(file.size, head, entries, manifest, _parsed(manifest.encode(), "manifest"), signature)


def _parsed(text: bytes, field: str) -> dict[str, Json]:
    try:
        value = strict_json.parse(text)
    except ValueError as error:
        raise _no(field, f"the {field} cannot be used: {error}", "strict JSON", text[:80], REPACK) from None
    if not isinstance(value, dict):
        raise _no(field, f"the {field} is not an object", "an object", value, REPACK)
    return value


def _metadata(header: dict[str, Json]) -> tuple[str, str]:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.keys() != {"manifest", "signature"}:
        got = sorted(metadata) if isinstance(metadata, dict) else metadata
        raise _no("metadata", "the metadata has other keys", "manifest and signature", got, REPACK)
    manifest, signature = metadata["manifest"], metadata["signature"]
    if not isinstance(manifest, str) or not isinstance(signature, str):
        raise _no("metadata", "the metadata holds something else than text", "two strings", metadata, REPACK)
    return manifest, signature


def check_layout(envelope: Envelope, lines: Mapping[str, TensorEntry]) -> None:
    """What safetensors readers see is what was signed: the same tensors, back to back, filling the file."""
    if envelope.entries.keys() != lines.keys():
        odd = sorted(envelope.entries.keys() ^ lines.keys())
        raise _no("header", "header and manifest list different tensors", "the same tensors", odd, REPACK)
    spans = offsets(lines)
    for name, line in sorted(lines.items()):
        entry = envelope.entries[name]
        wanted = {"dtype": line.dtype, "shape": list(line.shape), "data_offsets": list(spans[name])}
        for key, value in wanted.items():
            got = entry.get(key) if isinstance(entry, dict) else entry
            if got != value:
                reason = f"the header's {key} of tensor '{name}' does not fit the manifest"
                raise _no(f"{name}.{key}", reason, value, got, REPACK)
    expected = len(envelope.head) + max((end for _, end in spans.values()), default=0)
    if envelope.size < expected:
        raise _no("size", INCOMPLETE, f"{expected} bytes", envelope.size, AGAIN)
    if envelope.size > expected:
        raise _no("size", "something was added to the file", f"{expected} bytes", envelope.size, AGAIN)


def check_canonical(envelope: Envelope, lines: Mapping[str, TensorEntry]) -> None:
    """The one spelling of this message; another one would be a second file with the same meaning."""
    if canonical(envelope.manifest) != envelope.manifest_text.encode():
        raise _no("manifest", "the manifest is not in canonical form", "canonical JSON", "another spelling", REPACK)
    if header_bytes(envelope.manifest_text, envelope.signature, lines) != envelope.head:
        raise _no("header", "the header is not in canonical form", "canonical JSON", "another spelling", REPACK)


def _no(field: str, reason: str, expected: object, got: object, fix: str) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=shown(got), fix=fix)
