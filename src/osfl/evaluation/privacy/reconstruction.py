"""A reconstruction attack: a decoder learns to turn features back into images, then is shown what clients sent.

The attacker knows the encoder and has some images of its own. It trains a decoder, given the class, on their features, and
applies it to two things: the features of the clients' training images (which FALCON and FedPFT never send) and the synthetic
features (which they do). A reconstruction of real features is compared with its own image. Synthetic features have no image
of their own, so the best match counts: the training image of the class with the least squared error. Real features are judged
by that rule, too, and so is the mean image of the class among the attacker's images: what is found without any features.
FALCON's paper asks the other way round: for each original image the highest PSNR and the highest SSIM over all
reconstructions. Both stand in the result. The more reconstructions there are, the higher are the paper's figures, whatever they
show.

Two attackers: one has the clients' validation images, as an outsider with similar images would; the other has the very
training images, so that its decoder may know them by heart: the worst case. Images are made small, at most `side` pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from osfl.core.method import Context, Method
from osfl.core.result import Attacker, Reconstructed, Reconstruction
from osfl.core.types import Dataset, Json, Progress, Shard, Upload
from osfl.data.source import together
from osfl.evaluation.generator_samples import Draw
from osfl.evaluation.privacy.similarity import psnr, squared_errors, ssim
from osfl.evaluation.tokens import Features
from osfl.models.decoders import START, build_decoder
from osfl.models.pictures import png
from osfl.runtime.devices import ahead

SIMILAR, KNOWN = "similar images", "the training images"  # what the attackers have
DECODER = 2  # the first saturated at black and found nothing; a round that it attacked is attacked again
_ORIGINALS = 64  # training images for each of which all reconstructions are looked through
_PIXELS = 1 << 22  # that are compared at once
_SHOWN = 8  # reconstructions in a gallery
_GAP = 3  # white pixels between the images of a strip


@dataclass(frozen=True)
class Effort:
    """How hard the attackers try."""

    steps: int = 1000  # of the decoder's training, Adam
    batch: int = 32
    lr: float = 1e-3
    side: int = 64  # of the images that are compared
    most: int = 256  # features of each kind that are attacked


@dataclass(frozen=True)
class Known:
    """Small images in [0, 1], their features in one vector each, and their labels."""

    images: torch.Tensor
    features: torch.Tensor
    labels: torch.Tensor


def attack(
    method: Method,
    uploads: Sequence[Upload],
    shards: Sequence[Shard],
    classes: Sequence[str],
    ctx: Context,
    effort: Effort = Effort(),
) -> Reconstruction | None:
    """Both attackers (one, where nobody has validation images); nothing where no features are made."""
    synthetic = Features(*method.tokens(uploads, ctx))
    if not len(synthetic.labels):
        return None
    shards = sorted(shards, key=lambda shard: shard.client)
    private = _known(together([shard.train for shard in shards]), method, effort, ctx)
    similar = _known(together([shard.val for shard in shards]), method, effort, ctx)
    made = Features(synthetic.rows.flatten(1), synthetic.labels)
    jobs = {name: has for name, has in ((SIMILAR, similar), (KNOWN, private)) if len(has.labels) > 1}

    def work(name: str) -> tuple[Attacker, dict[str, Json]]:
        return _attacker(name, jobs[name], private, made, classes, effort, ctx.generator, ctx.device, ctx.progress)

    found = dict(zip(jobs, ctx.map(work, list(jobs)), strict=True))
    figures = {title: figure for _, figures in found.values() for title, figure in figures.items()}
    return {
        "side": private.images.shape[-1],
        "steps": effort.steps,
        "decoder": DECODER,
        "attackers": {name: row for name, (row, _) in found.items()},
        "figures": figures,
    }


def side_of(size: Sequence[int], effort: Effort) -> int:
    """Of the images that are compared: a power of two, and no larger than it takes."""
    return min(effort.side, 1 << max(int(math.log2(START)), math.ceil(math.log2(max(size)))))


def _known(data: Dataset, method: Method, effort: Effort, ctx: Context) -> Known:
    if not len(data):
        return Known(torch.zeros(0, 1, START, START), torch.zeros(0, 1), data.labels)
    side = side_of(data.images.shape[-2:], effort)
    small = functional.interpolate(data.images.float() / 255, (side, side), mode="bilinear", antialias=True).clamp(0, 1)
    return Known(small, method.encode(data.images, ctx).flatten(1), data.labels)


def _attacker(
    name: str,
    own: Known,
    private: Known,
    made: Features,
    classes: Sequence[str],
    effort: Effort,
    draw: Draw,
    device: torch.device,
    progress: Progress,
) -> tuple[Attacker, dict[str, object]]:
    center, scale = own.features.mean(0), own.features.std(0).nan_to_num(1.0).clamp_min(1e-4)
    usual = torch.stack([_mean_image(own, label) for label in range(len(classes))])
    decoder = build_decoder(
        own.features.shape[1], len(classes), own.images.shape[1], own.images.shape[-1], draw("attack", "decoder")
    ).to(device)
    _learn(
        decoder,
        (own.features - center) / scale,
        own.images - usual[own.labels],
        own.labels,
        effort,
        draw("attack", name, "order"),
        device,
        lambda done, total: progress(f"attacker with {name}", done, total),
    )

    def decoded(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parts = zip(torch.split((features - center) / scale, 64), torch.split(labels, 64), strict=True)
            return torch.cat([(usual[y] + decoder(x.to(device), y.to(device)).cpu()).clamp(0, 1) for x, y in parts])

    real = torch.randperm(len(private.labels), generator=draw("attack", "real"))[: effort.most]
    fake = torch.randperm(len(made.labels), generator=draw("attack", "synthetic"))[: effort.most]
    from_real = decoded(private.features[real], private.labels[real])
    from_fake = decoded(made.rows[fake], made.labels[fake])
    blind = usual[private.labels[real]]
    rows: Attacker = {
        "images": len(own.labels),
        "real": _alike(from_real, private.images[real]),
        "real_best": _alike(from_real, _nearest(from_real, private.labels[real], private)),
        "synthetic": _alike(from_fake, _nearest(from_fake, made.labels[fake], private)),
        "blind": _alike(blind, _nearest(blind, private.labels[real], private)),
        "real_by_original": best_of_all(private.images[real[:_ORIGINALS]], from_real),
        "synthetic_by_original": best_of_all(private.images[real[:_ORIGINALS]], from_fake),
    }
    return rows, _figures(name, from_real, real, from_fake, made.labels[fake], private, classes)


def _learn(
    decoder: nn.Module,
    features: torch.Tensor,
    differences: torch.Tensor,
    labels: torch.Tensor,
    effort: Effort,
    rng: torch.Generator,
    device: torch.device,
    progress: Callable[[int, int], None],
) -> None:
    """Least squared error: what a high signal-to-noise ratio asks for."""
    optimizer = torch.optim.Adam(decoder.parameters(), effort.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, effort.steps)
    x, y, target = features.to(device), labels.to(device), differences.to(device)
    draws = ((torch.randint(len(x), (effort.batch,), generator=rng),) for _ in range(effort.steps))
    for step, (index,) in enumerate(ahead(draws, device)):
        loss = functional.mse_loss(decoder(x[index], y[index]), target[index])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == effort.steps:
            progress(step + 1, effort.steps)
    decoder.eval()


def _mean_image(own: Known, label: int) -> torch.Tensor:
    mine = own.images[own.labels == label]
    return mine.mean(0) if len(mine) else own.images.mean(0)


def _nearest(images: torch.Tensor, labels: torch.Tensor, private: Known) -> torch.Tensor:
    """For each image the training image of its class with the least squared error."""
    table = squared_errors(images, private.images)
    table[labels[:, None] != private.labels[None]] = torch.inf
    return private.images[table.argmin(1)]


def _alike(images: torch.Tensor, targets: torch.Tensor) -> Reconstructed:
    error = (images - targets).double().square().flatten(1).mean(1)
    return {"count": len(images), "psnr": float(psnr(error).mean()), "ssim": float(ssim(images, targets).mean())}


def best_of_all(originals: torch.Tensor, found: torch.Tensor) -> Reconstructed:
    """For each original the highest PSNR and the highest SSIM over all that was found, perhaps of two different images."""
    error = squared_errors(originals, found).min(1).values
    at_once = max(1, _PIXELS // found.numel())
    likeness = torch.cat([_likest(part, found) for part in torch.split(originals, at_once)])
    return {"count": len(originals), "psnr": float(psnr(error).mean()), "ssim": float(likeness.mean())}


def _likest(originals: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """The highest SSIM of each original with all that was found."""
    pairs = originals.repeat_interleave(len(found), 0), found.repeat(len(originals), 1, 1, 1)
    return ssim(*pairs).view(len(originals), len(found)).max(1).values


# --- pictures --------------------------------------------------------------------------------------------------------


def _figures(
    name: str,
    from_real: torch.Tensor,
    real: torch.Tensor,
    from_fake: torch.Tensor,
    fake_labels: torch.Tensor,
    private: Known,
    classes: Sequence[str],
) -> dict[str, object]:
    """Each strip: a training image and what the attacker makes of features, real ones and synthetic ones."""
    warning = "These are images of clients: do not publish this page if they are private."
    truth = private.images[real]
    own = [_strip(truth[i], from_real[i], classes[int(private.labels[real[i]])]) for i in range(min(_SHOWN, len(real)))]
    nearest = _nearest(from_fake[:_SHOWN], fake_labels[:_SHOWN], private)
    made = [_strip(nearest[i], from_fake[i], classes[int(fake_labels[i])]) for i in range(len(nearest))]
    return {
        f"Attacker with {name}: from real features": {
            "kind": "gallery",
            "images": own,
            "wide": True,
            "note": (f"Left: a training image. Right: what the decoder makes of its features, which are never sent. {warning}"),
        },
        f"Attacker with {name}: from synthetic features": {
            "kind": "gallery",
            "images": made,
            "wide": True,
            "note": (
                f"Left: the training image of the class that is nearest to the right one, which the decoder made of synthetic "
                f"features. {warning}"
            ),
        },
    }


def _strip(left: torch.Tensor, right: torch.Tensor, caption: str) -> Mapping[str, str]:
    gap = torch.ones(left.shape[0], left.shape[1], _GAP)
    whole = (torch.cat([left, gap, right], 2) * 255).round().to(torch.uint8)
    return {"png": png(whole), "caption": caption}
