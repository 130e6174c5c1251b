"""FedCGS: the classifier does not depend on who holds what, and a client or class can be subtracted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Limits, Payload, Release, Shard, Task, Upload, settings_as_json
from osfl.ingredients.statistics.gaussians import summed, unpacked
from osfl.ingredients.statistics.shrinkage import gcv_ridge
from osfl.ingredients.tokens.encoding import pooled
from osfl.methods.fedcgs import FedCGS, Settings
from osfl.rounds.egress import check_exposure
from osfl.rounds.exposure import attack, spanned
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Federation, Simulation, prepare


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def ctx(federation: Federation) -> Context:
    return Context(federation.plan, torch.device("cpu"))


def method(federation: Federation, **changes: object) -> FedCGS:
    settings = resolve_settings(FedCGS, "smoke", {"precision": "float64", **changes})
    return FedCGS(federation.plan.task, settings)


def uploads(one: FedCGS, federation: Federation) -> list[Upload]:
    return [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]


def weights(release: Release) -> torch.Tensor:
    return torch.cat([release.shared.tensors["head/weight"], release.shared.tensors["head/bias"][:, None]], 1)


def test_every_partition_gives_the_same_classifier() -> None:
    found = []
    for partition, clients, seed in (("iid", 2, 0), ("dirichlet:0.1", 5, 1), ("silos", None, 2)):
        federation = prepare(Simulation("fedcgs", "digits", clients, partition, "smoke", seed, samples=120, image_size=8))
        whole = [replace(s, train=_all(s)) for s in federation.shards]  # validation images are cut by client: use all
        federation = replace(federation, shards=whole)
        one = method(federation, ridge=1e-2, least=1)
        found.append(weights(one.server_phase(uploads(one, federation), ctx(federation))))
    for other in found[1:]:
        assert torch.allclose(found[0], other, rtol=1e-5, atol=1e-5)


def _all(shard: Shard) -> Dataset:
    from osfl.data.source import together

    return together([shard.train, shard.val])


def test_bytes_are_those_of_the_formula() -> None:
    federation = small_federation("fedcgs")
    one = method(federation, precision="float32")
    payload = one.client_phase(federation.shards[0], ctx(federation))
    d, classes = one.width(), len(federation.plan.task.classes)
    assert sum(t.numel() * t.element_size() for t in payload.tensors.values()) == 4 * (classes * d + d * (d + 1) // 2)
    assert 4 * (10 * 512 + 512 * 513 // 2 + 10) == 545_832  # counts included


def test_a_class_is_forgotten_as_if_it_had_never_been() -> None:
    federation = small_federation("fedcgs")
    one = method(federation, by_class=True)
    assert one.separable() and not method(federation).separable()
    cut = [Upload(u.client, "", one.without_class(u.payload, 3)) for u in uploads(one, federation)]
    bare = []
    for shard in federation.shards:
        keep = shard.train.labels != 3
        bare.append(replace(shard, train=shard.train.subset(keep.nonzero().flatten())))
    never = uploads(one, replace(federation, shards=bare))
    after, expected = (one.server_phase(u, ctx(federation)).shared.tensors for u in (cut, never))
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_the_personal_map_starts_as_nothing_and_fits_the_client() -> None:
    federation = small_federation("fedcgs")
    one = method(federation, personal=True, personal_epochs=0, ridge=100.0)
    release = one.server_phase(uploads(one, federation), ctx(federation))
    shard = federation.shards[0]
    x = shard.train.images.float() / 127.5 - 1
    shared = one.build(Payload({n: t for n, t in release.shared.tensors.items() if n != "means"}))(x)
    untouched = one.build(one.personalize(release, shard, ctx(federation)))(x)
    assert torch.allclose(shared, untouched, atol=1e-4)
    longer = method(federation, personal=True, personal_epochs=20)
    own = longer.build(longer.personalize(release, shard, ctx(federation)))(x)
    loss = torch.nn.functional.cross_entropy
    assert loss(own, shard.train.labels).item() < loss(shared, shard.train.labels).item()


def test_the_cpu_preset_is_within_classes_with_shrinkage_from_the_sums_and_the_paper_is_unchanged() -> None:
    cpu, paper = (resolve_settings(FedCGS, preset) for preset in ("cpu", "paper"))
    assert (cpu.covariance, cpu.shrinkage) == ("within", "gcv")
    assert (paper.covariance, paper.shrinkage, paper.ridge) == ("total", "ridge", 1e-4)
    assert "shrinkage" not in settings_as_json(paper)


def test_automatic_shrinkage_is_the_classifier_with_the_ridge_that_gcv_finds() -> None:
    federation = small_federation("fedcgs")
    one = method(federation, covariance="within", shrinkage="gcv")
    sent = uploads(one, federation)
    total = summed(one._statistics(upload) for upload in sent)
    ridge = gcv_ridge(replace(total, gram=unpacked(total.gram)), "within")
    fixed = method(federation, covariance="within", ridge=ridge)
    capless = Context(replace(federation.plan, limits=Limits(share=1.0)), torch.device("cpu"))
    assert torch.equal(weights(one.server_phase(sent, capless)), weights(fixed.server_phase(sent, capless)))


def test_wrong_settings_are_named() -> None:
    task = Task("t", ("a", "b"), (1, 8, 8))
    found = FedCGS(task, Settings(ridge=-1)).problems(3)
    assert any("'ridge'" in line for line in found) and any("encoder_weights" in line for line in found)


def test_sums_of_fewer_images_than_features_are_reported() -> None:
    """Images of the site are told from held-out ones by the span of B, and the site is told; a secure sum hides it."""
    federation = small_federation("fedcgs", partition="iid", clients=2, samples=600)
    shard, plan = federation.shards[0], federation.plan
    small = replace(shard, train=shard.train.subset((shard.train.labels < 2).nonzero().flatten()[:20]))
    for by_class in (False, True):
        one = method(federation, by_class=by_class)
        payload = one.client_phase(small, ctx(federation))
        found = [r for r in attack(one.exposed(payload, small, ctx(federation))) if r.residuals is not None]
        assert len(found) == 2 and all(ratio.ratio < 1e-3 and ratio.stops == "none" for ratio in found)
        assert "membership test" in spanned(found)
        (line,) = one.cautions(payload, plan)
        assert (
            f"fewer than {one.width()} features" in line and "secure_sum = true" in line and by_class == ("of a class" in line)
        )
        assert not one.cautions(payload, replace(plan, secure_sum=True))
    whole = method(federation)
    many = replace(shard, train=Dataset(shard.train.images.repeat(5, 1, 1, 1), shard.train.labels.repeat(5)))
    payload = whole.client_phase(many, ctx(federation))
    assert len(many.train) > whole.width() and not whole.cautions(payload, plan)


def test_a_feature_that_one_image_has_stops_a_real_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its row of B is that image's features, whatever precision B has."""
    federation = small_federation("fedcgs", partition="iid", clients=2, samples=600)
    shard = federation.shards[0]
    for precision in ("float32", "float64"):
        one = method(federation, precision=precision)
        lonely = one.encode(shard.train.images[:1], ctx(federation))[0]

        def features(tokens: torch.Tensor, _: Context, lonely: torch.Tensor = lonely) -> torch.Tensor:
            rows = pooled(tokens, "global").clone()
            rows[:, 0] = torch.where((rows - lonely).norm(dim=1) < 1e-5, 3.0, 0.0)
            return rows

        monkeypatch.setattr(one, "_features", features)
        payload = one.client_phase(shard, ctx(federation))
        with pytest.raises(UploadBlocked, match="a row of second moments") as caught:
            check_exposure(one, payload, shard, federation.plan.task, ctx(federation))
        assert caught.value.field == "readable"
        check_exposure(one, payload, shard, federation.plan.task, ctx(federation), real=False)


def test_sums_of_no_image_count_for_nothing_and_alone_are_refused() -> None:
    federation = prepare(Simulation("fedcgs", "digits", 3, "iid", "smoke", samples=120, image_size=8))
    one = method(federation, least=1)
    sent = uploads(one, federation)
    empty = replace(sent[2], payload=_nothing(sent[2].payload))
    release = one.server_phase([*sent[:2], empty], ctx(federation))
    assert torch.equal(weights(release), weights(one.server_phase(sent[:2], ctx(federation))))
    with pytest.raises(RoundError, match="sums of no image"):
        one.server_phase([empty], ctx(federation))


def _nothing(payload: Payload) -> Payload:
    facts = {**payload.facts, "samples": 0, "class_counts": [0] * 10}
    return Payload({name: torch.zeros_like(value) for name, value in payload.tensors.items()}, facts)
