"""OneSum under differential privacy: what one image changes, how much noise hides it, who draws it, and what is stated."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.private_sums import canary, judged, log_likelihood
from osfl.core.errors import RoundError, TrainingError
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Json, Payload, Plan, Privacy, Shard, Upload
from osfl.ingredients.statistics.gaussians import NEVER, Statistics, unpacked
from osfl.ingredients.statistics.private_sums import (
    SHARES,
    Noise,
    noise_problems,
    noised,
    noisy_gaussians,
    site_noise,
    statement,
)
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.onesum import OneSum
from osfl.simulate.checks import small_federation

PRIVATE = {"dimensions": 16, "filters": 4}
M = 3.73063166  # noise multiplier for epsilon 1 and delta 1e-5, by dp-accounting
CLIENTS = ("a", "b", "c", "d")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of frequencies, which must not fail once in a thousand runs."""
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)


def method(**changes: Any) -> OneSum:
    return OneSum(small_federation("onesum").plan.task, resolve_settings(OneSum, "smoke", {**PRIVATE, **changes}))


def plan_of(one: OneSum, privacy: Privacy | None, quorum: int = 0) -> Plan:
    return Plan(one.task, "onesum", one.settings, CLIENTS, quorum=quorum, privacy=privacy)


def remembering() -> Callable[[Json, Callable[[], Payload]], Payload]:
    kept: dict[str, Payload] = {}
    return lambda key, make: kept[str(key)] if str(key) in kept else kept.setdefault(str(key), make())


def ctx(one: OneSum, privacy: Privacy | None, quorum: int = 0, **changes: Any) -> Context:
    return Context(plan_of(one, privacy, quorum), torch.device("cpu"), **changes)


def shard(client: str = "a", count: int = 30) -> Shard:
    """Ordinary images, and the oddest there are."""
    rng = torch.Generator().manual_seed(len(client))
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=rng, dtype=torch.uint8)
    images[0], images[1], images[2, :, ::2] = 0, 255, 0
    data = Dataset(images, torch.arange(count) % 10)
    return Shard(client, data.subset(torch.arange(4, count)), data.subset(torch.arange(4)), f"{client}{count}")


def exact(one: OneSum, found: Shard) -> dict[str, torch.Tensor]:
    """The term before its noise."""
    kept: list[Payload] = []

    def keep(key: Json, make: Callable[[], Payload]) -> Payload:
        kept.append(make())
        return kept[-1]

    one.client_phase(found, ctx(one, Privacy(1.0, 1e-5), get_or_compute=keep))
    return dict(next(one.tensors for one in reversed(kept) if "counts" in one.tensors))


# --- what one image changes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"symmetry": "square"}, {"norm": 3.0}], ids=str)
def test_no_neighbor_is_further_away_than_the_sensitivity(changes: dict[str, Any]) -> None:
    """Every image left out in turn; held-out images are in the sums, too."""
    one, whole = method(**changes), shard(count=16)
    full, n = exact(one, whole), len(whole.train) + len(whole.val)
    assert int(full["counts"].sum()) == n * LEVELS
    lengths = []
    for gone in range(len(whole.train)):
        kept = torch.tensor([i for i in range(len(whole.train)) if i != gone])
        less = exact(one, replace(whole, train=whole.train.subset(kept), digest=f"without {gone}"))
        counts, sums, gram = ((full[name] - less[name]).double() for name in ("counts", "sums", "gram"))
        assert float(counts.norm()) == LEVELS
        assert float(sums.norm()) <= LEVELS
        assert float(unpacked(gram).norm()) <= LEVELS**2 * (1 + 1e-12)
        assert int((sums.abs().sum(1) > 0).sum()) <= 1  # its own class
        lengths.append(float(sums.norm()) / LEVELS)
    assert max(lengths) > 0.999 if "norm" not in changes else 0 < max(lengths) < 1


def test_shares_of_the_budget_add_up() -> None:
    assert sum(SHARES.values()) == pytest.approx(1)


# --- the noise ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_seeded")
@pytest.mark.parametrize(("kind", "quorum", "sites"), [("site", 0, 1), ("site", 3, 1), ("share", 0, 4), ("share", 3, 3)])
def test_a_term_has_the_noise_of_the_plan(kind: Any, quorum: int, sites: int) -> None:
    """Deviations by hand: multiplier / sqrt(share of the budget), times what one image changes, over sqrt(sites that share)."""
    one, found = method(), shard()
    plain, context = exact(one, found), ctx(one, Privacy(1.0, 1e-5, kind), quorum, get_or_compute=remembering())
    drawn = [one.client_phase(found, context).tensors for _ in range(200)]
    off = {name: torch.stack([(sent[name] - plain[name]).double() for sent in drawn]) for name in plain}
    row, column = torch.triu_indices(16, 16).unbind()
    root = math.sqrt(sites)
    for values, wanted in (
        (off["counts"], M / math.sqrt(0.05) / root * 2**15),
        (off["sums"], M / math.sqrt(0.65) / root * 2**15),
        (off["gram"][:, row == column], M / math.sqrt(0.3) / root * 2**30),
        (off["gram"][:, row != column], M / math.sqrt(0.3) / root * 2**30 / math.sqrt(2)),
    ):
        assert float(values.square().mean().sqrt()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * values.numel()))
        assert abs(float(values.mean())) < 5 * wanted / math.sqrt(values.numel())


