"""Convolutions and means over cells in double precision as products of matrices, which every runtime of ONNX computes.

ONNX Runtime has no convolution and no adaptive mean of 64 bits; OneSum's features are in double precision, so
that sums of them are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_CONVOLUTION, _MEAN = torch.ops.aten.conv2d.default, torch.ops.aten.adaptive_avg_pool2d.default


def in_products() -> dict[object, Callable[..., object]]:
    """For `ExportedProgram.run_decompositions`: these two where numbers have 64 bits; everything else stays as it is."""
    return {_CONVOLUTION: convolved, _MEAN: averaged}


def convolved(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> torch.Tensor:
    """The filters times the patches that they see; (batch, channels, height, width)."""
    usual = ((stride, 1), (padding, 0), (dilation, 1))
    plain = bias is None and groups == 1 and all(_pair(one) == (value, value) for one, value in usual)
    if x.dtype != torch.float64 or not plain:
        return NotImplemented  # type: ignore[no-any-return]
    height, width = x.shape[-2] - weight.shape[-2] + 1, x.shape[-1] - weight.shape[-1] + 1
    places = _flat(weight.shape[-2], weight.shape[-1], x.shape[-1])
    positions = _flat(height, width, x.shape[-1])
    seen = (places[:, None] + positions).flatten()  # of each pixel that a place of the filter sees at a position
    patches = x.flatten(2).index_select(2, seen).reshape(-1, x.shape[1] * places.shape[0], positions.shape[0])
    found: torch.Tensor = weight.flatten(1) @ patches
    return found.unflatten(-1, (height, width))  # type: ignore[no-any-return]


def _flat(rows: int, columns: int, width: int) -> torch.Tensor:
    """Where the pixels of a rectangle are in an image of this width whose rows stand one after the other."""
    return (torch.arange(rows)[:, None] * width + torch.arange(columns)).flatten()


def averaged(x: torch.Tensor, output_size: object) -> torch.Tensor:
    """The mean over each cell, with the cells of adaptive pooling."""
    if x.dtype != torch.float64:
        return NotImplemented  # type: ignore[no-any-return]
    rows, columns = (_cells(side, cells).to(x) for side, cells in zip(x.shape[-2:], _pair(output_size), strict=True))
    found: torch.Tensor = rows @ x @ columns.T
    return found


def _cells(side: int, cells: int) -> torch.Tensor:
    """The matrix (cells, side) that takes the mean over floor(i side / cells) to ceil((i + 1) side / cells)."""
    place, cell = torch.arange(side), torch.arange(cells)[:, None]
    inside = ((place + 1) * cells > cell * side) & (place * cells < (cell + 1) * side)
    return inside.double() / inside.sum(1, keepdim=True)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))
