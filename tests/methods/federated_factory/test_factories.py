"""Generators of one class behind one interface: every kind, small classes, divergence, seeds, kept work."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import FilesError, TrainingError
from osfl.core.method import Context
from osfl.core.types import Dataset, Json, Payload, Plan, Shard, Task, Upload, digest_of
from osfl.methods.federated_factory import autoencoders, factories
from osfl.methods.federated_factory.autoencoders import vae_loss
from osfl.methods.federated_factory.cells import Cell, cells_of
from osfl.methods.federated_factory.factories import factory_for, factory_problems, sample_cell, train_factories, train_factory
from osfl.methods.federated_factory.mixtures import Mixture, MixtureSettings
from osfl.methods.federated_factory.symmetries import draw_turns, orbit, turned
from osfl.runtime.payloads import PayloadCache
from tests.methods.federated_factory.conftest import KINDS, TASK, TINY, Kind, pictures, quiet, rng, shard_of


@pytest.mark.parametrize("kind", KINDS)
def test_samples_resemble_the_class(kind: Kind) -> None:
    factory = factory_for(replace(TINY, factory=kind), TASK)
    tensors = factory.fit(pictures(60), rng(), quiet)
    made = factory.sample(tensors, 64, rng(1))
    assert made.dtype == torch.uint8 and made.shape == (64, 1, 8, 8)
    bright, dark = made[:, :, 3:5, 3:5].float().mean(), made[:, :, 0].float().mean()
    assert bright > 120 and dark < 90, (bright, dark)
    assert float(made[:, 0, 4, 4].float().std()) > 2  # not one image again and again


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_follow_the_contract_and_repeat(kind: Kind) -> None:
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
def test_a_class_of_two_images(kind: Kind, n: int) -> None:
    factory = factory_for(replace(TINY, factory=kind, edm_images=64, vae_steps=5), TASK)
    tensors = factory.fit(pictures(n), rng(), quiet)
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values())
    assert factory.sample(tensors, 4, rng()).shape == (4, 1, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_images_of_odd_sides(kind: Kind) -> None:
    task = Task("odd", ("a", "b"), (3, 7, 9))
    factory = factory_for(replace(TINY, factory=kind, edm_images=64, vae_steps=5), task)
    images = torch.randint(0, 256, (6, 3, 7, 9), generator=rng(), dtype=torch.uint8)
    assert factory.sample(factory.fit(images, rng(), quiet), 2, rng()).shape == (2, 3, 7, 9)


@pytest.mark.parametrize(("kind", "change"), [("edm", {"edm_lr": 1e30}), ("vae", {"vae_lr": 1e30})])
def test_a_generator_that_diverges_says_whose_which_class_and_which_setting(kind: Kind, change: dict[str, Any]) -> None:
    shard, ctx = shard_of(pictures(20))
    settings = replace(TINY, factory=kind, dropout=0.0, **change)
    with pytest.raises(TrainingError) as caught:
        train_factory(shard, 1, settings, TASK, ctx)
    command = str(caught.value)
    assert caught.value.client == "st-mary" and caught.value.field == next(iter(change))
    assert "'square'" in command and "diverged" in command and next(iter(change)) in command


def test_a_generator_that_diverges_in_its_last_step_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loss is taken after that step; the tensors tell."""
    broken = {"mean": torch.zeros(3), "factors": torch.tensor([0.0, math.nan])}
    monkeypatch.setattr(Mixture, "fit", lambda *_: broken)
    shard, ctx = shard_of(pictures(20))
    with pytest.raises(TrainingError, match=r"'square'.*tensor 'factors' is not finite") as caught:
        train_factory(shard, 1, replace(TINY, factory="mixture"), TASK, ctx)
    assert caught.value.client == "st-mary"


def test_a_generator_that_diverges_costs_no_other(tmp_path: Path) -> None:
    """The classes that were learned before are kept: with a lower rate only the one that failed is learned again."""
    images = torch.cat([pictures(6), pictures(6, seed=7)])
    data = Dataset(images, torch.tensor([0] * 6 + [1] * 6))
    shard, ctx = Shard("st-mary", data, data.subset(torch.arange(0)), "x"), shard_of(pictures(2))[1]
    learned: list[int] = []

    class Fails(Mixture):
        def fit(self, images: torch.Tensor, *more: Any) -> dict[str, torch.Tensor]:
            learned.append(int(images.sum()))
            made = super().fit(images, *more)
            return made if len(learned) != 2 else {name: value * math.nan for name, value in made.items()}

    ctx = replace(ctx, get_or_compute=PayloadCache(tmp_path).get_or_compute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(factories._KINDS, "mixture", (Fails, MixtureSettings))
        with pytest.raises(TrainingError, match="'square'"):
            train_factories(shard, replace(TINY, factory="mixture"), TASK, ctx)
        payload = train_factories(shard, replace(TINY, factory="mixture"), TASK, ctx)
    assert len(learned) == 3 and learned[1] == learned[2]
    assert {name.split("/")[0] for name in payload.tensors} == {"class-0", "class-1"}


def test_how_images_are_sampled_is_not_learned_again() -> None:
    """The same generator, kept under the same key, whatever the number of Heun's steps."""
    shard, ctx = shard_of(pictures(6))
    keys: list[Any] = []

    def get_or_compute(key: Any, make: Callable[[], Payload]) -> Payload:
        keys.append(key)
        return Payload({})

    for changes in ({}, {"edm_steps": 9}, {"edm_start": 40.0}, {"edm_lr": 0.5}):
        train_factory(shard, 1, replace(TINY, factory="edm", **changes), TASK, replace(ctx, get_or_compute=get_or_compute))
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_a_full_disk_while_sampling_names_the_cell() -> None:
    def full(key: object, make: Callable[[], Payload]) -> Payload:
        make()
        raise OSError(28, "No space left on device", "cache/x")

    shard, ctx = shard_of(pictures(20))
    settings = replace(TINY, factory="mixture")
    cell = Cell(1, "st-mary", 20, train_factory(shard, 1, settings, TASK, ctx))
    with pytest.raises(FilesError, match="No space left") as caught:
        sample_cell(cell, 5, settings, TASK, replace(ctx, get_or_compute=full))
    assert "'square'" in str(caught.value) and "st-mary" in str(caught.value) and "not repeated" in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("mixture_dims", 0),
        ("vae_lr", -1.0),
        ("edm_images", 0),
        ("dropout", 1.0),
        ("edm_ema", 0.5),
        ("edm_steps", 1),
        ("least", 1),
        ("unet", "w16"),
        ("edm_directions", -1),
        ("edm_start", 0.002),
        ("edm_start", 3.0),
    ],
)
def test_settings_that_cannot_work(setting: str, value: Any) -> None:
    assert not factory_problems(TINY, TASK)
    problems = factory_problems(replace(TINY, **{setting: value}), TASK)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]


