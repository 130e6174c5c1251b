"""Every method's uploads are judged; small rounds of honest sites, and one of a site that lies."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from benchmarks import lying_sites
from osfl.core.method import Context
from osfl.core.registry import is_reference, load, names
from osfl.core.types import Payload, Probed, Upload
from osfl.rounds.judging.judge import judge
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from tests.rounds.judging.uploads import lying, sent

NOTHING = ("local_only",)  # its sites send nothing
PROBED = {name for name in names() if not is_reference(load(name)) and name not in NOTHING}


@pytest.mark.parametrize("method", sorted(PROBED))
def test_every_method_has_something_that_can_be_compared(method: str) -> None:
    """A new method without it is judged by sizes and copies alone, and has to be named here."""
    assert load(method).provides("probed")
    with compute_threads(1):
        instance, ctx, payloads = sent(small_federation(method))
        probed = [instance.probed(Upload(client, "", payload), ctx) for client, payload in payloads.items()]
    comparable = [one for one in probed if one.classifier is not None or one.points is not None]
    assert comparable  # a site of few images may have nothing
    for one in comparable:
        if one.points is not None:
            assert one.labels is not None and len(one.labels) == len(one.points)
            assert bool(one.points.double().isfinite().all())


@pytest.mark.parametrize("method", ["onesum", "fedcgs", "fedpft", "federated_factory"])
def test_a_site_that_renames_classes_is_named_and_honest_ones_are_not(method: str) -> None:
    federation = small_federation(method, "iid", 4, samples=800)
    with compute_threads(1):
        instance, ctx, honest = sent(federation)
        lies = {**honest, "client-02": lying(instance, federation, "client-02")}
        fine, found = (judge(instance, [Upload(c, "", p) for c, p in all_of.items()], ctx) for all_of in (honest, lies))
    assert fine == [] and {one.client for one in found} == {"client-02"}


def test_moments_of_no_images_are_unusable() -> None:
    federation = small_federation("fedcgs", "iid", 4, samples=200)
    with compute_threads(1):
        instance, ctx, honest = sent(federation)
        gram = honest["client-01"].tensors["gram"]
        changed = Payload({**honest["client-01"].tensors, "gram": -gram}, honest["client-01"].facts)
        found = judge(instance, [Upload(c, "", p) for c, p in {**honest, "client-01": changed}.items()], ctx)
    assert ("client-01", "unusable") in {(one.client, one.rule) for one in found}


@pytest.mark.parametrize(("case", "seed"), [("FederatedFactory", 509), ("OneSum", 509)])
def test_a_lie_that_lowers_an_honest_site_is_named(case: str, seed: int) -> None:
    """The liar is one of few who know an honest site's classes, so that both are contradicted alike until one is left out."""
    made = lying_sites.federation(case, "digits", 5, "dirichlet:0.3", seed)
    with compute_threads(1):
        method, ctx, honest = sent(made)
        lies = {**honest, "client-01": lying(method, made, "client-01")}
        uploads, fine = ([Upload(c, "", p) for c, p in all_of.items()] for all_of in (lies, honest))
        assert {one.client for one in judge(method, uploads, ctx)} == {"client-01"} and not judge(method, fine, ctx)


def test_no_more_than_one_network_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    networks: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    federation, most = small_federation("fedavg", "iid", 6, samples=200), 0
    with compute_threads(1):
        method, ctx, payloads = sent(federation)
        probed = method.probed

        def counted(upload: Upload, ctx: Context) -> Probed:
            nonlocal most
            gc.collect()
            most = max(most, len(networks))
            one = probed(upload, ctx)
            assert one.classifier is not None
            networks.add(one.classifier)
            return one

        monkeypatch.setattr(method, "probed", counted)
        assert judge(method, [Upload(client, "", payload) for client, payload in payloads.items()], ctx) == []
    assert most == 0  # when the next one is made, the one before is gone


def test_three_uploads_are_not_compared() -> None:
    federation = small_federation("onesum", "iid", 3, samples=400)
    with compute_threads(1):
        instance, ctx, honest = sent(federation)
        lies = {**honest, "client-02": lying(instance, federation, "client-02")}
        assert judge(instance, [Upload(c, "", p) for c, p in lies.items()], ctx) == []


def test_of_many_sites_a_panel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.rounds.judging.probes.PANEL", 4)
    federation = small_federation("onesum", "iid", 6, samples=800)
    with compute_threads(1):
        instance, ctx, honest = sent(federation)
        for liar in honest:
            lies = {**honest, liar: lying(instance, federation, liar)}
            found = judge(instance, [Upload(c, "", p) for c, p in lies.items()], ctx)
            assert {one.client for one in found} == {liar}
