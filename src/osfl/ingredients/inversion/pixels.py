"""Model inversion: synthesize images of each class by gradient descent on the pixels of a trained network's input.

Paper: Yin et al., "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR 2020. The loss is
CE(f(x), y) + tv·R_TV(x) + bn·R_BN(x) + l2·||x|| + adi·(1 - JS), with the network frozen and in evaluation mode.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.ingredients.training.local import not_positive, too_low
from osfl.models.flops import inversion_flops
from osfl.runtime.meter import spend
from osfl.runtime.precision import descend

Each = Callable[[int, torch.Tensor], None]  # (step from 1, images): called after every step, to keep a trajectory


@dataclass(frozen=True)
class Inversion:
    """How images are found; defaults are DeepInversion's for small images, as FedISCA and FedBiCross use them."""

    steps: int = 500  # T
    lr: float = 0.05  # of Adam on the pixels
    tv: float = 2.5e-5  # weight of total variation, for 256 images of 3 x 32 x 32; see `normalized`
    bn: float = 10.0  # weight of the BN statistics
    l2: float = 0.0
    adi: float = 0.0  # weight of the disagreement with the student (adaptive DeepInversion)
    roll: int = 2  # random shift of up to so many pixels each step
    flip: bool = False  # random mirror each step
    clamp: bool = False  # keep pixels in the valid range [-1, 1]


@dataclass(frozen=True)
class Pixels:
    """How a server makes images; mixed into Settings. Defaults are those of DeepInversion for small images."""

    images: int = 256  # found together, as one batch
    steps: int = 500  # T, descent steps on the pixels
    pixel_lr: float = 0.05  # of Adam on the pixels
    tv: float = 2.5e-5  # weight of total variation, for 256 images of 3 x 32 x 32; others are converted
    bn: float = 10.0  # weight of the distance to the BN statistics
    roll: int = 2  # random shift of up to so many pixels each step
    flip: bool = False  # random mirror each step
    clamp: bool = False  # keep pixels in the valid range
    labels: Literal["balanced", "seen", "counts"] = "balanced"  # seen: classes the makers have; counts: as often as they do

    def inversion(self, **more: float) -> Inversion:
        return Inversion(self.steps, self.pixel_lr, self.tv, self.bn, roll=self.roll, flip=self.flip, clamp=self.clamp, **more)


def pixel_problems(settings: Pixels, least_images: int = 2) -> list[str]:
    """Settings that make no image, a sentence each."""
    least = {"images": least_images, "steps": 1, "tv": 0, "bn": 0, "roll": 0}
    return too_low(settings, least) + not_positive(settings, "pixel_lr")


# --- the terms -------------------------------------------------------------------------------------------------------


def total_variation(x: torch.Tensor, normalize: bool = False) -> torch.Tensor:
    """Norms of the differences to four neighbors, over the whole batch; it grows as the root of the number of pixels.

    `normalize` divides by that root, so that one weight serves any batch and image size.
    """
    total: torch.Tensor = _Variation.apply(x)  # type: ignore[no-untyped-call]
    return total / x.numel() ** 0.5 if normalize else total


_FIRST, _LAST, _ALL = slice(None, -1), slice(1, None), slice(None)
_NEIGHBORS = (  # two views of the pixels whose difference counts: along rows, columns and both diagonals
    ((..., _ALL, _FIRST), (..., _ALL, _LAST)),
    ((..., _FIRST, _ALL), (..., _LAST, _ALL)),
    ((..., _FIRST, _FIRST), (..., _LAST, _LAST)),
    ((..., _LAST, _FIRST), (..., _FIRST, _LAST)),
)


