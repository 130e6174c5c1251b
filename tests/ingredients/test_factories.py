"""Generators of one class (methods sheet, tests 23 to 26): samplers, averages, small classes, quotas, divergence."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from osfl.errors import FilesError, TrainingError
from osfl.ingredients.autoencoders import vae_loss
from osfl.ingredients.cells import Cell, quotas, shares
from osfl.ingredients.diffusion import batch_for, ema_beta, ema_exponent, follow, heun, learning_rate, time_grid
from osfl.ingredients.experts import product_of_experts
from osfl.ingredients.factories import FactorySettings, factory_for, factory_problems, sample_cell, train_factory
from osfl.ingredients.symmetries import orbit, turned
from osfl.protocol import Context, Dataset, Payload, Plan, Shard, Task

TASK = Task("toy", ("round", "square"), (1, 8, 8))
TINY = FactorySettings(
    symmetry="none", mixture_dims=6, mixture_components=3, mixture_prior=2.0, vae_latent=4, vae_width=32, vae_steps=300,
    unet="w8-m1.2-b1-s2", dropout=0.1, edm_images=2000, edm_batch=32, edm_rampup=200, edm_lr_batches=30, edm_ema=0.1,
    edm_steps=5,
)  # fmt: skip
KINDS = ("mixture", "vae", "edm")


def quiet(done: int, total: int) -> None:
    pass


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(n: int, seed: int = 0) -> torch.Tensor:
    """A bright square on a dark ground, its brightness and the ground's varying."""
    x = torch.randint(20, 60, (n, 1, 1, 1), generator=rng(seed)).expand(n, 1, 8, 8).clone()
    x[:, :, 2:6, 2:6] = torch.randint(150, 230, (n, 1, 1, 1), generator=rng(seed + 1))
    return x.to(torch.uint8)


# --- every kind ---


@pytest.mark.parametrize("kind", KINDS)
def test_samples_resemble_the_class(kind: str) -> None:
    factory = factory_for(replace(TINY, factory=kind), TASK)
    tensors = factory.fit(pictures(60), rng(), quiet)
    made = factory.sample(tensors, 64, rng(1))
    assert made.dtype == torch.uint8 and made.shape == (64, 1, 8, 8)
    bright, dark = made[:, :, 3:5, 3:5].float().mean(), made[:, :, 0].float().mean()
    assert bright > 120 and dark < 90, (bright, dark)
    assert float(made[:, 0, 4, 4].float().std()) > 2  # not one image again and again


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_follow_the_contract_and_repeat(kind: str) -> None:
    factory = factory_for(replace(TINY, factory=kind, edm_images=64, vae_steps=5), TASK)
    first, again = (factory.fit(pictures(12), rng(3), quiet) for _ in range(2))
    contract = factory.contract()
    assert first.keys() == contract.keys()
    assert all(tuple(first[name].shape) == line.shape for name, line in contract.items())
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(factory.sample(first, 5, rng(1)), factory.sample(again, 5, rng(1)))
    assert not torch.equal(factory.sample(first, 5, rng(1)), factory.sample(first, 5, rng(2)))
    assert factory.sample(first, 0, rng(1)).shape == (0, 1, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 3])
