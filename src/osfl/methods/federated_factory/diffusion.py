"""A diffusion model of one class: the generator of the FederatedFactory paper, trained and sampled as in EDM and EDM2.

Karras et al., "Elucidating the Design Space of Diffusion-Based Generative Models" (EDM), NeurIPS 2022, and "Analyzing and
Improving the Training Dynamics of Diffusion Models" (EDM2), CVPR 2024. The network is in models/unet.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.types import ADDED, Contract, Payload
from osfl.ingredients.statistics.support import Readable, Support, supported_directions
from osfl.methods.federated_factory.symmetries import draw_turns, orbit, turned
from osfl.models.flops import forward_flops, training_flops
from osfl.models.initial import initialize
from osfl.models.inputs import to_images, to_input
from osfl.models.memory import TrainingMemory, training_memory
from osfl.models.naming import contract_of, load_named, named
from osfl.models.preconditioning import Gaussian
from osfl.models.unet import Block, Denoiser, parse_unet
from osfl.runtime.devices import ahead
from osfl.runtime.memory import available, micro_batch, too_little
from osfl.runtime.meter import spend
from osfl.runtime.payloads import load_payload, save_payload
from osfl.runtime.precision import advance, backward, half, restore_scaling, scaling

if TYPE_CHECKING:
    from osfl.core.types import Tensors

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (images, noise level of each) -> images
_CHUNK = 256  # images sampled at once; part of what a seed means, so not a setting
LAST_LEVEL = 0.002  # of noise before an image is clean
LOST = 20.0  # noise level at which nothing can be seen of pixels in [-1, 1]
SAMPLING = ("edm_steps", "edm_start")  # settings that learning does not see
_LEAST_STD = 0.02  # of what is outside the known directions: two images leave nothing there
_CHECK = 32  # steps between two looks at the loss
_FILLS = 32  # images that keep a GPU busy
COPIES = 5  # of the weights: themselves, gradients, two of Adam, an average
KEEP_EVERY = 500_000  # images between two states that are kept


@dataclass(frozen=True)
class DiffusionSettings(Support):
    """Defaults: 32 px in the paper; for 128 px it has unet = w64-m1.2.2.2-b3-a16.8 and edm_batch = 1024."""

    unet: str = "w128-m1.2.2.2-b3-a16.8"  # width, multiples by level, blocks a level, sides with attention, -s2 folds pixels
    dropout: float = 0.3  # of the U-Net
    edm_images: int = 25_000_000  # images that a generator sees while it learns
    edm_batch: int = 4096  # or the largest power of two within the class' size, at least 32
    edm_lr: float = 0.01  # Adam (0.9, 0.99)
    edm_lr_batches: int = 35_000  # after so many batches the rate falls as 1 / sqrt(t)
    edm_rampup: int = 10_000_000  # images over which the rate grows to its full size
    edm_ema: float = 0.05  # width of the weights' average, relative to the length of training
    edm_noise_mean: float = -0.8  # of ln sigma while learning
    edm_noise_std: float = 1.6  # deviation of ln sigma while learning
    edm_steps: int = 32  # of Heun's method when sampling: 2 n - 1 calls of the network
    edm_directions: int = field(default=0, metadata=ADDED)  # principal directions known at the start; they and the mean travel
    edm_start: float = field(default=80.0, metadata=ADDED)  # noise level that sampling begins at


class Diffusion:
    """One class, one denoiser. Images whose side the U-Net cannot halve often enough are padded by their border."""

    def __init__(self, settings: DiffusionSettings, image: tuple[int, int, int], symmetry: str, device: torch.device) -> None:
        self.settings, self.image, self.symmetry, self.device = settings, image, symmetry, device
        self.shape = parse_unet(settings.unet)
        step = self.shape.divides
        self.padded = (image[0], math.ceil(image[1] / step) * step, math.ceil(image[2] / step) * step)

    def contract(self) -> Contract:
        with torch.device("meta"):
            model = Denoiser(self.padded, self.shape, directions=self.settings.edm_directions)
        return {name.removeprefix("net/"): line for name, line in contract_of(model, "net").items()}

    def _build(self, rng: torch.Generator | None) -> Denoiser:
        with torch.device("meta"):  # no draws from the global generator by torch's own defaults
            model = Denoiser(self.padded, self.shape, self.settings.dropout, self.settings.edm_directions)
        model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype))  # type: ignore[no-untyped-call]
        initialize(model, rng)
        return model.to(self.device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def memory(self) -> TrainingMemory:
        """What learning takes; `checkpointed` where blocks are computed again."""
        with torch.device("meta"):
            net = Denoiser(self.padded, self.shape, self.settings.dropout, self.settings.edm_directions)
        return training_memory(_AtOneLevel(net), self.padded, block=Block, half=half(self.device) is not None)

    def parts(self, batch: int, memory: int) -> tuple[int, bool]:
        """(images that go through the network at once, whether blocks are computed again), within so many bytes.

        Blocks are computed again only where otherwise fewer than `_FILLS` images fit: it takes a third more time.
        """
        if not memory:
            return batch, False
        needs = self.memory()
        plain = micro_batch(batch, needs.fixed(COPIES), needs.each, memory)
        if plain >= min(batch, _FILLS):
            return plain, False
        size = micro_batch(batch, needs.fixed(COPIES), needs.checkpointed, memory)
        if not size:
            least = needs.fixed(COPIES) + needs.checkpointed
            fix = "Raise --memory, or take a smaller network (`--set unet=...`)."
            raise too_little("a diffusion generator", least, memory, fix)
        return size, True

    def bytes_within(self, images: int, memory: int) -> int:
        """What learning from so many images of a class takes, within so many bytes."""
        part, recompute = self.parts(batch_for(images, self.settings.edm_batch), memory)
        needs = self.memory()
        return round(needs.fixed(COPIES) + part * (needs.checkpointed if recompute else needs.each))

    def fit(
        self,
        images: torch.Tensor,
        rng: torch.Generator,
        progress: Callable[[int, int], None],
        kept: Path | None = None,
    ) -> dict[str, torch.Tensor]:
        """uint8 images (n, channels, height, width) of one class -> the averaged weights.

        `kept`: where the state is written every `KEEP_EVERY` images, so that a killed training goes on from there, to the
        same bytes.
        """
        s = self.settings
        batch = batch_for(len(images), s.edm_batch)
        steps = max(1, math.ceil(s.edm_images / batch))
        part, recompute = self.parts(batch, available(self.device))
        net = self._build(rng)
        net.unet.recompute = recompute
        if isinstance(net.knows, Gaussian):
            different = torch.unique(images, dim=0)
            moments(self._pad(to_input(orbit(different, self.symmetry))), net.knows, s.least, len(different))
        spend(training_flops(_AtOneLevel(net), self.padded) * steps * batch)
        average = copy.deepcopy(net)
        noise = _on(self.device, rng)
        net.train().unet.randomize(noise)
        optimizer = torch.optim.Adam(net.parameters(), s.edm_lr, betas=(0.9, 0.99))
        total = torch.zeros((), device=self.device)
        shown = max(1, steps // 4)
        known = images.to(self.device)
        state = _State(net, average, optimizer, {"rng": rng, "noise": noise})
        done = state.take_up(kept)
        stretch = max(1, KEEP_EVERY // batch)  # steps; what is drawn ahead never reaches beyond it
        while done < steps:
            draws = (
                (torch.randint(len(images), (batch,), generator=rng), *draw_turns(batch, self.symmetry, rng))
                for _ in range(min(stretch, steps - done))
            )
            for step, (picked, *turns) in enumerate(ahead(draws, self.device), done + 1):
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(s, step, batch)
                x = self._pad(to_input(turned(known[picked], self.symmetry, turns), self.device))
                total += diffusion_step(net, optimizer, x, s.edm_noise_mean, s.edm_noise_std, noise, part)
                follow(average, net, ema_beta(s.edm_ema, step * batch, batch))
                if step % _CHECK == 0 or step == steps:  # rarely: asking at each step would stall a GPU
                    _check_finite(total, step, s)
                if step % shown == 0:
                    progress(step // shown, steps // shown)
            done = min(done + stretch, steps)
            if done < steps:
                state.keep(kept, done)
        if kept is not None:
            kept.unlink(missing_ok=True)
        return {name.removeprefix("net/"): value for name, value in named(average, "net").items()}

    def sample(self, tensors: Tensors, count: int, rng: torch.Generator) -> torch.Tensor:
        """`count` images as uint8, by Heun's method without any randomness but the first noise."""
        net = self._build(None)
        load_named(net, {f"net/{name}": value for name, value in tensors.items()}, "net")
        net.eval().requires_grad_(False)
        calls = 2 * self.settings.edm_steps - 1
        spend(forward_flops(_AtOneLevel(net), self.padded) * count * calls, makes=count)
        made = []
        part, _ = self.parts(_CHUNK, available(self.device))
        for start in range(0, count, _CHUNK):
            size = min(_CHUNK, count - start)
            noise = torch.randn((size, *self.padded), generator=rng).to(self.device, memory_format=torch.channels_last)
            first = net.knows.noised(noise, self.settings.edm_start)
            for few in torch.split(first, part):
                made.append(to_images(self._cut(heun(net, few, self.settings.edm_steps, self.settings.edm_start)).cpu()))
        return torch.cat(made) if made else torch.empty((0, *self.image), dtype=torch.uint8)

    def readable(self, tensors: Tensors) -> Readable:
        if not self.settings.edm_directions:
            return Readable({})
        known = (tensors[f"knows.{name}"].reshape(-1, *self.padded) for name in ("mean", "basis"))
        mean, directions = (self._cut(rows).flatten(1) for rows in known)
        return Readable({}, mean, directions)

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        down, right = self.padded[1] - self.image[1], self.padded[2] - self.image[2]
        if not (down or right):
            return x
        return functional.pad(x, (right // 2, right - right // 2, down // 2, down - down // 2), mode="replicate")

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        top, left = (self.padded[1] - self.image[1]) // 2, (self.padded[2] - self.image[2]) // 2
        return x[:, :, top : top + self.image[1], left : left + self.image[2]]


class _AtOneLevel(nn.Module):
    """The denoiser as a function of images alone, to count its operations."""

    def __init__(self, net: Denoiser) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(x, torch.ones(len(x), device=x.device))
        return found


def _on(device: torch.device, rng: torch.Generator) -> torch.Generator:
    """Noise by the million is drawn where it is used; on a CPU that is the generator itself."""
    if device.type == "cpu":
        return rng
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (1,), generator=rng)))


