"""The diffusion model: sampler, averages, schedule, loss."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from osfl.core.types import Task
from osfl.methods.federated_factory import diffusion
from osfl.methods.federated_factory.diffusion import (
    Diffusion,
    batch_for,
    diffusion_loss,
    draw_noise,
    ema_beta,
    ema_exponent,
    follow,
    heun,
    learning_rate,
    moments,
    time_grid,
)
from osfl.methods.federated_factory.factories import factory_for
from osfl.models.preconditioning import Gaussian, White
from osfl.models.unet import Denoiser
from osfl.runtime.meter import measure
from tests.methods.federated_factory.conftest import TASK, TINY, pictures, quiet, rng

# --- diffusion: sampler ---


def test_time_grid_ends() -> None:
    for n in (2, 18, 32):
        grid = time_grid(n)
        assert len(grid) == n + 1 and torch.all(grid[1:] < grid[:-1])
        assert math.isclose(float(grid[0]), 80.0) and math.isclose(float(grid[-2]), 0.002) and float(grid[-1]) == 0.0


def test_n_steps_cost_2n_minus_1_calls() -> None:
    for n in (2, 5, 18):
        calls: list[float] = []

        def denoise(x: torch.Tensor, sigma: torch.Tensor, calls: list[float] = calls) -> torch.Tensor:
            calls.append(float(sigma[0]))
            return x / 2

        heun(denoise, torch.zeros(1, 1, 1, 1), n)
        assert calls[0] == 80.0
        assert len(calls) == 2 * n - 1


@pytest.mark.parametrize(("n", "expected", "tolerance"), [(18, 1.056, 0.08), (32, 1.014, 0.02), (50, 1.008, 0.012)])
def test_heun_with_the_exact_denoiser_of_a_gaussian(n: int, expected: float, tolerance: float) -> None:
    """N(0.3, 0.5^2) data: the deviation comes out too large by 5.6, 1.4 and 0.8 per cent, the mean exactly."""
    m, s = 0.3, 0.5

    def denoise(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        level = sigma[:, None, None, None] ** 2
        return (s**2 * x + level * m) / (s**2 + level)

    noise = torch.randn((20_000, 1, 1, 1), generator=rng(), dtype=torch.float64)
    noise = (noise - noise.mean()) / noise.std()  # what is tested is the sampler, not the draw
    made = heun(denoise, 80 * noise, n)
    ratio = float(made.std()) / s
    assert abs(ratio - 1) < tolerance and abs(ratio - expected) < 0.003
    assert abs(float(made.mean()) - m) < 2.5e-3  # noise at 80 begins with mean 0, not m: m s / 80 = 1.9e-3 of that is left


# --- diffusion: averages, schedule, batches ---


def test_exponents_of_the_average() -> None:
    assert math.isclose(ema_exponent(0.05), 16.972, abs_tol=1e-3) and math.isclose(ema_exponent(0.10), 6.937, abs_tol=1e-3)


def test_the_average_copies_first_and_leaves_constants_alone() -> None:
    net, average = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    assert ema_beta(0.05, 64, 64) == 0.0
    follow(average, net, ema_beta(0.05, 64, 64))
    assert torch.equal(average.weight, net.weight)
    for seen in (128, 192, 256):
        follow(average, net, ema_beta(0.05, seen, 64))
    assert torch.allclose(average.weight, net.weight, atol=1e-6)


def test_the_average_weights_time_by_a_power() -> None:
    """A parameter that grows as t is averaged to (g + 1) / (g + 2) of its last value."""
    value, seen, g = 0.0, 0, ema_exponent(0.1)
    for step in range(1, 4001):
        seen += 10
        beta = ema_beta(0.1, seen, 10)
        value = beta * value + (1 - beta) * step
    assert math.isclose(value / 4000, (g + 1) / (g + 2), rel_tol=1e-3)


def test_learning_rate_ramps_up_and_falls() -> None:
    s = replace(TINY, edm_lr=0.01, edm_rampup=1000, edm_lr_batches=100)
    assert math.isclose(learning_rate(s, 5, 100), 0.005) and math.isclose(learning_rate(s, 50, 100), 0.01)
    assert math.isclose(learning_rate(s, 400, 100), 0.005)


def test_batches_are_powers_of_two_within_the_class() -> None:
    assert [batch_for(n, 4096) for n in (1, 31, 63, 64, 5000, 10_000)] == [32, 32, 32, 64, 4096, 4096]


# --- diffusion: learning ---


class Halves:
    """A denoiser that halves what it is given and is equally unsure everywhere."""

    knows = White()

    def __init__(self) -> None:
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        self.seen.append((x, sigma))
        return x / 2

    def uncertainty(self, sigma: torch.Tensor) -> torch.Tensor:
        return torch.full_like(sigma, 0.7)


def test_the_diffusion_loss_by_hand() -> None:
    """(1 / sigma^2 + 1 / 0.5^2) / e^u (D - x)^2 + u, noise of deviation sigma, ln sigma ~ N(-0.8, 1.6^2)."""
    net, x = Halves(), 0.3 * torch.ones(20_000, 1, 2, 2)
    loss = diffusion_loss(net, x, *draw_noise(x, -0.8, 1.6, rng()))  # type: ignore[arg-type]
    ((noisy, sigma),) = net.seen
    assert abs(float(sigma.log().mean()) + 0.8) < 0.05 and abs(float(sigma.log().std()) - 1.6) < 0.05
    spread = (noisy - x) / sigma[:, None, None, None]
    assert abs(float(spread.mean())) < 0.02 and abs(float(spread.std()) - 1) < 0.02
    error = (noisy / 2 - x).square().mean((1, 2, 3))
    assert math.isclose(float(loss), float(((1 / sigma**2 + 4) / math.exp(0.7) * error + 0.7).mean()), rel_tol=1e-4)


def learned(steps: int, **changes: Any) -> dict[str, torch.Tensor]:
    settings = replace(TINY, factory="edm", edm_images=32 * steps, **changes)
    return factory_for(settings, TASK).fit(pictures(20), rng(), quiet)


def test_what_travels_is_the_average_of_the_weights_on_the_way() -> None:
    on_the_way = [learned(steps, edm_ema=0.0) for steps in (1, 2, 3)]
    average = dict(on_the_way[0])
    for step, weights in enumerate(on_the_way[1:], 2):
        beta = (1 - 1 / step) ** (6.9372 + 1)
        average = {name: beta * value + (1 - beta) * weights[name] for name, value in average.items()}
    found = learned(3, edm_ema=0.1)
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in average.items())
    assert not all(torch.allclose(found[name], value, atol=1e-5) for name, value in on_the_way[-1].items())


def test_the_optimizer_is_the_paper_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam with 0.9 and 0.99, the schedule's rate at each step, and as many steps as the images fill."""
    used = []

    class Watched(torch.optim.Adam):
        def step(self, *args: Any, **options: Any) -> Any:
            used.append((self.param_groups[0]["lr"], self.param_groups[0]["betas"]))
            return super().step(*args, **options)

    monkeypatch.setattr(torch.optim, "Adam", Watched)
    settings = replace(TINY, factory="edm", edm_images=32 * 39 + 1)
    factory_for(settings, TASK).fit(pictures(20), rng(), quiet)
    assert used == [(learning_rate(settings, step, 32), (0.9, 0.99)) for step in range(1, 41)]
    assert used[0][0] < used[10][0] > used[-1][0]  # it rises, and falls


