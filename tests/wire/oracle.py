"""A second opinion on what the gate should accept, written without it: the official safetensors reader, struct, json.

It may be slow and may fail with any exception; an exception means no.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from safetensors import deserialize

from osfl.core.types import Contract
from osfl.wire.gate import AcceptancePolicy

_STRUCT = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}
_WIDTH = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "U8": 1, "BOOL": 1}


def acceptable(data: bytes, policy: AcceptancePolicy) -> bool:
    try:
        return _judge(data, policy)
    except Exception:  # a second opinion does not care why
        return False


def _judge(data: bytes, policy: AcceptancePolicy) -> bool:
    seen = {name: dict(info, data=bytes(info["data"])) for name, info in deserialize(data)}
    length = struct.unpack("<Q", data[:8])[0]
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    output = json.loads(metadata["manifest"])
    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(policy.enrolled[output["client"]]))
    public.verify(bytes.fromhex(metadata["signature"]), metadata["manifest"].encode())
    tensors, facts = output["tensors"], output["facts"]
    expected = {"format": 1, "kind": "upload", "client": output["client"], "plan": policy.plan, "made_from": {}}
    right_round = output == {**expected, "tensors": tensors, "facts": facts} and output["format"] is not True
    small = len(data) <= policy.limits.upload_bytes and length <= policy.limits.header_bytes
    return (
        right_round
        and small
        and _tensors_fit(seen, tensors, policy.contracts[facts["architecture"]])
        and _facts_fit(facts, policy)
        and _spelled(output, metadata["signature"], seen) == data
    )


def _tensors_fit(seen: dict[str, Any], output: dict[str, Any], contract: Contract) -> bool:
    required = {name for name, field in contract.items() if field.required}
    if seen.keys() != output.keys() or not required <= seen.keys() <= contract.keys():
        return False
    free: dict[str, set[int]] = {}
    for name, tensor in seen.items():
        field = contract[name]
        line = {"dtype": tensor["dtype"], "shape": tensor["shape"], "sha256": hashlib.sha256(tensor["data"]).hexdigest()}
        if json.dumps(line, sort_keys=True) != json.dumps(output[name], sort_keys=True) or field.dtype != tensor["dtype"]:
            return False
        if len(field.shape) != len(tensor["shape"]) or not _values_fit(tensor, field.below):
            return False
        for want, size in zip(field.shape, tensor["shape"], strict=True):
            free.setdefault(str(want), {want} if isinstance(want, int) else set()).add(size)
    return all(len(sizes) == 1 for sizes in free.values())


def _values_fit(tensor: dict[str, Any], below: int | None) -> bool:
    raw = tensor["data"]
    if tensor["dtype"] == "BF16":  # the upper half of a float32
        raw = b"".join(b"\0\0" + raw[at : at + 2] for at in range(0, len(raw), 2))
    code = "f" if tensor["dtype"] == "BF16" else _STRUCT[tensor["dtype"]]
    values = struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)
    bound = 2 if tensor["dtype"] == "BOOL" else below
    return all(math.isfinite(v) for v in values) and (bound is None or all(0 <= v < bound for v in values))


def _facts_fit(facts: dict[str, Any], policy: AcceptancePolicy) -> bool:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    counts = facts.get("class_counts", [1] * policy.classes)
    numbers = [facts.get("samples", 1), *counts]
    return (
        len(text) <= policy.limits.facts_bytes
        and _depth(facts) <= 4
        and all(type(number) is int and 0 <= number <= policy.limits.samples for number in numbers)
        and sum(counts) <= policy.limits.samples
        and numbers[0] >= 1
        and type(counts) is list
        and len(counts) == policy.classes
        and (sum(counts) > 0 or not counts)
    )


def _depth(value: Any) -> int:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("no JSON reader agrees on this")
    if isinstance(value, str):
        value.encode()
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


def _spelled(output: dict[str, Any], signature: str, seen: dict[str, Any]) -> bytes:
    """The only file that says this."""

    def compact(value: Any) -> str:
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    header: dict[str, Any] = {"__metadata__": {"manifest": compact(output), "signature": bytes.fromhex(signature).hex()}}
    body = b""
    for name in sorted(seen, key=lambda name: (-_WIDTH[seen[name]["dtype"]], name)):
        start, body = len(body), body + seen[name]["data"]
        header[name] = {"dtype": seen[name]["dtype"], "shape": seen[name]["shape"], "data_offsets": [start, len(body)]}
    text = compact(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return struct.pack("<Q", len(text)) + text + body