def test_noise_is_the_systems_and_not_the_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    one, found = method(), shard()
    context = ctx(one, Privacy(8.0, 1e-5))

    def sent() -> Payload:
        torch.manual_seed(0)
        return one.client_phase(found, context)

    first, second = sent(), sent()
    assert all(not torch.equal(first.tensors[name], second.tensors[name]) for name in ("counts", "sums", "gram"))
    monkeypatch.setattr(os, "urandom", lambda count: bytes(i % 251 for i in range(count)))
    third, fourth = sent(), sent()
    assert all(torch.equal(third.tensors[name], fourth.tensors[name]) for name in third.tensors)


@pytest.mark.usefixtures("_seeded")
def test_a_membership_attack_stays_within_its_bound_and_sees_everything_without_noise() -> None:
    """The best test there is, at epsilon 1; the true deviations are known to it."""
    one = method()
    noise, scores, clean = site_noise(plan_of(one, Privacy(1.0, 1e-5))), {}, {}
    step = canary(16, 10, torch.Generator().manual_seed(0))
    for where, add in (("in", 1), ("out", 0)):
        sums = [noised({n: add * step[n] for n in step}, noise) for _ in range(1500)]
        scores[where] = [log_likelihood(seen, step, noise) for seen in sums]
        clean[where] = [log_likelihood({n: add * step[n] for n in step}, step, noise.times(1e-3))] * 100
    found = judged(scores, 1.0)
    assert found["within"] and all(row["within"] for row in found["rates"])
    assert found["advantage"] > 0.5 * found["most"] > 0  # the attack is a good one
    assert judged(clean, 1.0)["advantage"] == 1 and not judged(clean, 1.0)["within"]
    assert judged(clean, 1000.0)["within"]  # where almost nothing is promised, everything may be seen
    halved = {
        w: [log_likelihood(noised({n: add * step[n] for n in step}, noise.times(0.5)), step, noise) for _ in range(1500)]
        for w, add in (("in", 1), ("out", 0))
    }
    assert not judged(halved, 1.0)["within"]  # so a bound that noise of half the size breaks


def test_noise_that_would_leave_whole_numbers_is_refused_by_the_plan() -> None:
    one = method()
    assert noise_problems(plan_of(one, Privacy(1e-6, 1e-9)))
    assert not noise_problems(replace(plan_of(one, Privacy(0.01, 1e-9)), clients=tuple(f"s{n}" for n in range(100))))
    assert any("privacy.epsilon" in text for text in one.privacy_problems(plan_of(one, Privacy(1e-6, 1e-9))))


# --- the server ---------------------------------------------------------------------------------------------------------


def test_moments_of_noisy_sums_by_hand() -> None:
    """Two classes of 100 at (+-0.1, 0), a third that does not stand out; what noise in the sums takes away is put back."""
    total = Statistics(
        torch.tensor([[10.0, 0.0], [-10.0, 0.0], [5.0, 5.0]]).double(),
        torch.diag(torch.tensor([110.0, 20.0]).double()),
        torch.tensor([100.0, 100.0, 3.0]).double(),
    )
    found = noisy_gaussians(total, Noise(1.0, 2.0, 0.0), ("a", "b", "c"))
    assert found.shares.tolist() == [0.5, 0.5, 0.0]
    assert torch.allclose(found.means, torch.tensor([[0.1, 0.0], [-0.1, 0.0], [0.0, 0.0]]).double())
    assert torch.allclose(found.within, torch.diag(torch.tensor([0.55 - 0.01 + 0.04, 0.1 + 0.04]).double()))
    assert found.shrinkage == pytest.approx(0.01 * (0.58 + 0.14) / 2)
    found = noisy_gaussians(total, Noise(1.0, 2.0, 20.0), ("a", "b", "c"))  # edge sqrt(4) * 20 / 200 = 0.2
    assert torch.allclose(found.within, torch.diag(torch.tensor([0.48, 0.04]).double()))
    assert found.shrinkage == pytest.approx(0.02)
    with pytest.raises(TrainingError, match="the noise hides"):
        noisy_gaussians(total, Noise(50.0, 2.0, 1.0), ("a", "b", "c"))


def sent_by_all(one: OneSum, context: Context) -> list[Upload]:
    return [Upload(client, "", one.client_phase(shard(client), context)) for client in CLIENTS]


