"""Training on tokens: classifiers, linear heads and generators that never see an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.types import ADDED
from osfl.ingredients.training.local import batches, decay, not_positive, step, too_low
from osfl.models.initial import initialize
from osfl.models.token_models import AttentionPool
from osfl.runtime.devices import ahead
from osfl.runtime.meter import spend

Progress = Callable[[int, int], None]
Draw = Callable[[int], Sequence[torch.Tensor]]  # random numbers for a batch of so many
PIECE = 4096  # sequences that are drawn at once


def draw_nothing(_: int) -> Sequence[torch.Tensor]:
    return ()


@dataclass(frozen=True)
class Classifying:
    """A classifier of token sequences and its training; mixed into Settings. Defaults are FALCON's."""

    epochs: int = 60  # passes over the sequences
    batch_size: int = 256  # sequences a step
    lr: float = 5e-4  # Adam
    hidden: int = 0  # of the feed-forward layer; 0: four times the tokens' width
    dropout: float = 0.3  # share of its inner numbers that each step leaves out
    query_residual: bool = field(default=True, metadata=ADDED)  # its query is added to what it finds; paper's equation: false

    def classifier(self, width: int, classes: int, rng: torch.Generator | None) -> AttentionPool:
        model = AttentionPool(width, classes, hidden=self.hidden, dropout=self.dropout, residual=self.query_residual)
        initialize(model, rng)
        return model


def classifying_problems(settings: Classifying) -> list[str]:
    found = [*too_low(settings, {"epochs": 1, "batch_size": 2, "hidden": 0}), *not_positive(settings, "lr")]
    found += [f"setting 'dropout': expected 0 to below 1, got {settings.dropout}"] * (not 0 <= settings.dropout < 1)
    return found


def fit_classifier(
    settings: Classifying,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    classes: int,
    start: torch.Generator,
    rng: torch.Generator,
    device: torch.device,
    progress: Progress,
) -> AttentionPool:
    """A classifier of real sequences (n, 1 + L, d), by cross-entropy."""
    model = settings.classifier(tokens.shape[2], classes, start)
    x, y = tokens.to(device), labels.to(device)

    def loss(index: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x[index], *kept), y[index])

    train_on_tokens(model, len(tokens), loss, rng, settings, device, progress, lambda n: model.draw_kept(n, rng))
    return model


def train_on_tokens(
    model: nn.Module,
    count: int,
    loss: Callable[..., torch.Tensor],
    rng: torch.Generator,
    settings: Classifying,
    device: torch.device,
    progress: Progress,
    draw: Draw = draw_nothing,
) -> None:
    """Adam over `count` sequences in random order, the last epoch kept. `loss` takes the positions of a batch, and what `draw`
    draws for it."""
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    for epoch in range(settings.epochs):
        steps = steps_of(count, settings.batch_size, rng, draw)
        train_epoch(model, optimizer, steps, loss, 0.0, "the classifier's loss", "lr", settings.lr)
        progress(epoch + 1, settings.epochs)
    spend(6.0 * parameter_count(model) * count * settings.epochs)
    model.cpu().eval()


def steps_of(count: int, batch_size: int, rng: torch.Generator, draw: Draw = draw_nothing) -> Iterator[Sequence[torch.Tensor]]:
    """What each step of an epoch draws: the positions of a batch, and what `draw` draws for so many."""
    for index in batches(count, batch_size, rng):
        yield index, *draw(len(index))


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[Sequence[torch.Tensor]],
    loss: Callable[..., torch.Tensor],
    clip: float,
    what: str,
    field: str,
    lr: float,
) -> None:
    """A step on `loss` of what each of the steps draws."""
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    for drawn in ahead(steps, device):
        value = loss(*drawn)
        step(model, optimizer, value, clip=clip)
        total = total + value.detach()
    if not bool(total.isfinite()):
        raise TrainingError(f"{what} is not finite", field=field, got=lr, fix=f"Lower it (`--set {field}=...`).")


def linear_head(
    x: torch.Tensor,
    y: torch.Tensor,
    classes: int,
    rng: torch.Generator,
    *,
    epochs: int,
    batch_size: int,
    optimizer: Literal["sgd", "adamw"],
    lr: float,
    standardize: bool,
    device: torch.device,
    progress: Progress,
) -> nn.Linear:
    """A linear classifier of features (n, d). It begins at zero; standardization is folded into its weights at the end."""
    ready = (x.mean(0), x.std(0).nan_to_num(1.0).clamp_min(1e-6)) if standardize else (x.new_zeros(x.shape[1]), x.new_ones(1))
    center, scale = ready
    z, target, head = ((x - center) / scale).to(device), y.to(device), nn.Linear(x.shape[1], classes).to(device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    descent: torch.optim.Optimizer = torch.optim.AdamW(head.parameters(), lr)
    if optimizer == "sgd":
        descent = torch.optim.SGD(head.parameters(), lr, momentum=0.9)

    def loss(index: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(head(z[index]), target[index])

    for epoch in range(epochs):
        for group in descent.param_groups:
            group["lr"] = lr * decay("cosine", epoch, epochs)
        train_epoch(head, descent, steps_of(len(z), batch_size, rng), loss, 0.0, "the head's loss", "lr", lr)
        progress(epoch + 1, epochs)
    spend(6.0 * parameter_count(head) * len(x) * epochs)
    head.cpu()
    with torch.no_grad():  # W (x - m) / s + b = (W / s) x + (b - (W / s) m)
        head.weight.div_(scale)
        head.bias.sub_(head.weight @ center)
    return head.eval()


def parameter_count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