class _Variation(torch.autograd.Function):
    """Sum of the norms of four differences. Written by autograd, the gradient of each view would be a new image of zeros,
    and all that took a quarter of an inversion step of a small network."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        gaps = [x[one] - x[other] for one, other in _NEIGHBORS]
        norms = torch.stack([gap.norm() for gap in gaps])
        ctx.save_for_backward(x, norms, *gaps)
        return norms.sum()

    @staticmethod
    def backward(ctx: Any, total: torch.Tensor) -> Any:
        x, norms, *gaps = ctx.saved_tensors
        gradient = torch.zeros_like(x)
        for gap, scale, (one, other) in zip(gaps, total / norms.clamp_min(1e-12), _NEIGHBORS, strict=True):
            gradient[one].addcmul_(gap, scale)
            gradient[other].addcmul_(gap, -scale)
        return gradient


def jensen_shannon(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """½ KL(p || m) + ½ KL(q || m) of two networks' probabilities, m = (p + q) / 2, batch mean; at most log 2."""
    log_p, log_q = student.log_softmax(-1), teacher.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2)
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1).mean()


def disagreement(student: torch.Tensor, teacher: torch.Tensor, temperature: float = 3.0) -> torch.Tensor:
    """The "JS" of adversarial inversion: expectation under the mixture, clamped to [0.01, 0.99], batch mean.

    It is the reverse of the textbook divergence, as in every public implementation; we keep it for comparability. With many
    classes most probabilities are below the clamp, and what is there has no gradient.
    """
    p = functional.softmax(student / temperature, -1).clamp(0.01, 0.99)
    q = functional.softmax(teacher / temperature, -1).clamp(0.01, 0.99)
    m = ((p + q) / 2).clamp(0.01, 0.99)
    return 0.5 * ((m * (m / p).log()).sum(-1) + (m * (m / q).log()).sum(-1)).mean()


class _Statistics(torch.autograd.Function):
    """Frozen BN and its statistics term in one pass each way.

    Both are affine in x for each channel, so their gradients fold into one multiply-add instead of five passes over
    memory; that is what bounds inversion on CPUs.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, mean: torch.Tensor, var: torch.Tensor
    ) -> Any:
        got_mean, got_var = _moments(x)
        gap_mean, gap_var = got_mean - mean, got_var - var
        size_mean, size_var = gap_mean.norm(), gap_var.norm()
        ctx.save_for_backward(x, scale, got_mean, gap_mean / size_mean.clamp_min(1e-12), gap_var / size_var.clamp_min(1e-12))
        return torch.addcmul(_wide(shift), x, _wide(scale)), size_mean + size_var

    @staticmethod
    def backward(ctx: Any, out: torch.Tensor, term: torch.Tensor) -> Any:
        x, scale, mean, way_mean, way_var = ctx.saved_tensors
        count = x.numel() // x.shape[1]
        slope = term * 2 * way_var / count  # d var / d x = 2 (x - mean) / count
        offset = term * way_mean / count - slope * mean
        return torch.addcmul(_wide(offset), x, _wide(slope)).addcmul_(out, _wide(scale)), None, None, None, None


def _moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and biased variance of each channel; torch.var_mean is 3 to 9 times slower on channels_last images."""
    rows = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
    mean = rows.mean(0)
    return mean, (rows - mean).square_().mean(0)


def _wide(channels: torch.Tensor) -> torch.Tensor:
    return channels.view(1, -1, 1, 1)


class _WatchedNorm(nn.Module):
    """A frozen BatchNorm2d that also returns how far its input is from the statistics it has seen in training."""

    def __init__(self, norm: nn.BatchNorm2d, terms: list[torch.Tensor]) -> None:
        super().__init__()
        assert norm.running_mean is not None and norm.running_var is not None
        scale = (norm.weight if norm.affine else 1.0) / (norm.running_var + norm.eps).sqrt()
        shift = (norm.bias if norm.affine else 0.0) - norm.running_mean * scale
        for name, value in (("scale", scale), ("shift", shift), ("mean", norm.running_mean), ("var", norm.running_var)):
            self.register_buffer(name, value.detach().clone())
        self.terms = terms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))  # 16-bit floats lose the moments; float64 stays
        out, term = _Statistics.apply(x, self.scale, self.shift, self.mean, self.var)  # type: ignore[no-untyped-call]
        self.terms.append(term)
        return out  # type: ignore[no-any-return]


