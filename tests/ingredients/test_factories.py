"""Generators of one class (methods sheet, tests 23 to 26): samplers, averages, small classes, quotas, divergence."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from osfl.errors import FilesError, TrainingError
from osfl.ingredients import autoencoders
from osfl.ingredients.autoencoders import vae_loss
from osfl.ingredients.cells import Cell, cells_of, quotas, shares
from osfl.ingredients.diffusion import (
    Diffusion,
    batch_for,
    diffusion_loss,
    ema_beta,
    ema_exponent,
    follow,
    heun,
    learning_rate,
    time_grid,
)
from osfl.ingredients.experts import product_of_experts
from osfl.ingredients.factories import FactorySettings, factory_for, factory_problems, sample_cell, train_factory
from osfl.ingredients.mixtures import Mixture, _mixture
from osfl.ingredients.symmetries import orbit, turned
from osfl.meter import measure
from osfl.protocol import Context, Dataset, Json, Payload, Plan, Shard, Task, Upload, digest_of

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


def test_a_generator_that_diverges_in_its_last_step_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss is taken after that step; the tensors tell."""
    broken = {"mean": torch.zeros(3), "factors": torch.tensor([0.0, math.nan])}
    monkeypatch.setattr(Mixture, "fit", lambda *_: broken)
    shard, ctx = shard_of(pictures(20))
    with pytest.raises(TrainingError, match=r"'square'.*tensor 'factors' is not finite") as caught:
        train_factory(shard, 1, replace(TINY, factory="mixture"), TASK, ctx)
    assert caught.value.client == "st-mary"


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


def test_a_u_net_of_any_width_can_learn() -> None:
    """200 channels are not a whole number of heads of 64."""
    settings = replace(TINY, factory="edm", unet="w100-m2-b1-a8", edm_images=32)
    assert not factory_problems(settings, TASK)
    assert all(bool(value.isfinite().all()) for value in factory_for(settings, TASK).fit(pictures(20), rng(), quiet).values())


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


@pytest.mark.parametrize("prior", [1e-9, 60.0])
def test_the_belief_about_a_component_is_as_wide_as_the_class(prior: float) -> None:
    """(n V + prior V) / (n + prior) = V: of one component, however strong the belief, the class' own covariance is left."""
    settings = replace(TINY, factory="mixture", mixture_components=1, mixture_prior=prior)
    images = torch.randint(90, 160, (40, 1, 8, 8), generator=rng(), dtype=torch.uint8)
    tensors = factory_for(settings, TASK).fit(images, rng(), quiet)
    x = images.flatten(1).double() / 127.5 - 1
    scale, basis = tensors["scales"][0].double(), tensors["basis"].double()
    inside = basis @ torch.cov(x.T, correction=0) @ basis.T
    assert torch.allclose(scale @ scale.T, inside, atol=1e-5)


def test_a_mixture_ends_where_its_parts_explain_themselves() -> None:
    """Weights and centers are those of the responsibilities that they imply, for groups of unequal size and width."""
    points = torch.cat([torch.randn((400, 2), generator=rng()), 0.3 * torch.randn((100, 2), generator=rng(1)) + 1.5]).double()
    settings = replace(TINY, mixture_prior=1e-6, mixture_iterations=500)
    weights, centers, scales = _mixture(points, 2, settings, rng(2))
    parts = torch.distributions.MultivariateNormal(centers, scale_tril=scales)
    owned = (weights.log() + parts.log_prob(points[:, None])).softmax(1)
    assert torch.allclose(owned.mean(0), weights, atol=0.02)
    assert torch.allclose(owned.T @ points / owned.sum(0)[:, None], centers, atol=0.05)
    small = int(weights.argmin())
    assert abs(float(weights[small]) - 0.2) < 0.06 and abs(float(centers[small].mean()) - 1.5) < 0.1


def test_small_classes_get_few_directions_and_few_components() -> None:
    """n - 1 directions, a component for every ten images."""
    for n, directions, components in ((3, 2, 1), (19, 6, 1), (20, 6, 2), (60, 6, 3)):
        images = torch.randint(0, 256, (n, 1, 8, 8), generator=rng(), dtype=torch.uint8)
        tensors = factory_for(replace(TINY, factory="mixture"), TASK).fit(images, rng(), quiet)
        assert int((tensors["basis"].abs().sum(1) > 0).sum()) == directions
        assert int((tensors["weights"] > 0).sum()) == components and float(tensors["weights"].sum()) == pytest.approx(1)


