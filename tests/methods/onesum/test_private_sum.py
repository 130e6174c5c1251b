"""Secure sum with differential privacy: sites mask sums with their share of the noise, and the total has all of it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.private_sums import attack_through_a_round
from osfl.core.errors import RoundError, TrainingError, UploadBlocked, UsageError
from osfl.core.plan import check_plan
from osfl.core.sums import LARGEST, most_of, scale_of
from osfl.core.types import ClientId, Limits, Payload, Plan, Privacy, Upload
from osfl.ingredients.statistics.private_sums import FINEST, largest, noise_problems, noised, site_noise, statement
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.onesum import OneSum
from osfl.rounds.secure_sum import encoded, masked, total_of
from osfl.runtime.payloads import payload_digest
from osfl.wire.masks import pair_seed
from osfl.wire.signing import SigningKey
from tests.methods.onesum.test_private import CLIENTS, M, ctx, method, plan_of, shard

KEYS = {name: SigningKey.from_seed(name.encode().ljust(32)) for name in CLIENTS}
PUBLIC = {name: key.public_hex for name, key in KEYS.items()}
SHARE = Privacy(1.0, 1e-5, "share")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def secure(one: OneSum, privacy: Privacy = SHARE, quorum: int = 0, **changes: Any) -> Plan:
    plan = replace(plan_of(one, privacy, quorum), secure_sum=True, limits=Limits(share=1.0))
    return replace(plan, **changes)


def terms(one: OneSum, plan: Plan) -> dict[ClientId, Payload]:
    context = replace(ctx(one, plan.privacy), plan=plan)
    return {client: one.client_phase(shard(client), context) for client in CLIENTS}


def summed(one: OneSum, plan: Plan, sent: dict[ClientId, Payload], missing: Sequence[ClientId] = ()) -> Upload:
    uploads = [
        Upload(client, plan.digest, masked(one, payload, client, plan, PUBLIC, KEYS[client]))
        for client, payload in sent.items()
        if client not in missing
    ]
    return total_of(uploads, one, plan, missing, repairs(plan, missing))


def repairs(plan: Plan, missing: Sequence[ClientId]) -> Callable[[ClientId], dict[ClientId, bytes]]:
    return lambda client: {name: pair_seed(KEYS[client], client, name, PUBLIC[name], plan.digest) for name in missing}


# --- the noise of a sum ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sites", "quorum", "colluders", "honest"), [(5, 0, 0, 5), (300, 0, 0, 300), (300, 200, 20, 180)])
def test_the_shares_of_honest_sites_add_up_to_a_trusted_curators_noise(
    sites: int, quorum: int, colluders: int, honest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a share of the noise on the counts is far less than an image, which rounding to images would lose."""
    monkeypatch.setattr(os, "urandom", np.random.default_rng(0).bytes)
    one = method()
    plan = replace(plan_of(one, None), clients=tuple(f"s{n:03}" for n in range(sites)), quorum=quorum)
    plan = replace(plan, privacy=Privacy(16.0, 1e-5, "share", colluders))
    shape = {"counts": (10,), "sums": (10, 16), "gram": (136,)}
    zeros = {name: torch.zeros(size, dtype=torch.int64) for name, size in shape.items()}
    noise, repeats = site_noise(plan), 12
    found: dict[str, list[torch.Tensor]] = {name: [] for name in shape}
    for _ in range(repeats):
        sent = [noised(zeros, noise) for _ in range(honest)]
        for name, kept in found.items():
            kept.append(torch.stack([one[name] for one in sent]).sum(0))
    multiplier = 0.344177482  # of epsilon 16 and delta 1e-5, by dp-accounting
    row, column = torch.triu_indices(16, 16).unbind()
    for values, share, step in (
        (torch.stack(found["counts"]), 0.05, LEVELS),
        (torch.stack(found["sums"]), 0.65, LEVELS),
        (torch.stack(found["gram"])[:, row == column], 0.3, LEVELS**2),
    ):
        deviation = float(values.double().square().mean().sqrt()) / step * math.sqrt(share)
        assert deviation == pytest.approx(multiplier, rel=4 / math.sqrt(2 * values.numel()))


