"""Sparse model inversion of vision transformers: patches that the class token hardly looks at are no longer made.

Paper: Hu et al., "Sparse Model Inversion: Efficient Inversion of Vision Transformers for Data-Free Applications", ICML 2024.
The loss is CE(f(x), y) - js·JS(f(x), f_S(x)) + tv·R_TV(x) + l2·||x||, with all weights frozen. At a stopping event the least
attended patches leave the token sequence (`Vit.embed`), so that both passes get cheaper, and their pixels never move again.

`scales` is ours: a step moves the image on several grids at once (`Pyramid`). A ViT has no batch norm that would tie images to
those it was trained on, and descending on pixels only finds noise that no other network understands. `Joint` is ours, too: all
clients as one network, so that images are of their class for all who know it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError, UsageError
from osfl.core.types import ADDED
from osfl.ingredients.inversion.pixels import disagreement, jensen_shannon, total_variation
from osfl.ingredients.training.local import not_positive, too_low
from osfl.models.flops import inversion_flops
from osfl.models.vit import OnSubset, Vit, kept_count
from osfl.runtime.meter import spend
from osfl.runtime.precision import gradients

Events = tuple[tuple[int, float], ...]  # (after this step, drop this share of the patches that are left)
_PUBLISHED = 64 * 3 * 224 * 224  # pixels of the batch that the published tv weight is for


@dataclass(frozen=True)
class SparseInversion:
    """How images are found; defaults are FedMITR's, with one event at half of the steps."""

    steps: int = 100  # T_I
    lr: float = 1e-3  # of Adam on the pixels, betas 0.5 and 0.99
    js: float = 1.0  # weight of the disagreement with the server's model, which is sought
    tv: float = 1e-4  # weight of total variation, for 64 images of 3 x 224 x 224; others are converted
    l2: float = 0.0
    events: Events = ((50, 0.3),)
    augment: bool = True  # shift by up to an eighth of the side and mirror, each step
    clamp: bool = False  # keep pixels in the valid range [-1, 1]
    scales: int = 1  # grids that a step moves the image on, each half as fine as the one before; 1 = pixels only
    start: float = 1.0  # standard deviation of the noise that images start as
    divergence: str = "public"  # of server and client, see `VitPixels`


@dataclass(frozen=True)
class VitPixels:
    """How a server makes images from ViTs; mixed into Settings. Defaults are FedMITR's."""

    images: int = 64  # B, of each client in each epoch
    steps: int = 100  # T_I, descent steps on the pixels
    pixel_lr: float = 1e-3  # of Adam on the pixels; a step moves each by about so much, and they start as N(0, 1)
    clamp: bool = False  # keep pixels in the valid range
    adversarial: float = 1.0  # alpha, weight of the JS between client and server, which is sought
    tv: float = 1e-4  # weight of total variation, for 64 images of 3 x 224 x 224; others are converted
    l2: float = 0.0  # weight of the images' norm; not published
    shifts: bool = True  # shift by up to an eighth of the side, and mirror, before each step
    scales: int = field(default=1, metadata=ADDED)  # grids that images move on at once, each half as fine; 1 = pixels only
    start: float = field(default=1.0, metadata=ADDED)  # standard deviation of the noise that images start as
    divergence: Literal["public", "textbook"] = field(default="public", metadata=ADDED)  # JS as in SMI's code, or as defined

    def inversion(self, events: Events = ()) -> SparseInversion:
        return SparseInversion(
            self.steps,
            self.pixel_lr,
            self.adversarial,
            self.tv,
            self.l2,
            events,
            self.shifts,
            self.clamp,
            self.scales,
            self.start,
            self.divergence,
        )


@dataclass(frozen=True)
class Sparse:
    """Synthetic images in [-1, 1] or beyond, (n, channels, height, width), and which patches were made to the end."""

    images: torch.Tensor
    keep: torch.Tensor  # (n, kept), ascending


# --- stopping events -------------------------------------------------------------------------------------------------