def test_what_is_padded_is_cut_off_again() -> None:
    one = factory_for(replace(TINY, factory="edm"), Task("odd", ("a", "b"), (1, 6, 5)))
    assert isinstance(one, Diffusion)
    x = torch.rand((2, 1, 6, 5), generator=rng())
    padded = one._pad(x)
    assert padded.shape == (2, 1, 8, 8) and torch.equal(one._cut(padded), x)
    assert torch.equal(padded[:, :, 0, 1:6], x[:, :, 0]) and torch.equal(padded[:, :, -1, 1:6], x[:, :, -1])


def test_sampling_costs_what_its_calls_cost() -> None:
    tensors, spent = learned(1), []
    for steps in (2, 3):
        with measure() as meter:
            factory_for(replace(TINY, factory="edm", edm_steps=steps), TASK).sample(tensors, 4, rng())
        assert meter.made == 4 and meter.made_flops == meter.flops
        spent.append(meter.flops)
    assert math.isclose(spent[1] / spent[0], 5 / 3)


# --- diffusion: around a Gaussian ---


def test_directions_cost_operations() -> None:
    """Two products with the basis at every call: 2 x 2 x 36 more directions x 64 pixels."""
    spent = []
    for directions in (4, 40):
        factory = factory_for(replace(TINY, factory="edm", edm_images=1, edm_directions=directions), TASK)
        tensors = factory.fit(pictures(60), rng(), quiet)
        with measure() as meter:
            factory.sample(tensors, 4, rng())
        spent.append(meter.flops)
    calls = 4 * (2 * TINY.edm_steps - 1)
    assert math.isclose(spent[1] - spent[0], calls * 2 * 2 * 36 * 64, rel_tol=1e-6)


