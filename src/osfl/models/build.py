"""From a name in the table to a module with its first weights."""

from __future__ import annotations

import functools
import threading
from typing import TypeAlias

import torch

from osfl.core.types import Task
from osfl.models.architectures import (
    BUILDERS,
    Architecture,
    architecture_for,
    architectures,
    architectures_in,
    check_architecture,
)
from osfl.models.cnn import Cnn
from osfl.models.efficientnet import EfficientNetLite
from osfl.models.initial import initialize
from osfl.models.inputs import to_images, to_input
from osfl.models.norms import with_group_norm
from osfl.models.resnet import ResNet
from osfl.models.timm_models import TimmNetwork, build_timm
from osfl.models.vit import Vit, VitShape

__all__ = [
    "Network",
    "architecture_for",
    "architectures",
    "architectures_in",
    "build_model",
    "check_architecture",
    "to_images",
    "to_input",
]

Network: TypeAlias = Cnn | ResNet | Vit | EfficientNetLite | TimmNetwork


def build_model(architecture: str, task: Task, rng: torch.Generator | None = None) -> Network:
    """A classifier for the task's images: `.features(x)` and logits by `.forward(x)`, x as `to_input` gives it.

    Every weight is drawn from `rng`; without it they are zeros and ones, to be loaded. Convolutional networks are
    channels_last (1.3-2.4 times faster on CPUs).
    """
    entry, options = check_architecture(architecture, task)
    if entry.family in ("own", "timm"):
        return _own(entry, task, rng)
    with torch.device("meta"):  # no memory, and no draws from the global generator by torch's own defaults
        model = _construct(entry, options, task.image, len(task.classes))
    # what to_empty does, without importing sympy for it (half a second)
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
    initialize(model, rng)
    if entry.family != "vit":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model


_GLOBAL = threading.Lock()  # own networks draw from torch's global generator, which threads share


def _own(entry: Architecture, task: Task, rng: torch.Generator | None) -> Network:
    """A network of the user's or of timm's, whose first weights follow from `rng` although it draws them by torch's own
    defaults."""
    seed = 0 if rng is None else int(torch.randint(0, 2**62, (1,), generator=rng))
    with _GLOBAL, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build = BUILDERS[entry.name] if entry.family == "own" else functools.partial(build_timm, entry.name)
        model: Network = build(len(task.classes), task.image)
    return model


def _construct(entry: Architecture, options: dict[str, int], image: tuple[int, int, int], classes: int) -> Network:
    if entry.family == "cnn":
        return with_group_norm(Cnn(image, classes, options["w"]), options["g"])
    if entry.family == "resnet":
        return with_group_norm(ResNet(image, classes, entry.layers, options["w"], entry.bottleneck), options["g"])
    if entry.family == "vit":
        return Vit(image, classes, VitShape(options["p"], options["w"], options["d"], options["h"], entry.layer_scale))
    return EfficientNetLite(image, classes)
