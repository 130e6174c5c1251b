"""Check the values of tensors: the signed bytes, finite numbers, labels in range."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.core.types import Contract, Field
from osfl.wire.bundle import TensorEntry

# numpy has no bfloat16; its bits are enough to see what is not finite. A bool is read as the byte that it is.
NUMPY = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "BOOL": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
}
FLOATS = {"F64", "F32", "F16", "BF16"}
_CHUNK_BYTES = 4 << 20  # a check needs little memory beside the upload itself
_BF16_EXPONENT = np.uint16(0x7F80)


def check_hashes(tensors: Mapping[str, RawTensor], entries: Mapping[str, TensorEntry]) -> None:
    for name, tensor in tensors.items():
        got = hashlib.sha256(tensor.data).hexdigest()
        if got != entries[name].sha256:
            raise Rejected(
                f"the data of tensor '{name}' are not what was signed",
                field=f"{name}.sha256",
                expected=entries[name].sha256,
                got=got,
                fix="The file was damaged in transit; copy it again from where it was made.",
            )


def check_values(tensors: Mapping[str, RawTensor], contract: Contract) -> None:
    """All numbers finite, booleans 0 or 1, and labels below their bound; `contract` may be empty."""
    for name, tensor in tensors.items():
        field = contract.get(name)
        if tensor.dtype in FLOATS:
            _check_finite(name, tensor)
            _check_bounds(name, tensor, field)
            continue
        below = 2 if tensor.dtype == "BOOL" else field.below if field else None
        if below is not None:
            _check_range(name, tensor, below)


def _check_finite(name: str, tensor: RawTensor) -> None:
    for chunk in _chunks(tensor):
        if tensor.dtype == "BF16":
            finite = (chunk & _BF16_EXPONENT) != _BF16_EXPONENT
        else:
            finite = np.isfinite(chunk)
        if not finite.all():
            raise Rejected(
                f"tensor '{name}' holds values that are not finite",
                field=f"{name}.values",
                expected="finite numbers",
                got="NaN or infinity",
                fix="Training diverged; lower the learning rate and train again with `osfl client plan.toml`.",
            )


def _check_bounds(name: str, tensor: RawTensor, field: Field | None) -> None:
    """Check the contract's rules for values: none below a bound, or a sum that can be divided by."""
    if field is None or (field.low is None and not field.positive_sum):
        return
    total = 0.0
    for chunk in _chunks(tensor):
        if field.low is not None and float(chunk.min()) < field.low:
            raise _out_of_bounds(name, f"no value below {field.low:g}", f"{float(chunk.min()):g}")
        total += float(chunk.astype(np.float64).sum())
    if field.positive_sum and not total > 0:
        raise _out_of_bounds(name, "values that add up to more than zero", f"{total:g}")


def _out_of_bounds(name: str, expected: str, got: str) -> Rejected:
    return Rejected(
        f"tensor '{name}' holds values out of range",
        field=f"{name}.values",
        expected=expected,
        got=got,
        fix="Train again with `osfl client plan.toml` and this version of osfl.",
    )


def _check_range(name: str, tensor: RawTensor, below: int) -> None:
    for chunk in _chunks(tensor):
        low, high = int(chunk.min()), int(chunk.max())
        if low < 0 or high >= below:
            raise Rejected(
                f"tensor '{name}' holds values out of range",
                field=f"{name}.values",
                expected=f"0 to {below - 1}",
                got=low if low < 0 else high,
                fix="Labels count from 0 in the plan's order of classes; check the client's data with `osfl check`.",
            )


def _chunks(tensor: RawTensor) -> Iterator[npt.NDArray[Any]]:
    data = memoryview(tensor.data)
    for start in range(0, len(data), _CHUNK_BYTES):
        yield np.frombuffer(data[start : start + _CHUNK_BYTES], dtype=NUMPY[tensor.dtype])