def events_of(schedule: str, steps: int, ratio: float) -> Events:
    """`50:0.3,100:0.3` as events; an empty schedule is one event of `ratio` at half of the steps, or none for 0."""
    if not schedule:
        return ((max(1, steps // 2), ratio),) if ratio > 0 else ()
    return tuple(_event(part) for part in schedule.split(","))


def _event(text: str) -> tuple[int, float]:
    step, colon, ratio = text.partition(":")
    try:
        if colon and 0 < float(ratio) < 1:
            return int(step), float(ratio)
    except ValueError:
        pass
    raise UsageError(
        f"setting 'stops': expected step:ratio with 0 < ratio < 1, got {text.strip()!r}",
        field="stops",
        fix="For example --set stops=50:0.3,75:0.3.",
    )


def event_problems(events: Events, steps: int) -> list[str]:
    """Events that cannot happen, a sentence each."""
    times = [step for step, _ in events]
    found = [f"setting 'stops': step {t} is not one of 1 to {steps}" for t in times if not 1 <= t <= steps]
    found += ["setting 'stops': steps must ascend"] * (times != sorted(set(times)))
    return found + [f"setting 'mask': expected a ratio from 0 to below 1, got {r}" for _, r in events if not 0 < r < 1]


def most_attended(attention: torch.Tensor, keep: torch.Tensor, ratio: float) -> torch.Tensor:
    """Of the patches `keep` (n, left), those that the class token attends to most, ascending; at least one stays."""
    count = max(1, kept_count(keep.shape[1], ratio))
    return keep.gather(1, attention.topk(count).indices).sort().values


def patches_left(patches: int, events: Events) -> int:
    """How many patches are made to the end."""
    for _, ratio in events:
        patches = max(1, kept_count(patches, ratio))
    return patches


def all_patches(images: int, patches: int, device: torch.device | None = None) -> torch.Tensor:
    return torch.arange(patches, device=device).repeat(images, 1)


def dropped(keep: torch.Tensor, patches: int) -> torch.Tensor:
    """The patches that are not in `keep`, (n, patches - kept), ascending."""
    away = torch.ones(len(keep), patches, dtype=torch.bool, device=keep.device).scatter_(1, keep, False)
    return away.nonzero()[:, 1].view(len(keep), patches - keep.shape[1])


def pixels_of(keep: torch.Tensor, grid: tuple[int, int], patch: int) -> torch.Tensor:
    """1 where a pixel belongs to a kept patch, else 0: (n, 1, height, width)."""
    inside = torch.zeros(len(keep), grid[0] * grid[1], device=keep.device).scatter_(1, keep, 1.0)
    return inside.view(-1, 1, *grid).repeat_interleave(patch, 2).repeat_interleave(patch, 3)


# --- augmentation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Move:
    """A shift around the border, in pixels, then perhaps a mirror."""

    down: int
    right: int
    mirror: bool

    def pixels(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.roll(x, (self.down, self.right), (2, 3))
        return x.flip(3) if self.mirror else x

    def patches(self, keep: torch.Tensor, grid: tuple[int, int], patch: int) -> torch.Tensor:
        """Where patches go when the image moves by whole patches."""
        rows = (keep // grid[1] + self.down // patch) % grid[0]
        columns = (keep % grid[1] + self.right // patch) % grid[1]
        return rows * grid[1] + (grid[1] - 1 - columns if self.mirror else columns)

    def whole(self, patch: int) -> Move:
        """The nearest move by whole patches: others would cut kept patches in two."""
        return Move(patch * round(self.down / patch), patch * round(self.right / patch), self.mirror)


def draw_move(height: int, width: int, rng: torch.Generator) -> Move:
    """Up to an eighth of the side either way, mirrored half of the time."""
    down = int(torch.randint(-(height // 8), height // 8 + 1, (), generator=rng))
    right = int(torch.randint(-(width // 8), width // 8 + 1, (), generator=rng))
    return Move(down, right, bool(torch.rand((), generator=rng) < 0.5))


# --- grids -------------------------------------------------------------------------------------------------------------


class Pyramid:
    """Images that start and move on several grids at once: the pixels, and grids that are each half as fine.

    All grids are stretched linearly to the pixels, so the image itself is all that is kept: where the optimizer moves a coarse
    grid, the pixels follow, and stopped pixels do not. One scale is the pixels only.
    """

    def __init__(
        self, count: int, image: tuple[int, int, int], scales: int, start: float, rng: torch.Generator, device: torch.device
    ) -> None:
        channels, height, width = image
        self.ways = [(stretching(height, k).to(device), stretching(width, k).to(device)) for k in range(1, scales)]
        self.x = torch.randn((count, *image), generator=rng).to(device)
        self.coarse = [
            torch.randn((count, channels, rows.shape[1], columns.shape[1]), generator=rng).to(device)
            for rows, columns in self.ways
        ]
        self._follow(None)
        self.x.mul_(start / math.sqrt(scales)).requires_grad_()  # with about the variance of pixels only

    def lead(self, gradient: torch.Tensor) -> None:
        """Gradients of all grids from that of the pixels. Coarse grids begin each step at zero: they hold the step only."""
        self.x.grad = gradient
        for grid, (rows, columns) in zip(self.coarse, self.ways, strict=True):
            grid.zero_().grad = rows.T @ gradient @ columns

    @torch.no_grad()
    def _follow(self, alive: torch.Tensor | None) -> None:
        for grid, (rows, columns) in zip(self.coarse, self.ways, strict=True):
            move = rows @ grid @ columns.T
            self.x += move if alive is None else move.mul_(alive)

    def finish_step(self, alive: torch.Tensor | None, clamp: bool) -> None:
        """After a step: pixels follow the coarse grids where they are not stopped, and stay in range."""
        self._follow(alive)
        if clamp:
            with torch.no_grad():
                self.x.clamp_(-1, 1)


def stretching(size: int, halvings: int) -> torch.Tensor:
    """Linear interpolation from a line of ceil(size / 2^halvings) numbers to one of `size`, as a matrix."""
    few = math.ceil(size / 2**halvings)
    return functional.interpolate(torch.eye(few)[None], size=size, mode="linear", align_corners=False)[0].T.contiguous()


# --- what is inverted ------------------------------------------------------------------------------------------------


class Inverted(Protocol):
    """What images are made from: logits and the class token's attention to each patch."""

    patches: int
    grid: tuple[int, int]
    patch: int

    def with_attention(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...


class Joint:
    """Several ViTs as one: their logits (members, batch, classes) combined, and the mean of their attention."""

    def __init__(self, members: Sequence[Vit], combine: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.members, self.combine = members, combine
        self.patches, self.grid, self.patch = members[0].patches, members[0].grid, members[0].patch

    def with_attention(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        logits, attention = zip(*(member.with_attention(x, keep) for member in self.members), strict=True)
        return self.combine(torch.stack(logits)), torch.stack(attention).mean(0)


# --- the descent -----------------------------------------------------------------------------------------------------


def invert_sparsely(
    model: Inverted,
    labels: torch.Tensor,
    image: tuple[int, int, int],
    settings: SparseInversion,
    rng: torch.Generator,
    *,
    server: Vit | None = None,
    device: torch.device | None = None,
) -> Sparse:
    """Images that a frozen ViT, or several as one, takes for the labels, and a frozen server (with js > 0) does not.

    The step before an event is not augmented, so that the attention it reads belongs to true patch positions.
    """
    device, labels = device or torch.device("cpu"), labels.to(device or "cpu")
    pyramid = Pyramid(len(labels), image, settings.scales, settings.start, rng, device)
    x, optimizer = pyramid.x, torch.optim.Adam([pyramid.x, *pyramid.coarse], settings.lr, betas=(0.5, 0.99), fused=True)
    events, keep, alive = dict(settings.events), all_patches(len(labels), model.patches, device), None
    for step in range(1, settings.steps + 1):
        move = draw_move(image[1], image[2], rng)  # drawn at every step, so that schedules can be compared
        if not settings.augment or step in events:
            move = Move(0, 0, False)
        loss, attention = _loss(x, keep, move, model, server, labels, settings)
        (gradient,) = gradients(loss, x)
        pyramid.lead(gradient if alive is None else gradient.mul_(alive))
        optimizer.step()
        pyramid.finish_step(alive, settings.clamp)
        if step in events:
            keep = most_attended(attention.detach(), keep, events[step])
            alive = pixels_of(keep, model.grid, model.patch)
            optimizer.state[x]["exp_avg"].mul_(alive)  # no momentum carries stopped pixels on
    if not bool(x.isfinite().all()):
        raise TrainingError(
            "inversion gave pixels that are not finite",
            field="pixel_lr",
            got=settings.lr,
            fix="Lower it (`--set pixel_lr=...`).",
        )
    networks = [*(model.members if isinstance(model, Joint) else [model]), *([server] if server and settings.js else [])]
    spend(sum(sparse_flops(network, image, settings) for network in networks) * len(labels), makes=len(labels))
    return Sparse(x.detach().clone(), keep)


def _loss(
    x: torch.Tensor,
    keep: torch.Tensor,
    move: Move,
    model: Inverted,
    server: Vit | None,
    labels: torch.Tensor,
    settings: SparseInversion,
) -> tuple[torch.Tensor, torch.Tensor]:
    """L_MI and the attention of the last block's class token to each patch in `keep`."""
    where = None  # while all patches are there, the ordinary pass needs no gather
    if keep.shape[1] < model.patches:
        move = move.whole(model.patch)
        where = move.patches(keep, model.grid, model.patch)
    seen = move.pixels(x)
    logits, attention = model.with_attention(seen, where)
    loss = functional.cross_entropy(logits, labels)
    if settings.js and server is not None:
        apart = jensen_shannon if settings.divergence == "textbook" else disagreement
        loss = loss - settings.js * apart(server(seen, where), logits)
    if settings.tv:
        loss = loss + settings.tv * math.sqrt(_PUBLISHED / x.numel()) * total_variation(x)
    if settings.l2:
        loss = loss + settings.l2 * x.norm()
    return loss, attention


def sparse_flops(model: Vit, image: tuple[int, int, int], settings: SparseInversion) -> float:
    """Of all steps for one image, through one network."""
    total, since, left = 0.0, 0, model.patches
    for step, ratio in (*settings.events, (settings.steps, 0.0)):
        network: nn.Module = OnSubset(model, left) if left < model.patches else model
        total += (step - since) * inversion_flops(network, image)
        since, left = step, max(1, kept_count(left, ratio))
    return total


# --- settings that cannot work ---------------------------------------------------------------------------------------


def vit_pixel_problems(settings: VitPixels, events: Events = ()) -> list[str]:
    """Settings that make no image, a sentence each."""
    least = {"images": 1, "steps": 1, "tv": 0, "l2": 0, "adversarial": 0, "scales": 1}
    return too_low(settings, least) + not_positive(settings, "pixel_lr", "start") + event_problems(events, settings.steps)
