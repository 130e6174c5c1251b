"""Published weights, from local safetensors files pinned by sha256: nothing is downloaded, nothing can execute."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import nn

from osfl.models.architectures import parse
from osfl.models.checkpoints import described, usual_names
from osfl.models.naming import ModelError, load_named, widened
from osfl.models.vit import Vit, resize_positions
from osfl.models.weights_table import IMAGENET, KNOWN, SYMMETRIC, Weights, weights_folder

_HEADS = ("_fc.", "head.", "fc.")  # the classifier, in each family's naming
_STEMS = ("_conv_stem.weight", "patch_embed.proj.weight")


def weights_path(name: str) -> Path:
    """Where the file of a known set of weights is."""
    path = KNOWN[name].path()
    if path.is_file():
        return path
    raise ModelError(
        f"the weights '{name}' are not at {path}",
        field=name,
        expected=f"a file with sha256 {KNOWN[name].sha256}",
        fix="They are a part of this package: install it again."
        if KNOWN[name].embedded
        else f"They are {KNOWN[name].origin}. Set OSFL_DATA to the folder that holds weights/{KNOWN[name].file}.",
    )


def given_path(weights: str, sha256: str, field: str) -> Path:
    """A user's file: a path, a name in the weights folder, or a file of a hub."""
    if weights.startswith("hub:"):
        return from_hub(weights.removeprefix("hub:"), field)
    for path in (Path(weights), weights_folder() / weights):
        if path.is_file():
            return path
    raise ModelError(
        f"the weights {weights!r} are not here",
        field=field,
        expected=f"a file with sha256 {sha256}",
        fix=f"Put the file into {weights_folder()}, or set OSFL_DATA to the folder that holds weights/.",
    )


def from_hub(address: str, field: str, beside: Sequence[str] = ()) -> Path:
    """`owner/name[@revision][:file]`, by huggingface_hub; what arrives is checked like any file. `beside`: names of files that
    come along where they exist."""
    repository, _, file = address.partition(":")
    repository, _, revision = repository.partition("@")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise ModelError(
            "weights from a hub need huggingface_hub",
            field=field,
            fix="Install it with: pip install 'osfl[hub]'. Or give a local file.",
        ) from None
    try:
        file = file or "model.safetensors"
        for name in beside:
            try:
                hf_hub_download(repository, str(PurePosixPath(file).with_name(name)), revision=revision or None)
            except Exception as error:
                if not _absent(error):
                    raise
        return Path(hf_hub_download(repository, file, revision=revision or None))
    except Exception as error:  # whatever a network, a proxy or the hub may say
        raise ModelError(
            f"the hub did not give {address!r}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            field=field,
            expected="owner/name[@revision][:file]",
            fix="Check the name and the network, or carry the file here and give its path instead of hub:.",
        ) from None


