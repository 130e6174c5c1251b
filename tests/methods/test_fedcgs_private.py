"""FedCGS under differential privacy: sums of bounded features in whole numbers, their noise, and the release of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Context
from osfl.core.plan import check_plan
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Json, Limits, Payload, Plan, Privacy, Shard, Upload
from osfl.ingredients.statistics.gaussians import unpacked
from osfl.ingredients.statistics.private_sums import site_noise
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.fedcgs import FedCGS
from osfl.rounds.egress import check_open_sums
from osfl.rounds.secure_sum import masked, total_of
from osfl.runtime.payloads import payload_digest
from osfl.simulate.checks import small_federation
from osfl.wire.signing import SigningKey

CLIENTS = ("a", "b", "c")
CLOSE = Privacy(1e4, 1e-5, "share")  # hardly any noise


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def method(**changes: Any) -> FedCGS:
    settings = resolve_settings(FedCGS, "smoke", {"dimensions": 8, "covariance": "within", **changes})
    return FedCGS(small_federation("fedcgs").plan.task, settings)


class Kept(dict[str, Payload]):
    """What a method computed and the sites keep, exact sums among it."""

    def get_or_compute(self, key: Json, make: Any) -> Payload:
        return self[str(key)] if str(key) in self else self.setdefault(str(key), make())


def context(one: FedCGS, privacy: Privacy | None, kept: Kept | None = None, secure_sum: bool = False) -> Context:
    plan = Plan(one.task, "fedcgs", one.settings, CLIENTS, Limits(share=1.0), privacy=privacy, secure_sum=secure_sum)
    check_plan(plan)
    return Context(plan, torch.device("cpu"), get_or_compute=(Kept() if kept is None else kept).get_or_compute)


def shard(client: str, count: int = 40) -> Shard:
    """Classes that are told by brightness, and the oddest images there are."""
    rng = torch.Generator().manual_seed(ord(client))
    labels = torch.arange(count) % 3
    images = (60 + 60 * labels[:, None, None, None] + 25 * torch.randn(count, 1, 8, 8, generator=rng)).clamp(0, 255)
    images = images.to(torch.uint8)
    images[0], images[1], images[2, :, ::2] = 0, 255, 0
    data = Dataset(images, labels)
    return Shard(client, data.subset(torch.arange(4, count)), data.subset(torch.arange(4)), f"{client}{count}")


def exact_sums(one: FedCGS, found: Shard) -> dict[str, torch.Tensor]:
    kept = Kept()
    one.client_phase(found, context(one, CLOSE, kept))
    return dict(next(payload.tensors for key, payload in kept.items() if "exact sums" in key))


def test_no_neighbor_is_further_away_than_the_sensitivity() -> None:
    """Every image left out in turn; held-out images are in the sums, too."""
    one, whole = method(), shard("a", 12)
    full = exact_sums(one, whole)
    assert int(full["counts"].sum()) == 12 * LEVELS
    lengths = []
    for gone in range(len(whole.train)):
        kept = torch.tensor([i for i in range(len(whole.train)) if i != gone])
        less = exact_sums(one, replace(whole, train=whole.train.subset(kept), digest=f"without {gone}"))
        counts, sums, gram = ((full[name] - less[name]).double() for name in ("counts", "sums", "gram"))
        assert float(counts.norm()) == LEVELS and float(sums.norm()) <= LEVELS
        assert float(unpacked(gram).norm()) <= LEVELS**2 * (1 + 1e-12)
        lengths.append(float(sums.norm()) / LEVELS)
    assert max(lengths) > 0.999


@pytest.mark.parametrize("privacy", [None, CLOSE], ids=["exact", "noisy"])
def test_a_secure_sum_has_the_release_of_the_open_one(privacy: Privacy | None) -> None:
    one = method(least=1)
    ctx, secure = context(one, privacy), context(one, privacy, secure_sum=True)
    sent = {client: one.client_phase(shard(client), ctx) for client in CLIENTS}
    assert set(sent["a"].facts) == ({"encoder"} if privacy is None else {"encoder", "noise"})
    keys = {client: SigningKey.from_seed(client.encode().ljust(32)) for client in CLIENTS}
    public = {client: key.public_hex for client, key in keys.items()}
    uploads = [
        Upload(client, "", masked(one, payload, client, secure.plan, public, keys[client])) for client, payload in sent.items()
    ]
    total = total_of(uploads, one, secure.plan)
    for name in ("counts", "sums", "gram"):
        assert torch.equal(total.payload.tensors[name], torch.stack([term.tensors[name] for term in sent.values()]).sum(0))
    released = one.server_phase([total], secure).shared
    expected = one.server_phase([Upload(client, "", payload) for client, payload in sent.items()], ctx).shared
    assert payload_digest(Payload(released.tensors)) == payload_digest(Payload(expected.tensors))
    if privacy is not None:
        assert released.facts["privacy"]["sites"] == 3 and released.facts["privacy"]["epsilon"] == 1e4
        assert released.facts["privacy"]["adversary"].startswith("the server and whoever")


def test_little_noise_gives_nearly_the_classifier_of_the_exact_sums() -> None:
    one = method(least=1, shrinkage="ridge", ridge=0.01)
    images = torch.cat([shard(client).train.images for client in CLIENTS])
    labels = torch.cat([shard(client).train.labels for client in CLIENTS])
    answers = []
    for privacy in (None, CLOSE):
        ctx = context(one, privacy)
        release = one.server_phase([Upload(c, "", one.client_phase(shard(c), ctx)) for c in CLIENTS], ctx).shared
        answers.append(one.build(release)(images.float() / 127.5 - 1))
        assert bool((answers[-1][:, 3:] < -1e6).all())  # classes that nobody has
    assert float((answers[0].argmax(1) == answers[1].argmax(1)).double().mean()) > 0.95
    assert float((answers[1].argmax(1) == labels).double().mean()) > 0.7


@pytest.mark.parametrize(
    ("how", "field"), [("no noise", "facts.noise"), ("counts", "counts"), ("sums", "sums"), ("gram", "gram")]
)
def test_a_term_beyond_what_noise_can_do_is_refused(how: str, field: str) -> None:
    one = method()
    ctx = context(one, Privacy(4.0, 1e-5))
    good = one.client_phase(shard("a"), ctx)
    assert good.facts["noise"] == site_noise(ctx.plan).as_json()
    one.check_upload(Upload("a", "", good), ctx)
    tensors, facts = {name: value.clone() for name, value in good.tensors.items()}, dict(good.facts)
    if how == "no noise":
        del facts["noise"]
    else:
        tensors[how].view(-1)[0] = -(2**52)
    with pytest.raises(RoundError) as caught:
        one.server_phase([Upload("a", "", Payload(tensors, facts))], ctx)
    assert (caught.value.client, caught.value.field) == ("a", field)


def test_too_few_shares_make_no_release() -> None:
    one = method()
    ctx = context(one, CLOSE)
    sent = [Upload(c, "", one.client_phase(shard(c), ctx)) for c in CLIENTS]
    with pytest.raises(RoundError, match="less than the plan promises"):
        one.server_phase(sent[:2], ctx)
    assert one.upload_model(sent[0], ctx) is not None  # an attack on one upload needs no others


def test_what_whole_numbers_cannot_do_is_refused() -> None:
    found = method(by_class=True, personalize="prior").problems(3)
    assert any("'by_class': with dimensions" in line for line in found)
    assert any("'personalize': with dimensions" in line for line in found)


def test_exact_sums_of_few_images_stop_a_real_site_and_noise_or_a_secure_sum_do_not() -> None:
    """Whole numbers without noise are as open to lattice reduction as OneSum's."""
    one, plan = method(), context(method(), None).plan
    few, enough = (one.client_phase(shard("a", count), context(one, None)) for count in (43, 44))  # four are held out
    assert one.too_few(few, plan) == (39, 40) and one.too_few(enough, plan) is None
    with pytest.raises(UploadBlocked, match="so few") as caught:
        check_open_sums(one, few, "north", plan)
    assert (caught.value.client, caught.value.field, caught.value.got) == ("north", "readable", 39)
    assert one.too_few(few, replace(plan, secure_sum=True)) is None and method(readable="send").too_few(few, plan) is None
    noisy = context(one, CLOSE)
    assert one.too_few(one.client_phase(shard("a", 43), noisy), noisy.plan) is None
    rounded = method(dimensions=0)  # sums in float64: what is known of them is their span
    assert rounded.too_few(rounded.client_phase(shard("a", 43), context(rounded, None)), plan) is None
