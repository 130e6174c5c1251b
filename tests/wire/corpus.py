"""Named bad files, and the field that the refusal must name. Add every new attack here."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from osfl.core.tensors import RawTensor
from tests.wire.forge import KEY, OTHER, OTHER_KEY, OTHER_PLAN, UNKNOWN, Draft, draft, padded, split, upload

GROUP_ORDER = 2**252 + 27742317777372353535851937790883648493  # of Ed25519
Maker = Callable[[], bytes]
CORPUS: dict[str, tuple[str, Maker]] = {}


def bad(name: str, field: str, maker: Maker) -> None:
    assert name not in CORPUS
    CORPUS[name] = (field, maker)


def raw(header: str | bytes, length: int | None = None) -> Maker:
    """A file with this header and no tensors."""
    text = header if isinstance(header, bytes) else header.encode("utf-8", "surrogatepass")
    return lambda: struct.pack("<Q", len(text) if length is None else length) + text


def changed(*path: str, to: Any = None, drop: bool = False) -> Maker:
    """The good manifest with one place changed, signed again."""

    def make() -> bytes:
        made = draft()
        place: Any = made.manifest
        for key in path[:-1]:
            place = place[key]
        if drop:
            del place[path[-1]]
        else:
            place[path[-1]] = to
        return made.build()

    return make


def entry(name: str, key: str, value: Any) -> Maker:
    """A header that tells safetensors readers something else than was signed."""

    def make() -> bytes:
        made = draft()
        made.entries[name][key] = value
        return made.build()

    return make


def change(edit: Callable[[Draft], Any], **how: Any) -> Maker:
    def make() -> bytes:
        made = draft()
        edit(made)
        return made.build(**how)

    return make


def message(**facts: Any) -> Maker:
    return lambda: upload(facts_changed=facts)


def holds(**tensors: Any) -> Maker:  # names that `upload` does not take for its own
    return lambda: upload(**tensors)


def respelled(edit: Callable[[str], str]) -> Maker:
    """The good header, spelled differently; the signature stays good."""
    return lambda: draft().build(header=padded(edit(json.dumps(split(upload())[0], sort_keys=True, separators=(",", ":")))))


def resigned(edit: Callable[[str], str]) -> Maker:
    """The good manifest, spelled differently and signed so."""
    return lambda: draft().build(text=edit(json.dumps(draft().manifest, sort_keys=True, separators=(",", ":"))))


def good_signature() -> str:
    return str(split(upload())[0]["__metadata__"]["signature"])


def malleated() -> bytes:
    """The good signature with the group order added: some verifiers say yes to both."""
    signature = bytes.fromhex(good_signature())
    scalar = int.from_bytes(signature[32:], "little") + GROUP_ORDER
    return draft().build(signature=(signature[:32] + scalar.to_bytes(32, "little")).hex())


def swapped_bodies() -> bytes:
    made = draft()
    made.body = made.body[24:48] + made.body[:24] + made.body[48:]  # labels and weights are 24 bytes each
    return made.build()


def floats(code: str, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


NAN, INF = float("nan"), float("inf")
DEEP = "[" * 20_000 + "]" * 20_000

bad("empty file", "size", lambda: b"")
bad("seven bytes", "size", lambda: b"\0" * 7)
bad("larger than the plan allows", "size", lambda: upload() + b"\0" * (64 << 10))
bad("header longer than the limit", "header length", lambda: struct.pack("<Q", (32 << 10) + 1) + b" " * (40 << 10))
bad("header longer than the file", "header length", raw("{}", length=3))
bad("header of 2^63 bytes", "header length", raw("{}", length=2**63))
bad("header of 2^64-1 bytes", "header length", raw("{}", length=2**64 - 1))
bad("cut in the header", "header length", lambda: upload()[:100])
bad("zip archive", "header length", lambda: b"PK\x03\x04" + upload())
bad("pickle", "header length", lambda: b"\x80\x04\x95\x8c\0\0\0\0" + b"\0" * 200)
bad("no header", "header", raw(""))
bad("header is not JSON", "header", raw("hello"))
bad("header is a list", "header", raw("[]"))
bad("header is null", "header", raw("null"))
bad("header in Latin-1", "header", raw(b'{"\xe9":1}'))
bad("header in UTF-16", "header", raw("{}".encode("utf-16-le")))
bad("header with a byte order mark", "header", raw("\ufeff{}"))
bad("header with a second value", "header", raw("{}{}"))
bad("header with a comment", "header", raw("{} // hi"))
bad("header with a NUL", "header", raw("{}\0"))
bad("duplicate key", "header", raw('{"a":1,"a":1}'))
bad("duplicate metadata", "header", respelled(lambda text: '{"__metadata__":{},' + text[1:]))
bad("duplicate key by escape", "header", raw('{"a":1,"\\u0061":2}'))
bad("NaN in the header", "header", raw('{"a":NaN}'))
bad("infinity in the header", "header", raw('{"a":-Infinity}'))
bad("overflowing number in the header", "header", raw('{"a":1e999}'))
bad("integer of 10,000 digits", "header", raw('{"a":' + "9" * 10_000 + "}"))
bad("integer beyond 64 bits", "header", raw('{"a":9223372036854775808}'))
bad("half a surrogate pair", "header", raw('{"a":"\\ud800"}'))
bad("half a surrogate pair as a key", "header", raw('{"\\udfff":1}'))
bad("deep lists", "header", raw('{"a":' + DEEP[:30_000] + "}"))
bad("deep objects", "header", raw('{"a":' * 4_000 + "1" + "}" * 4_000))
bad("seventeen levels", "header", raw('{"a":' * 17 + "1" + "}" * 17))

bad("no metadata", "metadata", raw("{}"))
bad("metadata is a list", "metadata", raw('{"__metadata__":[]}'))
bad("no signature", "metadata", lambda: draft().build(metadata={"manifest": "{}"}))
bad("a third key", "metadata", lambda: draft().build(metadata={"manifest": "{}", "signature": "", "format": "pt"}))
bad("manifest is an object", "metadata", lambda: draft().build(metadata={"manifest": {}, "signature": ""}))
bad("signature is null", "metadata", lambda: draft().build(metadata={"manifest": "{}", "signature": None}))
bad("manifest is not JSON", "manifest", lambda: draft().build(text="hello"))
bad("manifest is a list", "manifest", lambda: draft().build(text="[]"))
bad("manifest with a duplicate client", "manifest", resigned(lambda text: '{"client":"st-john",' + text[1:]))
bad("manifest with NaN", "manifest", resigned(lambda text: text.replace("0.5", "NaN")))
bad("manifest with a half surrogate", "manifest", resigned(lambda text: text.replace("\\u00e9", "\\ud800")))
bad("manifest nested deeply", "manifest", lambda: draft().build(text='{"a":' + DEEP[:9_000] + "}"))

bad("nobody", "client", changed("client", drop=True))
bad("unknown client", "client", lambda: upload("mallory", UNKNOWN))
bad("client is a number", "client", changed("client", to=7))
bad("client is a path", "client", changed("client", to="../../etc/passwd"))
bad("client in capitals", "client", changed("client", to="ST-MARY"))
bad("client with a space", "client", changed("client", to="st-mary "))
bad("client with terminal codes", "client", changed("client", to="\x1b[2Jst-mary"))
bad("client is a list", "client", changed("client", to=["st-mary"]))

bad("signed by an unknown key", "signature", lambda: upload(key=UNKNOWN))
bad("signed by another client", "signature", lambda: upload(key=OTHER_KEY))
bad("in another client's name", "signature", lambda: upload(OTHER, KEY))
bad("empty signature", "signature", lambda: draft().build(signature=""))
bad("signature of zeros", "signature", lambda: draft().build(signature="0" * 128))
bad("the good signature in capitals", "signature", lambda: draft().build(signature=good_signature().upper()))
bad("signature with a newline", "signature", respelled(lambda text: text.replace('"signature":"', '"signature":"\\n')))
bad("signature too long", "signature", respelled(lambda text: text.replace('"signature":"', '"signature":"00')))
bad("signature plus group order", "signature", malleated)
bad("signature of other words", "signature", lambda: draft().build(signature=KEY.sign(b"other words")))
bad("changed after signing", "signature", respelled(lambda text: text.replace('\\"samples\\":12', '\\"samples\\":13')))

bad("next format", "format", changed("format", to=2))
bad("format is true", "format", changed("format", to=True))
bad("format is text", "format", changed("format", to="1"))
bad("no format", "format", changed("format", drop=True))
bad("manifest lacks facts", "manifest", changed("facts", drop=True))
bad("manifest says more", "manifest", changed("extra", to=1))
bad("a release as an upload", "kind", lambda: upload(kind="release"))
bad("unknown kind", "kind", changed("kind", to=["upload"]))
bad("upload of another round", "plan", lambda: upload(plan=OTHER_PLAN))
bad("plan in capitals", "plan", lambda: upload(plan=draft().manifest["plan"].upper()))
bad("plan is null", "plan", changed("plan", to=None))
bad("made from something", "made_from", changed("made_from", to={OTHER: OTHER_PLAN}))
bad("made from a list", "made_from", changed("made_from", to=[]))

bad("facts are a list", "facts", changed("facts", to=[]))
bad("no architecture", "facts.architecture", message(architecture=None))
bad("unknown architecture", "facts.architecture", message(architecture="resnet152"))
bad("architecture is a number", "facts.architecture", message(architecture=1))
bad("architecture of someone else", "model/v", message(architecture="mlp"))
bad("tensors are a list", "tensors", changed("tensors", to=[]))
bad("tensor without a name", "tensors", changed("tensors", "", to={"dtype": "U8", "shape": [0], "sha256": "0" * 64}))
bad("tensor named in Greek", "tensors", changed("tensors", "λ", to={"dtype": "U8", "shape": [0], "sha256": "0" * 64}))
bad("tensor named __metadata__", "tensors", changed("tensors", "__metadata__", to={}))
bad("tensor described by a list", "mask", changed("tensors", "mask", to=[]))
bad("tensor without a hash", "mask", changed("tensors", "mask", "sha256", drop=True))
bad("tensor with an offset", "mask", changed("tensors", "mask", "offset", to=0))
bad("unknown dtype", "mask.dtype", changed("tensors", "mask", "dtype", to="F8_E4M3"))
bad("dtype is a list", "mask.dtype", changed("tensors", "mask", "dtype", to=["BOOL"]))
bad("negative size", "mask.shape", changed("tensors", "mask", "shape", to=[-4]))
bad("size is a float", "mask.shape", changed("tensors", "mask", "shape", to=[4.0]))
bad("size is true", "mask.shape", changed("tensors", "mask", "shape", to=[True]))
bad("shape is a number", "mask.shape", changed("tensors", "mask", "shape", to=4))
bad("seventeen dimensions", "mask.shape", changed("tensors", "mask", "shape", to=[1] * 17))
bad("hash in capitals", "mask.sha256", changed("tensors", "mask", "sha256", to="A" * 64))
bad("short hash", "mask.sha256", changed("tensors", "mask", "sha256", to="ab"))
bad("missing tensor", "model/w", lambda: upload(drop="model/w"))
bad("extra tensor", "extra", holds(extra=RawTensor("U8", (1,), b"\0")))
bad("extra empty tensor", "extra", holds(extra=RawTensor("F32", (0,), b"")))
bad("wrong dtype", "model/w.dtype", holds(model__w=RawTensor("I32", (2, 3), bytes(24))))
bad("transposed", "model/w.shape", holds(model__w=RawTensor("F32", (3, 2), bytes(24))))
bad("flattened", "model/w.shape", holds(model__w=RawTensor("F32", (6,), bytes(24))))
bad("one channel too many", "model/w.shape", holds(model__w=RawTensor("F32", (2, 4), bytes(32))))
bad("sizes that overflow", "model/w.shape", changed("tensors", "model/w", "shape", to=[2**62, 2**62]))
bad("labels for other tokens", "tokens.shape", holds(tokens=RawTensor("F16", (4, 2), bytes(16))))
bad("fewer tokens than labels", "tokens.shape", holds(tokens=RawTensor("F16", (2, 2), bytes(8))))

bad("header hides a tensor", "header", change(lambda made: made.entries.pop("mask")))
bad("header shows another tensor", "header", change(lambda made: made.entries.update(extra=made.entries["mask"])))
bad("header with another dtype", "mask.dtype", entry("mask", "dtype", "U8"))
bad("header with another shape", "mask.shape", entry("mask", "shape", [2, 2]))
bad("header entry is null", "mask.dtype", change(lambda made: made.entries.update(mask=None)))
bad("overlapping tensors", "mask.data_offsets", entry("mask", "data_offsets", [0, 4]))
bad("offsets backwards", "mask.data_offsets", entry("mask", "data_offsets", [66, 62]))
bad("offsets beyond the file", "mask.data_offsets", entry("mask", "data_offsets", [1 << 40, (1 << 40) + 4]))
bad("offsets beyond 63 bits", "mask.data_offsets", entry("mask", "data_offsets", [-4, 0]))
bad("bytes after the last tensor", "size", lambda: upload() + b"\0")
bad("a second file behind the first", "size", lambda: upload() + upload())
bad("cut in the body", "size", lambda: upload()[:-1])
bad("no body", "size", change(lambda made: setattr(made, "body", b"")))

bad("one byte of a weight", "model/w.sha256", change(lambda made: setattr(made, "body", made.body.replace(b"@@", b"A@"))))
bad("exchanged tensors", "labels.sha256", swapped_bodies)
bad("hash of other data", "mask.sha256", changed("tensors", "mask", "sha256", to=OTHER_PLAN))
bad("NaN weight", "model/w.values", holds(model__w=RawTensor("F32", (2, 3), floats("f", 0, 1, 2, 3, 4, NAN))))
bad("infinite weight", "model/w.values", holds(model__w=RawTensor("F32", (2, 3), floats("f", INF, 1, 2, 3, 4, 5))))
bad("minus infinity", "model/w.values", holds(model__w=RawTensor("F32", (2, 3), floats("f", 0, -INF, 2, 3, 4, 5))))
bad("half-precision NaN", "tokens.values", holds(tokens=RawTensor("F16", (3, 2), floats("e", 0, 0, 0, 0, 0, NAN))))
bad("bfloat16 infinity", "model/scale.values", holds(model__scale=RawTensor("BF16", (), b"\x80\x7f")))
bad("bfloat16 NaN", "model/scale.values", holds(model__scale=RawTensor("BF16", (), b"\xc1\xff")))
bad("label out of range", "labels.values", holds(labels=RawTensor("I64", (3,), struct.pack("<3q", 0, 3, 1))))
bad("negative label", "labels.values", holds(labels=RawTensor("I64", (3,), struct.pack("<3q", 0, -1, 1))))
bad("boolean of two", "mask.values", holds(mask=RawTensor("BOOL", (4,), bytes([0, 1, 2, 1]))))

bad("no samples", "facts.samples", message(samples=0))
bad("negative samples", "facts.samples", message(samples=-1))
bad("a million and one samples", "facts.samples", message(samples=10**6 + 1))
bad("a million and one images of a class", "facts.class_counts", message(class_counts=[0, 10**6 + 1, 0]))
bad("a million and one images of all classes", "facts.class_counts", message(class_counts=[10**6, 1, 0]))
bad("samples is true", "facts.samples", message(samples=True))
bad("samples is a float", "facts.samples", message(samples=4.0))
bad("samples is null", "facts.samples", changed("facts", "samples", to=None))
bad("counts of two classes", "facts.class_counts", message(class_counts=[1, 2]))
bad("negative count", "facts.class_counts", message(class_counts=[1, 2, -3]))
bad("count is true", "facts.class_counts", message(class_counts=[1, 2, True]))
bad("no image of any class", "facts.class_counts", message(class_counts=[0, 0, 0]))
bad("counts are an object", "facts.class_counts", message(class_counts={"0": 1, "1": 1, "2": 1}))
bad("facts too large", "facts", message(note="x" * 2000))
bad("facts too deep", "facts", changed("facts", "note", to=[[[[]]]]))

bad("manifest with spaces", "manifest", resigned(lambda text: text.replace(":", ": ", 1)))
bad("manifest with a newline", "manifest", resigned(lambda text: text + "\n"))
bad("manifest in another order", "manifest", resigned(lambda text: json.dumps(dict(reversed(json.loads(text).items())))))
bad("manifest not in ASCII", "manifest", resigned(lambda text: text.replace("\\u00e9", "é")))
bad("manifest with 5e-1", "manifest", resigned(lambda text: text.replace("0.5", "5e-1")))
bad("header with spaces", "header", respelled(lambda text: text.replace(":", ": ", 1)))
bad("header starts with a space", "header", respelled(lambda text: " " + text))
bad("header with too much padding", "header", respelled(lambda text: text + " " * 8))
bad("header padded with tabs", "header", respelled(lambda text: text + "\t" * (-len(text) % 8 or 8)))
bad("header with an escape", "header", respelled(lambda text: text.replace('"mask":{', '"m\\u0061sk":{')))
bad("header in another order", "header", respelled(lambda text: json.dumps(dict(reversed(json.loads(text).items())))))
bad("header with 4.0", "header", entry("mask", "shape", [4.0]))
bad("header with true", "header", entry("model/w", "extra", True))
