"""What a site makes of OneSum's release: its prior, its own network, and what it chooses on its held-out images."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from osfl.core.method import Context
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Payload, Release, Shard, Upload
from osfl.ingredients.training.local import classifier, local_model
from osfl.methods.onesum import OneSum
from osfl.methods.onesum.head import head_of
from osfl.methods.onesum.personal import FACTORS, Choice, choose, default_choice, mixed
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Federation


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def ctx(federation: Federation) -> Context:
    return Context(federation.plan, torch.device("cpu"))


def sited(federation: Federation, **changes: object) -> tuple[OneSum, Release]:
    one = OneSum(federation.plan.task, resolve_settings(OneSum, "smoke", {"prior": "site", **changes}))
    sent = [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]
    return one, one.server_phase(sent, ctx(federation))


def inputs(federation: Federation) -> torch.Tensor:
    return federation.test.images[:20].float() / 127.5 - 1


def answers(n: int, right: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities over three classes that name the label in a share `right` of the images, and the labels."""
    rng = torch_generator(seed, "answers")
    labels = torch.randint(0, 3, (n,), generator=rng)
    output = torch.where(torch.rand(n, generator=rng) < right, labels, (labels + 1) % 3)
    return (4.0 * torch.eye(3, dtype=torch.float64)[output]).log_softmax(1), labels


FLAT = torch.zeros(3, dtype=torch.float64)


def test_few_held_out_images_leave_the_default() -> None:
    _, labels = answers(2, 0.0)
    right, _ = answers(2, 1.0)
    for shrinkage, factor in ((0.05, 3.0), (0.1, 3.0), (0.2, 1.0)):  # a large lambda is not raised further
        found = choose({0: FLAT, **dict.fromkeys(FACTORS, right)}, right, labels, shrinkage)
        assert found == default_choice(True, shrinkage) == Choice(factor, 1.0, 0.25)
    assert choose({0: FLAT, 1.0: right}, None, labels, 0.05) == default_choice(False, 0.05) == Choice(1.0, 1.0, 0.0)


def test_many_held_out_images_choose_who_is_right() -> None:
    good, labels = answers(300, 0.95)
    bad, _ = answers(300, 0.2)
    bad_scores = {0: FLAT, **dict.fromkeys(FACTORS, bad)}
    assert choose(bad_scores, good, labels, 0.05).blend == 0.5
    assert choose({0: FLAT, **dict.fromkeys(FACTORS, good)}, bad, labels, 0.05).blend == 0.0
    assert choose({**bad_scores, 30.0: good}, None, labels, 0.05).factor == 30.0
    assert choose({0: FLAT, **dict.fromkeys(FACTORS, bad)}, None, labels, 0.05).softness == 0.5  # wrong and sure: softer


def test_a_mixture_is_one_of_probabilities() -> None:
    p, q = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.2, 0.8]]).log()
    assert torch.allclose(mixed(p, q, 0.25).exp(), torch.tensor([[0.725, 0.275]]))
    assert mixed(p, q, 0.0) is p and mixed(p, q, 1.0) is q


@pytest.mark.parametrize("blend", ["0.25", "1"])
def test_the_answer_is_the_mixture_of_both_models(blend: str) -> None:
    federation = small_federation("onesum")
    shard, x = federation.shards[0], inputs(federation)
    one, release = sited(federation, blend=blend)
    alone, _ = sited(federation, blend="0")
    own = one.build(one.personalize(release, shard, ctx(federation)))(x).exp()
    summed = alone.build(alone.personalize(release, shard, ctx(federation)))(x).softmax(1)
    network = classifier(local_model(shard, federation.plan.task, one.settings, ctx(federation)), federation.plan.task)
    expected = (1 - float(blend)) * summed + float(blend) * network(x).softmax(1)
    assert torch.allclose(own, expected, atol=1e-5)
    assert not torch.allclose(own, summed, atol=1e-3)


