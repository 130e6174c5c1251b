"""What a network gets of the images: the size of the files, the size they are opened at, the size and pixels it takes.

Named by `check`, `run` and `client` and kept in results.json, because a network that sees other pixels than it was trained on,
or images without their detail, works all the same, only worse.
"""

from __future__ import annotations

from typing import Any

from osfl.core.result import Inputs
from osfl.models.architectures import parse
from osfl.models.build import architectures_in
from osfl.models.encoder_table import sheet
from osfl.models.pretrained import pixels_for
from osfl.models.weights_table import KNOWN

PIXELS = {"symmetric": "pixels in [-1, 1]", "imagenet": "pixels less ImageNet's mean, over its deviation"}


def encoder_side(settings: Any) -> int:
    """The largest side at which a method's frozen encoder looks at an image; 0 for methods without one."""
    if not (hasattr(settings, "encoder") and hasattr(settings, "resolution") and hasattr(settings, "window")):
        return 0
    if getattr(settings, "features", "encoder") != "encoder":  # it may have an encoder, and does not use it
        return 0
    return max(int(settings.resolution), int(settings.window))  # regions are cut at the one, the whole is resized to the other


def describe_inputs(settings: Any, opened: int, native: int) -> Inputs:
    """`opened`: the side of images in memory; `native`: of the files, 0 where it is not known."""
    lines, cautions = [], []
    if native and native != opened:
        lines.append(f"Images of {native} px are opened at {opened} px ({'reduced' if native > opened else 'enlarged'}).")
    side, network, pixels, published = encoder_side(settings), "", "", ""
    if side:
        network, setting = f"the encoder {settings.encoder}", "encoder_pixels"
        pixels, published = _encoder_pixels(settings)
        resized = f"are resized from {opened} px to {side} px" if side != opened else f"have {side} px"
        lines.append(f"For {network} they {resized}; it gets {PIXELS[pixels]}.")
    elif pretrained := getattr(settings, "pretrained", ""):
        name, setting = architectures_in(settings.architecture)[0], "pretrained_pixels"
        network, side = f"{name} from {pretrained}", parse(name)[0].side
        pixels = pixels_for(pretrained, settings.pretrained_pixels, name)
        published = "" if pretrained in KNOWN else parse(name)[0].pixels
        lines.append(f"The network {name} starts from {pretrained} and gets {PIXELS[pixels]} ({_reason(settings, published)}).")
    if published and pixels != published:
        cautions.append(
            f"The setting {setting}={pixels} contradicts the table: {network} is published for "
            f"{PIXELS[published]}. Leave it out unless this file was trained otherwise"
        )
    if side > opened and native > opened:
        cautions.append(_lost(network, side, opened, native, enlarged=bool(encoder_side(settings))))
    return {"native": native, "opened": opened, "network": side, "pixels": pixels, "lines": lines, "cautions": cautions}


def _lost(network: str, side: int, opened: int, native: int, *, enlarged: bool) -> str:
    """Detail that the files have and the network does not get."""
    why = "they are enlarged again for it, which brings no detail back" if enlarged else "its weights saw larger images"
    return (
        f"Images of {native} px are opened at {opened} px, but {network} works at {side} px: {why}. To open them larger, "
        f"use --image-size {min(side, native)} (in a plan: image, in [task])"
    )


def _reason(settings: Any, published: str) -> str:
    """Why a file gets these pixels."""
    if settings.pretrained in KNOWN:
        return "from the table of weights"
    if published == settings.pretrained_pixels or (published and settings.pretrained_pixels == "table"):
        return "from the table of architectures"
    if settings.pretrained_pixels == "table":
        return "an assumption: the table has no entry for its pixels; the setting pretrained_pixels changes it"
    return "setting pretrained_pixels"


def _encoder_pixels(settings: Any) -> tuple[str, str]:
    """What an encoder gets, and what a user's file for it takes by the table; empty: nothing."""
    known = sheet(settings.encoder)
    if not known.architecture:
        return "symmetric", ""  # random features take images as they are
    if known.weights:
        return pixels_for(known.weights, "table", known.architecture), ""
    return str(settings.encoder_pixels), parse(known.architecture)[0].pixels