def test_a_share_that_rounding_would_lose_is_refused() -> None:
    one = method()
    many = replace(plan_of(one, Privacy(1e6, 1e-5, "share")), clients=tuple(f"s{n}" for n in range(10)))
    assert any("lost in rounding" in text for text in noise_problems(many))
    assert not noise_problems(replace(many, privacy=Privacy(100.0, 1e-5, "share")))
    assert min(site_noise(replace(many, privacy=Privacy(100.0, 1e-5, "share"))).as_json().values()) > FINEST


@pytest.mark.parametrize("missing", [(), ("b",), ("a", "d")], ids=len)
def test_the_total_is_the_sum_of_the_noised_numbers(missing: tuple[ClientId, ...]) -> None:
    """To the last bit, with sites missing and repaired; and the release is that of the open sum of the same uploads."""
    one = method()
    privacy = Privacy(1e4, 1e-5, "share")
    plan = secure(one, privacy, quorum=2)
    sent = terms(one, plan)
    total = summed(one, plan, sent, missing)
    among = [client for client in CLIENTS if client not in missing]
    for name in ("counts", "sums", "gram"):
        assert torch.equal(total.payload.tensors[name], torch.stack([sent[c].tensors[name] for c in among]).sum(0))
    context = replace(ctx(one, privacy), plan=plan)
    release = one.server_phase([total], context).shared
    plain = replace(context, plan=replace(plan, secure_sum=False))
    expected = one.server_phase([Upload(c, "", sent[c]) for c in among], plain).shared
    assert payload_digest(Payload(release.tensors)) == payload_digest(Payload(expected.tensors))
    stated = release.facts["privacy"]
    assert stated["sites"] == len(among) and stated["secure_sum"] and stated["adversary"].startswith("the server and whoever")
    assert not expected.facts["privacy"]["secure_sum"] and "trusted" in expected.facts["privacy"]["adversary"]
    assert stated["epsilon"] == expected.facts["privacy"]["epsilon"] <= 1e4


def test_a_masked_term_shows_its_noise_and_nothing_else_in_the_clear() -> None:
    one = method()
    plan = secure(one)
    upload = masked(one, terms(one, plan)["a"], "a", plan, PUBLIC, KEYS["a"])
    assert set(upload.facts) == {"features", "noise", "keys"} and upload.facts["noise"] == site_noise(plan).as_json()


# --- the server -------------------------------------------------------------------------------------------------------------


def test_a_sum_of_too_few_sites_or_of_other_noise_makes_no_release() -> None:
    one = method()
    privacy = Privacy(1e4, 1e-5, "share", 1)
    plan = secure(one, privacy, quorum=3)
    context, sent = replace(ctx(one, privacy), plan=plan), terms(one, plan)
    assert one.server_phase([summed(one, plan, sent, ("b",))], context)
    with pytest.raises(RoundError, match="less than the plan promises") as few:
        one.server_phase([summed(one, plan, sent, ("a", "b"))], context)
    assert few.value.expected == "uploads of 3 sites, each with its share"
    total = summed(one, plan, sent)
    less = Payload(total.payload.tensors, {**total.payload.facts, "noise": site_noise(secure(one)).as_json()})
    with pytest.raises(RoundError, match="not made with the noise"):
        one.server_phase([replace(total, payload=less)], context)
    for name in ("counts", "sums", "gram"):
        beyond = {n: value.clone() for n, value in total.payload.tensors.items()}
        beyond[name].view(-1)[0] = 2**55
        with pytest.raises(RoundError) as caught:
            one.check_upload(replace(total, payload=Payload(beyond, total.payload.facts)), context)
        assert caught.value.field == name


def test_a_single_upload_cannot_pass_for_many_sites() -> None:
    """Only the server's own sum says how many sites are in it."""
    one = method()
    privacy = Privacy(1e4, 1e-5, "share")
    context = ctx(one, privacy, 3)
    sent = one.client_phase(shard(), context)
    claimed = Upload("a", "", Payload(sent.tensors, {**sent.facts, "sites": 4}))
    with pytest.raises(RoundError, match="less than the plan promises"):
        one.server_phase([claimed], context)


