"""The table of encoders; no torch, so that listing them is quick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from osfl.models.architectures import parse


@dataclass(frozen=True)
class EncoderSheet:
    """One line of the table."""

    description: str
    width: int  # d, numbers that describe an image; 0: as many as the architecture has
    architecture: str = ""  # empty: needs no weights
    weights: str = ""  # a name in weights_table.KNOWN; empty: the plan gives a file and its sha256
    multiple: int = 1  # sides of the input must be a multiple


_LITE = ("efficientnet_lite0", "efficientnet_lite0_imagenet")
ENCODERS: Mapping[str, EncoderSheet] = {
    "random": EncoderSheet("fixed random convolutions, 224 numbers; needs no weights", 224),
    "efficientnet_lite0": EncoderSheet("EfficientNet-Lite0 (ImageNet), 1,280 numbers", 1280, *_LITE),
    "efficientnet_lite0_320": EncoderSheet("the same up to its last block, 320 numbers", 320, *_LITE),
    "vit_small_saliency": EncoderSheet(
        "ViT-S/14 in DINOv2's layout, fine-tuned for saliency, 384 numbers",
        384,
        "vit_small_dinov2",
        "vit_small_patch14_dinov2_saliency",
        14,
    ),
    "dinov2_small": EncoderSheet("DINOv2 ViT-S/14, 384 numbers; the plan pins its file", 384, "vit_small_dinov2", "", 14),
    "dinov2_base": EncoderSheet("DINOv2 ViT-B/14, 768 numbers; the plan pins its file", 768, "vit_base_dinov2", "", 14),
}


def sheet(name: str) -> EncoderSheet:
    """The line of an encoder. Any architecture is one, too, with a file that the plan pins."""
    if name in ENCODERS:
        return ENCODERS[name]
    entry, options = parse(name)
    return EncoderSheet(entry.description, 0, name, multiple=options.get("p", 1))
