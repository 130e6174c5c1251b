"""Random bundles from honest to absurd. Half are signed by an enrolled client *after* they were changed."""

from __future__ import annotations

import json
import random
import struct
import time
from collections.abc import Callable
from typing import Any

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.wire.gate import accept
from tests.wire.forge import CLIENT, KEY, OTHER, OTHER_PLAN, POLICY, Draft, draft, padded, split, upload
from tests.wire.oracle import acceptable

_ODD: list[Any] = [None, True, 0, -1, 1, 2, 3, 2**63, 10**30, 0.5, 1e300, "", "F32", "é", "\ud800", [], {}, [[]], [0], [-1]]
_ODD += [[2, 3], [3, 2], [2, 3.0], [True], {"a": {"b": {"c": {"d": 1}}}}, "x" * 5000, OTHER, "../x", OTHER_PLAN, "A" * 64]


def fuzzed(seed: int) -> bytes:
    """Bundle number `seed`: even ones are signed after the change, odd ones are damaged afterwards."""
    rng = random.Random(seed)
    return signed(rng) if seed % 2 == 0 else damaged(rng)


def campaign(count: int, first: int = 0) -> dict[str, Any]:
    """Throw `count` bundles at the gate and compare with the second opinion."""
    found = {"bundles": count, "signed": 0, "accepted": 0, "unhandled": 0, "wrong_accepts": 0, "wrong_refusals": 0}
    slowest, fields = 0.0, set()
    for seed in range(first, first + count):
        data = fuzzed(seed)
        start = time.perf_counter()
        try:
            accept(data, POLICY)
            verdict = True
        except Rejected as no:
            verdict = False
            fields.add(no.field)
        except Exception:
            verdict = None
        slowest = max(slowest, time.perf_counter() - start)
        right = acceptable(data, POLICY)
        found["signed"] += seed % 2 == 0
        found["accepted"] += verdict is True
        found["unhandled"] += verdict is None
        found["wrong_accepts"] += verdict is True and not right
        found["wrong_refusals"] += verdict is False and right
    return {**found, "slowest_ms": round(slowest * 1000, 2), "different_fields": len(fields)}


def damaged(rng: random.Random) -> bytes:
    """Bytes changed after signing."""
    data = bytearray(upload(facts_changed={"samples": rng.randint(1, 99)}))
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        at = rng.randrange(len(data) or 1)
        change = rng.randrange(7)
        if change == 0:
            data[at : at + 1] = bytes([data[at] ^ 1 << rng.randrange(8)]) if data else b""
        elif change == 1:
            data[at : at + 1] = rng.randbytes(1)
        elif change == 2:
            del data[at : at + rng.choice([1, 8, 1000])]
        elif change == 3:
            data[at:at] = rng.choice([b" ", b'"', b"{", b"[" * 999, b"\\u0000", b"1e999", rng.randbytes(8)])
        elif change == 4:
            data[:8] = struct.pack("<Q", rng.choice([0, 1, len(data), 2**32, 2**63, rng.randrange(2000)]))
        elif change == 5:
            other = upload(OTHER, facts_changed={"samples": rng.randint(1, 99)})
            data[at:] = other[at:]
        else:
            start = rng.randrange(len(data) or 1)
            data[at:at] = data[start : start + rng.randrange(64)]
    return bytes(data)


def signed(rng: random.Random) -> bytes:
    """Lies told by someone with a good key."""
    choice = rng.randrange(7)
    if choice == 0:
        return upload(**_other_tensor(rng))
    if choice == 1:
        return upload(drop=rng.choice(["model/w", "model/scale", "labels", "tokens", "mask"]))
    made = draft(upload(facts_changed={"samples": rng.randint(1, 99)}))
    change: Callable[[Draft, random.Random], bytes] = rng.choice([_boast, _lie, _lie, _mislead, _respell, _disorder])
    return change(made, rng)


