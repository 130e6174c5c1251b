"""Training with differential privacy of single images (DP-SGD), for clients that upload a classifier.

Paper: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016. Each step takes every image with the same probability
(Poisson sampling), shortens the gradient of each to at most `clip`, adds them up, and adds Gaussian noise of deviation
`multiplier * clip`. Which images, and the noise, come from the operating system and never from the plan's seed, which everybody
knows.

What is hidden is whether an image was there or blank: how many images a site has is known to all, and is not hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from osfl.core.errors import RoundError, TrainingError, go_on_without
from osfl.core.types import Dataset, Json, Plan, Privacy, Upload
from osfl.ingredients.statistics.gaussian_mechanism import shown_epsilon
from osfl.ingredients.statistics.secret_noise import gaussian, uniform
from osfl.ingredients.training.accountant import epsilon_of, multiplier_for
from osfl.ingredients.training.loss import classification_loss
from osfl.models.flops import training_flops
from osfl.models.inputs import to_input
from osfl.models.norms import norms
from osfl.runtime.meter import spend

_AT_ONCE = 64  # images whose gradients are in memory at once


@dataclass(frozen=True)
class Mechanism:
    """What ran at a site; epsilon follows from it and delta alone."""

    rate: float  # with which each image is in a step
    multiplier: float  # standard deviation of the noise, over the clipping norm
    steps: int

    def epsilon(self, delta: float) -> float:
        return epsilon_of(self.rate, self.multiplier, self.steps, delta)

    def as_json(self) -> Json:
        return {"rate": self.rate, "multiplier": self.multiplier, "steps": self.steps}


def mechanism_for(privacy: Privacy, images: int, batch_size: int, epochs: int) -> Mechanism:
    """The least noise that keeps the plan's epsilon at a site with so many images."""
    rate = min(1.0, batch_size / max(1, images))
    steps = epochs * max(1, math.ceil(images / batch_size))
    return Mechanism(rate, multiplier_for(privacy.epsilon, privacy.delta, rate, steps), steps)


