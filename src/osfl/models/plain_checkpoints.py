"""Checkpoints that are offered to a server: what a file holds, and whether it is a model of the architecture asked for.

Nothing is adapted: a model that was trained for other classes, patches or image sizes answers another question, so it is
refused, with the file and the tensor by the name that it has there.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from osfl.core.types import Limits, Task
from osfl.models.architectures import parse
from osfl.models.build import build_model
from osfl.models.checkpoints import described, naming_of, usual_name, usual_names
from osfl.models.companions import CONFIG, PROCESSOR, Companions, Pixels, check_config, declared_pixels, read_companions
from osfl.models.naming import ModelError, load_named
from osfl.models.output_checks import SANE, indifferent, largest, on_noise
from osfl.models.pretrained import check_finite, check_foldable, expect_usual_range, from_hub, read_weights
from osfl.models.weights_table import IMAGENET, SYMMETRIC, Weights

Image = tuple[int, int, int]
PATCHES, POSITIONS = "patch_embed.proj.weight", "pos_embed"
LARGEST = 1024  # pixels a side, as for images of any dataset
FINEST = 80  # patches a side: 1024 px in patches of 14 are 73, and what a network costs grows with their fourth power
_LONGEST = 200  # characters of a tensor's name; those of published networks have less than half of it
_HEADS = ("head.weight", "fc.weight", "_fc.weight")
ASSUMED, DECLARED, CONTRADICTED = "assumed", "from files beside it", "set by --pixels, against files beside it"
SCALES: Mapping[str, Pixels] = {"symmetric": SYMMETRIC, "imagenet": IMAGENET}


@dataclass(frozen=True)
class PlainCheckpoint:
    """A file that could be read, its tensors under our names."""

    file: str  # as it was offered
    sha256: str
    size: int  # bytes
    naming: str  # timm, transformers or osfl
    parameters: int
    head: tuple[int, ...]  # (classes, features) of its last layer; empty where there is none
    tensors: Mapping[str, torch.Tensor]
    original: Mapping[str, str]  # our name -> the file's
    beside: Companions  # configs in the same folder
    unused: Sequence[str] = ()  # what nothing here has a use for, such as a pooler; left out

    def named(self, tensor: str) -> str:
        """The tensor as the owner of the file knows it."""
        return self.original.get(tensor, tensor)


def read_checkpoint(plain_models: Path) -> PlainCheckpoint:
    """Read a safetensors file of any naming, also of a hub (`hub:owner/name`); `ModelError` for a file that is none, a pickle,
    or numbers that are none."""
    hub, address = str(plain_models).startswith("hub:"), str(plain_models).removeprefix("hub:")
    path = from_hub(address, "", beside=(CONFIG, PROCESSOR)) if hub else plain_models
    if not path.is_file():
        got, fix = ("a folder", "Name the file in it.") if path.is_dir() else ("nothing", "Check the path.")
        raise ModelError(f"there is no file {path}", field=path.name, expected="a safetensors file", got=got, fix=fix)
    part = re.search(r"-\d+-of-0*(\d+)$", path.stem)
    if path.name.endswith(".index.json") or (part and part[1] != "1"):
        raise ModelError(
            f"{path} belongs to a checkpoint in several files",
            field=path.name,
            expected="one safetensors file",
            got="a part of one",
            fix="Its owner can save it in one: save_pretrained(..., max_shard_size=...).",
        )
    size, most = path.stat().st_size, Limits().upload_bytes
    if size > most:
        raise ModelError(
            f"{path} is too large and was not read",
            field=path.name,
            expected=f"at most {most:,} bytes",
            got=f"{size:,}",
            fix="Offer the model without the other tensors, or in half precision.",
        )
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        raw = read_weights(path, found)
        _check_names(raw, path)
        check_finite(raw, str(path))
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {error.strerror}", field=path.name, fix="Check its permissions and the disk."
        ) from None
    except RuntimeError as error:  # torch's, of which the file's tensors are the only cause here: 65 sides are too many for it
        raise ModelError(
            f"{path} holds tensors that cannot be used: {error}",
            field=path.name,
            fix="Save the checkpoint again, or offer another.",
        ) from None
    original = _original(raw, str(path))  # first: of two tensors that are one, neither is used
    unused = sorted(name for name in raw if not usual_name(name))
    tensors = usual_names(raw, str(path))
    parameters = sum(value.numel() for value in tensors.values() if value.is_floating_point())
    head = next((tuple(tensors[name].shape) for name in _HEADS if name in tensors), ())
    beside = read_companions(path, str(plain_models))
    return PlainCheckpoint(str(plain_models), found, size, naming_of(raw), parameters, head, tensors, original, beside, unused)


def _check_names(names: Iterable[str], path: Path) -> None:
    """Checked first: from here on a name may be printed in full."""
    if (long := max(names, key=len, default="")) and len(long) > _LONGEST:
        raise ModelError(
            f"a tensor of {path} has a name without end, '{long[:60]}…'",
            field=f"{long[:60]}…",
            expected=f"at most {_LONGEST} characters",
            got=f"{len(long):,}",
            fix="No program for training names tensors like that: save the checkpoint again.",
        )


def _original(names: Iterable[str], file: str) -> dict[str, str]:
    """Our name of each tensor -> the file's; refused where two of its tensors would be one of ours."""
    original: dict[str, str] = {}
    parts: dict[str, str] = {}  # what query, key and value become together -> one of them
    for name in sorted(names):
        ours = usual_name(name)
        part = re.fullmatch(r"(blocks\.\d+\.attn\.)(?:query|key|value)(\..+)", ours)
        joined = f"{part[1]}qkv{part[2]}" if part else ours
        twin = original.get(ours) or original.get(joined) or parts.get(ours)
        if ours and twin:
            raise ModelError(
                f"tensors '{twin}' and '{name}' of {file} are one tensor of the model",
                field=name,
                expected=f"one '{joined}'",
                got="two",
                fix="Only its owner can say which one counts: offer a file without the other.",
            )
        original[ours] = name
        if part:
            parts[joined] = name
    return original


