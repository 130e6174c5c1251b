"""Every method that weighs sites by what they claim: above the plan's cap a larger claim changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from osfl.core.registry import is_reference, load, names
from osfl.core.types import Limits, Payload, Upload
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from tests.rounds.judging.uploads import sent

SUMS = ("onesum", "fedcgs")  # a claim is sums of so many images
WIDE = Limits(samples=10**12, class_samples=10**12)  # the gate lets every claim in: the cap alone is tested
WEIGHED: Mapping[str, Any] = {"ensemble": "class_count", "labels": "counts", "weighting": "samples"}
METHODS = sorted(name for name in names() if not is_reference(load(name)) and name != "local_only")


def claimed(payload: Payload, times: int, sums: bool) -> Payload:
    """The same upload of so many times as many images, as many of each class as before."""
    facts = dict(payload.facts)
    facts |= {"samples": times * facts["samples"]} if "samples" in facts else {}
    facts |= {"class_counts": [times * n for n in facts["class_counts"]]} if "class_counts" in facts else {}
    return Payload({name: times * t for name, t in payload.tensors.items()} if sums else payload.tensors, facts)


@pytest.mark.parametrize("name", METHODS)
def test_above_the_cap_a_larger_claim_changes_nothing(name: str) -> None:
    federation = small_federation(name, "iid", 4, samples=600 if name == "federated_factory" else 160)
    settings = federation.plan.settings
    for key, value in {**WEIGHED, **({"prior": "empirical"} if name == "federated_factory" else {})}.items():
        if hasattr(settings, key):
            settings = replace(settings, **{key: value})
    plan = replace(federation.plan, settings=settings, limits=WIDE)
    with compute_threads(1):
        method, ctx, payloads = sent(replace(federation, plan=plan))
        found = []
        for times in (128, 1024):  # exact in sums, too
            one = claimed(payloads["client-01"], times, name in SUMS)
            uploads = [Upload(c, "", one if c == "client-01" else payloads[c]) for c in sorted(payloads)]
            found.append(method.server_phase(uploads, ctx))
    assert found[0].shared.tensors.keys() == found[1].shared.tensors.keys()
    for client in ("", *found[0].personal):
        first, second = (one.for_client(client).tensors if client else one.shared.tensors for one in found)
        for key, tensor in first.items():
            torch.testing.assert_close(second[key], tensor, rtol=1e-4, atol=1e-5)
    if name == "ensemble":  # its release holds all models; how much each counts shows in the answers
        x = federation.test.images[:50].float() / 127.5 - 1
        one, other = (method.build(release.shared).eval()(x) for release in found)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
