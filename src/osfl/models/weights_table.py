"""The table of weights that are known by name; no torch, so that listing them is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from osfl.runtime.cache import data_root


@dataclass(frozen=True)
class Weights:
    """One file: which architecture it fits, what it must hash to, and whose it is."""

    architecture: str
    file: str
    sha256: str
    license: str
    origin: str
    # what the file's own preprocessing does to RGB in [0, 1]; ours gives [-1, 1], i.e. mean and deviation 0.5
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    deviation: tuple[float, ...] = (0.5, 0.5, 0.5)
    embedded: bool = False  # a part of this package, not of the weights folder

    def path(self) -> Path:
        """Where the file is, or should be."""
        return (EMBEDDED if self.embedded else weights_folder()) / self.file


EMBEDDED = Path(__file__).parent / "embedded"
SYMMETRIC = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # [0, 1] becomes [-1, 1]
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation that most published networks expect

KNOWN: Mapping[str, Weights] = {
    "efficientnet_lite0_imagenet": Weights(
        "efficientnet_lite0",
        "efficientnet_lite0_imagenet-fp16.safetensors",
        "8d9dcb36a79a19ba36dfa5edbd22e63967fd699bbaf9d4a0a6b208c5e552bf00",
        "Apache-2.0",
        "ImageNet-1k weights by Google, PyTorch conversion by ML Illustrated",
    ),
    "vit_small_patch14_dinov2_saliency": Weights(
        "vit_small_dinov2",
        "vit_small_patch14_dinov2_saliency-fp16.safetensors",
        "52cc6ece26324d17d7af1c45ef24cf942ae33d6acff53dac0bf870ddef203dc2",
        "MIT (starting from Apache-2.0 weights)",
        "backbone of a saliency model in DINOv2's layout; not the original DINOv2",
        mean=(0.485, 0.456, 0.406),
        deviation=(0.229, 0.224, 0.225),
    ),
    "vit_signs": Weights(
        "vit",
        "vit_signs-fp16.safetensors",
        "b3f02b02d7de5791ea47fe169b3272fea4ab3542801206a0661a71fef66e8fb1",
        "Apache-2.0",
        "a small ViT that learned to classify drawn signs, gray, 16 px (benchmarks/pretrain_vit.py)",
        embedded=True,
    ),
}


def weights_folder() -> Path:
    """`weights/` in the folder of the datasets."""
    return data_root() / "weights"
