"""A U-Net whose layers keep the magnitude of what passes through them, for diffusion models of small images.

After Karras et al., "Analyzing and Improving the Training Dynamics of Diffusion Models" (EDM2), CVPR 2024: weights of unit
length per output, sums and concatenations that preserve variance, pixel normalization in the encoder, no biases (a
constant channel at the input instead). Written from the paper's equations.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from osfl.core.errors import UsageError
from osfl.models.preconditioning import Gaussian, White
from osfl.runtime.precision import mixed

_CLIP = 256.0  # activations stay within; reached only when training goes wrong
_HEAD = 64  # channels a head of attention


@dataclass(frozen=True)
class UnetShape:
    """`w128-m1.2.2.2-b3-a16.8`: width, its multiples by level, blocks a level, sides of maps with attention.

    `-s2` folds squares of 2 x 2 pixels into channels first: a quarter of the work at the same number of weights.
    """

    width: int
    multiples: tuple[int, ...]
    blocks: int
    attention: tuple[int, ...]
    fold: int = 1

    @property
    def divides(self) -> int:
        """Image sides must be a multiple of this."""
        return int(self.fold * 2 ** (len(self.multiples) - 1))


def parse_unet(name: str) -> UnetShape:
    found = re.fullmatch(r"w(\d+)-m(\d+(?:\.\d+)*)-b(\d+)(?:-a(\d+(?:\.\d+)*))?(?:-s(\d+))?", name)
    numbers = [] if found is None else [_numbers(part) for part in found.groups()]
    if not numbers or not all(all(value > 0 for value in part) for part in numbers):
        raise UsageError(
            f"{name!r} is not the name of a U-Net",
            field="unet",
            fix="For example w16-m1.2-b1-s2, or the paper's w128-m1.2.2.2-b3-a16.8.",
        )
    return UnetShape(numbers[0][0], numbers[1], numbers[2][0], numbers[3], (*numbers[4], 1)[0])


def _numbers(text: str | None) -> tuple[int, ...]:
    return () if text is None else tuple(int(part) for part in text.split("."))


# --- operations that keep the magnitude ------------------------------------------------------------------------------


def normalize(x: torch.Tensor, dim: tuple[int, ...]) -> torch.Tensor:
    """Root mean square 1 over the given dimensions (EDM2, Eq. 30)."""
    size = math.prod(x.shape[d] for d in dim)
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float32)
    return x / (norm / math.sqrt(size) + 1e-4).to(x.dtype)


def mp_silu(x: torch.Tensor) -> torch.Tensor:
    return functional.silu(x) / 0.596


def mp_sum(a: torch.Tensor, b: torch.Tensor, t: float) -> torch.Tensor:
    """a + t (b - a), scaled so that two unit variances give one (Eq. 88)."""
    return torch.lerp(a, b, t) / math.sqrt((1 - t) ** 2 + t**2)


def mp_cat(a: torch.Tensor, b: torch.Tensor, t: float = 0.5) -> torch.Tensor:
    """Both side by side, each contributing by its share t, whatever their numbers of channels (Eq. 103)."""
    na, nb = a.shape[1], b.shape[1]
    scale = math.sqrt((na + nb) / ((1 - t) ** 2 + t**2))
    return torch.cat([a * (scale * (1 - t) / math.sqrt(na)), b * (scale * t / math.sqrt(nb))], 1)


class MPConv(nn.Module):
    """Convolution (or a linear layer, kernel 0) whose effective weights have length 1 for every output.

    While training, the stored weights are brought back to root mean square 1 at each call (forced weight normalization),
    so that the learning rate always means the same relative change.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int = 0) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.empty(outputs, inputs, *([kernel, kernel] if kernel else [])))

    def effective(self) -> torch.Tensor:
        """The weights as they are used, of length 1 for every output."""
        dims = tuple(range(1, self.weight.ndim))
        if self.training:
            with torch.no_grad():
                self.weight.copy_(normalize(self.weight, dims))
        return normalize(self.weight, dims) / math.sqrt(self.weight[0].numel())

    def forward(self, x: torch.Tensor, gain: torch.Tensor | float = 1.0) -> torch.Tensor:
        weight = self.effective() * gain
        if not self.kernel:
            return functional.linear(x, weight)
        return functional.conv2d(x, weight, padding=self.kernel // 2)

    def initialize(self, rng: torch.Generator | None) -> None:
        if rng is None:
            self.weight.zero_()
        else:
            self.weight.normal_(generator=rng)


class Fourier(nn.Module):
    """A number as waves of random frequency and phase: sqrt(2) cos(2 pi (f x + p))."""

    frequencies: torch.Tensor
    phases: torch.Tensor

    def __init__(self, waves: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(waves))
        self.register_buffer("phases", torch.empty(waves))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch,) -> (batch, waves)
        angle = 2 * math.pi * (x[:, None] * self.frequencies + self.phases)
        return angle.cos() * math.sqrt(2)

    def initialize(self, rng: torch.Generator | None) -> None:
        if rng is None:
            self.frequencies.zero_()
            self.phases.zero_()
        else:
            self.frequencies.normal_(generator=rng)
            self.phases.uniform_(generator=rng)


