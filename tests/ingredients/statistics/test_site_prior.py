"""The site's prior by Bayes' rule, and the methods that may use it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from osfl.core.method import Context
from osfl.core.registry import load, names
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Release, Upload, settings_as_json
from osfl.ingredients.statistics.gaussians import NEVER
from osfl.ingredients.statistics.site_prior import (
    LEARNED,
    OneClassifier,
    PriorCorrected,
    SitePrior,
    corrected,
    corrected_prior,
    site_log_prior,
    with_class_shares,
)
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation

BALANCED, NATURAL = ("ensemble", "federated_factory", "dense"), ("fedavg", "fedcgs", "fedpft", "falcon")
METHODS = ("ensemble", "federated_factory", "fedcgs")
ONE = {"coboosting", "dafl", "deepinversion", "deepinversion_vit", "dense", "ensemble", "falcon", "fedavg", "fedcgs", "fedftg"}
ONE |= {"fedisca", "fedlmg", "fedmitr", "fedpft"}


def test_the_prior_of_three_images() -> None:
    """Two images of class 0, one of class 2, none of class 1."""
    found = site_log_prior(torch.tensor([0, 0, 2]), 3).exp()
    assert found.tolist() == pytest.approx([2.01 / 3.03, 0.01 / 3.03, 1.01 / 3.03])


def test_bayes_rule_on_two_coins() -> None:
    """A model of balanced classes says 0.8 to 0.2; where nine of ten images are of the second, it is 0.8 * 0.1 to 0.2 * 0.9."""
    balanced = nn.Linear(1, 2)
    nn.init.zeros_(balanced.weight)
    with torch.no_grad():
        balanced.bias.copy_(torch.tensor([0.8, 0.2]).log() + 3)  # whatever is added to all logits alike
    found = PriorCorrected(balanced, torch.tensor([0.1, 0.9]).log())(torch.zeros(1, 1)).softmax(-1)
    assert found[0].tolist() == pytest.approx([0.08 / 0.26, 0.18 / 0.26])
    softer = PriorCorrected(balanced, torch.tensor([0.5, 0.5]).log(), 0.5)(torch.zeros(1, 1)).softmax(-1).detach()
    assert float(softer[0, 0] / softer[0, 1]) == pytest.approx((0.8 / 0.2) ** 0.5)


def test_a_class_that_nobody_has_stays_out() -> None:
    found = corrected_prior(torch.tensor([0.0, -1.0]), torch.tensor([-0.5, NEVER]))
    assert found.tolist() == [0.0, NEVER]
    model = nn.Identity()
    assert corrected(model, Payload({})) is model


@pytest.mark.parametrize("name", (*BALANCED, *NATURAL))
def test_a_site_weighs_the_release_by_its_own_classes(name: str, tmp_path: Path) -> None:
    federation = small_federation(name)
    settings = replace(federation.plan.settings, personalize="prior", prior_temperature=0.5)
    plan = replace(federation.plan, settings=settings, limits=replace(federation.plan.limits, share=1.0))
    method, ctx = load(name)(plan.task, settings), Context(plan, torch.device("cpu"))
    uploads = [Upload(shard.client, "", method.client_phase(shard, ctx)) for shard in federation.shards]
    release, shard = method.server_phase(uploads, ctx), federation.shards[0]
    learned = torch.zeros(10)
    if name in NATURAL:
        counts = torch.tensor([upload.payload.facts["class_counts"] for upload in uploads]).sum(0)
        learned = torch.tensor([math.log(n / counts.sum()) if n else 0.0 for n in counts])
    x = federation.test.images[:16].float() / 127.5 - 1
    shared = method.build(release.shared).eval()(x)
    own = method.build(method.personalize(release, shard, ctx))(x)
    expected = 0.5 * (shared.log_softmax(-1) - learned.float()) + site_log_prior(shard.train.labels, 10).float()
    assert torch.allclose(own, expected, atol=1e-4)
    plain = load(name)(plan.task, replace(settings, personalize="none"))
    assert plain.personalize(release, shard, ctx) is release.shared
    assert (LEARNED in release.shared.tensors) == (name in NATURAL)
    assert LEARNED not in plain.server_phase(uploads, ctx).shared.tensors


@pytest.mark.parametrize("name", METHODS)
def test_a_whole_round_has_personalized_scores(name: str, tmp_path: Path) -> None:
    federation = small_federation(name)
    plan = replace(federation.plan, settings=replace(federation.plan.settings, personalize="prior"))
    result = run_federation(replace(federation, plan=plan), tmp_path, {"preset": "smoke", "command": ""})
    assert result["scores"]["personalized"] and "personalize = 'prior', paper: 'none'" in result["deviations"]


def test_every_method_with_one_classifier_has_it() -> None:
    """FedBiCross and FOL personalize by training; OneSum has a prior of its own; references are in simulation only."""
    assert {name for name in names() if issubclass(load(name), OneClassifier)} == ONE
    others = {name for name in names() if "prior_temperature" in load(name).Settings.__dataclass_fields__} - ONE
    assert others == {"federated_factory"}  # which has one in one of its modes


def test_shares_that_are_claimed_are_capped_and_divided_out() -> None:
    """Two sites of 30 and 10 images, each with one class, and a third class that nobody has; nobody counts more than 40 %."""
    facts = ({"class_counts": [30, 0, 0]}, {"class_counts": [0, 10, 0]})
    uploads = [Upload(client, "", Payload({}, fact)) for client, fact in zip("ab", facts, strict=True)]
    settings = SitePrior("prior")
    found = with_class_shares(Release(Payload({})), uploads, settings, 1.0).shared.tensors[LEARNED].exp()
    assert found.tolist() == pytest.approx([0.75, 0.25, 1.0])
    found = with_class_shares(Release(Payload({})), uploads, settings, 0.4).shared.tensors[LEARNED].exp()
    assert found.tolist() == pytest.approx([0.5, 0.5, 1.0])  # of two, both alike
    plain = Release(Payload({}))
    assert with_class_shares(plain, uploads, SitePrior(), 1.0) is plain


@pytest.mark.parametrize("name", (*METHODS, "fedavg", "fedmitr", "falcon"))
def test_plans_that_do_not_use_it_keep_their_digests(name: str) -> None:
    assert not {"personalize", "prior_temperature"} & set(settings_as_json(resolve_settings(load(name), "cpu")))


def test_what_it_cannot_correct_is_named() -> None:
    task = small_federation("federated_factory").plan.task
    method = load("federated_factory")
    for changes in ({"mode": "peer"}, {"prior": "empirical"}):
        found = method(task, resolve_settings(method, "smoke", {"personalize": "prior", **changes})).problems(3)
        assert any("'personalize'" in line for line in found)
    ensemble = load("ensemble")
    settings = resolve_settings(ensemble, "smoke", {"personalize": "prior", "prior_temperature": 0})
    assert any("'prior_temperature'" in line for line in ensemble(task, settings).problems(3))
