"""The table of architectures and how their names are written; no torch, so that listing them is quick.

A name may be followed by options, each a letter and a number: `cnn-w16`, `vit-p4-w192-d6-h3`. Where clients differ, a
setting lists them: `client-01:resnet18-w8,*:cnn`. `timm:NAME` is a network of timm's, where that is installed.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from osfl.core.errors import UsageError
from osfl.core.names import architecture_rule
from osfl.core.types import ClientId, Task

OPTIONS = {
    "w": "width",
    "p": "patch side in pixels",
    "d": "depth in blocks",
    "h": "attention heads",
    "g": "groups of group norm, 0 for batch norm",
}
_LARGEST = 65536  # a typing mistake should be a message, not an allocation of a terabyte


@dataclass(frozen=True)
class Architecture:
    """One line of the table: which module is built, and its options with their defaults."""

    family: str  # cnn, resnet, vit, efficientnet, timm, or own
    name: str = field(default="", kw_only=True)  # of an own one
    description: str
    options: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[int, ...] = ()  # residual blocks a stage
    bottleneck: bool = False
    layer_scale: bool = False
    pixels: str = ""  # what it is published for, where that is known and not [-1, 1]
    side: int = 0  # of the images that it is published for, in pixels, where that is known


def _vit(
    width: int,
    heads: int,
    described: str,
    patch: int = 16,
    layer_scale: bool = False,
    pixels: str = "",
    side: int = 0,
) -> Architecture:
    sides = {"p": patch, "w": width, "d": 12, "h": heads}
    return Architecture("vit", described, sides, layer_scale=layer_scale, pixels=pixels, side=side)


def _resnet(described: str, layers: tuple[int, ...], bottleneck: bool = False) -> Architecture:
    return Architecture("resnet", described, {"w": 64, "g": 0}, layers, bottleneck)


TABLE: Mapping[str, Architecture] = {
    "cnn": Architecture("cnn", "three 3x3 convolutions of width w, 2w, 4w; small and fast, from 8 px", {"w": 32, "g": 0}),
    "resnet18": _resnet("ResNet-18, small-image stem up to 64 px", (2, 2, 2, 2)),
    "resnet50": _resnet("ResNet-50, small-image stem up to 64 px", (3, 4, 6, 3), bottleneck=True),
    "vit": Architecture("vit", "vision transformer for small images", {"p": 4, "w": 64, "d": 4, "h": 4}),
    "deit_tiny": _vit(192, 3, "DeiT-Tiny/16, 5.7 M parameters, meant for 224 px", pixels="imagenet", side=224),
    "deit_small": _vit(384, 6, "DeiT-Small/16, 22 M parameters, meant for 224 px", pixels="imagenet", side=224),
    "deit_base": _vit(768, 12, "DeiT-Base/16, 86 M parameters, meant for 224 px", pixels="imagenet", side=224),
    "vit_tiny": _vit(192, 3, "ViT-Tiny/16, the same module as deit_tiny"),
    "vit_small": _vit(384, 6, "ViT-Small/16, the same module as deit_small"),
    "vit_base": _vit(768, 12, "ViT-Base/16, the same module as deit_base"),
    "vit_small_dinov2": _vit(384, 6, "ViT-S/14 with LayerScale, laid out as DINOv2", 14, layer_scale=True, pixels="imagenet"),
    "vit_base_dinov2": _vit(768, 12, "ViT-B/14 with LayerScale, laid out as DINOv2", 14, layer_scale=True, pixels="imagenet"),
    "efficientnet_lite0": Architecture("efficientnet", "EfficientNet-Lite0, 1,280 features, 3.4 M parameters"),
}


_OWN: dict[str, Architecture] = {}  # of this process: `osfl.register_model`
BUILDERS: dict[str, Callable[[int, tuple[int, int, int]], Any]] = {}  # of own ones: (classes, image) -> nn.Module


def register_model(name: str, build: Callable[[int, tuple[int, int, int]], object]) -> str:
    """Make any network an architecture of this process: `build(classes, (channels, height, width))` gives an nn.Module.

    It takes images in [-1, 1] and gives logits. Methods that look inside a network need a `features(x)` of it, too.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in TABLE:
        taken = f"{name!r} is one of ours" if name in TABLE else f"{name!r} cannot be the name of an architecture"
        raise UsageError(taken, field="architecture", fix="Use another one, of a-z 0-9 _.")
    try:
        if hasattr(build, "forward") and not isinstance(build, type):
            raise TypeError("a network, which each site would share with the others")
        inspect.signature(build).bind(2, (1, 8, 8))
    except (TypeError, ValueError):
        fix = "Give a function, such as: def build(classes, image): return nn.Sequential(...)"
        raise UsageError(f"{name!r} is not built by build(classes, image)", field="architecture", fix=fix) from None
    _OWN[name], BUILDERS[name] = Architecture("own", "given in Python", name=name), build
    return name


def architectures() -> Mapping[str, str]:
    """Every name with a one-line description, options included."""
    return {name: entry.description + _described_options(entry) for name, entry in TABLE.items()}


def _described_options(entry: Architecture) -> str:
    if not entry.options:
        return ""
    return " (options: " + ", ".join(f"-{key}{value} {OPTIONS[key]}" for key, value in entry.options.items()) + ")"


