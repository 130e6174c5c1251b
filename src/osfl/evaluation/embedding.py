"""The space in which images are compared. Its name is part of every figure: a distance means nothing without it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from osfl.core.types import RunMap, Task
from osfl.models.build import build_model
from osfl.models.flops import forward_flops
from osfl.models.folding import freeze
from osfl.models.inception import SIDE, UNUSED, Inception
from osfl.models.inputs import to_input
from osfl.models.naming import ModelError, load_named
from osfl.models.pretrained import load_pretrained, read_weights, weights_path
from osfl.models.random_features import RandomFeatures
from osfl.runtime.meter import spend

_CHUNK = 64  # fixed, so that features do not depend on the number of workers
INCEPTION = "OSFL_INCEPTION"  # where a user has the network that FID and KID are defined on, as a safetensors file
_LITE = "efficientnet_lite0_imagenet"


@dataclass(frozen=True)
class Space:
    """A network whose features are compared, and the image side it is shown."""

    name: str
    network: nn.Module
    side: int
    frechet: str = "FD"  # FID and KID are the same distances on Inception, and only there are they called so
    kernel: str = "KD"

    def embed(self, images: torch.Tensor, device: torch.device, run_map: RunMap) -> torch.Tensor:
        """Features (images, dimensions) in float64; gray images count as color images of three equal channels."""
        network = self.network.to(device)
        spend(forward_flops(network, (3, self.side, self.side)) * len(images))

        def features(chunk: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                return network(_shown(chunk, self.side, device)).cpu().double()  # type: ignore[no-any-return]

        return torch.cat(run_map(features, torch.split(images, _CHUNK))).clone()  # clone: out of inference mode


def _shown(images: torch.Tensor, side: int, device: torch.device) -> torch.Tensor:
    x = to_input(images, device)
    x = x.expand(-1, 3, -1, -1)
    if x.shape[-2:] == (side, side):
        return x
    return F.interpolate(x, (side, side), mode="bilinear", align_corners=False, antialias=True)


class _Features(nn.Module):
    """A classifier without its last layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model.features(x)  # type: ignore[operator]
        return found


def available_space() -> Space:
    """The best space that this machine has: Inception where a user names its file, else a pretrained network if its
    weights are here, else random convolutions."""
    if os.environ.get(INCEPTION):
        return inception_space(Path(os.environ[INCEPTION]))
    try:
        weights_path(_LITE)
    except ModelError:
        return random_space()
    model = build_model("efficientnet_lite0", Task("space", ("none",), (3, 64, 64)))
    load_pretrained(model, _LITE)
    return Space("EfficientNet-Lite0 (ImageNet) features at 64 px", _Features(freeze(model)), 64)


def inception_space(path: Path) -> Space:
    """FID's own space. The file is the user's, so its hash goes into the name: only equal hashes compare."""
    if not path.is_file():
        raise ModelError(
            f"{INCEPTION} names {path}, which is no file",
            field=INCEPTION,
            expected="a file of Inception-v3",
            fix=f"Correct the path, or unset {INCEPTION}.",
        )
    tensors = {key: value for key, value in read_weights(path).items() if not key.startswith(UNUSED)}
    network = Inception()
    load_named(network, {f"{path}/{key}": value for key, value in tensors.items()}, str(path))
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    return Space(f"Inception-v3 features at 299 px (sha256 {found[:16]})", freeze(network), SIDE, "FID", "KID")


def random_space() -> Space:
    return Space("fixed random convolutional features at 32 px", RandomFeatures().eval(), 32)
