"""What a network from ImageNet says about places in pictures, learned by a small ViT: a start for clients on small images.

There are no ImageNet images here, but there is a network that was trained on them (EfficientNet-Lite0, pinned by sha256). It
is shown crops of PACS pictures; the ViT sees the same crops, a quarter as wide. Of each patch it learns to say what the
teacher says at that place (the 112 channels of stride 16, one place a patch of 4 pixels), and with its class token what the
teacher says of the whole crop (1,280 features); squared errors of standardized numbers. No labels are used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.pretrained import load_pretrained
from osfl.models.vit import Vit
from osfl.models.weights_table import KNOWN

TEACHER, PLACES, STRIDE = "efficientnet_lite0_imagenet", "_blocks.10", 16  # the last block whose map has this stride


@dataclass(frozen=True)
class Distillation:
    """One recipe, named completely in the record."""

    architecture: str = "vit"
    crops: int = 24_576
    smallest: float = 0.1  # share of a picture that a crop shows at least
    epochs: int = 10
    batch_size: int = 64
    lr: float = 2e-3  # Adam, cosine by step
    warmup: int = 200  # steps
    clip: float = 1.0


@dataclass(frozen=True)
class Lessons:
    """Crops as the student sees them, and the teacher's outputs for each."""

    images: torch.Tensor  # (crops, 3, side, side) uint8
    places: torch.Tensor  # (crops, channels, grid, grid) half precision
    whole: torch.Tensor  # (crops, features) half precision


def crop(pictures: torch.Tensor, smallest: float, rng: torch.Generator) -> torch.Tensor:
    """A part of one picture, (1, 3, height, width): its share and shape (3:4 to 4:3) drawn, mirrored half of the time."""
    side = pictures.shape[-1]
    which = int(torch.randint(len(pictures), (), generator=rng))
    share, shape, down, right, mirrored = torch.rand(5, generator=rng).tolist()
    area, ratio = (smallest + (1 - smallest) * share) * side**2, (4 / 3) ** (2 * shape - 1)
    height, width = (min(side, int(math.sqrt(area * r))) for r in (ratio, 1 / ratio))
    top, left = int(down * (side - height + 1)), int(right * (side - width + 1))
    part = pictures[which : which + 1, :, top : top + height, left : left + width].float()
    return part.flip(-1) if mirrored < 0.5 else part


def _resized(parts: list[torch.Tensor], side: int) -> torch.Tensor:
    scaled = [functional.interpolate(part, (side, side), mode="bilinear", antialias=True) for part in parts]
    return torch.cat(scaled).round().clamp(0, 255).to(torch.uint8)


def lessons(pictures: torch.Tensor, side: int, patch: int, recipe: Distillation) -> Lessons:
    """Crops and the teacher's answers, each asked once."""
    wide = side // patch * STRIDE
    teacher = build_model("efficientnet_lite0", Task("imagenet", ("none",), (3, wide, wide)))
    load_pretrained(teacher, TEACHER)
    teacher.eval()
    received: list[torch.Tensor] = []
    teacher.get_submodule(PLACES).register_forward_hook(lambda _, __, out: received.append(out.half().contiguous()))
    images, whole = [], []
    rng = torch_generator(0, "pretrain", "crops")
    for first in range(0, recipe.crops, 64):
        parts = [crop(pictures, recipe.smallest, rng) for _ in range(min(64, recipe.crops - first))]
        images.append(_resized(parts, side))
        with torch.no_grad():
            whole.append(teacher.features(to_input(_resized(parts, wide))).half())
    return Lessons(torch.cat(images), torch.cat(received), torch.cat(whole))


def distilled(given: Lessons, recipe: Distillation, progress: Callable[[int, int], None] | None = None) -> Vit:
    """The ViT after all lessons; its head is not trained."""
    side = given.images.shape[-1]
    rng = torch_generator(0, "pretrain", "distil")
    model = build_model(recipe.architecture, Task("crops", ("none",), (3, side, side)), torch_generator(0, "pretrain", "init"))
    assert isinstance(model, Vit)
    width = model.head.in_features
    heads = [
        _first(nn.Linear(width, given.places.shape[1]), rng),
        _first(nn.Linear(width, given.whole.shape[1]), rng),
    ]
    learned = [*model.parameters(), *(p for head in heads for p in head.parameters())]
    optimizer = torch.optim.Adam(learned, recipe.lr)
    place, whole = _standard(given.places, (0, 2, 3)), _standard(given.whole, (0,))
    total, done = recipe.epochs * (len(given.images) // recipe.batch_size), 0
    model.train()
    for epoch in range(recipe.epochs):
        order = torch.randperm(len(given.images), generator=rng)
        for index in order.split(recipe.batch_size)[: len(order) // recipe.batch_size]:
            rate = min(1.0, (done + 1) / recipe.warmup) * 0.5 * (1 + math.cos(math.pi * done / total))
            optimizer.param_groups[0]["lr"] = recipe.lr * rate
            x, there, all_of_it = (
                to_input(given.images[index]),
                place(given.places[index]),
                whole(given.whole[index]),
            )
            if float(torch.rand((), generator=rng)) < 0.5:
                x, there = x.flip(-1), there.flip(-1)
            tokens = model.forward_features(x)
            loss = functional.mse_loss(heads[0](tokens[:, 1:]), there.flatten(2).transpose(1, 2))
            loss = loss + functional.mse_loss(heads[1](tokens[:, 0]), all_of_it)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(learned, recipe.clip)
            optimizer.step()
            done += 1
        if progress is not None:
            progress(epoch + 1, recipe.epochs)
    return model.eval()


def _first(layer: nn.Linear, rng: torch.Generator) -> nn.Linear:
    with torch.no_grad():
        layer.weight.normal_(0, 1 / math.sqrt(layer.in_features), generator=rng)
        layer.bias.zero_()
    return layer


def _standard(given: torch.Tensor, over: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """(x - mean) / deviation of each channel; of the first 2,000 answers."""
    some = given[:2000].float()
    mean, deviation = some.mean(over, keepdim=True), some.std(over, keepdim=True) + 1e-3
    return lambda x: (x.float() - mean) / deviation


def teacher_output() -> dict[str, str]:
    """For the record."""
    known = KNOWN[TEACHER]
    return {"name": TEACHER, "sha256": known.sha256, "license": known.license, "origin": known.origin, "asked_at": PLACES}
