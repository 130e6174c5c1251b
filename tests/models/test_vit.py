"""Token subsets of the ViT and its fast class-token path."""

from __future__ import annotations

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.models.build import build_model
from osfl.models.vit import Vit, kept_count, resize_positions

PATCH, SIDE, GRID = 4, 16, 4


@pytest.fixture
def model() -> Vit:
    task = Task("t", ("a", "b", "c"), (3, SIDE, SIDE))
    built = build_model("vit-p4-w32-d3-h4", task, torch_generator(0, "vit")).eval()
    assert isinstance(built, Vit)
    with torch.no_grad():  # first weights are small; larger ones make attention and positions matter
        for parameter in built.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None
    return built


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3, SIDE, SIDE, generator=torch_generator(0, "pixels"))


def some(kept: int = 6) -> torch.Tensor:
    rng = torch_generator(0, "keep")
    return torch.stack([torch.randperm(GRID**2, generator=rng)[:kept] for _ in range(3)])


def pixels_of(keep: torch.Tensor) -> torch.Tensor:
    """True where a pixel belongs to a kept patch: (batch, 1, side, side)."""
    grid = torch.zeros(len(keep), GRID**2, dtype=torch.bool).scatter_(1, keep, True).view(-1, 1, GRID, GRID)
    return grid.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3)


def test_all_patches_are_the_ordinary_pass(model: Vit, x: torch.Tensor) -> None:
    every = torch.arange(GRID**2).expand(3, -1)
    assert torch.equal(model(x, every), model(x))


def test_dropped_pixels_do_not_matter(model: Vit, x: torch.Tensor) -> None:
    keep = some()
    other = torch.where(pixels_of(keep), x, 1e3)
    assert torch.equal(model(x, keep), model(other, keep))
    assert not torch.allclose(model(x), model(other))


def test_no_gradient_reaches_dropped_pixels(model: Vit, x: torch.Tensor) -> None:
    keep = some()
    model(x.requires_grad_(), keep).square().sum().backward()
    assert x.grad is not None
    assert (x.grad[~pixels_of(keep).expand_as(x)] == 0).all()
    assert (x.grad[pixels_of(keep).expand_as(x)] != 0).any()


def test_order_of_kept_patches_does_not_matter(model: Vit, x: torch.Tensor) -> None:
    keep = some()
    torch.testing.assert_close(model(x, keep), model(x, keep.flip(1)), rtol=1e-5, atol=1e-5)


def test_each_patch_keeps_its_position(model: Vit) -> None:
    same = torch.zeros(1, 3, SIDE, SIDE)  # all patches alike, so only positions tell them apart
    assert not torch.allclose(model(same, torch.tensor([[0, 1]])), model(same, torch.tensor([[2, 3]])))


def test_dropping_is_physical(model: Vit, x: torch.Tensor) -> None:
    assert model.embed(x, some(6)).shape[1] == 7
    assert model.forward_features(x, some(6)).shape == (3, 7, 32)


@pytest.mark.parametrize(("patches", "ratio", "kept"), [(196, 0.3, 137), (64, 0.3, 44), (10, 0.3, 7), (9, 1, 0)])
def test_kept_count(patches: int, ratio: float, kept: int) -> None:
    assert kept_count(patches, ratio) == kept


def test_the_class_path_equals_the_whole_last_block(model: Vit, x: torch.Tensor) -> None:
    torch.testing.assert_close(model.features(x), model.forward_features(x)[:, 0], rtol=1e-4, atol=1e-5)


def test_attention_of_the_class_token(model: Vit, x: torch.Tensor) -> None:
    keep = some()
    logits, attention = model.with_attention(x, keep)
    assert torch.equal(logits, model(x, keep)) and attention.shape == keep.shape
    tokens = model.embed(x, keep)
    for block in model.blocks[:-1]:
        tokens = block(tokens)
    attn = model.blocks[-1].attn
    q, k, _ = attn.qkv(model.blocks[-1].norm1(tokens)).view(3, 7, 3, 4, 8).permute(2, 0, 3, 1, 4)  # type: ignore
    whole = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1).mean(1)  # (batch, tokens, tokens)
    torch.testing.assert_close(attention, whole[:, 0, 1:])
    assert (attention.sum(1) < 1).all() and (attention > 0).all()


def test_positions_resize() -> None:
    pos = torch.randn(1, 1 + 9, 5, generator=torch_generator(0, "pos"))
    assert resize_positions(pos, (3, 3)) is pos
    resized = resize_positions(pos, (4, 2))
    assert resized.shape == (1, 9, 5) and torch.equal(resized[:, :1], pos[:, :1])
    flat = torch.ones(1, 1 + 9, 5)
    torch.testing.assert_close(resize_positions(flat, (6, 5)), torch.ones(1, 31, 5))


def test_tensor_names_are_timms(model: Vit) -> None:
    names = set(model.state_dict())
    block = {"norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2"}
    wanted = {f"blocks.{i}.{part}.{kind}" for i in range(3) for part in block for kind in ("weight", "bias")}
    wanted |= {f"{part}.{kind}" for part in ("patch_embed.proj", "norm", "head") for kind in ("weight", "bias")}
    assert names == wanted | {"cls_token", "pos_embed"}
