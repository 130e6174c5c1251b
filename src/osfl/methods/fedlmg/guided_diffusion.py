"""Images that a diffusion model finds likely and a classifier recognizes: its latents are corrected at every step (FedLMG).

With z the noisy latent and x the clean one that the model takes it for, a step is z <- z - grad (CE + w R_BN)(resized image of
x), then the model's own step. Before the first one, z is corrected a few times by R_BN only. CE is each image's own, so that
images made together move as far as a single one; R_BN is about all images of the batch at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.ingredients.inversion.pixels import Watched
from osfl.ingredients.training.local import too_low
from osfl.models.flops import inversion_flops
from osfl.models.inputs import to_images
from osfl.models.latent_prior import Prior
from osfl.runtime.meter import spend
from osfl.runtime.precision import gradients


@dataclass(frozen=True)
class Guidance:
    """Of the sampler; mixed into Settings. Defaults are FedLMG's."""

    pipeline: str = ""  # a folder in diffusers' layout, hub:owner/name, or toy, which needs no weights and knows nothing
    pipeline_sha256: str = ""  # what its files must hash to
    prompt: str = "a photo of a {}"  # for each class, by its name
    prompt_guidance: float = 3.0  # classifier-free
    diffusion_steps: int = 50  # of the sampler, from noise to image
    first_corrections: int = 10  # by batch-norm statistics only, before the first step
    bn: float = 0.1  # weight of R_BN
    step_size: float = 1.0  # of a correction


def guidance_problems(settings: Guidance) -> list[str]:
    return too_low(settings, {"diffusion_steps": 1, "first_corrections": 0, "bn": 0, "step_size": 0})


def schedule(count: int, steps: int) -> list[int]:
    """Training steps of the diffusion model that are visited, from pure noise to the last but one."""
    return torch.linspace(count - 1, 0, steps + 1).round().long().tolist()[:-1]


def guided_images(
    prior: Prior,
    member: Watched,
    labels: torch.Tensor,
    image: tuple[int, int, int],
    settings: Guidance,
    rng: torch.Generator,
    device: torch.device,
) -> torch.Tensor:
    """One image a label, uint8, by deterministic (DDIM) steps; everything random is in the first latents."""
    member.to(device)
    labels, z = labels.to(device), torch.randn((len(labels), *prior.latent), generator=rng).to(device)
    times = schedule(len(prior.kept), settings.diffusion_steps)
    first = settings.first_corrections if member.layers else 0  # without batch norm there is nothing to correct by
    for _ in range(first):
        z = _corrected(z, times[0], prior, member, labels, image, settings, classify=False)
    for now, then in zip(times, [*times[1:], -1], strict=True):
        z = _corrected(z, now, prior, member, labels, image, settings, classify=True)
        noise = prior.noise(z, now, labels)
        clean, kept = _clean(z, noise, prior.kept[now]), prior.kept[then] if then >= 0 else z.new_ones(())
        z = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    if not bool(z.isfinite().all()):
        raise TrainingError(
            "guided diffusion gave latents that are not finite",
            field="step_size",
            got=settings.step_size,
            fix="Lower it (`--set step_size=...`).",
        )
    corrections, (ask, draw) = first + len(times), prior.flops()
    passes = corrections * (ask + 2 * draw + inversion_flops(member.network, image))  # 2: and the backward pass
    spend((passes + len(times) * ask + draw) * len(labels), makes=len(labels))
    with torch.no_grad():
        return to_images(_pictured(prior, z, image).clamp(-1, 1).cpu())


def _clean(z: torch.Tensor, noise: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return (z - (1 - kept).sqrt() * noise) / kept.sqrt()


def _corrected(
    z: torch.Tensor,
    t: int,
    prior: Prior,
    member: Watched,
    labels: torch.Tensor,
    image: tuple[int, int, int],
    settings: Guidance,
    *,
    classify: bool,
) -> torch.Tensor:
    """z minus the gradient. The model's noise is taken as given: the backward pass is through decoder and classifier only."""
    noise = prior.noise(z, t, labels).detach()
    z = z.detach().requires_grad_()
    logits, term = member(_pictured(prior, _clean(z, noise, prior.kept[t]), image))
    loss = settings.bn * term
    if classify:
        loss = loss + functional.cross_entropy(logits, labels, reduction="sum")
    if not loss.requires_grad:  # R_BN only, and no batch norm
        return z.detach()
    (gradient,) = gradients(loss, z)
    return (z - settings.step_size * gradient).detach()


def _pictured(prior: Prior, latent: torch.Tensor, image: tuple[int, int, int]) -> torch.Tensor:
    """The latent's image in the channels and size of the task."""
    drawn = prior.decode(latent)
    if drawn.shape[1] != image[0]:
        drawn = drawn.mean(1, keepdim=True).expand(-1, image[0], -1, -1)
    return functional.interpolate(drawn, image[1:], mode="bilinear", antialias=True)
