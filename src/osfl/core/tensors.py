"""Tensors as bytes, without torch: dtype, shape and little-endian data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

WIDTH = MappingProxyType(  # bytes an element, by safetensors' name
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U32": 4, "U16": 2, "U8": 1} | {"BOOL": 1}
)


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes: little-endian, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview

    def __post_init__(self) -> None:
        if self.dtype not in WIDTH:
            raise ValueError(f"no bundle holds {self.dtype}; known are {', '.join(WIDTH)}")
        expected, got = nbytes(self.dtype, self.shape), memoryview(self.data).nbytes
        if got != expected:
            raise ValueError(f"{self.dtype} {list(self.shape)} takes {expected} bytes, not {got}")


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return WIDTH[dtype] * math.prod(shape)
