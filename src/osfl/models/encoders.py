"""Frozen encoders: an image in, a vector out. Named in the plan, pinned by sha256, the same at every site.

`random` needs no weights at all. The others read a safetensors file that the plan pins: one of `KNOWN` (see weights_table.py),
a file of the user's in timm's or transformers' naming, or one fetched from a hub (`hub:facebook/dinov2-base`). Any architecture
of ours is an encoder with such a file: what its classifier would see is the vector.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import UsageError
from osfl.core.seeds import torch_generator
from osfl.core.types import Task, digest_of
from osfl.models.architectures import check_architecture
from osfl.models.build import build_model
from osfl.models.checkpoints import usual_names
from osfl.models.efficientnet import EfficientNetLite
from osfl.models.encoder_table import ENCODERS, sheet
from osfl.models.folding import freeze
from osfl.models.pretrained import fill, given_path, read_weights, weights_path
from osfl.models.random_features import RandomFeatures
from osfl.models.vit import Vit
from osfl.models.weights_table import IMAGENET, KNOWN, Weights
from osfl.runtime.precision import mixed

_VERSION = 2  # of what an encoder does besides its weights; a change makes old features unused


@dataclass(frozen=True)
class Encoder:
    """A network that describes images as vectors; `digest` names everything that its answers depend on."""

    name: str
    width: int  # d, numbers in a vector
    digest: str
    network: nn.Module  # frozen; (batch, 3, side, side) in [-1, 1] -> (batch, d)


Features = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def _class_token(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model.features(x)  # type: ignore[operator]
    return found


def _before_head(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """320 numbers: the last block's channels, averaged over the image."""
    assert isinstance(model, EfficientNetLite)
    return model.blocks(x).mean((2, 3))


_FEATURES: Mapping[str, Features] = {"efficientnet_lite0_320": _before_head}


def encoder_problems(name: str, side: int, weights: str, sha256: str, pixels: str = "imagenet") -> list[str]:
    """What is wrong with an encoder's settings, before any file is looked for."""
    try:
        kind = sheet(name)
        if name not in ENCODERS:
            check_architecture(name, _task(side))
    except UsageError as error:
        return [
            f"setting 'encoder': expected one of {', '.join(ENCODERS)}, or an architecture (`osfl ls architectures`) that "
            f"takes windows of {side} pixels, got {name!r}: {error.problems[0]}"
        ]
    found = []
    if side < 8 or side % kind.multiple:
        expected = f"a multiple of {kind.multiple}" if kind.multiple > 1 else "at least 8"
        found.append(f"setting 'window': {name} takes images of {expected} pixels, got {side}")
    if kind.architecture and not kind.weights and not (weights and sha256):
        found.append(
            f"setting 'encoder_weights': {name} needs a safetensors file and its sha256 (encoder_weights, "
            "encoder_sha256), so that every site has the same encoder; hub:owner/name fetches one"
        )
    if weights and kind.weights:
        found.append(f"setting 'encoder_weights': {name} has weights of its own; leave it empty")
    if pixels != "imagenet" and not weights:
        found.append("setting 'encoder_pixels': describes the file of 'encoder_weights', and there is none")
    if weights and not re.fullmatch(r"[0-9a-f]{64}", sha256):
        found.append(f"setting 'encoder_sha256': expected 64 lower-case hex digits, got {sha256!r}")
    return found


@lru_cache(maxsize=16)
def encoder_width(name: str, side: int) -> int:
    """d, the numbers in a vector."""
    if width := sheet(name).width:
        return width
    with torch.device("meta"):
        model = build_model(name, _task(side))
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1].in_features


@lru_cache(maxsize=4)
def load_encoder(name: str, side: int, weights: str = "", sha256: str = "", pixels: str = "imagenet") -> Encoder:
    """The encoder, with weights whose hash is in the plan; else an error that tells where to get them."""
    kind, digest = sheet(name), encoder_digest(name, side, sha256, pixels)
    if not kind.architecture:
        plain = _Describing(RandomFeatures(grid=1), _class_token)
        return Encoder(name, kind.width, digest, _Standardized(plain, side))
    model = build_model(kind.architecture, _task(side))
    normalization = IMAGENET if pixels == "imagenet" else ()
    known = KNOWN[kind.weights] if kind.weights else Weights(kind.architecture, weights, sha256, "", "", *normalization)
    path = weights_path(kind.weights) if kind.weights else given_path(weights, sha256, "encoder_weights")
    tensors = usual_names(read_weights(path, known.sha256), str(path))
    if isinstance(model, Vit):
        fill(model, tensors, known, str(path))
        described: nn.Module = model
    else:  # convolutions pad with zeros, so what comes before them cannot be folded into them
        fill(model, tensors, replace(known, mean=Weights.mean, deviation=Weights.deviation), str(path))
        described = _Normalized(model, known) if (known.mean, known.deviation) != (Weights.mean, Weights.deviation) else model
    network = _Describing(freeze(described), _FEATURES.get(name, _class_token))
    return Encoder(name, encoder_width(name, side), digest, network)


def encoder_digest(name: str, side: int, sha256: str = "", pixels: str = "imagenet") -> str:
    """Names everything that an encoder's answers depend on; known from the plan only, without its weights."""
    known = sheet(name).weights
    other = [pixels] if pixels != "imagenet" else []
    return digest_of(["osfl encoder", _VERSION, name, KNOWN[known].sha256 if known else sha256, side, *other])


def _task(side: int) -> Task:
    return Task("encoder", ("none",), (3, side, side))


class _Normalized(nn.Module):
    """A network that takes images in [-1, 1], where its weights expect RGB less a mean and over a deviation."""

    def __init__(self, model: nn.Module, known: Weights) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(known.mean).view(3, 1, 1))
        self.register_buffer("deviation", torch.tensor(known.deviation).view(3, 1, 1))

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return _class_token(self.model, (0.5 * (x + 1) - self.get_buffer("mean")) / self.get_buffer("deviation"))


class _Describing(nn.Module):
    """A network reduced to its features."""

    def __init__(self, model: nn.Module, features: Features) -> None:
        super().__init__()
        self.model, self.take = model.eval().requires_grad_(False), features

    @mixed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.take(self.model, x)


class _Standardized(nn.Module):
    """Features minus their mean, over their deviation, on fixed pictures of blurred noise.

    Untrained features are nearly the same for all images; what they differ in is then of the size that classifiers expect.
    """

    def __init__(self, network: nn.Module, side: int) -> None:
        super().__init__()
        self.network = network
        with torch.no_grad():
            found = network(_noise_pictures(side))
        self.register_buffer("center", found.mean(0))
        self.register_buffer("scale", found.std(0).clamp_min(1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = (self.network(x) - self.center) / self.scale
        return y


def _noise_pictures(side: int) -> torch.Tensor:
    """(128, 3, side, side) in [-1, 1]: the same on every machine, blurred to grains of different sizes."""
    rng, found = torch_generator(0, "noise pictures"), []
    for grain in (2, 4, 8, 16):
        small = 2 * torch.rand(32, 3, grain, grain, generator=rng) - 1
        found.append(functional.interpolate(small, (side, side), mode="bilinear", align_corners=False))
    return torch.cat(found)
