"""Images made from an upload, beside the client's own: model inversion of classifiers, and samples of generators.

Inversion follows the gradient of a classifier down to images that it is sure of, with total variation and, where there are
batch norms, their statistics as a prior (as DeepInversion does). Each image that was made is compared with the nearest training
image of its class, and each training image with the best of all that was made; the same with held-out images says what is
found without the upload.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from osfl.core.result import Rebuilt, Reconstructed
from osfl.core.types import Dataset
from osfl.evaluation.privacy.reconstruction import best_of_all
from osfl.evaluation.privacy.similarity import psnr, squared_errors, ssim
from osfl.models.norms import norms

ORIGINALS = 64  # training images for each of which all that was made is looked through
_TV, _BN = 0.01, 1.0


def invert(
    model: nn.Module, labels: torch.Tensor, shape: tuple[int, int, int], rng: torch.Generator, steps: int, device: torch.device
) -> torch.Tensor:
    """Images in [0, 1] that the classifier gives these labels."""
    model = model.to(device).eval().requires_grad_(False)
    pixels = (0.5 * torch.randn(len(labels), *shape, generator=rng)).to(device).requires_grad_(True)
    optimizer, wanted, gaps = torch.optim.Adam([pixels], 0.1), labels.to(device), list[torch.Tensor]()

    def gap(layer: nn.BatchNorm2d, x: torch.Tensor) -> None:
        assert layer.running_mean is not None and layer.running_var is not None
        mean, spread = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        gaps.append((mean - layer.running_mean).norm() + (spread - layer.running_var).norm())

    hooks = [layer.register_forward_pre_hook(lambda module, given: gap(module, given[0])) for layer in norms(model)]
    try:
        for _ in range(steps):
            gaps.clear()
            x = pixels.clamp(-1, 1)
            loss = functional.cross_entropy(model(x), wanted)
            variation = (x[..., 1:] - x[..., :-1]).abs().mean() + (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
            loss = loss + _TV * variation + (_BN * torch.stack(gaps).mean() if gaps else 0.0)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    finally:
        for hook in hooks:
            hook.remove()
    return ((pixels.detach().cpu().clamp(-1, 1) + 1) / 2).contiguous()


def judge_rebuilt(party: str, client: str, how: str, made: Dataset, train: Dataset, held_out: Dataset) -> Rebuilt | None:
    """What was made (float images in [0, 1]) beside training and held-out images (uint8); None: no class has all three."""
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in ("original", "made", "blind", "error", "likeness", "ratio")}
    for label in sorted(set(made.labels.tolist())):
        mine, own, others = made.images[made.labels == label], _of(train, label), _of(held_out, label)
        if not min(len(mine), len(own), len(others)):
            continue
        size = min(len(own), len(others))  # the more images there are, the nearer is the nearest
        errors = squared_errors(mine, own)
        nearest = errors.argmin(1)
        rows["error"].append(errors.amin(1))
        rows["likeness"].append(ssim(mine, own[nearest]))
        rows["ratio"].append((errors[:, :size].amin(1) / squared_errors(mine, others[:size]).amin(1).clamp_min(1e-9)).sqrt())
        originals = own[: max(1, ORIGINALS // 8)]
        for name, found in (("original", mine), ("blind", others.mean(0, keepdim=True))):
            best = best_of_all(originals, found)
            rows[name].append(torch.tensor([[best["count"], best["psnr"], best["ssim"]]]))
    if not rows["error"]:
        return None
    error = torch.cat(rows["error"])
    return {
        "party": party,
        "of": client,
        "how": how,
        "images": len(error),
        "by_original": _mean(rows["original"]),
        "by_reconstruction": {
            "count": len(error),
            "psnr": float(psnr(error).mean()),
            "ssim": float(torch.cat(rows["likeness"]).mean()),
        },
        "blind": _mean(rows["blind"]),
        "ratio": float(torch.cat(rows["ratio"]).median()),
    }


def _of(data: Dataset, label: int) -> torch.Tensor:
    return data.images[data.labels == label].float() / 255


def _mean(rows: list[torch.Tensor]) -> Reconstructed:
    table = torch.cat(rows)
    weights = table[:, 0] / table[:, 0].sum()
    return {"count": int(table[:, 0].sum()), "psnr": float(weights @ table[:, 1]), "ssim": float(weights @ table[:, 2])}
