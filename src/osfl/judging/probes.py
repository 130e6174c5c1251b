"""Public probes: what each upload says its classes look like, and how every other upload answers that.

Where uploads hold samples, tokens or class means, these are the points. A classifier alone says it, too: images that begin as
noise of the plan's seed and are changed until the classifier is sure of a class. They look like nothing, and yet classifiers
that learned the same classes from other images recognize them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from osfl.core.method import Context
from osfl.core.types import ClientId, Probed
from osfl.models.folding import freeze
from osfl.models.inputs import to_input
from osfl.models.random_features import RandomFeatures

_EACH, _MOST = 4, 64  # images that a classifier is asked for: of a class, and in all where there are many classes
PANEL = 64  # sites that are asked about everybody's points; of more, some by the plan's seed
_STEPS, _RATE, _SMOOTH = 30, 0.1, 0.1  # how they are made: steps of Adam, and how much neighboring pixels are alike
_RARE = 0.25  # of an equal share: a class that a classifier answers less often on the others' points is none of its classes
LEAST = 10  # images that a class needs to count as one that a site knows: of fewer nothing follows


@dataclass(frozen=True)
class Statement:
    """One site's points with their labels, and how it answers the points of all sites, by the site that made them."""

    points: torch.Tensor  # (n, d) or images
    labels: torch.Tensor  # (n,)
    answers: Mapping[ClientId, torch.Tensor]  # (points of that site, classes): the higher, the more likely
    known: torch.Tensor  # (classes,) whether it claims to know the class


def statements(probed: Mapping[ClientId, Probed], ctx: Context) -> list[dict[ClientId, Statement]]:
    """What sites say about each other's classes: by their classifiers, and by their points where they have any."""
    speak = {client: one for client, one in probed.items() if _says_something(one)}
    if len(speak) < 2:
        return []
    if all(one.points is None for one in speak.values()):
        models = {client: freeze(one.classifier).to(ctx.device) for client, one in speak.items() if one.classifier is not None}
        made = {client: _images_for(model, ctx, client) for client, model in models.items()}
        return [_answered(speak, made, models, ctx)]
    pairs = {client: (one.points, one.labels) for client, one in speak.items()}
    made = {client: (points, labels) for client, (points, labels) in pairs.items() if points is not None and labels is not None}
    speak = {client: speak[client] for client in made}
    found = [_answered(speak, made, _prototypes(speak), ctx)]
    models = {client: one.classifier for client, one in speak.items() if one.classifier is not None}
    return [*found, _answered(speak, made, models, ctx)] if len(models) == len(speak) else found


def _says_something(one: Probed) -> bool:
    return one.classifier is not None if one.points is None else len(one.points) > 0


def as_vectors(one: Probed) -> Probed:
    """Images as features that know texture, color and rough layout; they are the same everywhere."""
    if one.points is None or not one.pixels:
        return one
    with torch.no_grad():
        x = to_input(one.points)
        features = torch.cat([RandomFeatures().features(part.expand(-1, 3, -1, -1)) for part in torch.split(x, 64)])
    return Probed(one.counts, None, features, one.labels)


# --- images that a classifier is sure of -----------------------------------------------------------------------------------


def _images_for(model: nn.Module, ctx: Context, client: ClientId) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (classes * 4, ...) for which the classifier gives each class in turn."""
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


def _prototypes(speak: Mapping[ClientId, Probed]) -> dict[ClientId, nn.Module]:
    scale = within(list(speak.values())).sqrt()
    classes = max(max(len(one.counts) for one in speak.values()), *(int(one.labels.max()) + 1 for one in speak.values()))  # type: ignore[union-attr]
    return {client: _Prototypes(one, scale, classes) for client, one in speak.items()}


def within(speak: Sequence[Probed]) -> torch.Tensor:
    """How much points of one class differ, (d,): the median of the sites, so that no single one has a say."""
    rows = torch.stack([variance_of(one) for one in speak])
    found = rows.median(0).values
    return found + 1e-3 * found.mean() + 1e-12


def variance_of(one: Probed) -> torch.Tensor:
    """Of one site, (d,): what it says, or of its points within classes."""
    assert one.points is not None and one.labels is not None
    if one.variance is not None:
        return one.variance.double()
    rows = one.points.flatten(1).double()
    return torch.stack([rows[one.labels == c].var(0, unbiased=False) for c in one.labels.unique()]).mean(0)


def _answered(
    speak: Mapping[ClientId, Probed],
    made: Mapping[ClientId, tuple[torch.Tensor, torch.Tensor]],
    models: Mapping[ClientId, nn.Module],
    ctx: Context,
) -> dict[ClientId, Statement]:
    found, names = {}, sorted(models)
    order = torch.randperm(len(names), generator=ctx.generator("judging", "panel")).tolist()
    panel = {names[place] for place in order[:PANEL]}
    for client, model in models.items():
        asked = made if client in panel else {other: pair for other, pair in made.items() if other in panel}
        with torch.no_grad():
            answers = {other: _votes(model, points).cpu() for other, (points, _) in asked.items()}
        classes = next(iter(answers.values())).shape[1]
        known = _known(speak[client], client, answers, classes)
        found[client] = Statement(*made[client], answers, known)
    return found


def _votes(model: nn.Module, points: torch.Tensor) -> torch.Tensor:
    """Probabilities of a classifier, which a loud one cannot exceed; what prototypes say is bounded already."""
    said: torch.Tensor = model(points).float()
    return said if isinstance(model, _Prototypes) else said.softmax(1)


def _known(one: Probed, client: ClientId, answers: Mapping[ClientId, torch.Tensor], classes: int) -> torch.Tensor:
    """The classes of which a site claims some images; where it does not say, those that it ever gives on others' points."""
    if one.counts:
        return torch.tensor([count >= LEAST for count in one.counts])
    if one.labels is not None:
        return torch.bincount(one.labels, minlength=classes) > 0
    given = torch.cat([logits.argmax(1) for other, logits in answers.items() if other != client])
    return torch.bincount(given, minlength=classes) > _RARE * len(given) / classes
