"""How near synthetic features are to real ones: the maximum mean discrepancy of whole token sequences.

All tokens of an image stand in one vector, so that what the generator makes of their dependence counts, too. The kernel is
exp(-|x - y|² / m) with m the median squared distance between pairs of the clients' training features (the median
heuristic): it does not depend on the method, so methods on the same shards and features compare. As with images, an equal
number of held-out features is compared as well: what they get is what a perfect generator could get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from osfl.core.method import Context, Method
from osfl.core.result import ClassOfTokens, Tokens
from osfl.core.types import Dataset, Shard, Upload
from osfl.data.source import together
from osfl.evaluation.distances import gaussian_discrepancy, median_squared_distance
from osfl.evaluation.generator_samples import KINDS, Draw, per_class


@dataclass(frozen=True)
class Features:
    """Features of some images, (n, ...), and their labels (n,)."""

    rows: torch.Tensor
    labels: torch.Tensor

    def of(self, label: int) -> torch.Tensor:
        """Those of one class, each as one vector in float64."""
        return self.rows[self.labels == label].flatten(1).double()


def features_by_kind(
    method: Method, uploads: Sequence[Upload], shards: Sequence[Shard], held_out: Dataset, ctx: Context
) -> dict[str, Features]:
    """Synthetic features, those of all clients' training images, and those of held-out images."""
    training = together([shard.train for shard in sorted(shards, key=lambda shard: shard.client)])
    real = [Features(method.encode(data.images, ctx), data.labels) for data in (training, held_out)]
    return dict(zip(KINDS, (Features(*method.tokens(uploads, ctx)), *real), strict=True))


def judge_tokens(kinds: Mapping[str, Features], classes: Sequence[str], *, draw: Draw) -> Tokens | None:
    """All figures about a pool of synthetic features; nothing where there is none."""
    synthetic = kinds["synthetic"]
    if not len(synthetic.labels):
        return None
    found = {
        name: {kind: _sample(some.of(c), draw, kind, name, len(classes)) for kind, some in kinds.items()}
        for c, name in enumerate(classes)
    }
    counts = {name: {kind: int((some.labels == c).sum()) for kind, some in kinds.items()} for c, name in enumerate(classes)}
    width = median_squared_distance(torch.cat([rows["training"] for rows in found.values()])) or 1.0
    return {
        "shape": list(synthetic.rows.shape[1:]),
        "squared_width": width,
        "overall": _overall(found, counts, width),
        "classes": {name: _compared(found[name], counts[name], width) for name in classes},
    }


def _sample(rows: torch.Tensor, draw: Draw, kind: str, name: str, classes: int) -> torch.Tensor:
    return rows[torch.randperm(len(rows), generator=draw("judge tokens", kind, name))[: per_class(classes)]]


def _compared(rows: Mapping[str, torch.Tensor], counts: Mapping[str, int], width: float) -> ClassOfTokens:
    """Synthetic and held-out features against training features, the same number of each."""
    n = min(len(some) for some in rows.values())
    row: ClassOfTokens = {
        "synthetic": counts["synthetic"],
        "training": counts["training"],
        "held_out": counts["held_out"],
        "compared": n,
        "mmd": None,
        "mmd_floor": None,
    }
    if n < 2:
        return row
    synthetic, training, held_out = (rows[kind][:n] for kind in KINDS)
    return {
        **row,
        "mmd": gaussian_discrepancy(synthetic, training, width),
        "mmd_floor": gaussian_discrepancy(held_out, training, width),
    }


def _overall(
    found: Mapping[str, Mapping[str, torch.Tensor]], counts: Mapping[str, Mapping[str, int]], width: float
) -> ClassOfTokens:
    """All classes together, each with as many features of one kind as of another: a mix of classes is not what is judged."""
    equal = {name: min(len(rows) for rows in kinds.values()) for name, kinds in found.items()}
    rows = {kind: torch.cat([found[name][kind][:n] for name, n in equal.items()]) for kind in KINDS}
    return _compared(rows, {kind: sum(count[kind] for count in counts.values()) for kind in KINDS}, width)