def test_a_class_of_two_images(kind: str, n: int) -> None:
    factory = factory_for(replace(TINY, factory=kind, edm_images=64, vae_steps=5), TASK)
    tensors = factory.fit(pictures(n), rng(), quiet)
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values())
    assert factory.sample(tensors, 4, rng()).shape == (4, 1, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_odd_sides(kind: str) -> None:
    task = Task("odd", ("a", "b"), (3, 7, 9))
    factory = factory_for(replace(TINY, factory=kind, edm_images=64, vae_steps=5), task)
    images = torch.randint(0, 256, (6, 3, 7, 9), generator=rng(), dtype=torch.uint8)
    assert factory.sample(factory.fit(images, rng(), quiet), 2, rng()).shape == (2, 3, 7, 9)


def shard_of(images: torch.Tensor) -> tuple[Shard, Context]:
    data = Dataset(images, torch.ones(len(images), dtype=torch.long))
    plan = Plan(TASK, "federated_factory", TINY, ("st-mary",))
    return Shard("st-mary", data, data.subset(torch.arange(0)), "x"), Context(plan, torch.device("cpu"))


@pytest.mark.parametrize(("kind", "change"), [("edm", {"edm_lr": 1e30}), ("vae", {"vae_lr": 1e30})])
def test_a_generator_that_diverges_says_whose_which_class_and_which_setting(kind: str, change: dict[str, float]) -> None:
    shard, ctx = shard_of(pictures(20))
    settings = replace(TINY, factory=kind, dropout=0.0, **change)
    with pytest.raises(TrainingError) as caught:
        train_factory(shard, 1, settings, TASK, ctx)
    words = str(caught.value)
    assert caught.value.client == "st-mary" and caught.value.field == next(iter(change))
    assert "'square'" in words and "diverged" in words and next(iter(change)) in words


def test_a_full_disk_while_sampling_names_the_cell() -> None:
    def full(key: object, make: Callable[[], Payload]) -> Payload:
        make()
        raise OSError(28, "No space left on device", "shelf/x")

    shard, ctx = shard_of(pictures(20))
    settings = replace(TINY, factory="mixture")
    cell = Cell(1, "st-mary", 20, train_factory(shard, 1, settings, TASK, ctx))
    with pytest.raises(FilesError, match="No space left") as caught:
        sample_cell(cell, 5, settings, TASK, replace(ctx, once=full))
    assert "'square'" in str(caught.value) and "st-mary" in str(caught.value) and "not repeated" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("mixture_dims", 0), ("vae_lr", -1.0), ("edm_images", 0), ("dropout", 1.0), ("edm_ema", 0.5), ("edm_steps", 1),
     ("least", 1), ("unet", "w16")],
)  # fmt: skip
def test_settings_that_cannot_work(setting: str, value: object) -> None:
    assert not factory_problems(TINY, TASK)
    problems = factory_problems(replace(TINY, **{setting: value}), TASK)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]


# --- mixture ---


def test_a_mixture_of_one_component_has_the_moments_of_its_class() -> None:
    settings = replace(TINY, factory="mixture", mixture_components=1, mixture_prior=1e-9, mixture_dims=64)
    images = torch.randint(90, 160, (200, 1, 8, 8), generator=rng(), dtype=torch.uint8)
    factory = factory_for(settings, TASK)
    tensors = factory.fit(images, rng(), quiet)
    x = images.flatten(1).double() / 127.5 - 1
    assert torch.allclose(tensors["mean"][0].double(), x.mean(0), atol=1e-6)
    scale, basis = tensors["scales"][0].double(), tensors["basis"].double()
    covariance = basis.T @ scale @ scale.T @ basis
    assert torch.allclose(covariance, torch.cov(x.T, correction=0), atol=1e-4)
    made = factory.sample(tensors, 4000, rng(1)).flatten(1).double() / 127.5 - 1
    assert torch.allclose(made.mean(0), x.mean(0), atol=0.02)
    assert torch.allclose(made.std(0), x.std(0), rtol=0.1)


def test_a_mixture_finds_two_groups() -> None:
    images = torch.cat([pictures(50), 255 - pictures(50, 7)])
    factory = factory_for(replace(TINY, factory="mixture"), TASK)
    centre = factory.sample(factory.fit(images, rng(), quiet), 200, rng(1))[:, 0, 4, 4].float()
    middle = ((centre > 110) & (centre < 140)).float().mean()
    assert middle < 0.1 and 0.3 < float((centre > 127).float().mean()) < 0.7


# --- autoencoder ---