def test_samples_of_a_component_have_its_covariance() -> None:
    factory = factory_for(replace(TINY, factory="mixture", mixture_dims=2, mixture_components=1), TASK)
    basis = torch.zeros(2, 64)
    basis[0, 0] = basis[1, 1] = 1
    scale = torch.tensor([[[0.2, 0.0], [0.1, 0.05]]])
    one = {"weights": torch.ones(1), "centers": torch.zeros(1, 2), "scales": scale}
    tensors = {"mean": torch.zeros(1, 64), "basis": basis, **one}
    made = factory.sample(tensors, 20_000, rng()).flatten(1)[:, :2].double() / 127.5 - 1
    assert torch.allclose(torch.cov(made.T), (scale[0] @ scale[0].T).double(), atol=1e-3)


# --- autoencoder ---


def test_the_autoencoder_s_loss_is_the_bound_by_hand() -> None:
    x, made = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    loss = vae_loss(x, made, torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    assert math.isclose(float(loss), math.log(0.25) + 0.5, rel_tol=1e-4)  # 2/2 log v, and half of mean^2


def test_the_autoencoder_draws_with_the_deviation_whose_variance_it_is_charged_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder says ln variance: e^(spread / 2) is what the noise is multiplied by."""
    drawn: list[torch.Tensor] = []

    class Fixed(torch.nn.Module):
        """An encoder that says mean 1 and variance 9 of every image."""

        def __init__(self) -> None:
            super().__init__()
            self.mean = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.mean, torch.full((4,), math.log(9))]).expand(len(x), -1)

    real = autoencoders._layers

    def layers(sizes: list[int], rng: torch.Generator | None) -> Any:
        if sizes[-1] == 8:  # two numbers for each of four
            return Fixed()
        decoder = real(sizes, rng)
        decoder[0].register_forward_pre_hook(lambda _, given: drawn.append(given[0].detach()))
        return decoder

    monkeypatch.setattr(autoencoders, "_layers", layers)
    factory_for(replace(TINY, factory="vae", vae_steps=1, vae_batch=1000), TASK).fit(pictures(20), rng(), quiet)
    assert abs(float(drawn[0].mean()) - 1) < 0.2 and abs(float(drawn[0].std()) - 3) < 0.2


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


# --- diffusion: learning ---


class Halves:
    """A denoiser that halves what it is given and is equally unsure everywhere."""

    data_std = 0.5

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
    loss = diffusion_loss(net, x, -0.8, 1.6, rng())  # type: ignore[arg-type]
    ((noisy, sigma),) = net.seen
    assert abs(float(sigma.log().mean()) + 0.8) < 0.05 and abs(float(sigma.log().std()) - 1.6) < 0.05
    spread = (noisy - x) / sigma[:, None, None, None]
    assert abs(float(spread.mean())) < 0.02 and abs(float(spread.std()) - 1) < 0.02
    error = (noisy / 2 - x).square().mean((1, 2, 3))
    assert math.isclose(float(loss), float(((1 / sigma**2 + 4) / math.exp(0.7) * error + 0.7).mean()), rel_tol=1e-4)


def learned(steps: int, **changes: float) -> dict[str, torch.Tensor]:
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


# --- seeds and kept work ---


def twins(client: str = "a", digest: str = "x") -> Shard:
    """A client that holds the same images in both classes."""
    data = Dataset(pictures(24).repeat(2, 1, 1, 1), torch.repeat_interleave(torch.arange(2), 24))
    return Shard(client, data, data.subset(torch.arange(0)), digest)


QUICK = replace(TINY, factory="vae", vae_steps=2)


def test_every_generator_and_every_cell_has_a_seed_of_its_own() -> None:
    """The same images, or the same weights, at another client or in another class give other numbers."""
    ctx = Context(Plan(TASK, "federated_factory", QUICK, ("a", "b")), torch.device("cpu"))
    places = [(label, client) for client in "ab" for label in (0, 1)]
    learned = [train_factory(twins(client), label, QUICK, TASK, ctx) for label, client in places]
    drawn = [sample_cell(Cell(label, client, 24, learned[0]), 3, QUICK, TASK, ctx) for label, client in places]
    for i, j in combinations(range(4), 2):
        assert not all(torch.equal(learned[i][name], learned[j][name]) for name in learned[i])
        assert not torch.equal(drawn[i], drawn[j])
    assert torch.equal(sample_cell(Cell(1, "b", 9, learned[0]), 3, QUICK, TASK, ctx), drawn[3])  # no matter how many it saw


def test_kept_work_is_never_taken_for_another() -> None:
    """Whatever changes a generator or its images is part of the name under which they are kept, and nothing else is."""
    names: list[str] = []

    def once(key: Json, make: Callable[[], Payload]) -> Payload:
        names.append(digest_of(key))
        return make()

    def ctx(seed: int = 0) -> Context:
        plan = Plan(TASK, "federated_factory", QUICK, ("a", "b"), seed=seed)
        return replace(Context(plan, torch.device("cpu")), once=once)

    tensors = train_factory(twins(), 0, QUICK, TASK, ctx())
    for shard, label, settings, seed in (
        (twins(), 1, QUICK, 0), (twins("b"), 0, QUICK, 0), (twins(digest="y"), 0, QUICK, 0), (twins(), 0, QUICK, 1),
        (twins(), 0, replace(QUICK, vae_steps=3), 0), (twins(), 0, replace(QUICK, symmetry="flip"), 0),
        (twins(), 0, replace(QUICK, factory="mixture"), 0),
    ):  # fmt: skip
        train_factory(shard, label, settings, TASK, ctx(seed))
    other = {name: value + 1 for name, value in tensors.items()}
    for cell, count, seed in (
        (Cell(0, "a", 24, tensors), 3, 0), (Cell(0, "a", 24, tensors), 2, 0), (Cell(1, "a", 24, tensors), 3, 0),
        (Cell(0, "b", 24, tensors), 3, 0), (Cell(0, "a", 24, other), 3, 0), (Cell(0, "a", 24, tensors), 3, 1),
    ):  # fmt: skip
        sample_cell(cell, count, QUICK, TASK, ctx(seed))
    assert len(names) == len(set(names)) == 14
    train_factory(twins(), 0, replace(QUICK, edm_lr=0.5, mixture_dims=3), TASK, ctx())  # of other kinds
    assert names[-1] == names[0]


def test_a_generator_that_has_seen_nothing_is_none() -> None:
    sent = {f"class-{label}/mean": torch.zeros(1) for label in range(3)}
    upload = Upload("a", "", Payload(sent, {"class_counts": [0, 3, 2]}))
    assert [(cell.place, cell.seen) for cell in cells_of([upload], 3)] == [((1, "a"), 3), ((2, "a"), 2)]


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


def test_each_expert_is_clamped_before_the_sum() -> None:
    """What one expert can take is ln 1e-12, what six can take is six times that."""
    floor = -math.log(1e-12)
    sure = torch.tensor([[[0.0, 1e4]]], dtype=torch.float64)
    others = torch.tensor([[[20.0, 0.0]]], dtype=torch.float64).expand(2, -1, -1)
    first, second = product_of_experts(torch.cat([sure, others]), 1e-12)[0].tolist()
    assert math.isclose(first - second, 2 * 20 - floor, rel_tol=1e-9)
    first, second = product_of_experts(sure.expand(6, -1, -1), 1e-12)[0].tolist()
    assert math.isclose(second - first, 6 * floor, rel_tol=1e-9)


def test_the_product_is_summed_in_double() -> None:
    """A thousand experts that nearly agree: what is left over is not lost in single precision."""
    logits = torch.randn((1000, 3, 4), generator=rng()) * 5
    exact = product_of_experts(logits.double(), 1e-12)
    found = product_of_experts(logits, 1e-12)
    assert found.dtype == torch.float32 and torch.equal(found, exact.float())


# --- symmetries ---


def test_orbits_hold_every_copy_once() -> None:
    image = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    assert [len(orbit(image, how)) for how in ("none", "flip", "dihedral")] == [1, 2, 8]
    copies = {tuple(one.flatten().tolist()) for one in orbit(image, "dihedral")}
    assert len(copies) == 8
    seen = {tuple(one.flatten().tolist()) for one in turned(image.expand(300, -1, -1, -1), "dihedral", rng())}
    assert seen == copies
    assert torch.equal(turned(image, "none", rng()), image)