def image_of(checkpoint: PlainCheckpoint, architecture: str) -> Image | None:
    """The images that a transformer was trained for, from its patches and positions; None where they do not show it, or show
    of images that nobody has."""
    declared = _declared_image(checkpoint, architecture)
    return None if declared is None or declared[0] not in (1, 3) or _vast(declared, architecture) else declared


def _vast(image: Image, architecture: str) -> bool:
    return image[1] > min(LARGEST, FINEST * parse(architecture)[1]["p"])


def _declared_image(checkpoint: PlainCheckpoint, architecture: str) -> Image | None:
    patch = parse(architecture)[1].get("p")
    first, positions = checkpoint.tensors.get(PATCHES), checkpoint.tensors.get(POSITIONS)
    if patch is None or first is None or positions is None or first.ndim != 4 or positions.ndim != 3:
        return None
    side = math.isqrt(max(0, positions.shape[1] - 1))
    if first.shape[2:] != (patch, patch) or side < 1 or side * side + 1 != positions.shape[1]:
        return None
    return int(first.shape[1]), side * patch, side * patch


def pixels_of(checkpoint: PlainCheckpoint, given: str | None) -> tuple[Pixels, str]:
    """The pixels that the model was trained on, and where that is known from: the user, or else files beside it."""
    declared = declared_pixels(checkpoint.beside)
    declared = next((scale for scale in SCALES.values() if declared and _alike(declared, scale)), declared)
    if given is None:
        return (declared, DECLARED) if declared else (SYMMETRIC, "as all of ours" if checkpoint.naming == "osfl" else ASSUMED)
    return SCALES[given], "set by --pixels" if declared in (None, SCALES[given]) else CONTRADICTED


def _alike(a: Pixels, b: Pixels) -> bool:
    """Up to how configs write numbers down."""
    return all(math.isclose(x, y, rel_tol=1e-4) for x, y in zip((*a[0], *a[1]), (*b[0], *b[1]), strict=True))


def scale_name(pixels: Pixels) -> str:
    known = (name for name, scale in SCALES.items() if scale == pixels)
    return next(known, f"mean {_short(pixels[0])}, deviation {_short(pixels[1])}")


