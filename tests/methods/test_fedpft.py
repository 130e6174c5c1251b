"""FedPFT: bytes, small classes, and cells that can be forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Upload
from osfl.ingredients.statistics.gaussians import fit_mixture
from osfl.methods import fedpft
from osfl.methods.fedpft import FedPFT
from osfl.rounds.egress import check_exposure
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Federation


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def ctx(federation: Federation) -> Context:
    return Context(federation.plan, torch.device("cpu"))


def method(federation: Federation, **changes: object) -> FedPFT:
    return FedPFT(federation.plan.task, resolve_settings(FedPFT, "smoke", changes))


@pytest.mark.parametrize("shape", ["diag", "spherical", "full"])
def test_bytes_are_those_of_the_formula(shape: str) -> None:
    federation = small_federation("fedpft")
    one = method(federation, components=1, shape=shape)
    payload = one.client_phase(federation.shards[0], ctx(federation))
    held, d = sum(n > 0 for n in payload.facts["class_counts"]), one.settings.width()
    numbers = {"diag": 2 * d + 1, "spherical": d + 2, "full": 1 + d + d * (d + 1) // 2}[shape]
    assert sum(2 * t.numel() for t in payload.tensors.values()) == 2 * numbers * held
    assert {t.dtype for t in payload.tensors.values()} == {torch.float16}
    assert 2 * 20 * (2 * 768 + 1) == 61_480  # 61.5 kB a class, as FALCON's paper counts it


@pytest.mark.parametrize("shape", ["spherical", "full"])
def test_every_shape_makes_a_release(shape: str) -> None:
    federation = small_federation("fedpft")
    one = method(federation, shape=shape)
    output = [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]
    assert bool(one.server_phase(output, ctx(federation)).shared.tensors["head/weight"].isfinite().all())


@pytest.mark.parametrize(("images", "sent"), [(1, False), (2, False), (3, True)])
def test_a_class_of_few_images_is_not_sent(images: int, sent: bool) -> None:
    """The mean of one image is its features."""
    federation = small_federation("fedpft")
    shard = federation.shards[0]
    label = int(shard.train.labels[0])
    keep = (shard.train.labels != label).nonzero().flatten()
    some = (shard.train.labels == label).nonzero().flatten()[:images]
    few = replace(shard, train=shard.train.subset(torch.cat([some, keep])))
    payload = method(federation).client_phase(few, ctx(federation))
    assert payload.facts["class_counts"][label] == (images if sent else 0)
    assert (f"class-{label}/means" in payload.tensors) is sent
    if sent:
        assert float(payload.tensors[f"class-{label}/spread"].min()) > 0  # not rounded to zero


def test_a_class_of_many_copies_of_few_images_is_not_sent() -> None:
    federation = small_federation("fedpft")
    shard, one = federation.shards[0], method(federation, least=3)
    label = int(shard.train.labels[0])
    some, rest = ((shard.train.labels == label) == wanted for wanted in (True, False))
    few = torch.cat([some.nonzero().flatten()[:2].repeat(8), rest.nonzero().flatten()])
    payload = one.client_phase(replace(shard, train=shard.train.subset(few)), ctx(federation))
    assert f"class-{label}/means" not in payload.tensors and len(payload.tensors) > 0
    assert payload.facts["class_counts"][label] == 0


def test_a_class_is_forgotten_as_if_it_had_never_been() -> None:
    federation = small_federation("fedpft")
    one = method(federation)
    output = [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]
    cut = [Upload(u.client, "", one.without_class(u.payload, 3)) for u in output]
    bare = [replace(s, train=s.train.subset((s.train.labels != 3).nonzero().flatten())) for s in federation.shards]
    never = [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in bare]
    after, expected = (one.server_phase(u, ctx(federation)).shared.tensors for u in (cut, never))
    assert all(torch.equal(after[name], expected[name]) for name in expected)


@pytest.mark.parametrize("what", ["weights", "spread"])
def test_a_mixture_that_is_none_is_refused_with_its_client(what: str) -> None:
    federation = small_federation("fedpft")
    one = method(federation)
    output = [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]
    name = next(n for n in output[1].payload.tensors if n.endswith(what))
    wrong = Payload({**output[1].payload.tensors, name: -output[1].payload.tensors[name]}, output[1].payload.facts)
    with pytest.raises(RoundError, match="no mixture of Gaussians") as caught:
        one.server_phase([output[0], Upload(output[1].client, "", wrong), output[2]], ctx(federation))
    assert caught.value.client == output[1].client and name.startswith(str(caught.value.field))


def test_standardization_is_folded_into_the_head() -> None:
    from osfl.core.seeds import torch_generator
    from osfl.ingredients.tokens.training import linear_head

    x = torch.randn(60, 4, generator=torch_generator(0, "x")) * torch.tensor([1.0, 10, 0.1, 1]) + 5
    y = (x[:, 1] > 5).long()
    head = linear_head(
        x,
        y,
        2,
        torch_generator(0, "h"),
        epochs=30,
        batch_size=16,
        optimizer="sgd",
        lr=0.1,
        standardize=True,
        device=torch.device("cpu"),
        progress=lambda done, total: None,
    )
    assert float((head(x).argmax(1) == y).float().mean()) > 0.95


def test_full_covariances_of_few_images_do_not_span_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve images a class lie in eleven directions of their covariance; the egress check sees it, supported ones do not show
    them."""
    federation = small_federation("fedpft", partition="iid", clients=2, samples=1200)
    one, shard = method(federation, components=1, shape="full", window=8), federation.shards[0]
    some = torch.cat([(shard.train.labels == c).nonzero().flatten()[:12] for c in (0, 1)])
    held = (shard.val.labels < 2).nonzero().flatten()
    small = replace(shard, train=shard.train.subset(some), val=shard.val.subset(held))
    found = check_exposure(one, one.client_phase(small, ctx(federation)), small, federation.plan.task, ctx(federation))
    assert {ratio.what for ratio in found} == {"component", "sample", "mean", "direction", "combination of directions"}
    assert min(ratio.ratio for ratio in found) > 0.3
    monkeypatch.setattr(fedpft, "fit_supported", lambda x, k, rng, **em: fit_mixture(x, k, "full", rng, **em))
    with pytest.raises(UploadBlocked, match="a combination of directions in the upload is much nearer"):
        check_exposure(one, one.client_phase(small, ctx(federation)), small, federation.plan.task, ctx(federation))


@pytest.mark.parametrize(
    ("weights", "accepted"), [([0.25, 0.75], True), ([0.0, 1.0], True), ([-0.25, 1.25], False), ([0.0, 0.0], False)]
)
def test_weights_of_a_mixture_are_shares_and_may_be_zero(weights: list[float], accepted: bool) -> None:
    """A component may have lost all its images; none has less than none."""
    one = method(small_federation("fedpft"), components=2, shape="diag")
    parts = {"weights": torch.tensor(weights), "means": torch.zeros(2, 3), "spread": torch.ones(2, 3)}
    payload = Payload({f"class-0/{what}": tensor for what, tensor in parts.items()})
    if accepted:
        assert one.mixture(payload, 0).weights.tolist() == weights
    else:
        with pytest.raises(RoundError, match="no mixture of Gaussians"):
            one.mixture(payload, 0)
