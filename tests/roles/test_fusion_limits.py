"""Limits of a fusion: files that would cost much, answer nothing, or have no end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import RoundError
from osfl.models.output_checks import indifferent, on_noise
from osfl.models.vit import Vit
from osfl.roles.fusion import FusionRequest, examine_checkpoints
from tests.roles.test_fusion import CLASSES, NAME, Tensors, plain_models, request, tensors, three_models


@pytest.fixture
def stall(tmp_path: Path) -> list[Path]:
    return three_models(tmp_path)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The images of every call of a vision transformer."""
    shapes: list[tuple[int, ...]] = []

    def noting(self: Vit, x: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return plain(self, x)

    plain = Vit.forward
    monkeypatch.setattr(Vit, "forward", noting)
    return shapes


def test_networks_are_asked_once_and_only_at_the_size_that_won(
    stall: list[Path], tmp_path: Path, asked: list[tuple[int, ...]]
) -> None:
    large = [plain_models(tmp_path / f"large-{seed}.safetensors", tensors(seed, side=32)) for seed in (7, 8)]
    found = examine_checkpoints(request([*stall, *large]))
    assert len(found.accepted) == 3 and asked == [(2, 3, 16, 16)] * 3


def test_sizes_whose_models_explode_or_are_twins_do_not_win(stall: list[Path], tmp_path: Path) -> None:
    loud = [tensors(seed, side=32) for seed in (4, 5, 6)]
    for given in loud:
        given["head.weight"] *= 1e20
    bad = [plain_models(tmp_path / f"loud-{i}.safetensors", given) for i, given in enumerate(loud)]
    twins = [plain_models(tmp_path / f"twin-{i}.safetensors", tensors(7, side=64)) for i in range(3)]
    found = examine_checkpoints(request([*stall[:2], *bad, *twins]))
    assert found.task.image == (3, 16, 16) and len(found.accepted) == 2 and len(found.refused) == 6


@pytest.mark.parametrize(
    ("name", "tokens", "got"),
    [
        (NAME, 250 * 250 + 1, "got 1000 px, 250 patches"),
        (NAME, 81 * 81 + 1, "got 324 px, 81 patches"),
        ("vit-p64-w16-d1-h2", 17 * 17 + 1, "got 1088 px, 17 patches"),
    ],
)
def test_positions_for_images_that_nobody_has_cost_nothing(
    name: str, tokens: int, got: str, tmp_path: Path, asked: list[tuple[int, ...]]
) -> None:
    vast = tensors(0, name, side=128) | {"pos_embed": torch.zeros(1, tokens, 16)}
    path = plain_models(tmp_path / "vast.safetensors", vast)
    with pytest.raises(RoundError) as caught:
        examine_checkpoints(replace(request([path]), architecture=name))
    output = str(caught.value)
    assert f"'pos_embed' of {path} is for images that are too large (expected at most 1024 px" in output and got in output
    assert "Offer a model that was trained for smaller images" in output and not asked
    good = plain_models(tmp_path / "good.safetensors", tensors(1, name, side=128))
    found = examine_checkpoints(replace(request([path, good]), architecture=name))
    assert found.task.image == (3, 128, 128) and [one.tensor for one in found.refused] == ["pos_embed"]


def test_models_for_two_colors_do_not_outvote_the_others(stall: list[Path], tmp_path: Path) -> None:
    odd = [tensors(seed) for seed in range(4, 8)]
    for given in odd:
        given["patch_embed.proj.weight"] = given["patch_embed.proj.weight"][:, :2]
    files = [plain_models(tmp_path / f"odd-{i}.safetensors", given) for i, given in enumerate(odd)]
    found = examine_checkpoints(request([*stall, *files]))
    assert found.task.image == (3, 16, 16) and len(found.accepted) == 3
    assert all("another number of colors" in one.fix for one in found.refused)


def emptied(given: Tensors, *names: str) -> Tensors:
    return {name: torch.zeros_like(value) if not names or name in names else value for name, value in given.items()}


@pytest.mark.parametrize("names", [(), ("head.weight",), ("patch_embed.proj.weight",)])
def test_a_model_that_answers_everything_alike_is_refused(names: tuple[str, ...], stall: list[Path], tmp_path: Path) -> None:
    numb = emptied(tensors(9), *names) | {"head.bias": torch.tensor([0.5, 2.0, -1.0])}
    path = plain_models(tmp_path / "numb.safetensors", numb)
    found = examine_checkpoints(request([*stall, path]))
    assert len(found.accepted) == 3 and [one.file for one in found.refused] == [str(path)]
    assert f"{path} answers every image alike (expected answers that differ" in found.refused[0].reason
    assert "offer another checkpoint" in found.refused[0].fix


def test_a_convolutional_model_of_zeros_is_refused_and_a_new_one_is_not(tmp_path: Path) -> None:
    files = [
        plain_models(tmp_path / "numb.safetensors", emptied(tensors(0, "cnn-w4"))),
        plain_models(tmp_path / "new.safetensors", tensors(1, "cnn-w4")),
    ]
    found = examine_checkpoints(FusionRequest(files, "cnn-w4", CLASSES, image_size=16))
    assert [Path(one.checkpoint.file).name for one in found.accepted] == ["new.safetensors"]
    assert "answers every image alike" in found.refused[0].reason


class Bright(torch.nn.Module):
    """Only light counts for it: all noise is one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bright = (x.mean((1, 2, 3)) > 0.5).float()
        return torch.stack([bright, 1 - bright], 1)


def test_a_model_to_which_all_noise_is_one_is_asked_more() -> None:
    image, model = (3, 16, 16), Bright()
    noise = on_noise(model, image)
    assert torch.equal(noise[0], noise[1]) and not indifferent(model, image, noise)


@pytest.mark.parametrize("name", ["a" * 3000, "a b/" * 750, "module." * 2000 + "head.weight", "pooler." + "a" * 3000])
def test_a_name_without_end_is_cut(name: str, stall: list[Path], tmp_path: Path) -> None:
    path = plain_models(tmp_path / "odd.safetensors", tensors(9) | {name: torch.zeros(1)})
    [refused] = examine_checkpoints(request([*stall, path])).refused
    assert f"'{name[:60]}…' (expected at most 200 characters, got {len(name):,})" in refused.reason
    assert refused.file == str(path) and len(refused.reason) < 400 + len(str(path)) and len(refused.tensor) < 100


def written(path: Path, name: str, **about: Any) -> Path:
    """A safetensors file of one tensor, as no program would write it."""
    header = json.dumps({name: about}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(about["data_offsets"][1]))
    return path


@pytest.mark.parametrize(("kind", "size"), [("F32", 4), ("F16", 2)])
def test_a_tensor_of_more_sides_than_torch_can_take_is_refused(kind: str, size: int, stall: list[Path], tmp_path: Path) -> None:
    path = written(tmp_path / "deep.safetensors", "norm.bias", dtype=kind, shape=[1] * 65, data_offsets=[0, size])
    found = examine_checkpoints(request([*stall, path]))
    assert len(found.accepted) == 3 and [one.file for one in found.refused] == [str(path)]
    assert f"{path} holds tensors that cannot be used: only tensors with up to 64 dims" in found.refused[0].reason


def test_a_shape_without_end_and_what_safetensors_says_are_cut(stall: list[Path], tmp_path: Path) -> None:
    deep = plain_models(tmp_path / "deep.safetensors", tensors(9) | {"norm.bias": torch.zeros([1] * 60)})
    broken = written(tmp_path / "broken.safetensors", "a" * 3000, dtype="F32", shape=[1], data_offsets=[4, 8])
    refused = examine_checkpoints(request([*stall, deep, broken])).refused
    assert [one.file for one in refused] == [str(broken), str(deep)]
    assert "is no safetensors file" in refused[0].reason and "expected F32 [16], got F32 [1, 1" in refused[1].reason
    assert all(len(one.reason) < 400 + 3 * len(one.file) for one in refused)