def _short(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def blank(architecture: str, task: Task) -> nn.Module:
    """The network without its numbers: names and shapes only, whatever its size."""
    with torch.device("meta"):
        return build_model(architecture, task)


def check_fits(
    checkpoint: PlainCheckpoint, model: nn.Module, architecture: str, task: Task, pixels: Pixels = SYMMETRIC
) -> None:
    """`ModelError` with the reason why the file is not this `blank` model; nothing is computed, whatever is offered."""
    _check_size(checkpoint, architecture)
    _check_informative(checkpoint, model.state_dict())
    check_config(checkpoint.beside, architecture, task.classes)
    if pixels != SYMMETRIC:
        check_foldable(checkpoint.tensors, checkpoint.file)
    try:
        load_named(model, {f"{checkpoint.file}/{name}": value for name, value in checkpoint.tensors.items()}, checkpoint.file)
    except ModelError as error:
        error.fix = "It is another architecture, or not all of it, or more: `osfl ls architectures` lists what is known here."
        raise


def fitted(checkpoint: PlainCheckpoint, architecture: str, task: Task, pixels: Pixels = SYMMETRIC) -> nn.Module:
    """The offer as a classifier of the task that takes pixels in [-1, 1]; `ModelError` with the tensor that does not fit, or
    with what it answers."""
    check_fits(checkpoint, blank(architecture, task), architecture, task, pixels)
    model, tensors = build_model(architecture, task), dict(checkpoint.tensors)
    if pixels != SYMMETRIC:
        tensors = {name: value.clone() for name, value in tensors.items()}
        expect_usual_range(tensors, Weights(architecture, checkpoint.file, checkpoint.sha256, "", "", *pixels))
    load_named(model, {f"{checkpoint.file}/{name}": value for name, value in tensors.items()}, checkpoint.file)
    _check_outputs(model.eval(), checkpoint.file, task.image)
    return model


def _check_outputs(model: nn.Module, file: str, image: Image) -> None:
    """A network that is let in has been asked once."""
    given = on_noise(model, image)
    if not (most := largest(given)) < SANE:
        raise ModelError(
            f"{file} answers noise with numbers beyond all bounds",
            expected=f"below {SANE:g}",
            got=f"{most:.3g}",
            fix="Its weights are not those of a trained model: offer another checkpoint.",
        )
    if indifferent(model, image, given):
        raise ModelError(
            f"{file} answers every image alike",
            expected="answers that differ between noise, black and white",
            got="the same numbers for all",
            fix="Its weights are not those of a trained model, its head may be all zeros: offer another checkpoint.",
        )


def _check_size(checkpoint: PlainCheckpoint, architecture: str) -> None:
    """Before anything is built for images that nobody has."""
    declared = _declared_image(checkpoint, architecture)
    if declared is not None and _vast(declared, architecture):
        name, patches = checkpoint.named(POSITIONS), math.isqrt(checkpoint.tensors[POSITIONS].shape[1])
        raise ModelError(
            f"tensor '{name}' of {checkpoint.file} is for images that are too large",
            field=name,
            expected=f"at most {LARGEST} px and {FINEST} patches a side",
            got=f"{declared[1]} px, {patches} patches",
            fix="Offer a model that was trained for smaller images.",
        )


def _check_informative(checkpoint: PlainCheckpoint, state: Mapping[str, torch.Tensor]) -> None:
    """The tensors that say most about a misfit come first: patches, positions, head."""
    for name in (PATCHES, POSITIONS, *_HEADS):
        if name not in state:
            continue
        expected, found = state[name], checkpoint.tensors.get(name)
        if found is None or described(found) != described(expected):
            what, got = ("is missing", "nothing") if found is None else ("does not fit", described(found))
            fix = _why_missing(name, checkpoint) if found is None else _why(name, expected, found, checkpoint)
            raise ModelError(
                f"tensor '{checkpoint.named(name)}' of {checkpoint.file} {what}",
                field=checkpoint.named(name),
                expected=described(expected),
                got=got,
                fix=fix,
            )
    if (pooled := "fc_norm.weight") in checkpoint.tensors and pooled not in state:
        raise ModelError(
            f"{checkpoint.file} averages its patches instead of reading the class token",
            field=checkpoint.named(pooled),
            expected="a head on the class token",
            got=f"'{checkpoint.named(pooled)}'",
            fix="Offer a model whose head reads the class token.",
        )


def _why(name: str, expected: torch.Tensor, found: torch.Tensor, checkpoint: PlainCheckpoint) -> str:
    """What is probably the matter, by the first side that differs."""
    if found.ndim != expected.ndim:
        return "It is another kind of network: name the architecture it has."
    if found.dtype != expected.dtype:
        return "Its numbers are no floats, as in a quantized network: offer it as it was before."
    if name == POSITIONS and any(tensor.endswith(("dist_token", "distillation_token")) for tensor in checkpoint.tensors):
        return _DISTILLED
    if name in _HEADS and POSITIONS in checkpoint.tensors and found.shape[1] == 2 * expected.shape[1]:
        return _DOUBLE
    differs = next(i for i, (ours, its) in enumerate(zip(expected.shape, found.shape, strict=True)) if ours != its)
    sides = _SIDES.get(
        name,
        (
            "It answers for another number of classes than the list names.",
            "Its head reads another number of features than the class token has.",
        ),
    )
    return sides[min(differs, len(sides) - 1)]


def _why_missing(name: str, checkpoint: PlainCheckpoint) -> str:
    """Perhaps it is there behind a prefix that is not known; else what its absence means."""
    hidden = next((tensor.removesuffix(name) for tensor in checkpoint.tensors if tensor.endswith(f".{name}")), "")
    if hidden:
        return f"Its tensors begin with {hidden!r}: save it without."
    return _MISSING.get(name, "It has no head: offer a classifier that was fine-tuned for these classes.")


_WIDTH = "It has another width: name the architecture it has; `osfl ls architectures` lists them."
_DISTILLED = (
    "It is a distilled DeiT, which has one token more. In timm, offer a model without `distilled` in its name; in "
    "transformers a ViTForImageClassification, as which undistilled DeiTs are saved: DeiTForImageClassification "
    "always has that token."
)
_DOUBLE = (
    "Its head reads another number of features than the class token has: twice as many, the mean of all patches beside "
    "it, as in transformers' Dinov2ForImageClassification. Offer a model whose head reads the class token only, such "
    "as a ViTForImageClassification."
)
_SIDES = {
    PATCHES: (
        _WIDTH,
        "It takes images with another number of colors: offer models of one kind.",
        "Its patches have another side: name the architecture it has, such as -p16.",
    ),
    POSITIONS: (
        "It is no positional embedding of a class token and patches.",
        "It was trained for another image size, or has tokens besides the class token. Offer models of one size.",
        _WIDTH,
    ),
}
_MISSING = {
    PATCHES: "It is no vision transformer in a naming that is known here: timm's, transformers' or ours.",
    POSITIONS: "It has no learned positions, or not under this name; other kinds of positions are not known here.",
}
