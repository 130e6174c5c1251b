"""Training on tokens: classifiers, linear heads and generators that never see an image."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.errors import TrainingError
from osfl.ingredients.token_space import out_of_space
from osfl.ingredients.training import batches, decay, not_positive, step, too_low
from osfl.meter import spend
from osfl.models.initial import initialize
from osfl.models.token_models import AttentionPool, TokenGenerator

Progress = Callable[[int, int], None]
PIECE = 4096  # sequences that are drawn at once


@dataclass(frozen=True)
class Classifying:
    """A classifier of token sequences and its training; mixed into Settings. Defaults are FALCON's, Sec. 4.1."""

    epochs: int = 60  # passes over the sequences
    batch_size: int = 256  # sequences a step
    lr: float = 5e-4  # Adam
    hidden: int = 0  # of the feed-forward layer; 0: four times the tokens' width
    dropout: float = 0.3  # share of its inner numbers that each step leaves out

    def classifier(self, width: int, classes: int, rng: torch.Generator | None) -> AttentionPool:
        model = AttentionPool(width, classes, hidden=self.hidden, dropout=self.dropout)
        initialize(model, rng)
        return model


def classifying_problems(settings: Classifying) -> list[str]:
    found = [*too_low(settings, {"epochs": 1, "batch_size": 2, "hidden": 0}), *not_positive(settings, "lr")]
    found += [f"setting 'dropout': expected 0 to below 1, got {settings.dropout}"] * (not 0 <= settings.dropout < 1)
    return found


def fit_classifier(
    settings: Classifying, tokens: torch.Tensor, labels: torch.Tensor, classes: int, start: torch.Generator,
    rng: torch.Generator, device: torch.device, progress: Progress,
) -> AttentionPool:  # fmt: skip
    """A classifier of real sequences (n, 1 + L, d), by cross-entropy."""
    model = settings.classifier(tokens.shape[2], classes, start)

    def loss(index: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(tokens[index].to(device), rng), labels[index].to(device))

    train_on_tokens(model, len(tokens), loss, rng, settings, device, progress)
    return model


def train_on_tokens(
    model: nn.Module, count: int, loss: Callable[[torch.Tensor], torch.Tensor], rng: torch.Generator,
    settings: Classifying, device: torch.device, progress: Progress,
) -> None:  # fmt: skip
    """Adam over `count` sequences in random order, the last epoch kept; `loss` takes the positions of a batch."""
    model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), settings.lr)
    for epoch in range(settings.epochs):
        _epoch(model, optimizer, count, settings.batch_size, loss, rng, 0.0, "the classifier's loss", "lr", settings.lr)
        progress(epoch + 1, settings.epochs)
    spend(6.0 * _size(model) * count * settings.epochs)
    model.cpu().eval()


def fit_generator(
    model: TokenGenerator, tokens: torch.Tensor, labels: torch.Tensor, rng: torch.Generator, *,
    epochs: int, batch_size: int, lr: float, device: torch.device, progress: Progress,
    held_out: tuple[torch.Tensor, torch.Tensor] | None = None, patience: int = 0,
) -> None:  # fmt: skip
    """Least negative log-likelihood, the mean over sequences and positions, by AdamW; tokens are (n, 1 + L, d).

    With patience, what was best for the held-out sequences is kept, be it the start, and the rest is not trained.
    """
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)

    def loss(index: torch.Tensor) -> torch.Tensor:
        return -model.log_likelihood(tokens[index].to(device), labels[index].to(device)).mean()

    best = _Best(model, held_out, device) if patience and held_out is not None and len(held_out[1]) else None
    for epoch in range(epochs):
        _epoch(model, optimizer, len(tokens), batch_size, loss, rng, 2.0, "the generator's likelihood", "generator_lr", lr)
        spend(6.0 * _size(model) * tokens.shape[0] * tokens.shape[1])
        progress(epoch + 1, epochs)
        if best is not None and best.worse_since(model) >= patience:
            break
    if best is not None:
        model.load_state_dict(best.weights)
    model.cpu().eval()


class _Best:
    """The weights under which held-out sequences were likeliest so far."""

    def __init__(self, model: TokenGenerator, held_out: tuple[torch.Tensor, torch.Tensor], device: torch.device) -> None:
        self._tokens, self._labels = (part.to(device) for part in held_out)
        self._likelihood, self._since, self.weights = -math.inf, 0, dict[str, torch.Tensor]()
        self.worse_since(model)

    @torch.no_grad()
    def worse_since(self, model: TokenGenerator) -> int:
        """For how many calls the model has not become better."""
        found = float(model.log_likelihood(self._tokens, self._labels).mean())
        self._since += 1
        if found > self._likelihood:
            self._likelihood, self._since = found, 0
            self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        return self._since


def _epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, batch_size: int,
    loss: Callable[[torch.Tensor], torch.Tensor], rng: torch.Generator, clip: float, what: str, field: str, lr: float,
) -> None:  # fmt: skip
    total = torch.zeros(())
    for index in batches(count, batch_size, rng):
        value = loss(index)
        step(model, optimizer, value, clip=clip)
        total = total.to(value.device) + value.detach()
    if not bool(total.isfinite()):
        raise TrainingError(f"{what} is not finite", field=field, got=lr, fix=f"Lower it (`--set {field}=...`).")


def draw_sequences(
    model: TokenGenerator, space: torch.Tensor, wanted: dict[int, int], rng: Callable[[int], torch.Generator],
    temperature: float, device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """So many sequences of each class, and their labels; every class has a generator of random numbers of its own."""
    model.to(device).eval()
    found, labels = [], []
    for label, count in wanted.items():
        classes, random = torch.full((count,), label), rng(label)
        for part in torch.split(classes, PIECE):  # the network's own memory is that of one piece
            found.append(out_of_space(model.sample(part.to(device), random, temperature).cpu(), part, space))
        labels.append(classes)
    made = sum(wanted.values())
    spend(model.sampling_flops() * made, makes=made)
    return torch.cat(found), torch.cat(labels)


def linear_head(
    x: torch.Tensor, y: torch.Tensor, classes: int, rng: torch.Generator, *, epochs: int, batch_size: int,
    optimizer: Literal["sgd", "adamw"], lr: float, standardize: bool, device: torch.device, progress: Progress,
) -> nn.Linear:  # fmt: skip
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
        _epoch(head, descent, len(z), batch_size, loss, rng, 0.0, "the head's loss", "lr", lr)
        progress(epoch + 1, epochs)
    spend(6.0 * _size(head) * len(x) * epochs)
    head.cpu()
    with torch.no_grad():  # W (x - m) / s + b = (W / s) x + (b - (W / s) m)
        head.weight.div_(scale)
        head.bias.sub_(head.weight @ center)
    return head.eval()


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