def _absent(error: Exception) -> bool:
    """Whether the hub reports that there is no such file; by name, because the classes move between versions of the library. A
    local one means that nobody was asked."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds


def pin_problems(weights: str, sha256: str, setting: str) -> list[str]:
    """What is wrong with a setting that names weights and its twin `..._sha256`, before any file is looked for."""
    if weights in KNOWN or not weights:
        known = f"{weights} is pinned already" if weights else f"there is no {setting!r} that it could be the hash of"
        return [f"setting '{setting}_sha256': {known}; leave it empty"] if sha256 not in ("", _pin(weights)) else []
    if re.fullmatch(r"[0-9a-f]{64}", sha256):
        return []
    near = difflib.get_close_matches(weights, KNOWN, n=3, cutoff=0.5)
    meant = f"; known names that need none: {', '.join(near)}" if near else ""
    return [
        f"setting '{setting}_sha256': {weights!r} must be the same file at every site: expected 64 lower-case hex digits, "
        f"as `sha256sum` prints them, got {sha256!r}{meant}"
    ]


def fit_problems(weights: str, pixels: str, architectures: Sequence[str]) -> list[str]:
    """What is wrong with starting these architectures from a known set of weights; files are checked when they are read. Names
    alone would not do: other heads of attention have tensors of the same shapes."""
    if weights not in KNOWN:
        return []
    known, found = KNOWN[weights], []
    for name in architectures:
        if parse(name) != parse(known.architecture):
            found.append(
                f"setting 'pretrained': {weights} is for the architecture {known.architecture!r}, not {name!r}; add "
                f"--set architecture={known.architecture}"
            )
    if pixels != (table := pixels_for(weights, "table", known.architecture)) and pixels != "table":
        found.append(f"setting 'pretrained_pixels': {weights} takes {table} pixels, got {pixels}; leave it out")
    return found


def _pin(name: str) -> str:
    return KNOWN[name].sha256 if name in KNOWN else ""


def pixels_for(weights: str, pixels: str, architecture: str) -> str:
    """`symmetric` ([-1, 1]) or `imagenet`: what a file takes. `table`: as the tables of weights and architectures say."""
    if pixels != "table":
        return pixels
    if weights in KNOWN:
        return "symmetric" if (KNOWN[weights].mean, KNOWN[weights].deviation) == SYMMETRIC else "imagenet"
    return parse(architecture)[0].pixels or "symmetric"


def start_from(model: nn.Module, weights: str, sha256: str = "", pixels: str = "symmetric") -> None:
    """Put published weights under a classifier whose head stays as it was drawn; names as timm or transformers have them.

    `weights`: a name in KNOWN, or a file that hashes to `sha256` and takes pixels in [-1, 1] or as `imagenet` has them.
    The head is never the file's: a file does not say for which classes it is, so an equal number of them would be chance.
    """
    known = KNOWN.get(weights) or Weights("", weights, sha256, "", "", *(IMAGENET if pixels == "imagenet" else ()))
    path = weights_path(weights) if weights in KNOWN else given_path(weights, sha256, "pretrained")
    tensors = usual_names(read_weights(path, known.sha256), str(path))
    check_finite(tensors, str(path))
    fill(model, tensors, known, str(path))


def check_finite(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse numbers that are none: nothing could be learned from them."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            count = int((~torch.isfinite(value)).sum())
            raise ModelError(
                f"tensor '{where}/{name}' has {count} values that are not finite",
                field=name,
                expected="finite numbers",
                got="NaN or infinity",
                fix="Train it again with a smaller learning rate, or take an earlier checkpoint.",
            )


def load_pretrained(model: nn.Module, name: str) -> None:
    """Load a known set of weights into a model of its architecture; the classifier keeps its own first weights."""
    fill(model, read_weights(weights_path(name), KNOWN[name].sha256), KNOWN[name], name)


def fill(model: nn.Module, tensors: dict[str, torch.Tensor], known: Weights, where: str) -> None:
    """Put a file's tensors into a model that takes images in [-1, 1]; the classifier keeps its own first weights."""
    if (known.mean, known.deviation) != SYMMETRIC:
        check_foldable(tensors, where)
        expect_usual_range(tensors, known)
    _load(model, tensors, where, own_head=True)