def test_moments_are_those_of_the_images() -> None:
    """All directions: the covariance itself. Fewer: the largest variances, and the mean of the others."""
    x = torch.randn((50, 1, 2, 3), generator=rng()) * torch.arange(1, 7).reshape(1, 1, 2, 3) + 0.5
    covariance = torch.cov(x.flatten(1).T, correction=0)
    values = torch.linalg.eigvalsh(covariance).flip(0)
    for directions in (6, 2):
        known = Gaussian((1, 2, 3), directions)
        known.initialize(None)
        moments(x, known, least=1, images=50)
        assert torch.allclose(known.mean, x.flatten(1).mean(0, keepdim=True), atol=1e-5)
        assert torch.allclose(known.variances[:directions], values[:directions], rtol=1e-4)
    assert math.isclose(float(known.variances[-1]), float(values[2:].mean()), rel_tol=1e-4)
    assert torch.allclose(known.basis @ known.basis.T, torch.eye(2), atol=1e-5)


def test_few_images_show_no_direction() -> None:
    """Two images could be computed from their mean and their difference; all that is left of them is the mean."""
    known, x = Gaussian((1, 2, 3), 4), torch.randn((2, 1, 2, 3), generator=rng())
    known.initialize(None)
    moments(x, known, least=10, images=2)
    assert torch.allclose(known.mean, x.flatten(1).mean(0, keepdim=True), atol=1e-6) and not known.basis.any()
    assert torch.allclose(known.variances, ((x[0] - x[1]).square().sum() / 4 / 6).expand(5), rtol=1e-4)


def test_hardly_trained_it_draws_from_the_class_gaussian() -> None:
    """Where white noise would still be noise: one step of learning, samples with the mean and spread of the images."""
    images = pictures(200)
    found = {}
    for directions in (0, 6):
        settings = replace(TINY, factory="edm", edm_images=1, edm_steps=8, edm_directions=directions, edm_start=20.0)
        factory = factory_for(settings, TASK)
        tensors = factory.fit(images, rng(), quiet)
        assert {name: tuple(value.shape) for name, value in tensors.items()} == {
            name: line.shape for name, line in factory.contract().items()
        }
        found[directions] = factory.sample(tensors, 200, rng(1)).float()
    real = images.float()
    assert float((found[6].mean(0) - real.mean(0)).abs().mean()) < 6 < float((found[0].mean(0) - real.mean(0)).abs().mean())
    assert float((found[6].std(0) - real.std(0)).abs().mean()) < 6


def test_samples_come_in_pieces_that_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    factory, tensors = factory_for(replace(TINY, factory="edm"), TASK), learned(1)
    monkeypatch.setattr(diffusion, "_CHUNK", 2)
    assert [len(factory.sample(tensors, count, rng())) for count in (0, 2, 5)] == [0, 2, 5]


# --- diffusion: what a network sees while it learns ---


def observed(monkeypatch: pytest.MonkeyPatch, steps: int, **changes: Any) -> list[tuple[Denoiser, torch.Tensor]]:
    """The network and the images of each step."""
    seen: list[tuple[Denoiser, torch.Tensor]] = []

    def noted(net: Denoiser, x: torch.Tensor, sigma: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        seen.append((net, x.clone()))
        return diffusion_loss(net, x, sigma, noise)

    monkeypatch.setattr(diffusion, "diffusion_loss", noted)
    bright = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)
    bright[:, :, :, 6:] = 255  # the right border
    bright[:, :, 0, 0] = 200  # and one corner
    factory_for(replace(TINY, factory="edm", edm_images=32 * steps, **changes), TASK).fit(bright, rng(), quiet)
    return seen


@pytest.mark.parametrize(("symmetry", "copies"), [("none", 1), ("flip", 2), ("dihedral", 8)])
def test_a_generator_learns_from_mirrored_and_turned_images(
    monkeypatch: pytest.MonkeyPatch, symmetry: str, copies: int
) -> None:
    """As many different images as the symmetry makes of one, each about as often."""
    images = torch.cat([x for _, x in observed(monkeypatch, 5, symmetry=symmetry)])
    different, times = torch.unique(images, dim=0, return_counts=True)
    assert len(different) == copies and int(times.min()) > 0.5 * len(images) / copies
    assert bool((different[..., :, -1].flatten(1).mean(1) > 0.5).any())  # the image itself is among them


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_generator_learns_with_the_dropout_of_the_plan(monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    """The network as training leaves it answers the same images in two ways where units are dropped, and only there."""
    net, x = observed(monkeypatch, 3, dropout=dropout)[-1]
    with torch.no_grad():
        one, other = (net(x, torch.ones(len(x))) for _ in range(2))
    assert net.training and torch.allclose(one, other, atol=1e-4) == (dropout == 0)