def test_a_u_net_of_any_width_can_learn() -> None:
    """200 channels are not a whole number of heads of 64."""
    settings = replace(TINY, factory="edm", unet="w100-m2-b1-a8", edm_images=32)
    assert not factory_problems(settings, TASK)
    assert all(bool(value.isfinite().all()) for value in factory_for(settings, TASK).fit(pictures(20), rng(), quiet).values())


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

    def get_or_compute(key: Json, make: Callable[[], Payload]) -> Payload:
        names.append(digest_of(key))
        return make()

    def ctx(seed: int = 0) -> Context:
        plan = Plan(TASK, "federated_factory", QUICK, ("a", "b"), seed=seed)
        return replace(Context(plan, torch.device("cpu")), get_or_compute=get_or_compute)

    tensors = train_factory(twins(), 0, QUICK, TASK, ctx())
    for shard, label, settings, seed in (
        (twins(), 1, QUICK, 0),
        (twins("b"), 0, QUICK, 0),
        (twins(digest="y"), 0, QUICK, 0),
        (twins(), 0, QUICK, 1),
        (twins(), 0, replace(QUICK, vae_steps=3), 0),
        (twins(), 0, replace(QUICK, symmetry="flip"), 0),
        (twins(), 0, replace(QUICK, factory="mixture"), 0),
    ):
        train_factory(shard, label, settings, TASK, ctx(seed))
    other = {name: value + 1 for name, value in tensors.items()}
    for cell, count, seed in (
        (Cell(0, "a", 24, tensors), 3, 0),
        (Cell(0, "a", 24, tensors), 2, 0),
        (Cell(1, "a", 24, tensors), 3, 0),
        (Cell(0, "b", 24, tensors), 3, 0),
        (Cell(0, "a", 24, other), 3, 0),
        (Cell(0, "a", 24, tensors), 3, 1),
    ):
        sample_cell(cell, count, QUICK, TASK, ctx(seed))
    assert len(names) == len(set(names)) == 14
    train_factory(twins(), 0, replace(QUICK, edm_lr=0.5, mixture_dims=3), TASK, ctx())  # of other kinds
    assert names[-1] == names[0]


def test_a_generator_that_has_seen_nothing_is_none() -> None:
    sent = {f"class-{label}/mean": torch.zeros(1) for label in range(3)}
    upload = Upload("a", "", Payload(sent, {"class_counts": [0, 3, 2]}))
    assert [(cell.place, cell.seen) for cell in cells_of([upload], 3)] == [((1, "a"), 3), ((2, "a"), 2)]


# --- symmetries ---


def test_orbits_hold_every_copy_once() -> None:
    image = torch.arange(9, dtype=torch.uint8).reshape(1, 1, 3, 3)
    assert [len(orbit(image, how)) for how in ("none", "flip", "dihedral")] == [1, 2, 8]
    copies = {tuple(one.flatten().tolist()) for one in orbit(image, "dihedral")}
    assert len(copies) == 8
    drawn = draw_turns(300, "dihedral", rng())
    seen = {tuple(one.flatten().tolist()) for one in turned(image.expand(300, -1, -1, -1), "dihedral", drawn)}
    assert seen == copies
    assert torch.equal(turned(image, "none", draw_turns(1, "none", rng())), image)


def test_near_copies_of_an_image_are_one_image() -> None:
    """Thirty noisy copies among others had a component of their own, that image; with eight others they were a class."""
    rest, victim = torch.randint(0, 256, (60, 1, 8, 8), generator=rng(5), dtype=torch.uint8), pictures(1, 7)
    noise = torch.randint(-6, 7, (30, 1, 8, 8), generator=rng(6))
    near = (victim.int() + noise).clamp(0, 255).to(torch.uint8)
    settings = replace(TINY, factory="mixture", least=10)
    shard, ctx = shard_of(torch.cat([rest, near]))
    kept = factories.different_images(shard, 1)
    assert torch.equal(kept, torch.cat([rest, near[:1]]))
    tensors = train_factory(shard, 1, settings, TASK, ctx)
    alone, own = shard_of(kept)
    assert all(torch.equal(value, tensors[name]) for name, value in train_factory(alone, 1, settings, TASK, own).items())
    centers = factory_for(settings, TASK).readable(tensors).candidates["component"]
    assert float((centers - (victim.flatten(1) / 127.5 - 1)).norm(dim=1).min()) > 2
    few, _ = shard_of(torch.cat([rest[:8], near[:12]]))
    assert factories.enough(few, settings, 2) == [] and factories.enough(shard, settings, 2) == [1]
