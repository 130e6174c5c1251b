"""Public probes: what each upload shows of its classes, and how a panel of sites classifies that.

Where uploads hold samples, tokens or class means, these are the points. A classifier alone shows its classes, too: images that
begin as noise of the plan's seed and are changed until the classifier is sure of a class. They look like nothing, and yet
classifiers that learned the same classes from other images recognize them.

What is kept of a site while others are read is small: its points, its claimed counts, and no network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.nn import functional

from osfl.core.method import Context
from osfl.core.types import ClientId, Probed
from osfl.models.folding import freeze
from osfl.models.inputs import to_images, to_input
from osfl.models.random_features import RandomFeatures

_EACH, _MOST = 4, 64  # images that a classifier is asked for: of a class, and in all where there are many classes
PANEL = 64  # sites that classify everybody's points; of more, some by the plan's seed
_TOGETHER = 8  # sites whose points are classified at once
_STEPS, _RATE, _SMOOTH = 30, 0.1, 0.1  # how images are made: steps of Adam, and how much neighboring pixels are alike
_RARE = 0.25  # of an equal share: a class that a classifier answers less often on the others' points is none of its classes
LEAST = 10  # images that a class needs to count as one that a site knows: of fewer nothing follows


@dataclass(frozen=True)
class Comparison:
    """How a panel of sites classifies the points of all sites."""

    panel: tuple[ClientId, ...]
    labels: Mapping[ClientId, torch.Tensor]  # (n,) by what classes a site calls its own points
    answers: Mapping[ClientId, torch.Tensor]  # (panel, n, classes): the higher, the more likely
    known: Mapping[ClientId, torch.Tensor]  # (classes,) whether a site claims to know the class
    given: Mapping[ClientId, torch.Tensor]  # (classes,) how often a site answers each class
    made: bool = False  # whether the points are images that classifiers were asked for
    # of these, (classes, classes): by class, what a site outside the panel answers to the panel's images
    replies: Mapping[ClientId, torch.Tensor] = field(default_factory=dict)


def summary(one: Probed, ctx: Context, client: ClientId, sites: int) -> Probed:
    """What of a site is kept: points, as features where they are images; of a classifier without points the images that it
    is sure of, as 8-bit pixels. Of more sites than the panel has, a few points of each class."""
    if one.points is not None:
        vectors = replace(_as_vectors(one), classifier=None)
        return _few(vectors) if sites > PANEL and len(one.points) else vectors
    if one.classifier is None or ctx.plan.task.kind != "multiclass":
        return replace(one, classifier=None)
    images, labels = _images_for(freeze(one.classifier).to(ctx.device), ctx, client)
    return Probed(one.counts, None, to_images(images).cpu(), labels, pixels=True)


def _few(one: Probed) -> Probed:
    assert one.points is not None and one.labels is not None
    kept = torch.cat([(one.labels == label).nonzero().flatten()[:_EACH] for label in one.labels.unique()])
    return replace(one, points=one.points[kept].clone(), labels=one.labels[kept].clone())


def _as_vectors(one: Probed) -> Probed:
    """Images as features that know texture, color and rough layout; they are the same everywhere. Numbers as float32."""
    assert one.points is not None
    if not one.pixels:
        return replace(one, points=one.points.float().nan_to_num().clone())
    with torch.no_grad():
        x = to_input(one.points)
        features = torch.cat([RandomFeatures().features(part.expand(-1, 3, -1, -1)) for part in torch.split(x, 64)])
    return Probed(one.counts, None, features, one.labels)


# --- images that a classifier is sure of -----------------------------------------------------------------------------------


def _images_for(model: nn.Module, ctx: Context, client: ClientId) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (classes * 4, ...) in [-1, 1], for which the classifier gives each class in turn."""
    classes = len(ctx.plan.task.classes)
    labels = torch.arange(classes).repeat_interleave(max(1, min(_EACH, _MOST // classes)))
    rng = ctx.generator("judging", "probes")
    x = public_noise(len(labels), ctx.plan.task.image, rng).to(ctx.device).requires_grad_(True)
    optimizer = torch.optim.Adam([x], _RATE)
    for step in range(_STEPS):
        down, across = torch.randint(-1, 2, (2,), generator=rng).tolist()
        loss = functional.cross_entropy(model(torch.roll(x, (down, across), (-2, -1))), labels.to(ctx.device))
        loss = loss + _SMOOTH * ((x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean())
        (gradient,) = torch.autograd.grad(loss, x)
        x.grad = gradient.nan_to_num()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
        ctx.progress(f"{client} is probed", step + 1, _STEPS)
    return x.detach(), labels


def public_noise(count: int, image: tuple[int, int, int], rng: torch.Generator) -> torch.Tensor:
    """Smooth noise in [-1, 1], (count, channels, height, width): coarse grids of normal numbers, enlarged and added."""
    channels, height, width = image
    total = torch.zeros(count, channels, height, width)
    side = 2
    while side <= min(height, width):
        grid = torch.randn(count, channels, side, side, generator=rng)
        total += functional.interpolate(grid, (height, width), mode="bilinear", align_corners=False) / side**0.5
        side *= 2
    return (total * 0.4).clamp(-1, 1)


# --- answers ---------------------------------------------------------------------------------------------------------------


def by_prototypes(sites: Mapping[ClientId, Probed], ctx: Context) -> Comparison:
    """Every site's class means classify the points of all."""
    scale = within(list(sites.values())).sqrt()
    classes = max(max(len(one.counts), int(_labels(one).max()) + 1) for one in sites.values())
    return compare(sites, lambda client: _Prototypes(sites[client], scale, classes), ctx)


def compare(sites: Mapping[ClientId, Probed], load: Callable[[ClientId], nn.Module], ctx: Context) -> Comparison:
    """Each site's model in turn classifies the points of all sites, or of the panel where it is not in that itself."""
    names = sorted(sites)
    order = torch.randperm(len(names), generator=ctx.generator("judging", "panel")).tolist()
    panel = sorted(names[place] for place in order[:PANEL])
    labels, made = {client: _labels(sites[client]) for client in names}, any(one.pixels for one in sites.values())
    rows, given, known = dict[ClientId, torch.Tensor](), dict[ClientId, torch.Tensor](), dict[ClientId, torch.Tensor]()
    replies = dict[ClientId, torch.Tensor]()
    for client in (*panel, *(name for name in names if name not in panel)):
        asked = names if client in panel else panel
        answers = _classified(load(client), [sites[other] for other in asked], ctx)
        own = torch.cat([torch.full((len(labels[other]),), other == client) for other in asked])
        given[client] = torch.bincount(answers.argmax(1), minlength=answers.shape[1])
        known[client] = _known(sites[client], torch.bincount(answers[~own].argmax(1), minlength=answers.shape[1]))
        if client in panel:
            rows[client] = answers
        elif made:
            sure = torch.cat([known[other][labels[other]] for other in panel])
            asked_of = torch.cat([labels[other] for other in panel])
            replies[client] = class_means(answers[None, sure], asked_of[sure])[0].half()
    parts = torch.stack([rows[client] for client in panel]).split([len(labels[client]) for client in names], 1)
    return Comparison(tuple(panel), labels, dict(zip(names, parts, strict=True)), known, given, made, replies)


def _labels(one: Probed) -> torch.Tensor:
    assert one.labels is not None
    return one.labels


def class_means(answers: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """By class that points are called by, the mean answer: (sites, n, classes) to (sites, classes, classes)."""
    member = functional.one_hot(labels, answers.shape[2]).T.double()
    return torch.matmul(member / member.sum(1, keepdim=True).clamp_min(1), answers.double())


def _classified(model: nn.Module, sites: Sequence[Probed], ctx: Context) -> torch.Tensor:
    """Probabilities of a classifier, which a loud one cannot exceed; of class means, which are bounded already, distances."""
    parts, points = [], [one.points for one in sites if one.points is not None]
    with torch.no_grad():
        for start in range(0, len(points), _TOGETHER):
            some = torch.cat(points[start : start + _TOGETHER])
            answers = model(to_input(some, ctx.device) if sites[0].pixels else some.to(ctx.device)).float().cpu()
            parts.append(answers if isinstance(model, _Prototypes) else answers.softmax(1).nan_to_num().half())
    return torch.cat(parts)


def _known(one: Probed, given: torch.Tensor) -> torch.Tensor:
    """The classes of which a site claims some images; where it does not say, those that it ever answers on others' points."""
    if one.counts:
        return torch.tensor([count >= LEAST for count in one.counts])
    if one.labels is not None and not one.pixels:
        return torch.bincount(one.labels, minlength=len(given)) > 0
    return given > _RARE * int(given.sum()) / len(given)


class _Prototypes(nn.Module):
    """The nearest class mean of one site, each dimension divided by what images of a class differ by."""

    def __init__(self, one: Probed, scale: torch.Tensor, classes: int) -> None:
        super().__init__()
        assert one.points is not None and one.labels is not None
        self.scale, self.means = scale, torch.full((classes, one.points[0].numel()), float("inf"))
        for label in sorted(set(one.labels.tolist())):
            self.means[label] = (one.points[one.labels == label].flatten(1).double().mean(0) / scale).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        present = self.means.isfinite().all(1)
        near = -torch.cdist((x.flatten(1).double() / self.scale).float(), self.means[present]).square() / self.means.shape[1]
        return torch.full((len(x), len(self.means)), -1e9).index_copy(1, present.nonzero().flatten(), near)


def within(sites: Sequence[Probed]) -> torch.Tensor:
    """How much points of one class differ, (d,): the median of the sites, so that no single one decides."""
    found = torch.stack([variance_of(one).float() for one in sites]).median(0).values.double()
    return found + 1e-3 * found.mean() + 1e-12


def variance_of(one: Probed) -> torch.Tensor:
    """Of one site, (d,): what it sent, or of its points within classes."""
    assert one.points is not None and one.labels is not None
    if one.variance is not None:
        return one.variance.double()
    rows = one.points.flatten(1).double()
    return torch.stack([rows[one.labels == c].var(0, unbiased=False) for c in one.labels.unique()]).mean(0)