def _other_tensor(rng: random.Random) -> dict[str, Any]:
    """A tensor with other values, another shape, or another dtype; sometimes still a good one."""
    rows = rng.choice([0, 1, 3, 3, 3, 4])
    values = [rng.choice([0, 1, 2, 2, 3, -1, 2**62]) if rng.random() < 0.3 else rng.randrange(3) for _ in range(rows)]
    numbers = [rng.choice([0.0, 1.0, -1.5, 1.0, float("nan"), float("inf")]) for _ in range(rows * 2)]
    return rng.choice(
        [
            {"labels": RawTensor("I64", (rows,), struct.pack(f"<{rows}q", *values))},
            {"tokens": RawTensor("F16", (rows, 2), struct.pack(f"<{rows * 2}e", *numbers))},
            {"model__w": RawTensor("F32", (2, rows), struct.pack(f"<{rows * 2}f", *numbers))},
            {"model__scale": RawTensor("BF16", (), rng.randbytes(1) + rng.choice([b"\x3f", b"\x7f", b"\xff"]))},
            {"mask": RawTensor("BOOL", (4,), bytes(rng.choice([0, 1, 1, 2]) for _ in range(4)))},
            {rng.choice(["extra", "model__w2"]): RawTensor("U8", (rows,), bytes(rows))},
        ]
    )


def _boast(made: Draft, rng: random.Random) -> bytes:
    """Facts that are wrong, or odd but fine."""
    counts = [rng.randint(-1, 9) for _ in range(rng.randint(2, 4))]
    value = rng.choice([*_ODD, rng.randint(-5, 2**40), counts, counts, "mlp"])
    made.manifest["facts"][rng.choice(["samples", "class_counts", "architecture", "extra"])] = value
    return made.build()


def _lie(made: Draft, rng: random.Random) -> bytes:
    """Any place of the manifest, at any depth, replaced or removed."""
    place: Any = made.manifest
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.3:
            break
        place = place[key]
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice(_ODD)
    return made.build()


def _mislead(made: Draft, rng: random.Random) -> bytes:
    """A header that tells safetensors readers something else than was signed, or a body that differs."""
    name = rng.choice(list(made.entries))
    key = rng.choice(["dtype", "shape", "data_offsets"])
    change = rng.randrange(5)
    if change == 0:
        made.entries[name][key] = rng.choice(["F16", "I32", [0, 8], [6], [2, 3], [8, 0], None, [0, 2**63]])
    elif change == 1:
        made.entries[rng.choice(["extra", "mask"])] = made.entries.pop(name)
    elif change == 2:
        made.body += rng.randbytes(rng.randint(1, 9))
    elif change == 3:
        made.body = made.body[: rng.randrange(len(made.body))]
    else:
        at = rng.randrange(len(made.body))
        made.body = made.body[:at] + rng.randbytes(1) + made.body[at + 1 :]
    return made.build()


def _respell(made: Draft, rng: random.Random) -> bytes:
    """The same meaning in another spelling, signed."""
    other: dict[str, Any] = rng.choice(
        [{"indent": 1}, {"separators": (", ", ":")}, {"ensure_ascii": False}, {"sort_keys": False}]
    )
    options = {"sort_keys": True, "separators": (",", ":"), **other}
    text = json.dumps(made.manifest, **options)
    if rng.random() < 0.5:
        return made.build(text=text)
    header, _ = split(made.build())
    return made.build(header=padded(json.dumps(header, **options)))


def _disorder(made: Draft, rng: random.Random) -> bytes:
    """Signatures by the wrong hand, in the wrong case, or around other words."""
    good = KEY.sign(json.dumps(made.manifest).encode())
    signature = rng.choice([good, good.upper(), "", "0" * 128, 7, None, CLIENT])
    extra: dict[str, Any] = rng.choice([{}, {"extra": "1"}, {"manifest": "{}"}, {"manifest": None}])
    metadata = {"manifest": json.dumps(made.manifest, sort_keys=True, separators=(",", ":")), "signature": signature, **extra}
    return made.build(metadata=metadata)
