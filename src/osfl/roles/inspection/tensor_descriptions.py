"""Describe what a tensor is, from its name, its shape and the image size of the round."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from osfl.wire.masks import COMMITMENTS
from osfl.wire.values import FLOATS

Kind: TypeAlias = Literal["pictures", "weights", "statistics", "counter", "labels", "tokens", "features", "masked", "numbers"]
_OF_CLASS = re.compile(r"class-([^/]{1,40})/")
_PARAMETERS = ("weight", "bias", "scale", "gamma", "beta", "alpha")


@dataclass(frozen=True)
class Description:
    kind: Kind
    what: str


def describe_tensor(name: str, dtype: str, shape: Sequence[int], image: Sequence[int]) -> Description:
    """`image` is (channels, height, width) of the round, or empty if no plan is known."""
    last = re.split(r"[./]", name)[-1]
    if pictures := _pictures(dtype, shape, image):  # first: the name of a picture may not show it
        return Description("pictures", pictures)
    if last in ("running_mean", "running_var"):
        what = "average" if last == "running_mean" else "spread"
        return Description("statistics", f"{what} of what this layer saw in the training images")
    if last == "num_batches_tracked":
        return Description("counter", "number of training steps")
    if dtype not in FLOATS and len(shape) == 1 and "label" in last:
        return Description("labels", f"a class for each of {_many(shape[0], 'item')}")
    if dtype in FLOATS and len(shape) == 3 and ("token" in name.lower() or last == "sequences"):
        return Description("tokens", f"{_many(shape[0], 'sequence')} of {_many(shape[1], 'token')} of {shape[2]} numbers")
    if name == "counts":
        return Description("features", "number of training images of each class")
    if last in ("sums", "gram"):
        return Description("features", "sums of what a frozen network sees in the training images")
    if dtype in FLOATS and _OF_CLASS.match(name):
        return Description("weights", "parameters of a generator, which makes images of this class, or features of such images")
    if dtype in FLOATS and (last in _PARAMETERS or last.endswith(("weight", "bias")) or name.startswith("model/")):
        return Description("weights", _weights(last, shape))
    return Description("numbers", "numbers whose meaning this program does not know")


def describe_masked(name: str) -> Description:
    """Of a tensor of a masked upload: nothing can be read from its numbers."""
    if name == COMMITMENTS:
        return Description("masked", "commitments to the masks that this site shares with each other one")
    return Description("masked", "whole numbers with masks that cancel in the sum over all sites: each looks like noise")


def _pictures(dtype: str, shape: Sequence[int], image: Sequence[int]) -> str:
    """As text, if the shape is that of pictures: the round's own, or bytes that can hardly be anything else."""
    if len(shape) != 4 or not shape[0]:
        return ""
    of_round = bool(image) and list(shape[1:]) == list(image)
    like_bytes = dtype == "U8" and shape[1] in (1, 3) and min(shape[2:]) >= 8
    return f"{_many(shape[0], 'picture')} of {shape[3]} × {shape[2]} pixels" if of_round or like_bytes else ""


def _weights(last: str, shape: Sequence[int]) -> str:
    if last.endswith("bias"):
        return "offsets of a layer"
    return {1: "scales of a layer", 2: "connections of a layer", 4: "filters of a convolution"}.get(
        len(shape), "parameters of a layer"
    )


def owner_of(name: str, classes: Sequence[str]) -> str:
    """What a tensor belongs to: "network", "generator of class basophil", "network of north"."""
    found = _OF_CLASS.match(name)
    if found:
        number = found[1]
        known = classes[int(number)] if number.isdecimal() and int(number) < len(classes) else number
        return f"generator of class {known}"
    start, _, rest = name.partition("/")
    if start == "model":
        return "network"
    return f"{owner_of(rest, classes)} of {start}" if "/" in rest else f"part {start}" if rest else "unnamed part"


def _many(number: int, one: str) -> str:
    return f"{number:,} {one}" + ("" if number == 1 else "s")
