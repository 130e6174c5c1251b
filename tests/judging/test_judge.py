"""Every method's uploads are judged; small rounds of honest sites, and one of a site that lies."""

from __future__ import annotations

import pytest

from osfl.core.registry import is_reference, load, names
from osfl.core.types import Payload, Upload
from osfl.judging.judge import judge
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from tests.judging.uploads import lying, sent

NOTHING = ("local_only",)  # its sites send nothing
PROBED = {name for name in names() if not is_reference(load(name)) and name not in NOTHING}


@pytest.mark.parametrize("method", sorted(PROBED))
def test_every_method_says_what_can_be_probed(method: str) -> None:
    """A new method that says nothing is judged by sizes and copies alone, and has to say so here."""
    assert load(method).provides("probed")
    with compute_threads(1):
        instance, ctx, payloads = sent(small_federation(method))
        probed = [instance.probed(Upload(client, "", payload), ctx) for client, payload in payloads.items()]
    speak = [one for one in probed if one.classifier is not None or one.points is not None]
    assert speak  # a site of few images may have nothing to say
    for one in speak:
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


def test_three_uploads_are_not_compared() -> None:
    federation = small_federation("onesum", "iid", 3, samples=400)
    with compute_threads(1):
        instance, ctx, honest = sent(federation)
        lies = {**honest, "client-02": lying(instance, federation, "client-02")}
        assert judge(instance, [Upload(c, "", p) for c, p in lies.items()], ctx) == []


def test_of_many_sites_a_panel_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.judging.probes.PANEL", 3)
    federation = small_federation("onesum", "iid", 5, samples=800)
    with compute_threads(1):
        instance, ctx, honest = sent(federation)
        for liar in honest:
            lies = {**honest, liar: lying(instance, federation, liar)}
            found = judge(instance, [Upload(c, "", p) for c, p in lies.items()], ctx)
            assert {one.client for one in found} == {liar}
