"""Vision transformer: class token, learned positions, pre-norm blocks; runs on any subset of the patches.

Tensors are named as timm and DINOv2 name them, so that their weights load unchanged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from osfl.models.initial import draw_normal
from osfl.runtime.precision import mixed

_STD = 0.02  # of first weights, as in DeiT
_EPS = 1e-6  # of layer norms, as in timm and DINOv2


@dataclass(frozen=True)
class VitShape:
    patch: int = 4
    width: int = 64
    depth: int = 4
    heads: int = 4
    layer_scale: bool = False


def kept_count(patches: int, ratio: float) -> int:
    """How many patches stay when a share `ratio` is dropped: floor((1 - r) n), 137 of 196 at r = 0.3."""
    return math.floor((1 - ratio) * patches + 1e-9)  # 1 - 0.3 is a hair below 0.7, which must not cost a patch


class Dense(nn.Linear):
    """A linear layer that begins as transformers do: normal weights, zero bias."""

    def initialize(self, rng: torch.Generator | None) -> None:
        draw_normal(self.weight, _STD, rng)
        self.bias.zero_()


class Attention(nn.Module):
    """Multi-head self-attention by torch's fused kernel, which never forms the attention map."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = Dense(width, 3 * width)
        self.proj = Dense(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, width)
        q, k, v = (self._by_head(part) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v)
        y: torch.Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return y

    def of_class(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The class token's output (batch, 1, width), and what it attends to: (batch, tokens), mean over heads."""
        width = x.shape[-1]
        q = self._by_head(F.linear(x[:, :1], self.qkv.weight[:width], self.qkv.bias[:width]))
        k, v = (self._by_head(t) for t in F.linear(x, self.qkv.weight[width:], self.qkv.bias[width:]).chunk(2, dim=-1))
        row = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).softmax(-1)  # (batch, heads, 1, tokens)
        return self.proj((row @ v).transpose(1, 2).flatten(2)), row.mean(1).squeeze(1)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (batch, heads, tokens, head width)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = Dense(width, hidden)
        self.fc2 = Dense(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc2(F.gelu(self.fc1(x)))
        return y


class LayerScale(nn.Module):
    """A learned factor a channel on each residual branch (DINOv2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def initialize(self, rng: torch.Generator | None) -> None:
        self.gamma.fill_(1.0)  # DINOv2 begins at 1e-5, which a short training of a shallow network never leaves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width, eps=_EPS)
        self.attn = Attention(shape.width, shape.heads)
        self.ls1 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()
        self.norm2 = nn.LayerNorm(shape.width, eps=_EPS)
        self.mlp = Mlp(shape.width, 4 * shape.width)
        self.ls2 = LayerScale(shape.width) if shape.layer_scale else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        y: torch.Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return y

    def of_class(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This block for the class token alone: all a classifier needs of its last block."""
        mixed, row = self.attn.of_class(self.norm1(x))
        first = x[:, :1] + self.ls1(mixed)
        return first + self.ls2(self.mlp(self.norm2(first))), row


class PatchProjection(nn.Conv2d):
    """A convolution in name, a linear layer on patches in work; it begins as one."""

    def initialize(self, rng: torch.Generator | None) -> None:
        draw_normal(self.weight, 1 / math.sqrt(self.weight[0].numel()), rng)
        assert self.bias is not None
        self.bias.zero_()


class PatchEmbed(nn.Module):
    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = PatchProjection(channels, width, patch, patch)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, channels, height, width) -> (batch, patches, width)
        y: torch.Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return y


class Vit(nn.Module):
    """`forward(x, keep)`: with `keep` (batch, kept) only these patches enter the blocks, each at its own position."""

    def __init__(self, image: tuple[int, int, int], classes: int, shape: VitShape) -> None:
        super().__init__()
        self.patch = shape.patch
        self.grid = (image[1] // shape.patch, image[2] // shape.patch)
        self.patches = self.grid[0] * self.grid[1]
        self.patch_embed = PatchEmbed(image[0], shape.patch, shape.width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, shape.width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + self.patches, shape.width))
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.depth))
        self.norm = nn.LayerNorm(shape.width, eps=_EPS)
        self.head = Dense(shape.width, classes)

    def initialize(self, rng: torch.Generator | None) -> None:
        draw_normal(self.cls_token, _STD, rng)
        draw_normal(self.pos_embed, _STD, rng)

    def embed(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens with their positions, class token first; dropped patches are gone, not masked."""
        tokens = self.patch_embed(x) + self.pos_embed[:, 1:]
        if keep is not None:
            tokens = tokens.gather(1, keep.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
        first = (self.cls_token + self.pos_embed[:, :1]).expand(tokens.shape[0], -1, -1)
        return torch.cat([first, tokens], dim=1)

    @mixed
    def forward_features(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """All tokens after the last norm: (batch, 1 + kept, width)."""
        tokens = self.embed(x, keep)
        for block in self.blocks:
            tokens = block(tokens)
        normed: torch.Tensor = self.norm(tokens)
        return normed

    @mixed
    def features(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """The class token after the last norm: (batch, width)."""
        return self._class_token(x, keep)[0]

    @mixed
    def forward(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.features(x, keep))
        return logits

    @mixed
    def with_attention(self, x: torch.Tensor, keep: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the last block's attention of the class token to each kept patch (batch, kept), mean over heads.

        With the class token's attention to itself, which is left out, a row would sum to 1.
        """
        token, row = self._class_token(x, keep)
        return self.head(token), row[:, 1:]

    def _class_token(self, x: torch.Tensor, keep: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.embed(x, keep)
        for block in self.blocks[:-1]:
            tokens = block(tokens)
        last = self.blocks[-1]
        assert isinstance(last, Block)
        token, row = last.of_class(tokens)
        return self.norm(token).squeeze(1), row


class OnSubset(nn.Module):
    """The network on its first `count` patches: what any subset of that size costs."""

    def __init__(self, vit: Vit, count: int) -> None:
        super().__init__()
        self.vit, self.count = vit, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = torch.arange(self.count, device=x.device).expand(x.shape[0], -1)
        logits: torch.Tensor = self.vit(x, keep)
        return logits

    def extra_repr(self) -> str:
        return f"patches={self.count}"


def resize_positions(pos_embed: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Positions of a square grid, (1, 1 + n, width), resized bicubically; the class token's stays."""
    side = math.isqrt(pos_embed.shape[1] - 1)
    if grid == (side, side):
        return pos_embed
    old = pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    new = F.interpolate(old, size=grid, mode="bicubic", align_corners=False)
    return torch.cat([pos_embed[:, :1], new.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)