# --- bounds -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("angle", [0, 1 << 63], ids=["up", "down"])
def test_the_largest_noise_there_is_fits_the_bound_and_the_sum_cannot_overflow(
    angle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operating system's randomness as bad as it can be: every first number of a pair is 8.57 deviations off."""

    def worst(count: int) -> bytes:
        pairs = count // 16
        return np.concatenate([np.zeros(pairs, "<u8"), np.full(pairs, angle, "<u8")]).tobytes()

    one = method()
    plan = secure(one, limits=Limits(share=1.0, samples=30))
    check_plan(plan)
    monkeypatch.setattr(os, "urandom", worst)
    sent = terms(one, plan)["a"]
    summands, exact = one.summands(plan), one.summands(replace(plan, privacy=None))
    assert any(int(sent.tensors[n].abs().max()) > exact[n].bound for n in exact)  # more than the images alone could make
    numbers = encoded(one.to_sum(sent), summands, len(CLIENTS), "a")
    for name, summand in summands.items():
        assert scale_of(summand, len(CLIENTS)) == 1 and len(CLIENTS) * most_of(summand, len(CLIENTS)) <= LARGEST
        assert np.array_equal(numbers[name].view(np.int64), sent.tensors[name].reshape(-1).numpy())
        images = 30 * LEVELS ** (2 if name == "gram" else 1)
        assert summand.bound >= images + getattr(largest(plan), name)


def test_a_plan_whose_noise_could_overflow_the_sum_is_refused() -> None:
    one = method()
    many = tuple(f"s{n:04}" for n in range(8589))  # a million images each just fit
    plain = replace(secure(one), clients=many, privacy=None)
    check_plan(plain)
    with pytest.raises(UsageError, match=r"'gram' over 8589 sites .* could overflow"):
        check_plan(replace(plain, privacy=Privacy(0.3, 1e-5)))


def test_more_images_than_the_bound_is_made_for_stay_at_home() -> None:
    """Held-out images are in the sums, too; noise must not decide whether a site can take part."""
    one = method()
    plan = secure(one, limits=Limits(share=1.0, samples=29))
    with pytest.raises(TrainingError, match="more images than its sums can hold"):
        terms(one, plan)
    with pytest.raises(UploadBlocked, match="beyond the bound"):
        encoded({"counts": torch.full((10,), 2**62)}, one.summands(plan), 4, "a")


# --- what is stated -----------------------------------------------------------------------------------------------------


def test_epsilon_is_that_of_the_noise_that_colluders_do_not_know() -> None:
    """Multipliers by hand: with q of n sites and t colluders each site adds m / sqrt(q - t)."""
    one = method()
    plan = replace(secure(one, Privacy(1.0, 1e-5, "share", 1)), quorum=3)
    assert site_noise(plan).sums == pytest.approx(M / math.sqrt(0.65) / math.sqrt(2) * LEVELS)
    least, all_of_them = statement(plan, 3), statement(plan, 4)
    assert least["epsilon"] == 1.0  # two honest shares of the quorum
    assert all_of_them["epsilon"] < 1.0  # three
    assert least["epsilon_release"] == all_of_them["epsilon"] < 1.0  # who knows no site's noise
    assert least["epsilon_site"] == 1.0 and least["epsilon_term"] > 1.4  # a site that looks at the release is a colluder
    assert "together with up to 1 sites" in least["adversary"] and least["colluders"] == 1
    nobody = statement(replace(plan, privacy=SHARE), 4)
    assert nobody["epsilon"] == nobody["epsilon_release"] < nobody["epsilon_site"]
    each = statement(replace(plan, privacy=Privacy(1.0, 1e-5)), 4)
    assert each["epsilon"] == each["epsilon_term"] == 1.0 and each["adversary"].startswith("everybody")


def test_the_attack_of_the_record_goes_through_a_round_and_sees_a_canary_without_noise() -> None:
    found = attack_through_a_round(1000.0, 2)
    assert found["advantage"] == 1 and found["stated"] == 1000
