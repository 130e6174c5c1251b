"""What a network gets to see of the images: the size of the files, the size they are opened at, the size and pixels it takes.

Named by `check`, `run` and `client` and kept in results.json, because a network that sees other pixels than it was trained on,
or images without their detail, works all the same, only worse.
"""

from __future__ import annotations

from typing import Any

from osfl.models.architectures import parse
from osfl.models.build import architectures_in
from osfl.models.encoder_table import sheet
from osfl.models.pretrained import pixels_for
from osfl.result import Inputs

PIXELS = {"symmetric": "pixels in [-1, 1]", "imagenet": "pixels less ImageNet's mean, over its deviation"}


def encoder_side(settings: Any) -> int:
    """The side to which a method resizes images for its frozen encoder; 0 for methods without one."""
    return int(settings.resolution) if hasattr(settings, "encoder") and hasattr(settings, "resolution") else 0


def describe_inputs(settings: Any, opened: int, native: int) -> Inputs:
    """`opened`: the side of images in memory; `native`: of the files, 0 where nobody knows."""
    lines, cautions = [], []
    if native and native != opened:
        lines.append(f"Images of {native} px are opened at {opened} px ({'shrunk' if native > opened else 'enlarged'}).")
    side, network, pixels = encoder_side(settings), "", ""
    if side:
        network, pixels = f"the encoder {settings.encoder}", _encoder_pixels(settings)
        resized = f"are resized from {opened} px to {side} px" if side != opened else f"have {side} px"
        lines.append(f"For {network} they {resized}; it gets {PIXELS[pixels]}.")
    elif pretrained := getattr(settings, "pretrained", ""):
        name = architectures_in(settings.architecture)[0]
        network, side = f"{name} from {pretrained}", parse(name)[0].side
        pixels = pixels_for(pretrained, settings.pretrained_pixels, name)
        lines.append(f"The network {name} starts from {pretrained} and gets {PIXELS[pixels]} (setting pretrained_pixels).")
    if side > opened and native > opened:
        why = ("they are enlarged again for it, which brings no detail back" if encoder_side(settings) else
               "its weights know larger images")  # fmt: skip
        cautions.append(f"Images of {native} px are opened at {opened} px, but {network} works at {side} px: {why}. To open "
                        f"them larger, use --image-size {min(side, native)} (in a plan: image, in [task])")  # fmt: skip
    return {"native": native, "opened": opened, "network": side, "pixels": pixels, "lines": lines, "cautions": cautions}


def _encoder_pixels(settings: Any) -> str:
    known = sheet(settings.encoder)
    if not known.architecture:
        return "symmetric"  # random features take images as they are
    return pixels_for(known.weights, "table", known.architecture) if known.weights else str(settings.encoder_pixels)
