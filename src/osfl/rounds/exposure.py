"""The attack that the egress check tries on an upload: could one of the site's images be read out of what it sends?

A site knows the images that it trained on and images of the same classes that it held out. Whatever looks like an image in
the upload is compared with both:

- a candidate (a component's center, a class mean, a mean plus or minus a direction, a drawn sample): its distance to the
  nearest training image, over its distance to the second nearest, and over its distance to the nearest held-out image, times
  what that ratio is for held-out images themselves (below 1, because there are fewer of them). Near-copies of one image
  (`osfl.runtime.near_copies`) are one image here, and so is their mean: they do not hide each other;
- a set of directions: the residual of the training image that a least-squares combination of them comes nearest to, over
  the same of the held-out images, or, where there are fewer than five, over that of training images left out one by one.

A ratio near 1 means that the training images are no nearer than images that nobody used; 0 is a copy. Over 1,000 classes of six
datasets whose generators rest on ten images or more, the least ratio was 0.29; copies have 0.00 to 0.10
(benchmarks/records/egress_attack.json). An upload with a ratio below `BOUND` does not leave.

Second moments (sums of z z^T over features z) of fewer images than features give the span of the features. What is left of a
training image's features off that span, as a share of their length, is compared with the same of held-out images: the largest
of the ones over the least of the others. Below 1 whoever has the features of an image can tell whether it was in the sum.
That is no image, so it does not stop an upload; the site is told (`Ratio.stops`).

What is above the bound is not proven private: this is one attack, and what it finds is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from osfl.core.types import Exposed, Json
from osfl.runtime.meter import spend
from osfl.runtime.near_copies import near_copies

BOUND = 0.2  # a smaller ratio stops the upload
FEW = 5  # held-out images, below which nothing is compared with them
_NEIGHBORS = 3  # images that a rare kind has, of which none may be held out
_NULL = 256  # held-out images whose own ratios are computed
_LEFT_OUT = 50  # training images that are left out one by one
_NEAR = 1 / 3  # of the typical distance: what counts as a near-copy here, a little more than where generators are fitted
SPAN = "second moments"


@dataclass(frozen=True)
class Ratio:
    """The most suspicious candidate of one kind in one class."""

    label: int
    what: str  # "component", "mean", "direction", "sample", "combination of directions"
    ratio: float
    tried: int  # how many candidates of this kind there were
    train: int  # different training images that they were compared with
    held_out: int
    stops: Literal["all", "real", "none"] = "all"  # which uploads do not leave below the bound; else the site is told
    # Of second moments: off their span, the largest share of a training image's features, and the least of a held-out one's.
    residuals: tuple[float, float] | None = None

    def as_json(self) -> dict[str, Json]:
        found: dict[str, Json] = {
            "class": self.label,
            "what": self.what,
            "ratio": round(self.ratio, 4),
            "tried": self.tried,
            "train": self.train,
            "held_out": self.held_out,
        }
        if self.residuals is not None:
            found["residuals"] = [float(f"{share:.2g}") for share in self.residuals]
        return found


def attack(exposed: Iterable[Exposed]) -> list[Ratio]:
    """The least ratio of each kind of candidate in each class."""
    spans: dict[Callable[[], torch.Tensor], torch.Tensor] = {}  # of second moments that classes share
    return [ratio for one in exposed for ratio in (*_attack_class(one), *_attack_moments(one, spans))]


def worst(ratios: Sequence[Ratio], stops: Collection[str] = ("all", "real")) -> Ratio | None:
    """The most suspicious of what stops such uploads."""
    return min((found for found in ratios if found.stops in stops), key=lambda found: found.ratio, default=None)


def of_which(label: int, classes: Sequence[str]) -> str:
    """Which images a candidate was compared with: those of a class, or with the number after the last class all."""
    return f"class {classes[label]!r}" if label < len(classes) else "all images"


def compared(ratios: Sequence[Ratio], classes: Sequence[str]) -> str:
    """What was tried that would have stopped the upload, in a sentence or two; empty where there was nothing to try."""
    most = worst(ratios)
    if most is None:
        return ""
    tried = sum(ratio.tried for ratio in ratios if ratio.stops != "none")
    of = len({ratio.label for ratio in ratios if ratio.stops != "none" and ratio.label < len(classes)})
    return (
        f"{tried:,} candidates of {of} classes were compared with your images. The most suspicious, a {most.what} of "
        f"{of_which(most.label, classes)}, has a distance ratio of {most.ratio:.2f} "
        f"(0 is a copy, 1 is as near as to images that were not used, below {BOUND} nothing is sent)."
    )


def accepted(ratios: Sequence[Ratio], classes: Sequence[str]) -> str:
    """What shows an image and does not stop the upload, because the plan accepts it, in a sentence; empty: nothing."""
    found = [ratio for ratio in ratios if ratio.stops == "none" and ratio.residuals is None and ratio.ratio < BOUND]
    names = ", ".join(sorted({of_which(ratio.label, classes) for ratio in found}))
    return (
        f"SINGLE IMAGES CAN BE READ OUT: a {found[0].what} is much nearer to one of your training images than to images that "
        f"were not used, in {names}. The plan accepts it."
        if found
        else ""
    )


def spanned(ratios: Sequence[Ratio]) -> str:
    """What second moments of fewer images than features show, in a sentence or two; empty where they show nothing."""
    shown = [ratio for ratio in ratios if ratio.residuals is not None and ratio.ratio < 1]
    found = [ratio.residuals for ratio in shown if ratio.residuals is not None]
    if not found:
        return ""
    inside, outside = max(one[0] for one in found), min(one[1] for one in found)
    held_out = sum(ratio.held_out for ratio in shown)
    other = f"of {held_out:,} held-out images at least {outside:.2g}" if held_out else "no image was held out to compare with"
    return (
        f"The sums have the span of your images' features: of the features of a training image about {inside:.1g} of their "
        f"length is off it, {other}. Who has an image can tell by that whether it was used (a membership test). This test "
        "shows no image."
    )


def would_stop(ratios: Sequence[Ratio]) -> bool:
    """Whether an upload that a simulation goes on with would be stopped at a real site."""
    most = worst(ratios, ("real",))
    return most is not None and most.ratio < BOUND


def _attack_class(one: Exposed) -> list[Ratio]:
    train, held_out = torch.unique(one.train.float(), dim=0), one.held_out.float()
    group = near_copies(torch.cat([train, held_out]), _NEAR)
    group, held_out = group[: len(train)], held_out[group[len(train) :] >= len(train)]
    kinds = {what: rows.float() for what, rows in one.candidates.items() if len(rows)}
    found = {}
    if one.directions is not None:
        assert one.mean is not None
        mean, directions = one.mean.float(), _orthonormal(one.directions.float())
        kinds |= {"mean": mean, "direction": _extremes(train, mean, directions)}
        found["combination of directions"] = (
            _span_ratio(train, held_out, mean, directions, group),
            len(directions),
        )
    null = _held_out_ratio(train, held_out)
    for what, rows in kinds.items():
        if len(rows):
            found[what] = (float(nearest_ratios(rows, train, held_out, null, group).min()), len(rows))
    counts = len(train), len(held_out)
    return [Ratio(one.label, what, ratio, tried, *counts, one.stops) for what, (ratio, tried) in found.items()]


def nearest_ratios(
    rows: torch.Tensor, train: torch.Tensor, held_out: torch.Tensor, null: float, group: torch.Tensor | None = None
) -> torch.Tensor:
    """For each candidate (m, d) the smaller of two ratios, (m,): its distance to the nearest training image over that to the
    second nearest, and over that to the nearest held-out image times `null`, what held-out images themselves have.

    A rare kind of image may have no held-out one: the latter is at most how far the training image's third neighbor is.
    `group` (n,): training images with one number are near-copies. The mean of a group is as good as an image of it, and the
    second nearest image and the neighbors are of other groups.
    """
    group = torch.arange(len(train)) if group is None else group
    if len(group.unique()) < 2:  # what was computed from one image is that image
        return torch.zeros(len(rows))
    distances = torch.cdist(rows, train)
    first, nearest = distances.min(1)
    for number in group.unique(return_counts=True)[0][group.unique(return_counts=True)[1] > 1]:
        to_mean = torch.cdist(rows, train[group == number].mean(0, keepdim=True))[:, 0]
        closer = to_mean < first
        first = torch.where(closer, to_mean, first)
        nearest = torch.where(closer, (group == number).nonzero()[0, 0], nearest)
    same = group[nearest][:, None] == group[None]  # (m, n)
    ratios = first / distances.masked_fill(same, math.inf).amin(1).clamp_min(1e-12)
    if null > 0:
        among = torch.cdist(train[nearest], train).masked_fill(same, math.inf)
        near = among.topk(min(_NEIGHBORS, len(train)), largest=False).values
        far = near.masked_fill(near.isinf(), 0.0).amax(1)
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


def _span_ratio(
    train: torch.Tensor, held_out: torch.Tensor, mean: torch.Tensor, directions: torch.Tensor, group: torch.Tensor
) -> float:
    """How much nearer a combination of the directions comes to a training image than to an image that was not used."""
    different = train[group == torch.arange(len(train))]  # a near-copy that is left out is still there
    if len(different) < 2:
        return 0.0
    if len(held_out) >= FEW:
        reference = _residuals(held_out, mean, directions)
    else:
        few = range(min(len(different), _LEFT_OUT))
        reference = torch.stack([_left_out_residual(different, i, len(directions)) for i in few])
    least = float(reference.min())
    return float(_residuals(train, mean, directions).min()) / least if least > 1e-6 else 1.0


def _left_out_residual(train: torch.Tensor, i: int, dims: int) -> torch.Tensor:
    """What so many principal directions of the other images leave of this one."""
    others = torch.cat([train[:i], train[i + 1 :]])
    mean = others.mean(0, keepdim=True)
    directions = torch.linalg.svd(others - mean, full_matrices=False).Vh[: min(dims, len(others) - 1)]
    return _residuals(train[i : i + 1], mean, directions)[0]


def _attack_moments(one: Exposed, spans: dict[Callable[[], torch.Tensor], torch.Tensor]) -> list[Ratio]:
    """What the span of second moments leaves of training images and of held-out ones; nothing where it is all there is."""
    if one.moments is None or not 0 < one.summed < one.train.shape[1] or not len(one.train):
        return []
    if one.moments not in spans:
        spans[one.moments] = _span(one.moments(), one.summed)
    basis, found = spans[one.moments], []
    for rows in (one.train, one.held_out):
        wide = rows.double()
        off = wide - (wide @ basis) @ basis.T
        found.append(off.norm(dim=1) / wide.norm(dim=1).clamp_min(1e-12))
    inside, outside = float(found[0].max()), float(found[1].min()) if len(found[1]) else 1.0
    ratio = inside / max(outside, 1e-12)
    return [Ratio(one.label, SPAN, ratio, basis.shape[1], len(found[0]), len(found[1]), "none", (inside, outside))]


def _span(gram: torch.Tensor, rank: int) -> torch.Tensor:
    """An orthonormal basis (d, k) of the range of a positive semidefinite matrix of at most this rank, without an
    eigendecomposition of all of it (Halko, Martinsson and Tropp, 2011: a product with random vectors has the same range)."""
    wide, rng = gram.double(), torch.Generator().manual_seed(0)  # which vectors does not matter, and nobody gets them
    spend(2.0 * wide.numel() * rank)
    basis = torch.linalg.qr(wide @ torch.randn((len(wide), rank), generator=rng, dtype=torch.float64)).Q
    values, vectors = torch.linalg.eigh(basis.T @ wide @ basis)
    rounding = 100 * torch.finfo(gram.dtype).eps  # of what was sent
    return torch.matmul(basis, vectors[:, values > rounding * values.max()])
