"""Every method can be audited: its uploads say something about images, and whole audits of what each kind exposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from osfl.core.method import Context
from osfl.core.registry import is_reference, load, names
from osfl.core.types import Privacy, Upload
from osfl.evaluation.privacy.reconstruction import Effort
from osfl.evaluation.privacy.signals import upload_signals
from osfl.rounds.exposure import BOUND
from osfl.runtime.payloads import PayloadCache
from osfl.runtime.workers import compute_threads
from osfl.simulate.audit import Attempt, audit
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare

NOTHING = {"local_only"}  # methods that send nothing
QUICK = Attempt(shadows=2, canaries=4, images=20, inversion=5)
ONE_SHOT = [name for name in names() if not is_reference(load(name))]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> PayloadCache:
    """Methods that upload the same model train it once."""
    return PayloadCache(tmp_path_factory.mktemp("kept"))


@pytest.mark.parametrize("name", ONE_SHOT)
def test_every_upload_says_something_about_images(name: str, kept: PayloadCache, tmp_path: Path) -> None:
    federation = small_federation(name, "iid", 2, samples=300)
    plan, shard = federation.plan, federation.shards[0]
    method = load(name)(plan.task, plan.settings)
    ctx = Context(plan, torch.device("cpu"), scratch=tmp_path, get_or_compute=kept.get_or_compute)
    with compute_threads(1):
        upload = Upload(shard.client, plan.digest, method.client_phase(shard, ctx))
        found = upload_signals(method, upload, federation.test.subset(torch.arange(12)), ctx) if name not in NOTHING else {}
    assert bool(found) == (name not in NOTHING), "nothing in an upload can be attacked: define upload_model or exposed"
    assert all(len(values) == 12 and np.isfinite(values).all() for values in found.values())


@pytest.mark.parametrize(
    ("name", "signals", "made"),
    [
        ("fedavg", {"loss", "confidence"}, "model inversion"),
        ("fedcgs", {"loss", "confidence", "nearness", "leverage", "row"}, ""),
        ("federated_factory", {"nearness", "span"}, "samples"),
    ],
)
def test_a_whole_audit(name: str, signals: set[str], made: str, tmp_path: Path) -> None:
    simulation = Simulation(name, "digits", 2, "iid", "smoke", samples=160, image_size=8)
    run(simulation, tmp_path)
    result = audit(tmp_path, prepare(simulation), attempt=QUICK, effort=Effort(steps=2, most=10))
    found = result["audit"]
    uploads = [row for row in found["membership"] if row["party"] == "server" and row["of"] == "all"]
    assert {row["signal"] for row in uploads} <= signals and {"lira", "rmia"} <= {row["attack"] for row in uploads}
    assert any(row["party"] == "outsider" for row in found["membership"])
    assert all(row["members"] == row["others"] for row in found["membership"])
    assert {row["how"] for row in found["rebuilt"]} == ({made} if made else set())
    assert found["replayed"] is True  # the seed is public: who guesses the images can check the guess
    assert all(row["found_unplanted"] <= row["planted"] and row["planted"] == 4 for row in found["canaries"])
    assert len(found["verdict"]) >= 2 and len(found["not_shown"]) >= 2
    if name == "fedcgs":  # fewer images than features: the second moments tell members from others
        assert max(row["auc"]["value"] for row in uploads if row["signal"] == "leverage") > 0.99
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    card = (tmp_path / "model_card.md").read_text(encoding="utf-8")
    assert "Privacy attacks" in page and "Canaries" in page
    assert "Membership inference by server, uploads" in card and "No privacy audit" not in card


@pytest.mark.parametrize(("readable", "filters", "read"), [("stop", 24, True), ("send", 24, True), ("stop", 1, False)])
def test_the_audit_shows_rows_of_second_moments_that_are_an_image(
    readable: str, filters: int, read: bool, tmp_path: Path
) -> None:
    """Also where the plan accepts them, which stops nobody; with two features nobody has one alone."""
    changes = {"filters": filters, "readable": readable, "thumbnail": 0}
    simulation = Simulation("onesum", "digits", 2, "iid", "smoke", samples=60, image_size=8, changes=changes)
    run(simulation, tmp_path)
    result = audit(tmp_path, prepare(simulation), attempt=Attempt(shadows=0, images=10, inversion=1))
    rows = {row["of"]: row["ratio"] for row in result["audit"]["readout"] if row["what"] == "row of second moments"}
    assert (min(rows.values(), default=1.0) < BOUND) is read
    assert any("can be read out of" in sentence for sentence in result["audit"]["verdict"]) is read
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert ("nearest row of second moments: distance ratio" in page) is bool(rows)


def test_canaries_are_found_in_an_overfitted_round_and_not_before_they_are_planted(tmp_path: Path) -> None:
    overfitted = {"architecture": "cnn-w16", "epochs": 40, "weight_decay": 0.0, "schedule": "constant"}
    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", changes=overfitted, samples=400, image_size=8)
    run(simulation, tmp_path)
    attempt = Attempt(shadows=2, canaries=10, images=20, inversion=1)
    (found,) = audit(tmp_path, prepare(simulation), attempt=attempt)["audit"]["canaries"]
    assert found["planted"] == 10 and found["found"] >= 9
    assert found["false_alarms"]["value"] <= 0.01 and found["found_unplanted"] == 0


def test_an_interrupted_audit_goes_on_where_it_was(tmp_path: Path) -> None:
    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=120, image_size=8)
    run(simulation, tmp_path / "a")
    seen: list[str] = []

    def stop(what: str, done: int, total: int) -> None:
        seen.append(what)
        if what == "membership" and seen.count(what) == 1:
            raise KeyboardInterrupt

    quick = Attempt(shadows=2, canaries=0, images=10, inversion=1)
    with pytest.raises(KeyboardInterrupt):
        audit(tmp_path / "a", prepare(simulation), attempt=quick, progress=stop)
    trained = seen.count("client-01 trains")
    result = audit(tmp_path / "a", prepare(simulation), attempt=quick, progress=stop)
    # kept: the two shadow phases of this client; made now: the one that is replayed
    assert seen.count("client-01 trains") + seen.count("client-02 trains") <= 2 * trained + 1
    assert result["audit"]["shadows"] == 2 and not (tmp_path / "a" / "scratch").exists()


def test_no_attack_exceeds_the_bound_of_a_private_round(tmp_path: Path) -> None:
    changes = {"architecture": "cnn-w8-g2", "batch_size": 32}
    private = Simulation(
        "fedavg", "digits", 2, "iid", "smoke", samples=480, image_size=8, changes=changes, privacy=Privacy(1.0, 1e-3)
    )
    run(private, tmp_path)
    found = audit(tmp_path, prepare(private), attempt=replace(QUICK, canaries=0, images=200))["audit"]
    assert found["membership"] and not any(row["exceeds_bound"] for row in found["membership"])
    assert all(row["others"] >= 100 for row in found["membership"] if row["of"] == "all")  # enough to tell 1 %
    assert found["replayed"] is False  # noise cannot be repeated


def test_references_and_masked_uploads_say_what_was_not_attacked(tmp_path: Path) -> None:
    for name, text, options in (
        ("centralized", "reference", {}),
        ("fedavg", "masked", {"secure_sum": True, "changes": {"weighting": "uniform"}}),
    ):
        simulation = Simulation(name, "digits", 2, "iid", "smoke", samples=80, image_size=8, **options)  # type: ignore[arg-type]
        run(simulation, tmp_path / name)
        found = audit(tmp_path / name, prepare(simulation), attempt=QUICK)["audit"]
        assert {row["party"] for row in found["membership"]} == {"outsider"} and found["replayed"] is None
        assert any(text in sentence for sentence in found["not_shown"])