def test_the_autoencoder_s_loss_is_the_bound_by_hand() -> None:
    x, made = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    loss = vae_loss(x, made, torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    assert math.isclose(float(loss), math.log(0.25) + 0.5, rel_tol=1e-4)  # 2/2 log v, and half of mean^2


# --- diffusion: sampler (tests 23 and 24) ---


def test_time_grid_ends() -> None:
    for n in (2, 18, 32):
        grid = time_grid(n)
        assert len(grid) == n + 1 and torch.all(grid[1:] < grid[:-1])
        assert math.isclose(float(grid[0]), 80.0) and math.isclose(float(grid[-2]), 0.002) and float(grid[-1]) == 0.0


def test_n_steps_cost_2n_minus_1_calls() -> None:
    for n in (2, 5, 18):
        calls = []

        def denoise(x: torch.Tensor, sigma: torch.Tensor, calls: list[float] = calls) -> torch.Tensor:
            calls.append(float(sigma[0]))
            return x / 2

        heun(denoise, torch.zeros(1, 1, 1, 1), n)
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
    made = heun(denoise, noise, n)
    ratio = float(made.std()) / s
    assert abs(ratio - 1) < tolerance and abs(ratio - expected) < 0.003
    assert abs(float(made.mean()) - m) < 2.5e-3  # noise at 80 begins with mean 0, not m: m s / 80 = 1.9e-3 of that is left


# --- diffusion: averages, schedule, batches (test 25) ---


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


# --- quotas (test 26) and the product of experts (test 22) ---


def cell(label: int, client: str, seen: int) -> Cell:
    return Cell(label, client, seen, {})


def test_shares_sum_exactly_and_stay_within_one() -> None:
    for seed in range(50):
        weights = torch.randint(0, 40, (7,), generator=rng(seed)).tolist()
        total = int(torch.randint(1, 500, (1,), generator=rng(seed + 99)))
        if not sum(weights):
            continue
        cut = shares(total, weights)
        assert sum(cut) == total
        assert all(abs(part - total * weight / sum(weights)) < 1 for part, weight in zip(cut, weights, strict=True))
        assert all(part == 0 for part, weight in zip(cut, weights, strict=True) if weight == 0)
    assert shares(10, [1, 1, 1]) == [4, 3, 3] and shares(5, [0, 0]) == [0, 0]


def test_quotas_are_for_cells_that_exist_and_ignore_the_order_of_arrival() -> None:
    cells = [cell(0, "a", 10), cell(0, "b", 30), cell(2, "b", 7)]
    asked = quotas(cells, 100)
    assert asked == {(0, "a"): 25, (0, "b"): 75, (2, "b"): 100}
    assert quotas(list(reversed(cells)), 100) == asked
    assert quotas(cells[:2], 100) == {(0, "a"): 25, (0, "b"): 75}  # as if class 2 had never been there
    natural = quotas(cells, 100, "empirical")
    assert sum(natural.values()) == 200 and natural[2, "b"] == 30


def test_product_of_experts() -> None:
    logits = torch.randn((4, 9, 5), generator=rng(), dtype=torch.float64)
    one = product_of_experts(logits[:1], 1e-12)
    assert torch.allclose(one, logits[0].log_softmax(-1), atol=1e-9)  # of one expert, that expert
    same = product_of_experts(logits[:1].expand(3, -1, -1), 1e-12)
    assert torch.allclose(same, (3 * logits[0].log_softmax(-1)).log_softmax(-1), atol=1e-9)
    assert torch.equal(same.argmax(-1), logits[0].argmax(-1))
    several = product_of_experts(logits, 1e-12)
    assert torch.allclose(product_of_experts(logits[[2, 0, 3, 1]], 1e-12), several, atol=1e-12)
    assert torch.allclose(several.exp().sum(-1), torch.ones(9, dtype=torch.float64))


def test_one_expert_cannot_veto() -> None:
    """Probability 0 on the true class costs at most 27.63 = -ln 1e-12, which two others can outvote."""
    sure = torch.tensor([[[0.0, 1e4]]], dtype=torch.float64)  # exp(-1e4) is 0
    others = torch.tensor([[[20.0, 0.0]]], dtype=torch.float64).expand(2, -1, -1)
    answer = product_of_experts(torch.cat([sure, others]), 1e-12)
    assert int(answer.argmax()) == 0
    worst = product_of_experts(sure.expand(6, -1, -1), 1e-12)
    assert bool(torch.isfinite(worst).all()) and float(worst.abs().max()) <= 6 * 27.632


# --- symmetries ---


def test_orbits_hold_every_copy_once() -> None:
    image = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    assert [len(orbit(image, how)) for how in ("none", "flip", "dihedral")] == [1, 2, 8]
    copies = {tuple(one.flatten().tolist()) for one in orbit(image, "dihedral")}
    assert len(copies) == 8
    seen = {tuple(one.flatten().tolist()) for one in turned(image.expand(300, -1, -1, -1), "dihedral", rng())}
    assert seen == copies
    assert torch.equal(turned(image, "none", rng()), image)