def test_little_noise_gives_the_classifier_of_the_exact_sums_and_every_site_counts() -> None:
    one = method()
    context = ctx(one, Privacy(1e5, 1e-5))
    release = one.server_phase(sent_by_all(one, context), context).shared
    exacts = [exact(one, shard(client)) for client in CLIENTS]
    counts = torch.stack([term["counts"] for term in exacts]).sum(0)
    assert torch.equal(release.tensors["head/prior"] > NEVER / 2, counts > 0)
    assert torch.allclose(release.tensors["head/prior"].exp(), counts.double() / counts.sum(), atol=1e-3)
    answers = one.build(release)(torch.rand(4, 1, 8, 8) * 2 - 1)
    assert bool(answers.isfinite().all())


def test_one_site_of_many_images_is_not_scaled_down() -> None:
    """Its noise would go with it."""
    one = method()
    context = ctx(one, Privacy(1e5, 1e-5))
    sent = [Upload(c, "", one.client_phase(shard(c, 400 if c == "a" else 30), context)) for c in CLIENTS]
    prior = one.server_phase(sent, context).shared.tensors["head/prior"].exp()
    assert float(prior[0]) == pytest.approx((40 + 9) / (400 + 90), abs=1e-3)


def test_too_few_shares_make_no_release() -> None:
    one = method()
    context = ctx(one, Privacy(1e4, 1e-5, "share"), 3)
    sent = sent_by_all(one, context)
    assert one.server_phase(sent[:3], context)
    with pytest.raises(RoundError, match="less than the plan promises") as caught:
        one.server_phase(sent[:2], context)
    assert caught.value.field == "privacy.noise"
    assert one.upload_model(sent[0], context) is not None  # an attack on one upload needs no others
    assert one.upload_model(sent[0], ctx(one, Privacy(1e-3, 1e-5))) is None  # where noise hides every class
    everybody = ctx(one, Privacy(1e4, 1e-5))
    assert one.server_phase(sent_by_all(one, everybody)[:1], everybody)  # here each site has all of the noise


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ("no word about noise", "facts.noise"),
        ("less noise", "facts.noise"),
        ("count", "counts"),
        ("sums", "sums"),
        ("gram", "gram"),
    ],
)
def test_a_term_beyond_what_noise_can_do_is_refused(how: str, field: str) -> None:
    one = method()
    context = ctx(one, Privacy(4.0, 1e-5))
    good = one.client_phase(shard(), context)
    one.check_upload(Upload("a", "", good), context)
    tensors, facts = {name: value.clone() for name, value in good.tensors.items()}, dict(good.facts)
    if how == "no word about noise":
        del facts["noise"]
    elif how == "less noise":
        facts["noise"] = site_noise(plan_of(one, Privacy(8.0, 1e-5))).as_json()
    elif how == "count":
        tensors["counts"][0] = -100 * LEVELS
    else:
        tensors[how].view(-1)[0] = 2**50
    with pytest.raises(RoundError) as caught:
        one.check_upload(Upload("a", "", Payload(tensors, facts)), context)
    assert (caught.value.client, caught.value.field) == ("a", field)


def test_negative_counts_and_moments_that_are_not_positive_are_good_uploads() -> None:
    one = method()
    context = ctx(one, Privacy(0.5, 1e-5))
    tiny = Shard("a", shard().train.subset(torch.arange(1)), shard().val.subset(torch.arange(0)), "tiny")
    drawn = [one.client_phase(tiny, context) for _ in range(3)]
    assert any(bool((one.tensors["counts"] < 0).any()) for one in drawn)
    for payload in drawn:
        one.check_upload(Upload("a", "", payload), context)


# --- what is stated -----------------------------------------------------------------------------------------------------


def test_the_statement_is_of_what_ran() -> None:
    one = method()
    alone = statement(plan_of(one, Privacy(1.0, 1e-5)), 4)
    assert (alone["epsilon"], alone["epsilon_term"], alone["noise"]) == (1.0, 1.0, "site")
    assert alone["epsilon_release"] == pytest.approx(0.47, abs=0.02)  # noise of four sites: multiplier 7.46, of epsilon 0.47
    assert "the server" in alone["adversary"] and alone["repeatable"] is False
    shared = statement(plan_of(one, Privacy(1.0, 1e-5, "share")), 4)
    assert (shared["epsilon"], shared["epsilon_release"]) == (1.0, 1.0)
    assert shared["epsilon_term"] == pytest.approx(2.17, abs=0.03)  # a quarter of the variance: multiplier 1.865
    assert "trusted" in shared["adversary"]
    more = statement(plan_of(one, Privacy(1.0, 1e-5, "share"), quorum=2), 4)
    assert more["epsilon"] < 1.0  # more sites than the quorum: more noise than promised
