"""Methods that send Gaussians of noisy sums: what one image can change, the noise, where it comes from, and what is stated."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Json, Limits, Payload, Plan, Privacy, Shard, Task, Upload
from osfl.ingredients.statistics import private_gaussians, private_sums, secret_noise
from osfl.ingredients.statistics.gaussian_mechanism import multiplier_for
from osfl.ingredients.statistics.gaussians import folded_statistics, unpacked
from osfl.ingredients.statistics.private_gaussians import site_gaussians
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.federated_factory.mixtures import public_directions
from osfl.rounds.egress import check_payload
from osfl.rounds.exposure import attack
from osfl.rounds.folder import contracts_of, simulated_key
from osfl.rounds.phases import run_client_phase
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

METHODS = ("fedpft", "falcon", "federated_factory")
TASK = Task("stripes", ("a", "b", "c"), (1, 8, 8))
CLOSE = Privacy(1e4, 1e-5)  # hardly any noise
SMALL: dict[str, dict[str, Any]] = {
    "fedpft": {"dimensions": 8},
    "falcon": {"dimensions": 8},
    "federated_factory": {"mixture_dims": 8, "factory": "mixture", "symmetry": "none"},
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def opened(name: str, privacy: Privacy | None = CLOSE, **changes: Any) -> tuple[Any, Context]:
    kind = load(name)
    method = kind(TASK, resolve_settings(kind, "smoke", {**SMALL[name], **changes}))
    kept: dict[str, Payload] = {}

    def get_or_compute(key: Json, make: Any) -> Payload:
        if str(key) not in kept:
            kept[str(key)] = make()
        return kept[str(key)]

    plan = Plan(TASK, name, method.settings, ("a", "b"), privacy=privacy)
    return method, Context(plan, torch.device("cpu"), get_or_compute=get_or_compute)


def shard(count: int = 60, without: int | None = None) -> Shard:
    """Classes that are told by brightness, and the oddest images there are; `without` one of them."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    images = (60 + 60 * labels[:, None, None, None] + 25 * torch.randn(count, 1, 8, 8, generator=rng)).clamp(0, 255)
    images = images.to(torch.uint8)
    images[4], images[5], images[6, :, ::2] = 0, 255, 0
    data = Dataset(images, labels)
    kept = torch.tensor([i for i in range(count) if i != without])
    held_out = kept < 4
    return Shard("a", data.subset(kept[~held_out]), data.subset(kept[held_out]), f"{count} without {without}")


@pytest.fixture
def vectors(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[torch.Tensor, torch.Tensor]]]:
    """What methods hand over to be summed: whole vectors and labels."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def watched(found: torch.Tensor, labels: torch.Tensor, *rest: Any) -> Any:
        seen.append((found, labels))
        return site_gaussians(found, labels, *rest)

    monkeypatch.setattr("osfl.ingredients.tokens.bounded.site_gaussians", watched)
    monkeypatch.setattr("osfl.methods.federated_factory.mixtures.site_gaussians", watched)
    yield seen


@pytest.mark.parametrize("name", METHODS)
def test_no_neighbor_is_further_away_than_the_sensitivity(name: str, vectors: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Every image left out in turn, held-out ones, too. Three images of one person change three times as much at most."""
    method, ctx = opened(name)

    def exact(data: Shard) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        method.client_phase(data, ctx)
        found = folded_statistics(*vectors[-1], 3)
        return found.counts * LEVELS, found.sums, unpacked(found.gram)

    full, lengths = exact(shard(12)), []
    assert int(full[0].sum()) == 12 * LEVELS
    for gone in range(12):
        counts, sums, gram = (a - b for a, b in zip(full, exact(shard(12, gone)), strict=True))
        assert float(counts.norm()) == LEVELS and float(sums.norm()) <= LEVELS
        assert float(gram.norm()) <= LEVELS**2 * (1 + 1e-12)
        lengths.append(float(sums.norm()) / LEVELS)
    assert max(lengths) > 0.999 and torch.equal(vectors[-1][0], vectors[-1][0].round())
    person = full[1] - exact(shard(9))[1]  # three images less
    assert float(person.norm()) <= 3 * LEVELS


