"""Starting from somebody's weights: any naming, a head of our own, and files that do not fit are named with the tensor."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.models.build import build_model
from osfl.models.naming import ModelError
from osfl.models.pretrained import fit_problems, pin_problems, start_from
from osfl.models.weights_table import IMAGENET

NAME = "vit-p4-w16-d2-h2"
Tensors = dict[str, torch.Tensor]
OPTIONS = {
    "cls_token": "vit.embeddings.cls_token",
    "pos_embed": "vit.embeddings.position_embeddings",
    "patch_embed.proj.": "vit.embeddings.patch_embeddings.projection.",
    "blocks.": "vit.encoder.layer.",
    ".norm1.": ".layernorm_before.",
    ".norm2.": ".layernorm_after.",
    ".attn.proj.": ".attention.output.dense.",
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
    "head.": "classifier.",
}


def task(classes: int = 3, side: int = 16, channels: int = 3) -> Task:
    return Task("t", tuple(f"c{i}" for i in range(classes)), (channels, side, side))


def tensors(name: str = NAME, classes: int = 5, side: int = 16) -> Tensors:
    return dict(build_model(name, task(classes, side), torch_generator(0, "published")).state_dict())


def in_transformers_naming(given: Tensors) -> Tensors:
    """The same weights as ViTForImageClassification would save them."""
    found: Tensors = {}
    for name, value in given.items():
        for ours, theirs in OPTIONS.items():
            name = name.replace(ours, theirs)
        name = "vit.layernorm." + name.removeprefix("norm.") if name.startswith("norm.") else name
        if ".attn.qkv." in name:
            for part, piece in zip(("query", "key", "value"), value.chunk(3), strict=True):
                found[name.replace(".attn.qkv.", f".attention.attention.{part}.")] = piece.contiguous()
        else:
            found[name] = value
    return found


def in_naming_of_version_5(given: Tensors) -> Tensors:
    """As `state_dict()` of transformers 5 names them."""
    command = {
        ".encoder.layer.": ".layers.",
        ".attention.output.dense.": ".attention.o_proj.",
        ".output.dense.": ".mlp.fc2.",
        ".intermediate.dense.": ".mlp.fc1.",
    }
    command |= {f".attention.attention.{part}.": f".attention.{part[0]}_proj." for part in ("query", "key", "value")}
    found: Tensors = {}
    for name, value in in_transformers_naming(given).items():
        for four, five in command.items():
            name = name.replace(four, five)
        found[name] = value
    return found


def under(prefix: str, worded: Callable[[Tensors], Tensors]) -> Callable[[Tensors], Tensors]:
    return lambda given: {prefix + name: value for name, value in worded(given).items()}


def saved(path: Path, given: Tensors) -> tuple[str, str]:
    save_file({name: value.contiguous() for name, value in given.items()}, path)
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "worded",
    [
        dict,
        in_transformers_naming,
        in_naming_of_version_5,
        under("model/", dict),
        under("module.", in_naming_of_version_5),
        under("model.", in_transformers_naming),
        under("module.model.", dict),
        under("_orig_mod.backbone.", dict),
    ],
)
def test_every_naming_gives_the_same_backbone_and_an_own_head(worded: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    source = tensors(classes=3)  # as many classes as we have: still not ours
    model = build_model(NAME, task(), torch_generator(1, "init"))
    head = model.state_dict()["head.weight"].clone()
    start_from(model, *saved(tmp_path / "w.safetensors", worded(source)))
    for name, value in model.state_dict().items():
        assert torch.equal(value, head if name == "head.weight" else source[name]), name


def test_imagenet_pixels_are_folded_into_the_first_layer(tmp_path: Path) -> None:
    source = tensors()
    model = build_model(NAME, task(), torch_generator(1, "init"))
    theirs = build_model(NAME, task(5))
    theirs.load_state_dict(source)
    start_from(model, *saved(tmp_path / "w.safetensors", source), "imagenet")
    u = torch.rand(2, 3, 16, 16, generator=torch_generator(0, "x"))
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in IMAGENET)
    expected = theirs.features((u - mean) / deviation)
    torch.testing.assert_close(model.features(2 * u - 1), expected, rtol=1e-4, atol=1e-4)


def with_nan(given: Tensors) -> Tensors:
    given["blocks.1.mlp.fc1.bias"][3] = float("nan")
    return given


def distilled(given: Tensors) -> Tensors:
    return given | {"pos_embed": torch.zeros(1, 18, 16)}


@pytest.mark.parametrize(
    ("spoil", "tensor", "output"),
    [
        (lambda t: tensors("vit-p8-w16-d2-h2"), "patch_embed.proj.weight", "expected F32 [16, 3, 4, 4], got F32 [16, 3, 8, 8]"),
        (lambda t: {k: v for k, v in t.items() if k != "pos_embed"}, "pos_embed", "lacks"),
        (lambda t: t | {"pos_embed": torch.zeros(1, 17, 8)}, "pos_embed", "1 + n * n, 16], got F32 [1, 17, 8]"),
        (distilled, "pos_embed", "distilled DeiT"),
        (with_nan, "blocks.1.mlp.fc1.bias", "1 values that are not finite"),
        (lambda t: t | {"reg_token": torch.zeros(1, 4, 16)}, "reg_token", "which the model does not"),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_tensor(
    spoil: Callable[[Tensors], Tensors], tensor: str, output: str, tmp_path: Path
) -> None:
    path, pin = saved(tmp_path / "theirs.safetensors", spoil(tensors()))
    with pytest.raises(ModelError) as caught:
        start_from(build_model(NAME, task()), path, pin)
    assert f"{path}/{tensor}" in str(caught.value) and output in str(caught.value)


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps({"head.weight": [1.0]}))
    with pytest.raises(ModelError, match="is a pickle, which could run code"):
        start_from(build_model(NAME, task()), str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def test_half_a_file_is_stated_to_be_none(tmp_path: Path) -> None:
    path, _ = saved(tmp_path / "w.safetensors", tensors())
    Path(path).write_bytes(Path(path).read_bytes()[:-8])
    with pytest.raises(ModelError, match="no safetensors file"):
        start_from(build_model(NAME, task()), path, hashlib.sha256(Path(path).read_bytes()).hexdigest())


def test_convolutions_take_only_our_pixels(tmp_path: Path) -> None:
    path, pin = saved(tmp_path / "w.safetensors", tensors("cnn-w4"))
    start_from(build_model("cnn-w4", task()), path, pin)
    with pytest.raises(ModelError, match="Only vision transformers"):
        start_from(build_model("cnn-w4", task()), path, pin, "imagenet")


def test_weights_are_pinned_or_known() -> None:
    assert pin_problems("", "", "pretrained") == []
    assert pin_problems("efficientnet_lite0_imagenet", "", "pretrained") == []
    assert pin_problems("w.safetensors", "a" * 64, "pretrained") == []
    for weights, sha256 in (("w.safetensors", ""), ("", "a" * 64), ("efficientnet_lite0_imagenet", "a" * 64), ("w", "xyz")):
        assert "pretrained_sha256" in pin_problems(weights, sha256, "pretrained")[0]
    assert "known names that need none: vit_signs" in pin_problems("vit_sign", "", "pretrained")[0]
    assert "known names" not in pin_problems("w.safetensors", "", "pretrained")[0]


def test_known_weights_know_their_architecture_and_their_pixels() -> None:
    assert fit_problems("vit_signs", "symmetric", ["vit", "vit-p4-w64"]) == []  # written otherwise
    assert fit_problems("somebody.safetensors", "imagenet", ["vit-h8"]) == []  # a file is checked when it is read
    (heads,) = fit_problems("vit_signs", "symmetric", ["vit", "vit-h8"])  # whose tensors have the same shapes
    assert "'vit-h8'" in heads and "--set architecture=vit" in heads
    (pixels,) = fit_problems("vit_signs", "imagenet", ["vit"])
    assert pixels.startswith("setting 'pretrained_pixels'")


def test_positions_of_another_width_are_distinguished_from_odd_ones(tmp_path: Path) -> None:
    wider = tensors() | {"pos_embed": torch.zeros(1, 17, 24)}
    path, pin = saved(tmp_path / "w.safetensors", wider)
    with pytest.raises(ModelError, match="a network of another width") as caught:
        start_from(build_model(NAME, task()), path, pin)
    assert "a width of 24" in str(caught.value) and "distill" not in str(caught.value)


KEY = "vit.encoder.layer.0.attention.attention.key.weight"


@pytest.mark.parametrize(
    ("key", "got"),
    [
        (torch.zeros(3), "got F32 [3]"),
        (torch.zeros(()), "got F32 []"),
        (torch.zeros(8, 16), "got F32 [8, 16]"),
        (torch.zeros(16, 16, dtype=torch.int64), "got I64 [16, 16]"),
        (None, "got nothing"),
    ],
)
def test_query_key_and_value_are_three_of_a_kind(key: torch.Tensor | None, got: str, tmp_path: Path) -> None:
    spoilt = {name: value for name, value in in_transformers_naming(tensors()).items() if name != KEY}
    path, pin = saved(tmp_path / "theirs.safetensors", spoilt if key is None else spoilt | {KEY: key})
    with pytest.raises(ModelError) as caught:
        start_from(build_model(NAME, task()), path, pin)
    named = KEY if key is not None else "blocks.0.attn.key.weight"  # what is not there has no name in the file
    assert f"'{named}' of {path} does not go with" in str(caught.value) and f"expected F32 [16, 16], {got}" in str(caught.value)
