"""A private round from images to report: what it states, noise that is drawn once, and what may be forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import RoundError
from osfl.core.registry import load
from osfl.core.result import Result
from osfl.core.settings import resolve_settings
from osfl.core.types import Privacy
from osfl.roles import coordinator, site
from osfl.rounds.folder import simulated_key
from osfl.rounds.forgetting import forget, verify
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.shadows import all_as_training, pools, seen_by, shadow_shard
from osfl.simulate.simulation import Simulation, prepare
from tests.roles.test_roles import keys, make_plan, make_sites

ONE = Machine(workers=1)
SMALL = Simulation(
    "onesum", "digits", 3, "iid", "smoke", changes={"filters": 4}, samples=240, image_size=8, privacy=Privacy(30.0, 1e-5)
)


def digests(result: Result) -> tuple[str, str]:
    return result["plan_digest"], result["release_digest"]


def test_a_private_round_states_what_ran_and_resumes_without_new_noise(tmp_path: Path) -> None:
    first = run(SMALL, tmp_path / "first", machine=ONE)
    stated = first["privacy"]
    assert (stated["epsilon"], stated["delta"], stated["noise"], stated["sites"]) == (30.0, 1e-5, "site", 3)
    assert "--epsilon 30.0 --delta 1e-05 --noise site" in first["command"]
    assert first["settings"]["dimensions"] == 256  # what a private round begins with; here d is less
    page = (tmp_path / "first" / "report" / "index.html").read_text(encoding="utf-8")
    card = (tmp_path / "first" / "model_card.md").read_text(encoding="utf-8")
    for text in ("epsilon 30, delta 1e-05, for one image more or less at one site", "nobody can repeat this round bit by bit"):
        assert text in page and text in card
    for name in ("release.safetensors", "results.json"):
        (tmp_path / "first" / name).unlink()
    assert digests(run(SMALL, tmp_path / "first", machine=ONE)) == digests(first)  # the uploads that are there are taken
    plan, release = digests(run(SMALL, tmp_path / "second", machine=ONE))
    assert plan == first["plan_digest"]
    assert release != first["release_digest"]


def test_a_site_sends_the_same_noise_again(tmp_path: Path) -> None:
    settings = resolve_settings(load("onesum"), "smoke", {"dimensions": 16})
    plan = replace(make_plan("onesum"), settings=settings, privacy=Privacy(4.0, 1e-5))
    folder, key = make_sites(tmp_path / "sites") / "north", keys()["north"]
    path = site.make_upload(plan, "north", folder, key, tmp_path / "work", machine=ONE)
    sent = path.read_bytes()
    assert site.make_upload(plan, "north", folder, key, tmp_path / "work", machine=ONE).read_bytes() == sent
    assert site.make_upload(plan, "north", folder, key, tmp_path / "other", machine=ONE).read_bytes() != sent


def test_a_site_whose_noise_others_rely_on_cannot_be_subtracted(tmp_path: Path) -> None:
    run(SMALL, tmp_path / "site", machine=ONE)
    forget(tmp_path / "site", clients=["client-01"], machine=ONE)
    assert all(finding.good for finding in verify(tmp_path / "site"))
    run(replace(SMALL, privacy=Privacy(30.0, 1e-5, "share")), tmp_path / "share", machine=ONE)
    with pytest.raises(RoundError, match="it would show the sums of who left with a share of the noise"):
        forget(tmp_path / "share", clients=["client-01"], machine=ONE)
    forget(tmp_path / "share", clients=["client-01"], withdraw=True, machine=ONE)
    assert not (tmp_path / "share" / "release.safetensors").exists()


@pytest.mark.parametrize("method", ["onesum", "fedcgs"])
def test_a_private_secure_sum_states_that_the_server_saw_the_sum_alone(method: str, tmp_path: Path) -> None:
    changes = {"filters": 4} if method == "onesum" else {}
    both = replace(SMALL, method=method, changes=changes, secure_sum=True, privacy=Privacy(60.0, 1e-5, "share", 1))
    result = run(both, tmp_path, machine=ONE)
    stated = result["privacy"]
    assert "--secure-sum" in result["command"] and "--noise share --colluders 1" in result["command"]
    assert (stated["epsilon"], stated["epsilon_site"], stated["sites"], stated["colluders"]) == (60.0, 60.0, 3, 1)
    assert stated["secure_sum"] and stated["adversary"].startswith(
        "the server and whoever gets the release, together with up to 1"
    )
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    card = (tmp_path / "model_card.md").read_text(encoding="utf-8")
    for text in ("Uploads were masked", "Another site with the release, which knows its own share, has epsilon 60"):
        assert text in page and text in card
    with pytest.raises(RoundError, match="nobody knows what it added"):
        forget(tmp_path, clients=["client-01"], machine=ONE)


def test_a_withdrawn_release_with_shared_noise_gets_no_second_one(tmp_path: Path) -> None:
    """Both together would show the sums of the site that left with a share of the noise alone."""
    shared = replace(SMALL, privacy=Privacy(50.0, 1e-5, "share"), quorum=2, changes={"filters": 4, "dimensions": 8})
    folder = tmp_path / "round"
    run(shared, folder, machine=ONE)
    forget(folder, clients=[list(coordinator.status(folder).delivered)[-1]], withdraw=True, machine=ONE)
    assert "open a new round" in coordinator.status(folder).waits_for and not coordinator.status(folder).ready
    with pytest.raises(RoundError, match="withdrawn"):
        coordinator.make_release(folder, simulated_key(0, "server"), machine=ONE)
    with pytest.raises(RoundError, match="withdrawn"):
        run(shared, folder, machine=ONE)


def test_an_audit_of_noised_sums_takes_held_out_images_for_members(tmp_path: Path) -> None:
    """The sums are of all images of a site; elsewhere held-out images are what was not used."""
    private, open_ = (replace(SMALL, privacy=privacy) for privacy in (SMALL.privacy, None))
    for simulation, added in ((private, True), (open_, False)):
        federation = prepare(simulation)
        method = load("onesum")(federation.plan.task, federation.plan.settings)
        assert method.adds_held_out(federation.plan) is added
    shard = federation.shards[0]
    whole = all_as_training(shard)
    assert len(shard.val) > 0 == len(whole.val) and len(whole.train) == len(shard.train) + len(shard.val)
    assert whole.digest != shard.digest  # features of both are kept by it
    (pool,) = pools([whole], federation.test, 100, 0)
    shadow = shadow_shard(pool, seen_by(pool, 2, 0)[0], whole)
    assert len(shadow.val) == 0  # or a shadow's sums would be of the images that it did not see, too
