"""FALCON's autoregressive generator of token sequences: training by likelihood, and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from osfl.ingredients.tokens.training import PIECE, Progress, parameter_count, steps_of, train_epoch
from osfl.methods.falcon.token_space import out_of_space
from osfl.models.token_models import TokenGenerator
from osfl.runtime.meter import spend


def fit_generator(
    model: TokenGenerator,
    tokens: torch.Tensor,
    labels: torch.Tensor,
    rng: torch.Generator,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    device: torch.device,
    progress: Progress,
    held_out: tuple[torch.Tensor, torch.Tensor] | None = None,
    patience: int = 0,
) -> None:
    """Least negative log-likelihood, the mean over sequences and positions, by AdamW; tokens are (n, 1 + L, d).

    With patience, what was best for the held-out sequences is kept, be it the start, and the rest is not trained.
    """
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=1e-4)

    x, y = tokens.to(device), labels.to(device)

    def loss(index: torch.Tensor) -> torch.Tensor:
        return -model.log_likelihood(x[index], y[index]).mean()

    best = _Best(model, held_out, device) if patience and held_out is not None and len(held_out[1]) else None
    for epoch in range(epochs):
        steps = steps_of(len(tokens), batch_size, rng)
        train_epoch(model, optimizer, steps, loss, 2.0, "the generator's likelihood", "generator_lr", lr)
        spend(6.0 * parameter_count(model) * tokens.shape[0] * tokens.shape[1])
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


def draw_sequences(
    model: TokenGenerator,
    space: torch.Tensor,
    wanted: dict[int, int],
    rng: Callable[[int], torch.Generator],
    temperature: float,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
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