# --- learning ------------------------------------------------------------------------------------------------------------


def diffusion_step(
    net: Denoiser, optimizer: torch.optim.Optimizer, x: torch.Tensor, mean: float, std: float, rng: torch.Generator, part: int
) -> torch.Tensor:
    """One step on the mean loss of the batch, of which `part` images at once go through the network. Returns that loss.

    Noise is drawn for the whole batch, so it does not depend on the parts; what dropout draws does.
    """
    sigma, noise = draw_noise(x, mean, std, rng)
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=x.device)
    for seen, level, drawn in zip(*(torch.split(whole, part) for whole in (x, sigma, noise)), strict=True):
        loss = diffusion_loss(net, seen, level, drawn) * (len(seen) / len(x))
        backward(optimizer, loss)
        total += loss.detach()
    advance(optimizer, x.device)
    return total


def draw_noise(x: torch.Tensor, mean: float, std: float, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """sigma of each image, ln sigma ~ N(mean, std^2), and noise of deviation 1."""
    sigma = (torch.randn(len(x), generator=rng, device=x.device) * std + mean).exp()
    return sigma, torch.randn(x.shape, generator=rng, device=x.device)


def diffusion_loss(net: Denoiser, x: torch.Tensor, sigma: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """lambda / e^u (D(x + sigma n; sigma) - x)^2 + u, averaged over pixels and images."""
    u = net.uncertainty(sigma)
    noised = x + noise * sigma[:, None, None, None]
    error = (net(noised, sigma) - x).square().mean((1, 2, 3)) / net.knows.error(sigma)  # weight: 1 / c_out^2
    loss: torch.Tensor = (error / u.exp() + u).mean()
    return loss


@dataclass(frozen=True)
class _State:
    """All that a training goes on from: the network, its average, the optimizer, and the generators."""

    net: nn.Module
    average: nn.Module
    optimizer: torch.optim.Optimizer
    generators: Mapping[str, torch.Generator]

    def _weights(self) -> dict[str, torch.Tensor]:
        parts = (("net", self.net), ("average", self.average))
        return {f"{part}/{name}": value for part, module in parts for name, value in module.state_dict().items()}

    def keep(self, path: Path | None, done: int) -> None:
        if path is None:
            return
        slots = {
            f"optimizer/{name}/{key}": value
            for name, parameter in self.net.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        states = {f"generator/{name}": rng.get_state() for name, rng in self.generators.items()}
        facts = {"done": done, "scaling": scaling(self.optimizer)}
        save_payload(path, Payload({**self._weights(), **slots, **states}, facts))

    def take_up(self, path: Path | None) -> int:
        """Steps that were done, or 0 where nothing was kept."""
        found = None if path is None else load_payload(path)
        if found is None:
            return 0
        with torch.no_grad():
            for name, value in self._weights().items():
                value.copy_(found.tensors[name])
        for name, parameter in self.net.named_parameters():
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = found.tensors[f"optimizer/{name}/{key}"]
                # in the parameter's own memory order; the count of steps stays on the CPU
                like = value if key == "step" else torch.empty_like(parameter).detach().copy_(value)
                self.optimizer.state[parameter][key] = like
        for name, rng in self.generators.items():
            rng.set_state(found.tensors[f"generator/{name}"])
        restore_scaling(self.optimizer, next(self.net.parameters()).device, found.facts["scaling"])
        return int(found.facts["done"])


def moments(x: torch.Tensor, known: Gaussian, least: int, images: int) -> None:
    """Mean and covariance of a class, as far as they can be estimated from so many images without revealing one of them."""
    flat = x.flatten(1).double().cpu()
    mean = flat.mean(0, keepdim=True)
    off = flat - mean
    basis = supported_directions(off, len(known.basis), least, images)
    spread, others = (off @ basis.T).square().mean(0), flat.shape[1] - len(basis)
    rest = (off.square().sum() / len(flat) - spread.sum()) / max(others, 1)
    rest = rest.clamp_min(_LEAST_STD**2)
    known.know(mean, basis, spread.clamp_min(float(rest)), float(rest))


def batch_for(count: int, most: int) -> int:
    """The largest power of two within the class' size, from 32 up to `most`."""
    return min(most, max(32, 1 << (max(1, count).bit_length() - 1)))


def learning_rate(settings: DiffusionSettings, step: int, batch: int) -> float:
    """lr / sqrt(max(t / t_ref, 1)), after a linear ramp over the first images."""
    late = max(step / settings.edm_lr_batches, 1.0)
    return settings.edm_lr / math.sqrt(late) * min(step * batch / max(settings.edm_rampup, 1), 1.0)


@cache
def ema_exponent(width: float) -> float:
    """gamma whose averaging profile t^gamma has this relative standard deviation: std^2 = (g + 1) / ((g + 2)^2 (g + 3))."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        std = math.sqrt((middle + 1) / ((middle + 2) ** 2 * (middle + 3)))
        low, high = (middle, high) if std > width else (low, middle)
    return low


def ema_beta(width: float, seen: int, new: int) -> float:
    """beta = (1 - new / seen)^(gamma + 1): the first update (seen = new) copies the network. Width 0: no averaging."""
    return 0.0 if width <= 0 else float((1 - new / seen) ** (ema_exponent(width) + 1))


@torch.no_grad()
def follow(average: nn.Module, net: nn.Module, beta: float) -> None:
    """average <- beta average + (1 - beta) net, for every parameter."""
    mine, new = ([parameter.detach() for parameter in one.parameters()] for one in (average, net))
    torch._foreach_lerp_(mine, new, 1 - beta)


def _check_finite(total: torch.Tensor, step: int, settings: DiffusionSettings) -> None:
    if not math.isfinite(float(total)):
        raise TrainingError(
            f"the generator diverged (loss not finite by step {step})",
            field="edm_lr",
            got=settings.edm_lr,
            fix="Lower it (`--set edm_lr=...`), or lengthen the ramp-up (`--set edm_rampup=...`, in images).",
        )


# --- sampling --------------------------------------------------------------------------------------------------------------


def time_grid(steps: int, low: float = LAST_LEVEL, high: float = 80.0, rho: float = 7.0) -> torch.Tensor:
    """t_0 = high ... t_{n-1} = low, t_n = 0; float64."""
    i = torch.arange(steps, dtype=torch.float64) / max(steps - 1, 1)
    grid = (high ** (1 / rho) + i * (low ** (1 / rho) - high ** (1 / rho))) ** rho
    return torch.cat([grid, torch.zeros(1, dtype=torch.float64)])


@torch.no_grad()
def heun(denoise: Denoise, x: torch.Tensor, steps: int, start: float = 80.0) -> torch.Tensor:
    """Follow dx/dt = (x - D(x; t)) / t from images of noise level `start` to clean ones, second order, 2 n - 1 calls."""
    grid = time_grid(steps, high=start).tolist()
    for now, then in pairwise(grid):
        slope = (x - denoise(x, _levels(x, now))) / now
        ahead = x + (then - now) * slope
        if then > 0:
            slope = (slope + (ahead - denoise(ahead, _levels(x, then))) / then) / 2
            ahead = x + (then - now) * slope
        x = ahead
    return x


def _levels(x: torch.Tensor, sigma: float) -> torch.Tensor:
    return torch.full((len(x),), sigma, dtype=x.dtype, device=x.device)