def load_weights(model: nn.Module, path: Path, sha256: str | None = None, *, own_head: bool = False) -> None:
    """Load a safetensors file into a model, half precision widened to float32.

    Every tensor must match. With `own_head` the classifier is left as it is, whatever the file holds for it: used to
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
    try:
        tensors = load_tensors(data)
    except SafetensorError as error:
        raise _no_safetensors(path, data, error) from None
    return widened(tensors)


def _no_safetensors(path: Path, data: bytes, error: SafetensorError) -> ModelError:
    if data.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")):  # what torch.save writes
        return ModelError(
            f"{path} is a pickle, which could run code, and was not opened",
            field=path.name,
            expected="a safetensors file",
            got="what torch.save writes",
            fix="Its owner can convert it: safetensors.torch.save_file(state_dict, path).",
        )
    return ModelError(
        f"{path} is no safetensors file: {error}",
        field=path.name,
        fix="Fetch it again, a download may have been cut short; if it is a pickle, its owner can convert it: "
        "safetensors.torch.save_file(state_dict, path).",
    )


def _load(model: nn.Module, tensors: dict[str, torch.Tensor], prefix: str, own_head: bool) -> None:
    state = model.state_dict()
    if own_head:
        tensors = {key: value for key, value in tensors.items() if not key.startswith(_HEADS)}
        tensors |= {key: value for key, value in state.items() if key.startswith(_HEADS)}
    if isinstance(model, Vit) and "pos_embed" in tensors:
        tensors["pos_embed"] = _positions(tensors["pos_embed"], model, prefix)
    for key in _STEMS:
        gray = key in state and key in tensors and state[key].shape[1] == 1
        if gray and tensors[key].shape == (state[key].shape[0], 3, *state[key].shape[2:]):  # else it is refused as it is
            # exactly the network applied to the gray image repeated three times
            tensors[key] = tensors[key].sum(1, keepdim=True)
    load_named(model, {f"{prefix}/{key}": value for key, value in tensors.items()}, prefix)


def _positions(given: torch.Tensor, model: Vit, where: str) -> torch.Tensor:
    """The file's positions at the model's grid: its class token and a square of patches, resized where the grids differ."""
    width = model.pos_embed.shape[-1]
    patches = given.shape[1] - 1 if given.ndim == 3 else -1
    if given.ndim == 3 and given.shape[2] != width:
        raise ModelError(
            f"tensor '{where}/pos_embed' is for a network of another width",
            field="pos_embed",
            expected=f"F32 [1, 1 + n * n, {width}]",
            got=f"F32 {list(given.shape)}",
            fix=f"Set the architecture that the file is for (a width of {given.shape[2]}), or take another file.",
        )
    if patches < 1 or math.isqrt(patches) ** 2 != patches or given.shape[0] != 1:
        raise ModelError(
            f"tensor '{where}/pos_embed' holds no positions of a class token and a square of patches",
            field="pos_embed",
            expected=f"F32 [1, 1 + n * n, {width}]",
            got=f"F32 {list(given.shape)}",
            fix="A distilled DeiT (in transformers every DeiTForImageClassification) has one token more: take one without it, "
            "which transformers saves as ViTForImageClassification. Registers are not supported.",
        )
    return resize_positions(given, model.grid)


def check_foldable(tensors: Mapping[str, torch.Tensor], where: str) -> None:
    """Refuse a first layer into which no normalization of RGB pixels can be folded."""
    weight, bias = (tensors.get(f"patch_embed.proj.{part}") for part in ("weight", "bias"))
    if weight is None or weight.dtype != torch.float32 or weight.ndim != 4 or weight.shape[1] != 3:
        raise ModelError(
            f"{where} has no first layer of RGB patches into which its normalization of pixels could be folded",
            field="patch_embed.proj.weight",
            expected="F32 [width, 3, patch, patch]",
            got="nothing" if weight is None else described(weight),
            fix="Only vision transformers for RGB can take other pixels than [-1, 1]. If it was trained on those all the same, "
            "say so: --pixels symmetric, or the setting pretrained_pixels.",
        )
    if bias is None or bias.dtype != torch.float32 or bias.shape != weight.shape[:1]:
        raise ModelError(
            f"tensor 'patch_embed.proj.bias' of {where}, into which its normalization of pixels belongs, does not fit",
            field="patch_embed.proj.bias",
            expected=f"F32 [{weight.shape[0]}]",
            got="nothing" if bias is None else described(bias),
            fix="Save the checkpoint again, with all of its tensors.",
        )


def expect_usual_range(tensors: dict[str, torch.Tensor], known: Weights) -> None:
    """Fold the file's own normalization into its first layer, so that it takes images in [-1, 1] like every model here.

    With x = 2u - 1, (u - mean) / dev = x / (2 dev) + (0.5 - mean) / dev: linear, and exact where nothing is padded.
    """
    weight = tensors["patch_embed.proj.weight"]
    mean, deviation = torch.tensor(known.mean).view(3, 1, 1), torch.tensor(known.deviation).view(3, 1, 1)
    tensors["patch_embed.proj.bias"] += (weight * ((0.5 - mean) / deviation)).sum((1, 2, 3))
    tensors["patch_embed.proj.weight"] = weight / (2 * deviation)
