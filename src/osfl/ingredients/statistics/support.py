"""On how many images a statistic rests, and principal directions that rest on enough of them to be sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from osfl.core.types import Dataset, Exposed, Plan
from osfl.runtime.meter import spend
from osfl.runtime.near_copies import near_copies

LEAST = 3.0  # images that a feature rests on, below which its row of second moments is tried
FEWEST = 40  # images of a real site with open sums in whole numbers: of 13 and fewer plain lattice reduction computed all


@dataclass(frozen=True)
class Support:
    """How many different images stand behind whatever a site sends of a class."""

    least: int = 10  # different images that a class, a component and a direction rest on; smaller classes get no generator


@dataclass(frozen=True)
class Readable:
    """What anybody can read out of a generator, as rows of pixels in [-1, 1]; the egress check attacks it."""

    candidates: Mapping[str, torch.Tensor]  # by kind, (m, pixels)
    mean: torch.Tensor | None = None  # (1, pixels)
    directions: torch.Tensor | None = None  # (k, pixels)


def effective_images(shares: torch.Tensor, images: int) -> torch.Tensor:
    """On how many of the images each column rests: (sum p)^2 / sum p^2 of shares p (copies * images, k).

    Mirrored and turned copies follow the images in the same order; an image's shares are added over its copies.
    """
    p = shares.reshape(len(shares) // images, images, shares.shape[1]).sum(0)
    return p.sum(0).square() / p.square().sum(0).clamp_min(1e-300)


def rows_that_show(gram: torch.Tensor, rows: torch.Tensor, least: float = LEAST) -> tuple[torch.Tensor, torch.Tensor]:
    """What second moments G = sum z z^T of rows z (n, d) show of single ones: candidates (m, d), and which row each shows.

    Row j of G is the sum of z_j z. Where one image almost alone has feature j, G_j / sqrt(G_jj) is that image's features.
    Whoever receives G does not know which features these are, and has to try all; the site knows. m near-copies of an image
    count as one: together they show it sqrt(m) times as large.
    """
    group = near_copies(rows)
    alone = rows.square()
    shares = torch.zeros_like(alone).index_add_(0, group.to(alone.device), alone)
    few = (shares.sum(0).square() < least * shares.square().sum(0)) & (gram.diagonal() > 0)
    shown = shares[:, few].argmax(0)
    within = alone[:, few] * (group.to(alone.device)[:, None] == shown[None])
    copies = within.sum(0).square() / within.square().sum(0).clamp_min(1e-300)
    read = gram[few] / (gram.diagonal()[few] * copies).sqrt()[:, None]
    return read, shown


def shown_by_class(gram: torch.Tensor, rows: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The candidates by the class of the image that each shows most."""
    labels = torch.cat([torch.full((len(part),), c) for c, part in rows.items()] or [torch.zeros(0)])
    if not len(labels):
        return dict.fromkeys(rows, gram[:0])
    read, image = rows_that_show(gram, torch.cat(list(rows.values())).to(gram.dtype))
    return {c: read[labels[image] == c].float() for c in rows}


def stops_for(readable: str, plan: Plan) -> Literal["all", "real", "none"]:
    """What rows of second moments that show an image stop: nothing where the plan accepts it or nobody sees the sums."""
    return "none" if readable == "send" or plan.secure_sum else "real"


def of_no_class(data: Dataset, counted: Collection[int]) -> torch.Tensor:
    """(n,) which images are of none of these classes: in second moments they are all the same."""
    found = torch.ones(len(data), dtype=torch.bool)
    for c in counted:
        found &= ~data.shows(c)
    return found


def exposed_beyond_classes(
    sums: torch.Tensor,
    counts: torch.Tensor,
    rows: torch.Tensor,
    train: torch.Tensor,
    held_out: torch.Tensor,
    stops: Literal["all", "real", "none"],
) -> Exposed:
    """What multi-label sums show of images of no class, beside all of a site's images (n, d); its label follows the classes.

    `sums` and `counts` have a row a class and a last one of all images, `rows` are second moments that show images of no class.
    All images less those of each class: where every image but one has one class, that is the features of the one.
    """
    left = float(counts[-1] - counts[:-1].sum())
    rest = (sums[-1] - sums[:-1].sum(0))[None] / left if left else sums[:0]
    candidates = {"row of second moments": rows.float(), "sum of all images less the classes": rest.float()}
    return Exposed(len(counts) - 1, candidates, train, held_out, stops=stops)


def too_few_in_open_sums(images: int, readable: str, plan: Plan) -> tuple[int, int] | None:
    """Images in exact sums of whole numbers, and how many a real site needs, where it has fewer: lattice reduction computes
    the features of every image of a small site (benchmarks/exact_sums.py). None where nobody sees exact sums of one site, or
    the plan accepts it."""
    closed = plan.privacy is not None or plan.secure_sum or readable == "send"
    return (images, FEWEST) if not closed and 0 < images < FEWEST else None


def supported_directions(off: torch.Tensor, most: int, least: int, images: int) -> torch.Tensor:
    """Principal directions of centered rows, at most two for every `least` images, without those that fewer images carry.

    n images lie exactly in n - 1 directions, and could be computed from them; a fifth of that leaves most of each image out.
    An image that is unlike all others has a direction almost of its own: mean plus direction would show it.
    """
    basis = principal(off, min(most, 2 * images // least))
    return basis[effective_images((off @ basis.T).square(), images) >= least]


def principal(x: torch.Tensor, dims: int) -> torch.Tensor:
    """The first principal directions of centered rows (n, pixels), as rows, from the smaller of the two Gram matrices."""
    n, pixels = x.shape
    spend(2.0 * n * pixels * min(n, pixels) + 9.0 * min(n, pixels) ** 3)
    if n < pixels:
        values, vectors = torch.linalg.eigh(x @ x.T)
        directions = vectors.flip(1)[:, :dims].T @ x
        lengths = values.flip(0)[:dims].clamp_min(0).sqrt()
        return torch.div(directions, lengths.clamp_min(1e-9)[:, None])
    vectors = torch.linalg.eigh(x.T @ x)[1]
    return torch.clone(vectors.flip(1)[:, :dims].T)