def test_the_noise_of_a_site_is_that_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 / m^2 = sum 1 / m_i^2 over counts, sums and second moments, measured on sums of nothing."""
    sent: list[dict[str, torch.Tensor]] = []

    def watched(*given: Any) -> dict[str, torch.Tensor]:
        sent.append(private_sums.noised(*given))
        return sent[-1]

    monkeypatch.setattr(private_gaussians, "noised", watched)
    _, ctx = opened("fedpft", Privacy(1.0, 1e-5))
    for _ in range(30):
        site_gaussians(torch.zeros(0, 24, dtype=torch.float64), torch.zeros(0, dtype=torch.int64), TASK.classes, ctx.plan)
    row, column = torch.triu_indices(24, 24).unbind()
    parts = {
        "counts": (torch.stack([one["counts"] for one in sent]).double() / LEVELS).flatten(),
        "sums": (torch.stack([one["sums"] for one in sent]).double() / LEVELS).flatten(),
        "gram": (torch.stack([one["gram"] for one in sent])[:, row == column].double() / LEVELS**2).flatten(),
    }
    found = {name: float(values.square().mean().sqrt()) for name, values in parts.items()}
    for name, share in private_sums.SHARES.items():
        wanted = multiplier_for(1.0, 1e-5) / math.sqrt(share)
        assert found[name] == pytest.approx(wanted, rel=5 / math.sqrt(2 * len(parts[name])))
    off = (torch.stack([one["gram"] for one in sent])[:, row != column].double() / LEVELS**2).square().mean().sqrt()
    assert float(off) == pytest.approx(found["gram"] / math.sqrt(2), rel=0.1)  # those values count twice


@pytest.mark.parametrize("name", METHODS)
def test_noise_is_the_systems_and_not_the_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, ctx = opened(name, Privacy(8.0, 1e-5))
    first, second = (method.client_phase(shard(), ctx) for _ in range(2))
    assert first.facts["noise"] == second.facts["noise"]
    assert any(
        n not in second.tensors or not torch.equal(t, second.tensors[n])
        for n, t in first.tensors.items()
        if n.endswith(("means", "sequences", "centers"))
    )
    state: dict[str, np.random.Generator] = {}
    monkeypatch.setattr(secret_noise, "os", type("System", (), {"urandom": lambda count: state["rng"].bytes(count)}))
    sent = []
    for _ in range(2):  # with the system's randomness held still nothing else is drawn anew
        state["rng"] = np.random.default_rng(0)
        sent.append(method.client_phase(shard(), ctx).tensors)
    assert all(torch.equal(value, sent[1][key]) for key, value in sent[0].items())
    assert os.urandom(4) != os.urandom(4)


@pytest.mark.parametrize("name", METHODS)
def test_an_upload_follows_from_its_noisy_sums_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other images with the same sums as they leave the mechanism give the same upload, its facts included."""
    method, ctx = opened(name, Privacy(8.0, 1e-5))
    fixed = private_sums.noised
    kept: dict[str, torch.Tensor] = {}

    def once(*given: Any) -> dict[str, torch.Tensor]:
        kept.update({} if kept else fixed(*given))
        return dict(kept)

    monkeypatch.setattr(private_gaussians, "noised", once)
    one, other = method.client_phase(shard(), ctx), method.client_phase(shard(45), ctx)
    assert one.facts == other.facts and one.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(value, other.tensors[key]) for key, value in one.tensors.items())


@pytest.mark.parametrize("name", METHODS)
def test_an_upload_fits_its_contract_and_says_what_noise_it_has(name: str) -> None:
    method, ctx = opened(name)
    payload, contract = method.client_phase(shard(), ctx), method.contract("")
    assert set(payload.tensors) <= set(contract) and payload.facts["class_counts"] == [20, 20, 20]
    method.check_upload(Upload("a", "", payload), ctx)
    without = Payload(payload.tensors, {k: v for k, v in payload.facts.items() if k != "noise"})
    with pytest.raises(RoundError, match="not made with the noise") as caught:
        method.check_upload(Upload("a", "", without), ctx)
    assert (caught.value.client, caught.value.field) == ("a", "facts.noise")
    assert method.adds_held_out(ctx.plan) and not method.adds_held_out(replace(ctx.plan, privacy=None))
    assert attack(method.exposed(payload, shard(), ctx))  # an audit finds something to attack


@pytest.mark.parametrize("name", METHODS)
def test_a_site_whose_classes_drown_in_noise_is_not_refused(name: str) -> None:
    """A refusal would depend on its images."""
    method, ctx = opened(name, Privacy(0.05, 1e-5))
    payload = method.client_phase(shard(9), ctx)
    assert sum(count > 0 for count in payload.facts["class_counts"]) >= 1 and payload.tensors


@pytest.mark.parametrize("name", METHODS)
def test_a_private_round_states_epsilon_in_results_report_and_card(name: str, tmp_path: Path) -> None:
    weightless = {"encoder": "random", "resolution": 8, "window": 8, "stride": 8}
    changes = {} if name == "federated_factory" else {**weightless, "epochs": 20 if name == "fedpft" else 2}
    simulation = Simulation(name, "digits", 2, "iid", "smoke", changes=changes, samples=300, image_size=8, privacy=CLOSE)
    result = run(simulation, tmp_path, machine=Machine(workers=1))
    stated = result["privacy"]
    assert (stated["epsilon"], stated["epsilon_term"], stated["delta"], stated["sites"]) == (1e4, 1e4, 1e-5, 2)
    assert stated["noised"] == ["class counts", "class sums", "second moments"] and "--epsilon 10000.0" in result["command"]
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    card = (tmp_path / "model_card.md").read_text(encoding="utf-8")
    assert "epsilon 10000, delta 1e-05" in page and "epsilon 10000, delta 1e-05" in card
    if name == "fedpft":  # a linear head needs no long training
        assert (result["scores"]["global"]["accuracy"] or 0) > 0.5