# --- the network -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block, with self-attention where the map is small. Encoder blocks normalize their input by pixel."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        embedding: int,
        *,
        encoder: bool,
        resample: str = "keep",
        attention: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder, self.resample, self.outputs, self.dropout = encoder, resample, outputs, dropout
        self.rng: torch.Generator | None = None  # of dropout; without one there is none
        self.gain = nn.Parameter(torch.empty(()))
        self.first = MPConv(outputs if encoder else inputs, outputs, 3)
        self.modulate = MPConv(embedding, outputs)
        self.second = MPConv(outputs, outputs, 3)
        self.skip = MPConv(inputs, outputs, 1) if inputs != outputs else None
        self.heads = next(n for n in range(max(1, outputs // _HEAD), 0, -1) if outputs % n == 0) if attention else 0
        self.qkv = MPConv(outputs, 3 * outputs, 1) if attention else None
        self.project = MPConv(outputs, outputs, 1) if attention else None

    def initialize(self, rng: torch.Generator | None) -> None:
        self.gain.zero_()  # the noise level begins without influence

    def forward(self, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        x = _resampled(x, self.resample)
        if self.encoder:
            x = normalize(x if self.skip is None else self.skip(x), (1,))
        y = self.first(mp_silu(x))
        y = mp_silu(y * (self.modulate(embedding, self.gain) + 1)[:, :, None, None])
        y = self.second(self._dropped(y))
        if not self.encoder and self.skip is not None:
            x = self.skip(x)
        x = mp_sum(x, y, 0.3)
        if self.heads:
            x = mp_sum(x, self._attend(x), 0.3)
        return x.clamp(-_CLIP, _CLIP)

    def _dropped(self, y: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.dropout and self.rng is not None):
            return y
        kept = torch.rand(y.shape, generator=self.rng, device=y.device) >= self.dropout
        return y * kept / (1 - self.dropout)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        """Cosine attention: queries, keys and values have unit magnitude."""
        assert self.qkv is not None and self.project is not None
        batch, channels, height, width = x.shape
        y = self.qkv(x).reshape(batch, self.heads, channels // self.heads, 3, height * width)
        q, k, v = normalize(y, (2,)).unbind(3)  # (batch, heads, channels of a head, places)
        weights = torch.softmax(q.transpose(2, 3) @ k / math.sqrt(q.shape[2]), -1)
        found: torch.Tensor = self.project((v @ weights.transpose(2, 3)).reshape(batch, channels, height, width))
        return found


def _resampled(x: torch.Tensor, how: str) -> torch.Tensor:
    if how == "down":
        return functional.avg_pool2d(x, 2)
    return functional.interpolate(x, scale_factor=2, mode="nearest") if how == "up" else x


class Unet(nn.Module):
    """(batch, channels, height, width) and a noise level (batch,) -> the same shape; zero before it has learned anything."""

    def __init__(self, image: tuple[int, int, int], shape: UnetShape, dropout: float = 0.0) -> None:
        super().__init__()
        channels, side = image[0] * shape.fold**2, image[1] // shape.fold
        widths = [shape.width * multiple for multiple in shape.multiples]
        self.fold, embedding = shape.fold, max(widths)
        self.recompute = False  # the inside of blocks in the backward pass, instead of keeping it: activation checkpointing
        self.waves = Fourier(widths[0])
        self.embed = MPConv(widths[0], embedding)
        self.entry = MPConv(channels + 1, widths[0], 3)
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        out, kept = widths[0], [widths[0]]
        for level, width in enumerate(widths):
            attention = side >> level in shape.attention
            if level:
                self.encoder.append(Block(out, out, embedding, encoder=True, resample="down", dropout=dropout))
                kept.append(out)
            for _ in range(shape.blocks):
                self.encoder.append(Block(out, width, embedding, encoder=True, attention=attention, dropout=dropout))
                out = width
                kept.append(out)
        for level, width in reversed(list(enumerate(widths))):
            attention = side >> level in shape.attention
            if level == len(widths) - 1:
                deepest = bool(shape.attention)
                self.decoder.append(Block(out, out, embedding, encoder=False, attention=deepest, dropout=dropout))
                self.decoder.append(Block(out, out, embedding, encoder=False, dropout=dropout))
            else:
                self.decoder.append(Block(out, out, embedding, encoder=False, resample="up", dropout=dropout))
            for _ in range(shape.blocks + 1):
                self.decoder.append(
                    Block(out + kept.pop(), width, embedding, encoder=False, attention=attention, dropout=dropout)
                )
                out = width
        self.leave = MPConv(out, channels, 3)
        self.gain = nn.Parameter(torch.empty(()))
        self._joins = [block.first.weight.shape[1] for block in self.decoder if isinstance(block, Block)]

    def initialize(self, rng: torch.Generator | None) -> None:
        self.gain.zero_()

    @mixed
    def forward(self, x: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
        embedding = mp_silu(self.embed(self.waves(level)))
        if self.fold > 1:
            x = functional.pixel_unshuffle(x, self.fold)
        x = self.entry(torch.cat([x, torch.ones_like(x[:, :1])], 1))
        kept = [x]
        for block in self.encoder:
            x = self._through(block, x, embedding)
            kept.append(x)
        for block, inputs in zip(self.decoder, self._joins, strict=True):
            if inputs > x.shape[1]:  # this block expects what the encoder kept, too
                x = mp_cat(x, kept.pop())
            x = self._through(block, x, embedding)
        x = self.leave(x, self.gain)
        return functional.pixel_shuffle(x, self.fold) if self.fold > 1 else x

    def _through(self, block: nn.Module, x: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return block(x, embedding)  # type: ignore[no-any-return]
        # its dropout has a generator of its own, which torch does not know of
        before = None if block.rng is None else block.rng.get_state()  # type: ignore[union-attr,operator]
        return checkpoint(  # type: ignore[no-any-return]
            block,
            x,
            embedding,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (contextlib.nullcontext(), _drawing_from(block.rng, before)),  # type: ignore[arg-type]
        )

    def randomize(self, rng: torch.Generator | None) -> None:
        """Where dropout gets its numbers from: threads share torch's global generator, so it is never used."""
        for module in self.modules():
            if isinstance(module, Block):
                module.rng = rng


@contextlib.contextmanager
def _drawing_from(rng: torch.Generator | None, state: torch.Tensor | None) -> Iterator[None]:
    """The generator draws once more what it drew after this state, and then goes on as if it had not."""
    if rng is None or state is None:
        yield
        return
    now = rng.get_state()
    rng.set_state(state)
    try:
        yield
    finally:  # torch leaves by an exception as soon as it has what it needs
        rng.set_state(now)


# --- as a denoiser -----------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """D(x; sigma) = c_skip x + c_out F(c_in x, c_noise), and u(sigma), how uncertain it is (EDM, Table 1; EDM2, Eq. 21).

    With `directions`, c_skip x is the best linear denoiser of a class (models/preconditioning.py) instead of EDM's scalar.
    """

    def __init__(self, image: tuple[int, int, int], shape: UnetShape, dropout: float = 0.0, directions: int = 0) -> None:
        super().__init__()
        self.unet = Unet(image, shape, dropout)
        self.knows = Gaussian(image, directions) if directions else White()
        self.waves = Fourier(128)
        self.uncertain = MPConv(128, 1)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.unet(self.knows.scaled(x, sigma), sigma.log() / 4)
        return self.knows.linear(x, sigma) + self.knows.error(sigma).sqrt()[:, None, None, None] * found

    def uncertainty(self, sigma: torch.Tensor) -> torch.Tensor:
        """u(sigma), the logarithm of the expected squared error after weighting, (batch,)."""
        found: torch.Tensor = self.uncertain(self.waves(sigma.log() / 4)).squeeze(1)
        return found
