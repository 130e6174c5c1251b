"""What the numbers of a tensor look like: range, mean, spread, how many are none at all. Little memory beside the file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from osfl.core.tensors import WIDTH, RawTensor
from osfl.core.types import Json
from osfl.wire.values import NUMPY

_CHUNK = 1 << 20  # elements looked at together
BINS = 32


@dataclass(frozen=True)
class Numbers:
    """Of one tensor; None where there is no finite number."""

    count: int
    least: float | None
    most: float | None
    mean: float | None
    deviation: float | None
    not_finite: int

    def as_json(self) -> dict[str, Json]:
        return {
            "count": self.count,
            "least": self.least,
            "most": self.most,
            "mean": self.mean,
            "deviation": self.deviation,
            "not_finite": self.not_finite,
        }


def numbers_of(raw: RawTensor) -> Numbers:
    count, finite, total, squares = 0, 0, 0.0, 0.0
    least, most = math.inf, -math.inf
    for chunk in chunks(raw):
        good = chunk[np.isfinite(chunk)]
        count, finite = count + chunk.size, finite + good.size
        if good.size:
            least, most = min(least, float(good.min())), max(most, float(good.max()))
            with np.errstate(over="ignore"):  # squares of 1e200 are infinite, and then so is the deviation
                total, squares = total + float(good.sum()), squares + float((good * good).sum())
    if not finite:
        return Numbers(count, None, None, None, None, count)
    mean = total / finite
    variance = squares / finite - mean * mean
    deviation = math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else None
    return Numbers(count, least, most, mean if math.isfinite(mean) else None, deviation, count - finite)


def histogram(tensors: Sequence[RawTensor], found: Sequence[Numbers]) -> Json | None:
    """The finite numbers of several tensors together, as a figure of the report; None if there is nothing to draw."""
    lows, highs = [n.least for n in found if n.least is not None], [n.most for n in found if n.most is not None]
    if not lows or not highs or not (max(highs) - min(lows)) > 0 or not math.isfinite(max(highs) - min(lows)):
        return None
    edges = np.linspace(min(lows), max(highs), BINS + 1)
    if len(set(edges.tolist())) < BINS + 1:  # a range so narrow that floats cannot cut it
        return None
    counts = np.zeros(BINS, dtype=np.int64)
    for raw in tensors:
        for chunk in chunks(raw):
            counts += np.histogram(chunk[np.isfinite(chunk)], edges)[0]
    return {
        "kind": "histogram",
        "bins": edges.tolist(),
        "series": {"numbers": counts.tolist()},
        "x_label": "value",
        "y_label": "how many",
    }


def chunks(raw: RawTensor) -> Iterator[npt.NDArray[np.float64]]:
    """The elements in order as float64, some at a time."""
    data, step = memoryview(raw.data), _CHUNK * WIDTH[raw.dtype]
    for start in range(0, data.nbytes, step):
        yield _decoded(np.frombuffer(data[start : start + step], dtype=NUMPY[raw.dtype]), raw.dtype)


def _decoded(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    if dtype == "BF16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)