def private_fit(
    model: nn.Module,
    data: Dataset,
    settings: Any,
    mechanism: Mechanism,
    optimizer: torch.optim.Optimizer,
    set_lr: Callable[[float], None],
    decay: Callable[[str, int, int], float],
    *,
    device: torch.device,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train in place. Images are not augmented."""
    if not math.isfinite(mechanism.multiplier):
        raise TrainingError(
            "no noise keeps this epsilon over so many steps",
            field="privacy.epsilon",
            fix="Agree on a larger epsilon, or on fewer epochs.",
        )
    model.to(device).train()
    images, labels = data.images.to(device), data.labels.to(device)
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    each = max(1, mechanism.steps // settings.epochs)
    for step in range(mechanism.steps):
        set_lr(settings.lr * decay(settings.schedule, step // each, settings.epochs))
        chosen = torch.from_numpy(uniform(len(data)) < mechanism.rate).to(device)
        total = clipped_sum(model, parameters, images[chosen], labels[chosen], settings.clip)
        for name, value in parameters.items():
            noise = (gaussian(value.numel()) * mechanism.multiplier * settings.clip).to(value.dtype).reshape(value.shape)
            value.grad = (total[name] + noise.to(device)) / (mechanism.rate * len(data))
        optimizer.step()
        if progress is not None and (step + 1) % each == 0:
            progress((step + 1) // each, settings.epochs)
    if not all(bool(torch.isfinite(value).all()) for value in parameters.values()):
        raise TrainingError("training with noise diverged", field="lr", got=settings.lr, fix="Lower it (`--set lr=...`).")
    spend(training_flops(model, tuple(data.images.shape[1:])) * mechanism.rate * len(data) * mechanism.steps)
    model.eval()


def clipped_sum(
    model: nn.Module, parameters: Mapping[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor, clip: float
) -> dict[str, torch.Tensor]:
    """The sum over images of the gradient of each one's loss, each shortened to at most `clip`; zeros for no image."""
    from torch.func import functional_call, grad, vmap  # takes a second to import

    buffers = dict(model.named_buffers())

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return classification_loss(functional_call(model, (weights, buffers), (x[None],)), y[None])

    one = vmap(grad(loss), in_dims=(None, 0, 0))
    weights = {name: value.detach() for name, value in parameters.items()}
    total = {name: torch.zeros_like(value) for name, value in weights.items()}
    for x, y in zip(torch.split(images, _AT_ONCE), torch.split(labels, _AT_ONCE), strict=True):
        if not len(x):
            continue
        found = one(weights, to_input(x, x.device), y)
        length = torch.stack([value.flatten(1).norm(dim=1) for value in found.values()]).norm(dim=0)
        factor = (clip / length.clamp_min(1e-12)).clamp_max(1.0)
        for name, value in found.items():
            total[name] += torch.einsum("i,i...->...", factor, value)
    return total


# --- what the plan promises ----------------------------------------------------------------------------------------------


def private_training_problems(
    model: Callable[[str], nn.Module], plan: Plan, architectures: Sequence[str], instead_of_counts: Sequence[str]
) -> list[str]:
    """Why training with these settings would not keep the plan's epsilon, a sentence each. `instead_of_counts`: where class
    counts are sent, what to choose so that they are not."""
    assert plan.privacy is not None
    found = []
    for name in architectures:
        if norms(model(name)):
            found.append(
                f"setting 'architecture': batch norm of {name!r} mixes the images of a batch; with [privacy] take group norm, "
                "such as 'cnn-w16-g4' or 'resnet18-w16-g4', or a vision transformer"
            )
    if not plan.settings.clip > 0:
        found.append("setting 'clip': with [privacy] the gradient of each image is shortened to it; expected a positive number")
    if plan.settings.augment != "none":
        found.append("setting 'augment': with [privacy] images are not augmented; set augment=none")
    if instead_of_counts:
        found.append(
            "privacy: the server needs each site's class counts, to which no noise is added; choose "
            f"{' and '.join(instead_of_counts)}"
        )
    if plan.secure_sum:
        found.append(
            "privacy: a masked model does not say how it was trained, so nobody could compute epsilon; set secure_sum = false"
        )
    if plan.privacy.noise != "site":
        found.append("privacy.noise: each site trains with all of the noise; set noise = 'site'")
    return found


def check_mechanism(upload: Upload, plan: Plan) -> None:
    """An upload that was made with less noise than the plan asks for would make its epsilon untrue; who sent it is named."""
    assert plan.privacy is not None
    expected = mechanism_for(
        plan.privacy, int(upload.payload.facts.get("samples", 0)), plan.settings.batch_size, plan.settings.epochs
    ).as_json()
    if upload.payload.facts.get("mechanism") != expected:
        raise RoundError(
            "this upload was not trained with the noise that the plan asks for",
            client=upload.client,
            field="facts.mechanism",
            expected=expected,
            got=str(upload.payload.facts.get("mechanism", "nothing")),
            fix=go_on_without(upload.client),
        )


def training_statement(plan: Plan, uploads: Sequence[Upload]) -> Json:
    """What is true of a release of these uploads: the largest epsilon of all sites, from what each says that it ran."""
    assert plan.privacy is not None
    ran = [Mechanism(**upload.payload.facts["mechanism"]) for upload in uploads]
    epsilon = max((one.epsilon(plan.privacy.delta) for one in ran), default=0.0)
    shown = shown_epsilon(epsilon)
    return {
        "epsilon": shown,
        "delta": plan.privacy.delta,
        "adversary": "everybody but the site itself: the server, other sites, and whoever gets the release",
        "epsilon_release": shown,
        "epsilon_term": shown,
        "unit": "one image of one site, there or blank (how many images a site has is known)",
        "noise": "site",
        "sites": len(uploads),
        "noised": ["the gradients of every step of local training (DP-SGD)"],
        "repeatable": False,
    }