def parse(architecture: str) -> tuple[Architecture, dict[str, int]]:
    """The table's line for a name such as `resnet18-w16`, and its options filled in."""
    if re.fullmatch(r"timm:[a-z0-9_.]+", architecture.strip()):
        return Architecture("timm", "a network of timm's", name=architecture.strip().removeprefix("timm:")), {}
    name, *given = architecture.strip().split("-")
    entry = TABLE.get(name) or _OWN.get(name)
    if entry is None:
        near = difflib.get_close_matches(name, TABLE, n=3, cutoff=0.4)
        known = f"Did you mean {' or '.join(near)}?" if near else f"Known: {', '.join(TABLE)}."
        raise UsageError(f"unknown architecture '{architecture}'", field="architecture", fix=known)
    options = dict(entry.options)
    for text in given:
        key, value = _option(text, architecture, entry)
        options[key] = value
    return entry, options


def _option(text: str, architecture: str, entry: Architecture) -> tuple[str, int]:
    match = re.fullmatch(r"([a-z])([0-9]{1,6})", text)
    if match and match[1] in entry.options and 1 <= int(match[2]) <= _LARGEST:
        return match[1], int(match[2])
    takes = ", ".join(f"{key}<number> ({OPTIONS[key]})" for key in entry.options) or "no options"
    raise UsageError(
        f"architecture '{architecture}': option '{text}' is not understood",
        field="architecture",
        fix=f"{architecture.split('-')[0]} takes {takes}.",
    )


# --- does it fit the task? -------------------------------------------------------------------------------------------


def check_architecture(architecture: str, task: Task) -> tuple[Architecture, dict[str, int]]:
    """The parsed name if this task's images and classes suit it; otherwise every reason why not, with a remedy."""
    entry, options = parse(architecture)
    problems, fix = _CHECKS[entry.family](options, task.image[1], task.image[2])
    if min(task.image) < 1 or not task.classes:
        problems = [*problems, f"task '{task.name}' has image {task.image} and {len(task.classes)} classes"]
        fix = fix or "A task needs positive image sizes (channels, height, width) and at least one class."
    if problems:
        raise UsageError([f"architecture '{architecture}': {p}" for p in problems], field="architecture", fix=fix)
    return entry, options


def _at_least(smallest: int) -> Callable[[Mapping[str, int], int, int], tuple[list[str], str]]:
    def check(options: Mapping[str, int], height: int, width: int) -> tuple[list[str], str]:
        if min(height, width) < smallest:
            return [f"images are {height}x{width}, smaller than {smallest} px"], f"Set image_size to {smallest} or more."
        if options.get("g") and options["w"] % options["g"]:
            return [f"{options['g']} groups do not divide width {options['w']}"], "Set -w to a multiple of -g."
        return [], ""

    return check


def _check_vit(options: Mapping[str, int], height: int, width: int) -> tuple[list[str], str]:
    problems, fixes = [], []
    patch, dim, heads = options["p"], options["w"], options["h"]
    if height % patch or width % patch:
        problems.append(f"patch {patch} does not divide images of {height}x{width}")
        divisors = [p for p in range(2, min(height, width) + 1) if height % p == 0 and width % p == 0]
        nearest = sorted(divisors, key=lambda p: abs(p - patch))[:3]
        use = f"Use a patch that divides them, such as {', '.join(f'-p{p}' for p in nearest)}" if nearest else "Use -p1"
        fixes.append(f"{use}, or set image_size to a multiple of {patch}.")
    if dim % heads:
        problems.append(f"{heads} heads do not divide width {dim}")
        fixes.append(f"Set -w to a multiple of {heads}, or change -h.")
    return problems, " ".join(fixes)


_CHECKS: Mapping[str, Callable[[Mapping[str, int], int, int], tuple[list[str], str]]] = {
    "cnn": _at_least(8),
    "resnet": _at_least(8),
    "vit": _check_vit,
    "efficientnet": _at_least(16),
    "timm": _at_least(1),
    "own": _at_least(1),
}


# --- clients with different architectures ----------------------------------------------------------------------------


def architecture_for(spec: str, client: ClientId) -> str:
    """What this client trains: `cnn` is for all, in `client-01:resnet18-w8,*:cnn` the star is for the rest."""
    table = _by_client(spec)
    if client in table or "*" in table:
        return table.get(client, table.get("*", ""))
    raise UsageError(
        f"architecture '{spec}' has no entry for client '{client}'",
        field="architecture",
        fix="Add the client, or a rule for all others such as ',*:cnn'.",
    )


def architectures_in(spec: str) -> tuple[str, ...]:
    """Every architecture that a setting mentions, sorted, each once."""
    return tuple(sorted(set(_by_client(spec).values())))


def _by_client(spec: str) -> dict[ClientId, str]:
    if "," not in spec and not architecture_rule(spec)[0]:
        parse(spec)
        return {"*": spec.strip()}
    table: dict[ClientId, str] = {}
    for part in spec.split(","):
        client, name = architecture_rule(part)
        wrong = f"client '{client}' appears twice" if client in table else ""
        wrong = wrong if client and name else f"'{part.strip()}' is not client:architecture"
        if wrong:
            fix = "Write one client:architecture pair a client, separated by commas: 'client-01:resnet18-w8,*:cnn'."
            raise UsageError(f"architecture '{spec}': {wrong}", field="architecture", fix=fix)
        parse(name)
        table[client] = name
    return table