class Watched(nn.Module):
    """A frozen copy of a network whose forward gives (logits, R_BN); the network itself is not changed and gets no hook.

    R_BN sums, over the BN layers, the distances of the batch's mean and biased variance to the running ones (norms, not
    squares). A network without BN has R_BN = 0.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._terms: list[torch.Tensor] = []
        self.network = copy.deepcopy(model).eval().requires_grad_(False)
        self.layers = 0
        for parent in list(self.network.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.BatchNorm2d):
                    setattr(parent, name, _WatchedNorm(child, self._terms))
                    self.layers += 1
        self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.network(x)
        term = torch.stack(self._terms).sum() if self._terms else logits.new_zeros(())
        self._terms.clear()
        return logits, term


# --- the descent -----------------------------------------------------------------------------------------------------


def invert(
    models: Sequence[Watched],
    labels: torch.Tensor,
    shape: tuple[int, int, int],
    settings: Inversion,
    rng: torch.Generator,
    *,
    student: nn.Module | None = None,
    each: Each | None = None,
    device: torch.device | None = None,
    combine: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Images (n, channels, height, width) that the models, as one teacher, take for the labels.

    The teacher is the mean of logits unless `combine` makes one of (models, batch, classes). `student` is needed for adi.
    """
    device = device or torch.device("cpu")
    combine = combine or (lambda logits: logits.mean(0))
    labels = labels.to(device)
    x = torch.randn((len(labels), *shape), generator=rng).to(device)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
    optimizer = torch.optim.Adam([x], settings.lr, fused=True)
    scale = (x.numel() / (256 * 3 * 32 * 32)) ** -0.5  # the published tv weight is for that many pixels
    for step in range(1, settings.steps + 1):
        seen = _moved(x, settings, rng)
        answers = [model(seen) for model in models]
        logits = combine(torch.stack([answer for answer, _ in answers]))
        loss = functional.cross_entropy(logits, labels)
        loss = loss + settings.tv * scale * total_variation(seen)
        if settings.bn:
            loss = loss + settings.bn * sum(term for _, term in answers)
        if settings.l2:
            loss = loss + settings.l2 * seen.norm()
        if settings.adi and student is not None:
            loss = loss + settings.adi * (1 - disagreement(student(seen), logits).clamp(0, 1))
        descend(optimizer, loss)
        if settings.clamp:
            with torch.no_grad():
                x.clamp_(-1, 1)
        if each is not None:
            each(step, x.detach())
    if not bool(x.isfinite().all()):
        raise TrainingError(
            "inversion gave pixels that are not finite",
            field="pixel_lr",
            got=settings.lr,
            fix="Lower it (`--set pixel_lr=...`).",
        )
    spend(sum(inversion_flops(model.network, shape) for model in models) * len(labels) * settings.steps, makes=len(labels))
    return x.detach().clone()


def _moved(x: torch.Tensor, settings: Inversion, rng: torch.Generator) -> torch.Tensor:
    """The same images shifted around the border and mirrored at random, so that no pixel is special."""
    if settings.roll:
        down, right = torch.randint(-settings.roll, settings.roll + 1, (2,), generator=rng).tolist()
        x = torch.roll(x, (down, right), (2, 3))
    if settings.flip and bool(torch.rand((), generator=rng) < 0.5):
        x = x.flip(3)
    return x


def balanced_labels(count: int, classes: Sequence[int]) -> torch.Tensor:
    """So many labels, each of the classes as often as any other (within one)."""
    return torch.tensor([classes[i % len(classes)] for i in range(count)])


def labels_for(mode: str, count: int, seen: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Labels for `count` images; `seen` is the number of training images of each class of the makers, (classes,)."""
    if mode == "counts":
        return torch.multinomial(seen.double(), count, replacement=True, generator=rng)
    classes = range(len(seen)) if mode == "balanced" else [int(c) for c in seen.nonzero().flatten()]
    return balanced_labels(count, list(classes))
