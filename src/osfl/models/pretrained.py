"""Published weights, from local safetensors files pinned by sha256: nothing is downloaded, nothing can execute."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as load_tensors
from torch import nn

from osfl.models.naming import ModelError, load_named
from osfl.models.vit import Vit, resize_positions

_HEADS = ("_fc.", "head.", "fc.")  # the classifier, in each family's words
_STEMS = ("_conv_stem.weight", "patch_embed.proj.weight")


@dataclass(frozen=True)
class Weights:
    """One file: which architecture it fits, what it must hash to, and whose it is."""

    architecture: str
    file: str
    sha256: str
    licence: str
    origin: str
    # what the file's own preprocessing does to RGB in [0, 1]; ours gives [-1, 1], i.e. mean and deviation 0.5
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    deviation: tuple[float, float, float] = (0.5, 0.5, 0.5)


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
}


def weights_folder() -> Path:
    """`weights/` under OSFL_DATA, by default ../shared/data."""
    return Path(os.environ.get("OSFL_DATA", "../shared/data")) / "weights"


def weights_path(name: str) -> Path:
    """Where the file of a known set of weights is."""
    path = weights_folder() / KNOWN[name].file
    if path.is_file():
        return path
    raise ModelError(
        f"the weights '{name}' are not at {path}",
        field=name,
        expected=f"a file with sha256 {KNOWN[name].sha256}",
        fix=f"They are {KNOWN[name].origin}. Set OSFL_DATA to the folder that holds weights/{KNOWN[name].file}.",
    )


def load_pretrained(model: nn.Module, name: str) -> None:
    """Load a known set of weights into a model of its architecture; the classifier keeps its own first weights."""
    fill(model, read_weights(weights_path(name), KNOWN[name].sha256), KNOWN[name], name)


def fill(model: nn.Module, tensors: dict[str, torch.Tensor], known: Weights, where: str) -> None:
    """Put a file's tensors into a model that takes images in [-1, 1]; the classifier keeps its own first weights."""
    expect_usual_range(tensors, known)
    _load(model, tensors, where, own_head=True)


def load_weights(model: nn.Module, path: Path, sha256: str | None = None, *, own_head: bool = False) -> None:
    """Load a safetensors file into a model, half precision widened to float32.

    Every tensor must match. With `own_head` the classifier is left as it is, whatever the file holds for it: the way to
    start from weights trained for other classes.
    """
    _load(model, read_weights(path, sha256), str(path), own_head)


def read_weights(path: Path, sha256: str | None = None) -> dict[str, torch.Tensor]:
    """The tensors of a file, floats as float32; refused unless the bytes hash to `sha256`."""
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256:
        raise ModelError(
            f"the weights {path} are not the ones that were pinned",
            field="sha256",
            expected=sha256,
            got=found,
            fix="Fetch the file again from its source; if it changed on purpose, pin the new hash.",
        )
    return {key: value.float() if value.is_floating_point() else value for key, value in load_tensors(data).items()}


def _load(model: nn.Module, tensors: dict[str, torch.Tensor], prefix: str, own_head: bool) -> None:
    state = model.state_dict()
    if own_head:
        tensors = {key: value for key, value in tensors.items() if not key.startswith(_HEADS)}
        tensors |= {key: value for key, value in state.items() if key.startswith(_HEADS)}
    if isinstance(model, Vit) and "pos_embed" in tensors:
        tensors["pos_embed"] = resize_positions(tensors["pos_embed"], model.grid)
    for key in _STEMS:
        if key in state and key in tensors and state[key].shape[1] == 1 and tensors[key].shape[1] == 3:
            # exactly the network applied to the gray image repeated three times
            tensors[key] = tensors[key].sum(1, keepdim=True)
    load_named(model, {f"{prefix}/{key}": value for key, value in tensors.items()}, prefix)


def expect_usual_range(tensors: dict[str, torch.Tensor], known: Weights) -> None:
    """Fold the file's own normalization into its first layer, so that it takes images in [-1, 1] like every model here.

    With x = 2u - 1, (u - mean) / dev = x / (2 dev) + (0.5 - mean) / dev: linear, and exact where nothing is padded.
    """
    if known.mean == known.deviation == (0.5, 0.5, 0.5):
        return
    weight = tensors["patch_embed.proj.weight"]
    mean, deviation = torch.tensor(known.mean).view(3, 1, 1), torch.tensor(known.deviation).view(3, 1, 1)
    tensors["patch_embed.proj.bias"] += (weight * ((0.5 - mean) / deviation)).sum((1, 2, 3))
    tensors["patch_embed.proj.weight"] = weight / (2 * deviation)