def test_public_directions_are_low_frequencies_that_depend_on_nobodys_images() -> None:
    basis = public_directions(9, (3, 8, 8))
    lengths = basis.norm(dim=0)
    cosines = (basis / lengths).T @ (basis / lengths)
    assert float((cosines - torch.eye(9)).abs().max()) < 1e-9 and torch.equal(basis, public_directions(9, (3, 8, 8)))
    assert float((basis[:, 0].abs() - basis[0, 0].abs()).abs().max()) < 1e-9  # brightness comes first: the same at every pixel
    assert public_directions(500, (1, 4, 4)).shape == (16, 16)  # as many as there are


def test_an_image_that_looks_like_a_public_direction_is_sent_like_any_other() -> None:
    """A refusal would say that somebody has this image: what is sent besides noise is the same for everybody."""
    method, ctx = opened("federated_factory")
    data = shard()
    payload = method.client_phase(data, ctx)
    direction = payload.tensors["class-0/basis"][1]  # dark above, bright below: an image may look like that
    images, apart = data.train.images.clone(), direction - direction.min()
    images[0] = (apart / apart.max() * 255).round().reshape(1, 8, 8).to(torch.uint8)
    same = replace(data, train=Dataset(images, data.train.labels), digest="one image more")
    arguments = same, TASK, ctx.plan.limits
    with pytest.raises(UploadBlocked, match="contains an image of yours"):  # without noise it would be taken for a copy
        check_payload(payload, method.contract(""), *arguments)
    check_payload(payload, method.contract(""), *arguments, private=True)
    bundle, _ = run_client_phase(method, same, ctx.plan, contracts_of(method), simulated_key(0, "a"), ctx)
    assert bundle


def test_a_private_classifier_of_images_sees_what_its_generators_make() -> None:
    """Details that are in no public direction change no answer."""
    method, ctx = opened("federated_factory", images_per_class=8, epochs=1)
    uploads = [Upload("a", "", method.client_phase(shard(), ctx))]
    release = method.server_phase(uploads, ctx).shared
    model, x = method.build(release), (shard().train.images[:6].float() / 127.5 - 1) * 0.5
    basis = public_directions(8, (1, 8, 8)).float()
    detail = 0.2 * torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    off = detail - detail @ basis @ torch.linalg.pinv(basis)
    with torch.no_grad():
        assert torch.allclose(model(x), model(x + off.view_as(x)), atol=1e-4)
        plain = method.build(Payload(release.tensors, {k: v for k, v in release.facts.items() if k != "sees"}))
        assert not torch.allclose(plain(x), plain(x + off.view_as(x)), atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_other_sites_noise_is_not_counted_where_the_release_follows_from_each_upload(name: str) -> None:
    method, ctx = opened(name, Privacy(8.0, 1e-5))
    uploads = [Upload(client, "", Payload({}, {})) for client in "abcde"]
    stated = method.privacy_statement(None, uploads, ctx.plan)
    assert stated["sites"] == 5
    assert [stated[f"epsilon{whom}"] for whom in ("", "_term", "_release", "_site")] == [8.0] * 4


def test_noise_does_not_make_a_site_claim_more_than_the_plan_allows() -> None:
    limits = Limits(samples=60, class_samples=40)
    assert private_gaussians._within_limits([20, 0, 30], limits) == [20, 0, 30]
    assert private_gaussians._within_limits([45, 0, 3], limits) == [40, 0, 3]
    assert private_gaussians._within_limits([40, 40, 40], limits) == [20, 20, 20]
    assert private_gaussians._within_limits([40, 1, 40], limits) == [29, 1, 29]
    assert private_gaussians._within_limits([2, 2, 2, 0], Limits(samples=2, class_samples=2)) == [0, 1, 1, 0]
    _, ctx = opened("fedpft", Privacy(2.0, 1e-5))
    plan = replace(ctx.plan, limits=Limits(samples=30, class_samples=12))
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        rows = (torch.rand(30, 4, generator=rng) * LEVELS / 2).trunc()
        found = site_gaussians(rows.double(), torch.arange(30) % 3, "abc", plan)
        assert sum(found.counts) <= 30 and max(found.counts) <= 12
