"""`[privacy]` in a plan: read, written, left out of the digest where there is none, and refused where it would be untrue."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, plan_from, read_plan, write_plan
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Limits, Plan, Privacy, Task, Topology

TASK = Task("cells", ("basophil", "eosinophil", "monocyte"), (1, 8, 8))


def make_plan(privacy: Privacy | None, method: str = "onesum", **changes: Any) -> Plan:
    settings = resolve_settings(load(method), "smoke", {**load(method).PRIVATE, **changes.pop("settings", {})})
    return Plan(TASK, method, settings, ("north", "south", "west"), privacy=privacy, **changes)


@pytest.mark.parametrize(("noise", "colluders"), [("site", 0), ("share", 0), ("share", 2)])
def test_a_written_plan_is_read_with_the_same_digest(noise: Any, colluders: int, tmp_path: Path) -> None:
    plan = make_plan(Privacy(8.0, 1e-5, noise, colluders))
    assert ("colluders" in str(plan.as_json())) is bool(colluders)  # plans of before keep their digests
    path = tmp_path / "plan.toml"
    path.write_text(write_plan(plan), encoding="utf-8")
    found = read_plan(path)
    assert (found.privacy, found.digest) == (plan.privacy, plan.digest)
    path.write_text(write_plan(plan).replace("epsilon = 8.0", "epsilon = 8"), encoding="utf-8")
    assert read_plan(path).digest == plan.digest


def test_a_plan_without_privacy_does_not_mention_it() -> None:
    assert "privacy" not in make_plan(None).as_json()
    assert "[privacy]" not in write_plan(make_plan(None))
    assert make_plan(None).digest != make_plan(Privacy(8.0, 1e-5)).digest


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"epsilon": 0, "delta": 1e-5}, "'privacy.epsilon': expected a number above 0, got 0"),
        ({"epsilon": -1.0, "delta": 1e-5}, "'privacy.epsilon'"),
        ({"epsilon": float("inf"), "delta": 1e-5}, "'privacy.epsilon'"),
        ({"epsilon": True, "delta": 1e-5}, "'privacy.epsilon'"),
        ({"epsilon": "8", "delta": 1e-5}, "'privacy.epsilon'"),
        ({"epsilon": 8, "delta": 0}, "'privacy.delta': expected a number above 0 and below 1, got 0"),
        ({"epsilon": 8, "delta": 1.0}, "'privacy.delta'"),
        ({"epsilon": 8}, "'privacy.delta' is missing"),
        ({"delta": 1e-5}, "'privacy.epsilon' is missing"),
        ({"epsilon": 8, "delta": 1e-5, "noise": "none"}, "'privacy.noise': expected 'site' or 'share', got 'none'"),
        ({"epsilon": 8, "delta": 1e-5, "noise": "share", "colluders": 1.5}, "'privacy.colluders': expected a whole number"),
        ({"epsilon": 8, "delta": 1e-5, "epsilom": 1}, "unknown key 'privacy.epsilom'. Did you mean 'privacy.epsilon'"),
    ],
)
def test_a_table_that_says_something_else_is_refused(table: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text.replace("[", r"\[")):
        plan_from({**make_plan(None).as_json(), "privacy": table}, "plan.toml")


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (make_plan(Privacy(0.0, 1e-5)), "privacy.epsilon: expected a number above 0"),
        (make_plan(Privacy(8.0, 2.0)), "privacy.delta: expected a number above 0 and below 1"),
        (make_plan(Privacy(8.0, 1e-5), "local_only"), "what sites of local_only send is not a sum that noise is added to"),
        (make_plan(Privacy(8.0, 1e-5), "fedpft", settings={"dimensions": 0}), "set dimensions=64"),
        (make_plan(Privacy(8.0, 1e-5, "share"), "falcon"), "privacy.noise: the server uses what each site sends by itself"),
        (
            make_plan(Privacy(8.0, 1e-5), "federated_factory", settings={"factory": "edm"}),
            "kind 'edm' is trained on the images",
        ),
        (make_plan(Privacy(8.0, 1e-5), "federated_factory", settings={"symmetry": "flip"}), "set symmetry=none"),
        (make_plan(Privacy(8.0, 1e-5), "federated_factory", settings={"mode": "peer"}), "with .privacy. set mode=central"),
        (make_plan(Privacy(8.0, 1e-5), "fedavg", settings={"architecture": "cnn"}), "batch norm of 'cnn' mixes the images"),
        (
            make_plan(Privacy(8.0, 1e-5), "fedavg", settings={"clip": 0.0}),
            "setting 'clip': with .privacy. the gradient of each",
        ),
        (make_plan(Privacy(8.0, 1e-5), "fedavg", settings={"augment": "flip"}), "setting 'augment'"),
        (make_plan(Privacy(8.0, 1e-5), "ensemble", settings={"ensemble": "odds"}), "the server needs each site.s class counts"),
        (make_plan(Privacy(8.0, 1e-5, "share"), "fedavg"), "privacy.noise: each site trains with all of the noise"),
        (make_plan(Privacy(8.0, 1e-5), "fedcgs", settings={"dimensions": 0}), "setting 'dimensions': .privacy. needs sums"),
        (make_plan(Privacy(8.0, 1e-5), "fedcgs", settings={"covariance": "total"}), "set covariance=within"),
        (make_plan(Privacy(8.0, 1e-5), settings={"dimensions": 0}), "set dimensions=256"),
        (
            make_plan(Privacy(8.0, 1e-5), settings={"head": "ridge"}),
            "setting 'head': with .privacy. expected 'lda'",
        ),
        (make_plan(Privacy(8.0, 1e-5), settings={"by_class": True}), "setting 'by_class'"),
        (make_plan(Privacy(8.0, 1e-5), settings={"send": "smaller"}), "setting 'send'"),
        (make_plan(Privacy(8.0, 1e-5), settings={"shrinkage": "0.3"}), "setting 'shrinkage'"),
        (make_plan(Privacy(8.0, 1e-5, "share"), late=True), "round.late: two releases that differ by one site"),
        (
            make_plan(
                Privacy(8.0, 1e-5), "fedavg", secure_sum=True, limits=Limits(share=1.0), settings={"weighting": "uniform"}
            ),
            "privacy: a masked model does not say how it was trained",
        ),
        (make_plan(Privacy(8.0, 1e-5), topology=Topology("ring")), "privacy: with a topology sites would draw noise anew"),
        (
            make_plan(Privacy(8.0, 1e-5, "share", 3)),
            "privacy.colluders: expected fewer than the 3 sites of the smallest sum",
        ),
        (make_plan(Privacy(8.0, 1e-5, "share", 2), quorum=2), "fewer than the 2 sites of the smallest sum, got 2"),
        (make_plan(Privacy(8.0, 1e-5, "site", 1)), "privacy.colluders: each site adds all of the noise"),
        (make_plan(Privacy(8.0, 1e-5, "share", -1)), "privacy.colluders: expected a whole number of at least 0, got -1"),
        (make_plan(Privacy(1e-7, 1e-9)), "privacy.epsilon: its noise is more than whole numbers of 64 bits hold"),
    ],
)
def test_a_plan_whose_epsilon_would_be_untrue_is_refused(plan: Plan, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        check_plan(plan)
    assert "onesum" in str(caught.value.fix)
    check_plan(replace(make_plan(Privacy(8.0, 1e-5)), late=True))  # each site's noise is enough by itself


def test_a_secure_sum_of_noisy_terms_is_a_plan_that_nobody_joins_late() -> None:
    for privacy in (Privacy(8.0, 1e-5), Privacy(8.0, 1e-5, "share"), Privacy(8.0, 1e-5, "share", 2)):
        plan = make_plan(privacy, secure_sum=True, limits=Limits(share=1.0))
        check_plan(plan)
        with pytest.raises(UsageError, match="a secure sum has no late sites"):
            check_plan(replace(plan, late=True))