def test_what_was_chosen_is_in_the_facts_and_nothing_else_of_the_grid() -> None:
    federation = small_federation("onesum")
    one, release = sited(federation)
    own = one.personalize(release, federation.shards[0], ctx(federation))
    assert set(own.facts["site"]) == {"factor", "softness", "blend"} and not any(n.startswith("sites/") for n in own.tensors)
    heads = head_of(release.shared.tensors)
    place = FACTORS.index(own.facts["site"]["factor"])
    expected = heads.weight if place == 0 else release.shared.tensors["sites/weight"][place - 1]
    assert torch.equal(head_of(own.tensors).weight, expected)


def test_the_release_has_heads_for_sites_only_where_they_choose() -> None:
    federation = small_federation("onesum")
    for changes, offered in (({}, True), ({"blend": "0"}, False), ({"prior": "global"}, False)):
        _, release = sited(federation, **changes)
        assert ("sites/weight" in release.shared.tensors) == offered
    _, release = sited(federation)
    assert len(release.shared.tensors["sites/weight"]) == len(FACTORS) - 1


def test_only_held_out_images_are_asked() -> None:
    """The choice changes with them, and not with the test images, which personalization never sees."""
    federation = small_federation("onesum")
    shard = federation.shards[0]
    one, release = sited(federation)
    bare = replace(shard, val=shard.val.subset(torch.zeros(0, dtype=torch.int64)))
    found = one.personalize(release, bare, ctx(federation))
    assert found.facts["site"] == asdict(default_choice(True, found.facts["shrinkage"]))


def one_class(shard: Shard, images: int) -> Shard:
    label = int(shard.train.labels.mode().values)
    few = shard.train.subset((shard.train.labels == label).nonzero().flatten()[:images])
    return replace(shard, train=few, val=shard.val.subset(shard.val.labels == label))


@pytest.mark.parametrize("images", [1, 4])
def test_a_site_of_one_class_trains_no_network_and_answers(images: int) -> None:
    federation = small_federation("onesum")
    one, release = sited(federation)
    small = one_class(federation.shards[0], images)
    own = one.personalize(release, small, ctx(federation))
    assert "network" not in own.facts and own.facts["site"]["blend"] == 0
    assert bool(one.build(own)(inputs(federation)).isfinite().all())


def test_one_image_of_each_of_two_classes_and_constant_images() -> None:
    federation = small_federation("onesum")
    one, release = sited(federation)
    shard = federation.shards[0]
    for data in (
        Dataset(shard.train.images[:2], torch.tensor([0, 1])),
        Dataset(torch.full_like(shard.train.images, 128), shard.train.labels),
    ):
        own = one.personalize(release, replace(shard, train=data), ctx(federation))
        assert bool(one.build(own)(inputs(federation)).isfinite().all())


def test_more_features_than_images_at_all_sites() -> None:
    federation = small_federation("onesum")
    one, release = sited(federation, filters=32)
    assert one.width() > sum(len(s.train) for s in federation.shards)
    own = one.personalize(release, federation.shards[0], ctx(federation))
    assert bool(one.build(own)(inputs(federation)).isfinite().all())


def test_wrong_blends_are_named() -> None:
    task = small_federation("onesum").plan.task
    for changes, word in (({"blend": "much"}, "'blend'"), ({"blend": "2"}, "'blend'"), ({"epochs": 0}, "'epochs'")):
        settings = resolve_settings(OneSum, "smoke", {"prior": "site", **changes})
        assert any(word in sentence for sentence in OneSum(task, settings).problems(3))
    settings = replace(resolve_settings(OneSum, "smoke", {}), epochs=0)  # nobody trains where classes are not weighed by site
    assert not OneSum(task, settings).problems(3)


def test_a_site_may_fill_a_payload_again() -> None:
    """Facts survive JSON, as a kept model's do."""
    federation = small_federation("onesum")
    one, release = sited(federation, blend="0.5")
    own = one.personalize(release, federation.shards[0], ctx(federation))
    again = Payload(dict(own.tensors), {**own.facts})
    x = inputs(federation)
    assert torch.equal(one.build(own)(x), one.build(again)(x))
