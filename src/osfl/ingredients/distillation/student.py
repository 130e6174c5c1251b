"""Knowledge distillation: the loss that all methods share, and the training loop over a pool of images.

Teacher answers are computed once an image and kept (`answers`), because a pool is passed many times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.ingredients.training.local import After, batches, decay, step
from osfl.models.flops import training_flops
from osfl.runtime.devices import ahead
from osfl.runtime.meter import spend


def kd_loss(teacher: torch.Tensor, student: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """τ² KL(teacher ‖ student) of logits (batch, classes), batch mean; its gradient to the student is τ (q - p) / batch."""
    p = functional.log_softmax(teacher / temperature, -1)
    q = functional.log_softmax(student / temperature, -1)
    return temperature**2 * functional.kl_div(q, p, reduction="batchmean", log_target=True)


@dataclass(frozen=True)
class Pool:
    """Synthetic images as network inputs in [-1, 1], (n, channels, height, width), with what is known about them."""

    inputs: torch.Tensor
    teacher: torch.Tensor  # logits or log-probabilities of the teacher, (n, classes)
    labels: torch.Tensor | None = None  # (n,) the class that each image was made for

    def __len__(self) -> int:
        return len(self.inputs)


def distill(
    student: nn.Module,
    pool: Pool,
    rng: torch.Generator,
    *,
    epochs: int,
    batch_size: int = 128,
    lr: float = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    temperature: float = 4.0,
    hard: float = 0.0,
    soft: float = 1.0,
    schedule: str = "cosine",
    clip: float = 10.0,
    noise: float = 0.0,
    mirror: bool = False,
    ask: Callable[[torch.Tensor], torch.Tensor] | None = None,
    after: After | None = None,
    track: bool = True,
    device: torch.device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Train the student in place on the pool: `soft` times KD, plus `hard` times cross-entropy on the labels that images
    were made for.

    `noise` and `mirror` change images each time they are shown. With `ask`, the teacher is asked about the changed image
    (the student then learns the teacher's function around the pool); without, the teacher's output on the original is used.
    `after` may change the weights after each step. Without `track`, batch norm stays as it was when the student came.
    """
    device = device or torch.device("cpu")
    student.to(device).train()
    pool = Pool(pool.inputs.to(device), pool.teacher.to(device), None if pool.labels is None else pool.labels.to(device))
    if not track:
        _keep_statistics(student)
    optimizer = torch.optim.SGD(student.parameters(), lr, momentum=momentum, weight_decay=weight_decay)
    for epoch in range(epochs):
        now = lr * decay(schedule, epoch, epochs)
        for group in optimizer.param_groups:
            group["lr"] = now
        total = torch.zeros((), device=device)
        for index, sides, *drawn in ahead(_steps(pool, batch_size, noise, mirror, rng), device):
            inputs = pool.inputs[index].flip(sides) if sides else pool.inputs[index]
            inputs = inputs + noise * drawn[0] if noise else inputs
            inputs = inputs.contiguous(memory_format=torch.channels_last)
            with torch.no_grad():
                target = ask(inputs) if ask is not None else pool.teacher[index]
            answer = student(inputs)
            loss = soft * kd_loss(target, answer, temperature)
            if hard and pool.labels is not None:
                loss = loss + hard * functional.cross_entropy(answer, pool.labels[index])
            step(student, optimizer, loss, clip=clip)
            if after is not None:
                after(student, now)
            total += loss.detach()
        if not math.isfinite(float(total)):
            raise TrainingError(
                "the distillation loss is not finite", field="lr", got=lr, fix="Lower the server's learning rate."
            )
        if progress is not None:
            progress(epoch + 1, epochs)
    spend(training_flops(student, tuple(pool.inputs.shape[1:])) * len(pool) * epochs)
    student.eval()


def _keep_statistics(model: nn.Module) -> None:
    """Batch norm answers as in evaluation, while its scale and shift learn."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _steps(pool: Pool, batch_size: int, noise: float, mirror: bool, rng: torch.Generator) -> Iterator[Sequence[Any]]:
    """What each step of an epoch draws: which images, along which sides they are mirrored, and noise."""
    for index in batches(len(pool), batch_size, rng):
        sides = [side for side in (2, 3) if mirror and bool(torch.rand((), generator=rng) < 0.5)]
        shape = (len(index), *pool.inputs.shape[1:])
        yield (index, sides, torch.randn(shape, generator=rng)) if noise else (index, sides)
