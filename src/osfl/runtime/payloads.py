"""Payloads as ordinary safetensors files on our own disk: whole or not at all. Also torch tensors to raw bytes and back."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from osfl.core.tensors import RawTensor
from osfl.core.types import Json, Payload, digest_of
from osfl.runtime.atomic import replace_atomically
from osfl.runtime.meter import book, measure, spend_again
from osfl.runtime.precision import current_precision

DTYPES = {  # as safetensors names them
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in DTYPES.items()}


def to_raw(tensors: Mapping[str, torch.Tensor]) -> dict[str, RawTensor]:
    """Torch tensors as the wire knows them: dtype, shape and bytes."""
    return {name: _raw(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}


def _raw(tensor: torch.Tensor) -> RawTensor:
    data = tensor.reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
    return RawTensor(DTYPES[tensor.dtype], tuple(tensor.shape), data)


def from_raw(tensors: Mapping[str, RawTensor]) -> dict[str, torch.Tensor]:
    """The other way round; memory of its own, so that nothing aliases the bundle's bytes."""
    return {name: _tensor(raw) for name, raw in tensors.items()}


def _tensor(raw: RawTensor) -> torch.Tensor:
    if not len(raw.data):
        return torch.zeros(raw.shape, dtype=_TORCH[raw.dtype])
    return torch.frombuffer(bytearray(raw.data), dtype=_TORCH[raw.dtype]).reshape(raw.shape)


def save_payload(path: Path, payload: Payload) -> None:
    facts = json.dumps(payload.facts, sort_keys=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_atomically(path, save(tensors, metadata={"facts": facts}))


def load_payload(path: Path) -> Payload | None:
    """What was saved, or None if there is no readable file (it is then made again)."""
    try:
        with safe_open(path, framework="pt") as opened:
            facts = json.loads((opened.metadata() or {}).get("facts", "{}"))
            return Payload({name: opened.get_tensor(name) for name in opened.keys()}, facts)  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, json.JSONDecodeError):
        return None


def payload_digest(payload: Payload) -> str:
    """Equal digests mean equal bytes, names and facts."""
    tensors = {n: [r.dtype, list(r.shape), sha256(r.data).hexdigest()] for n, r in to_raw(payload.tensors).items()}
    return digest_of({"tensors": tensors, "facts": dict(payload.facts)})


class PayloadCache:
    """Work that is named completely by its key is done once and kept; it costs every later user what it cost the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()

    def get_or_compute(self, key: Json, make: Callable[[], Payload]) -> Payload:
        precision = current_precision()  # another one gives other bits
        part = self.folder if precision == "fp32" else self.folder / precision
        path = part / f"{digest_of(key)}.safetensors"
        with self._guard:
            lock = self._locks.setdefault(str(path), threading.Lock())
        with lock:
            start, worked = time.perf_counter(), time.process_time()
            kept = load_payload(path)
            if kept is not None:
                facts = dict(kept.facts)
                cost = facts.pop("cost", {"seconds": 0.0, "flops": 0.0})
                now = cost.get("processor_seconds", 0.0) - (time.process_time() - worked)
                book(cost["seconds"] - (time.perf_counter() - start), now)
                spend_again(cost)
                return Payload(kept.tensors, facts)
            with measure() as meter:
                made = make()
            spent = {"seconds": meter.seconds, "processor_seconds": meter.processor_seconds}
            cost = {**spent, "flops": meter.flops, "made": meter.made, "made_flops": meter.made_flops}
            spend_again(cost)
            save_payload(path, Payload(made.tensors, {**made.facts, "cost": cost}))
            return made
