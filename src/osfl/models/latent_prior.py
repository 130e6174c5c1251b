"""Latent diffusion models as knowledge of what images look like: latents in, their noise and their images out.

`toy` needs no weights and knows nothing: its latents are Gaussian, so that the noise in them is known in closed form, and a
latent is a small image. Anything else is a folder in the layout of `diffusers` (unet, vae, scheduler, text_encoder,
tokenizer), from disk or a hub, pinned by a digest of its files. That needs the extra: pip install 'osfl[diffusion]'.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.nn import functional

from osfl.models.flops import _Counter
from osfl.models.naming import ModelError

TOY = "toy"
_FILES = ("*.safetensors", "*.json", "*.txt")  # what a pipeline is made of; nothing here can execute


class Prior(Protocol):
    """A diffusion model of latents: z_t = sqrt(a_t) x + sqrt(1 - a_t) noise, with a_t = kept[t]."""

    latent: tuple[int, int, int]
    kept: torch.Tensor  # a_t of every training step, falling

    def noise(self, z: torch.Tensor, t: int, labels: torch.Tensor) -> torch.Tensor: ...
    def decode(self, x: torch.Tensor) -> torch.Tensor: ...
    def flops(self) -> tuple[float, float]: ...  # of one image: to ask for its noise, and to decode it


class Toy:
    """E[noise | z] = sqrt(1 - a) z for Gaussian latents; a latent becomes an image by enlarging it."""

    def __init__(self, channels: int, side: int = 8, steps: int = 100) -> None:
        self.latent, self.side = (channels, side, side), side
        self.kept = (1 - torch.linspace(1e-3, 0.1, steps, dtype=torch.float64)).cumprod(0).float()

    def noise(self, z: torch.Tensor, t: int, labels: torch.Tensor) -> torch.Tensor:
        return (1 - self.kept[t]).sqrt() * z

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(functional.interpolate(x, scale_factor=2.0, mode="bilinear"))

    def flops(self) -> tuple[float, float]:
        return 0.0, 0.0


class Pipeline:
    """Stable Diffusion and its kind: noise with classifier-free guidance on a sentence for each class."""

    def __init__(self, folder: Path, prompts: Sequence[str], guidance: float, device: torch.device) -> None:
        parts = _parts(folder)
        self.unet, self.vae = (parts[name].to(device).eval().requires_grad_(False) for name in ("unet", "vae"))
        side = int(self.unet.config.sample_size)
        self.latent, self.guidance, self.device = (int(self.unet.config.in_channels), side, side), guidance, device
        self.kept, self.velocity = parts["scheduler"].alphas_cumprod.float(), _velocity(parts["scheduler"], folder)
        self.text_features = _embedded(parts["text_encoder"].to(device).eval(), parts["tokenizer"], ["", *prompts], device)

    @torch.no_grad()
    def noise(self, z: torch.Tensor, t: int, labels: torch.Tensor) -> torch.Tensor:
        """e(nothing) + g (e(class) - e(nothing)), both in one batch."""
        condition = torch.cat([self.text_features[torch.zeros_like(labels)], self.text_features[labels + 1]])
        answer = self.unet(torch.cat([z, z]), torch.tensor(t, device=z.device), encoder_hidden_states=condition).sample
        plain, conditioned = answer.chunk(2)
        found: torch.Tensor = plain + self.guidance * (conditioned - plain)
        kept = self.kept[t]
        return kept.sqrt() * found + (1 - kept).sqrt() * z if self.velocity else found

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        image: torch.Tensor = self.vae.decode(x / self.vae.config.scaling_factor).sample
        return image

    def flops(self) -> tuple[float, float]:
        z = torch.zeros(1, *self.latent, device=self.device)
        with _Counter() as asked:
            self.noise(z, 0, torch.zeros(1, dtype=torch.int64, device=self.device))
        with torch.no_grad(), _Counter() as drawn:
            self.decode(z)
        return float(asked.total), float(drawn.total)


def prior_problems(pipeline: str, sha256: str) -> list[str]:
    """What is wrong with these settings, before anything is looked for."""
    if pipeline == TOY:
        return []
    if not pipeline:
        return ["setting 'pipeline': expected a folder in diffusers' layout, hub:owner/name, or toy"]
    if len(sha256) != 64 or any(c not in "0123456789abcdef" for c in sha256):
        return [f"setting 'pipeline_sha256': expected 64 lower-case hex digits, got {sha256!r}"]
    return []


def load_prior(
    pipeline: str, sha256: str, channels: int, prompts: Sequence[str], guidance: float, device: torch.device
) -> Prior:
    """The prior that a plan names, with files whose hashes it names."""
    if pipeline == TOY:
        return Toy(channels)
    folder = _from_hub(pipeline.removeprefix("hub:")) if pipeline.startswith("hub:") else Path(pipeline)
    if not (folder / "unet").is_dir():
        raise ModelError(
            f"there is no pipeline in {folder}",
            field="pipeline",
            expected=f"a folder with sha256 {sha256}",
            fix="Give the folder that holds unet, vae, scheduler, text_encoder and tokenizer.",
        )
    found = pipeline_digest(folder)
    if found != sha256:
        raise ModelError(
            "the pipeline is not the one that was pinned",
            field="pipeline_sha256",
            expected=sha256,
            got=found,
            fix="Use the files that the plan was written for.",
        )
    return Pipeline(folder, prompts, guidance, device)


def pipeline_digest(folder: Path) -> str:
    """sha256 over the names and hashes of all files that make up a pipeline, in order of their names."""
    files = sorted({path for pattern in _FILES for path in folder.rglob(pattern)})
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            inside = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(folder).as_posix()}\n{inside}\n".encode())
    return whole.hexdigest()


def _parts(folder: Path) -> dict[str, Any]:
    try:
        from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
        from transformers import CLIPTextModel, CLIPTokenizer
    except ImportError as error:
        raise ModelError(
            f"a diffusion pipeline needs {error.name}",
            field="pipeline",
            expected="diffusers and transformers",
            fix="Install them with: pip install 'osfl[diffusion]'.",
        ) from None
    safe = {"local_files_only": True, "use_safetensors": True}
    return {
        "unet": UNet2DConditionModel.from_pretrained(folder, subfolder="unet", **safe),
        "vae": AutoencoderKL.from_pretrained(folder, subfolder="vae", **safe),
        "scheduler": DDIMScheduler.from_pretrained(folder, subfolder="scheduler", local_files_only=True),
        "text_encoder": CLIPTextModel.from_pretrained(folder, subfolder="text_encoder", **safe),
        "tokenizer": CLIPTokenizer.from_pretrained(folder, subfolder="tokenizer", local_files_only=True),
    }


def _velocity(scheduler: Any, folder: Path) -> bool:
    kind = scheduler.config.prediction_type
    if kind not in ("epsilon", "v_prediction"):
        raise ModelError(
            f"the pipeline in {folder} predicts {kind!r}",
            field="pipeline",
            expected="epsilon or v_prediction",
            got=kind,
            fix="Choose another pipeline.",
        )
    return bool(kind == "v_prediction")


@torch.no_grad()
def _embedded(encoder: Any, tokenizer: Any, sentences: Sequence[str], device: torch.device) -> torch.Tensor:
    """The network's conditioning on each sentence, (sentences, tokens, width)."""
    ids = tokenizer(
        list(sentences),
        padding="max_length",
        truncation=True,
        max_length=encoder.config.max_position_embeddings,
        return_tensors="pt",
    ).input_ids
    hidden: torch.Tensor = encoder(ids.to(device)).last_hidden_state
    return hidden


def _from_hub(address: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelError(
            "a pipeline from a hub needs huggingface_hub",
            field="pipeline",
            fix="Install it with: pip install 'osfl[hub]'. Or give a local folder.",
        ) from None
    repository, _, revision = address.partition("@")
    return Path(snapshot_download(repository, revision=revision or None, allow_patterns=list(_FILES)))
