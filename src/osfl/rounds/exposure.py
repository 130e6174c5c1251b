"""The attack that the egress check tries on an upload: could one of the site's images be read out of what it sends?

A site knows the images that it trained on and images of the same classes that it held out. Whatever looks like an image in
the upload is compared with both:

- a candidate (a component's center, a class mean, a mean plus or minus a direction, a drawn sample): its distance to the
  nearest training image, over its distance to the second nearest, and over its distance to the nearest held-out image, times
  what that ratio is for held-out images themselves (below 1, because there are fewer of them);
- a set of directions: the residual of the training image that a least-squares combination of them comes nearest to, over
  the same of the held-out images, or, where there are fewer than five, over that of training images left out one by one.

A ratio near 1 means that the training images are no nearer than images that nobody used; 0 is a copy. Over 1,000 classes of six
datasets whose generators rest on ten images or more, the least ratio was 0.29; copies have 0.00 to 0.10
(benchmarks/records/egress_attack.json). An upload with a ratio below `BOUND` does not leave.

What is above the bound is not proven private: this is one attack, and what it finds is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from osfl.core.types import Exposed

BOUND = 0.2  # a smaller ratio stops the upload
FEW = 5  # held-out images, below which nothing is compared with them
_NEIGHBORS = 3  # images that a rare kind has, of which none may be held out
_NULL = 256  # held-out images whose own ratios are computed
_LEFT_OUT = 50  # training images that are left out one by one


@dataclass(frozen=True)
class Ratio:
    """The most suspicious candidate of one kind in one class."""

    label: int
    what: str  # "component", "mean", "direction", "sample", "combination of directions"
    ratio: float
    tried: int  # how many candidates of this kind there were
    train: int  # different training images that they were compared with
    held_out: int

    def as_json(self) -> dict[str, object]:
        return {
            "class": self.label,
            "what": self.what,
            "ratio": round(self.ratio, 4),
            "tried": self.tried,
            "train": self.train,
            "held_out": self.held_out,
        }


def attack(exposed: Iterable[Exposed]) -> list[Ratio]:
    """The least ratio of each kind of candidate in each class."""
    return [ratio for one in exposed for ratio in _attack_class(one)]


def _attack_class(one: Exposed) -> list[Ratio]:
    train, held_out = torch.unique(one.train.float(), dim=0), one.held_out.float()
    kinds = {what: rows.float() for what, rows in one.candidates.items() if len(rows)}
    found = {}
    if one.directions is not None:
        assert one.mean is not None
        mean, directions = one.mean.float(), _orthonormal(one.directions.float())
        kinds |= {"mean": mean, "direction": _extremes(train, mean, directions)}
        found["combination of directions"] = (_span_ratio(train, held_out, mean, directions), len(directions))
    null = _held_out_ratio(train, held_out)
    for what, rows in kinds.items():
        if len(rows):
            found[what] = (float(nearest_ratios(rows, train, held_out, null).min()), len(rows))
    return [Ratio(one.label, what, ratio, tried, len(train), len(held_out)) for what, (ratio, tried) in found.items()]


def nearest_ratios(rows: torch.Tensor, train: torch.Tensor, held_out: torch.Tensor, null: float) -> torch.Tensor:
    """For each candidate (m, d) the smaller of two ratios, (m,): its distance to the nearest training image over that to the
    second nearest, and over that to the nearest held-out image times `null`, what held-out images themselves have.

    A rare kind of image may have no held-out one: the latter is at most how far the training image's third neighbor is.
    """
    if len(train) < 2:  # what was computed from one image is that image
        return torch.zeros(len(rows))
    nearest = torch.cdist(rows, train).topk(2, largest=False)
    first, second = nearest.values.unbind(1)
    ratios = first / second.clamp_min(1e-12)
    if null > 0:
        among = torch.cdist(train[nearest.indices[:, 0]], train)
        far = among.topk(min(1 + _NEIGHBORS, len(train)), largest=False).values[:, -1]
        reference = torch.minimum(torch.cdist(rows, held_out).amin(1) * null, far)
        ratios = torch.minimum(ratios, first / reference.clamp_min(1e-12))
    return ratios


def _held_out_ratio(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """The median ratio of held-out images, each judged by the others; 0 where there are too few of them."""
    if len(held_out) < FEW:
        return 0.0
    some = held_out[:_NULL]
    others = torch.cdist(some, held_out)
    others[torch.arange(len(some)), torch.arange(len(some))] = math.inf
    return float((torch.cdist(some, train).amin(1) / others.amin(1).clamp_min(1e-12)).median())


def _extremes(train: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """Mean plus and minus each direction, as far out as the most extreme image: what an attacker would scale it to."""
    reach = ((train - mean) @ directions.T).abs().amax(0)[:, None] * directions
    return torch.cat([mean + reach, mean - reach])


def _orthonormal(directions: torch.Tensor) -> torch.Tensor:
    """Rows that span the same; directions that are not used are zeros."""
    used = directions[directions.norm(dim=1) > 1e-6]
    return torch.linalg.qr(used.T).Q.T if len(used) else used


def _residuals(x: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    off = x - mean
    found: torch.Tensor = (off - (off @ directions.T) @ directions).norm(dim=1)
    return found


def _span_ratio(train: torch.Tensor, held_out: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor) -> float:
    """How much nearer a combination of the directions comes to a training image than to an image that was not used."""
    if len(train) < 2:
        return 0.0
    if len(held_out) >= FEW:
        reference = _residuals(held_out, mean, directions)
    else:
        reference = torch.stack([_left_out_residual(train, i, len(directions)) for i in range(min(len(train), _LEFT_OUT))])
    least = float(reference.min())
    return float(_residuals(train, mean, directions).min()) / least if least > 1e-6 else 1.0


def _left_out_residual(train: torch.Tensor, i: int, dims: int) -> torch.Tensor:
    """What so many principal directions of the other images leave of this one."""
    others = torch.cat([train[:i], train[i + 1 :]])
    mean = others.mean(0, keepdim=True)
    directions = torch.linalg.svd(others - mean, full_matrices=False).Vh[: min(dims, len(others) - 1)]
    return _residuals(train[i : i + 1], mean, directions)[0]
