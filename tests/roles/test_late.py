"""Late joining: an upload that comes after the release is added, and the next release is that of a round with all in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import RoundError, UsageError
from osfl.core.plan import check_plan, plan_from, read_plan, write_plan
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Plan, Privacy, Task
from osfl.roles import coordinator, site
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.provenance import Check, Known, examine
from osfl.rounds.state import read_policy
from osfl.runtime.payloads import from_raw, to_raw
from osfl.wire.bundle import pack
from osfl.wire.gate import verify_release
from osfl.wire.inbox import Inbox
from osfl.wire.signing import SigningKey
from tests.roles.test_roles import ONE, keys, make_sites, opened

CLIENTS = ("north", "south", "west")
Keys = dict[str, SigningKey]


def make_plan(method: str = "onesum", late: bool = True, quorum: int = 1) -> Plan:
    task = Task("cells", ("basophil", "eosinophil", "monocyte"), (1, 8, 8))
    changes = {"readable": "send"} if method == "onesum" else {}  # sites of 36 images
    return Plan(task, method, resolve_settings(load(method), "smoke", changes), CLIENTS, seed=3, quorum=quorum, late=late)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> tuple[Keys, dict[str, Path]]:
    """Every site's upload for the plan that lets sites join late."""
    folder, known = tmp_path_factory.mktemp("late"), keys()
    sites = make_sites(folder / "sites", images=20)
    made = {c: site.make_upload(make_plan(), c, sites / c, known[c], folder / c, machine=ONE) for c in CLIENTS}
    return known, made


def started(folder: Path, bundles: tuple[Keys, dict[str, Path]], *clients: str) -> tuple[Path, str]:
    """A round in which these have delivered, and its release."""
    known, files = bundles
    fl_round = opened(folder, make_plan(), known)
    for client in clients:
        coordinator.receive(fl_round, files[client])
    return fl_round, coordinator.make_release(fl_round, known["server"], machine=ONE)


def joined(fl_round: Path, bundles: tuple[Keys, dict[str, Path]], client: str) -> str:
    known, files = bundles
    coordinator.receive(fl_round, files[client])
    return coordinator.make_release(fl_round, known["server"], machine=ONE)


def origin(fl_round: Path) -> set[str]:
    policy = read_policy(fl_round)
    return set(verify_release(fl_round / "release.safetensors", policy.server, policy.plan).made_from)


def tensors(fl_round: Path) -> dict[str, bytes]:
    policy = read_policy(fl_round)
    release = verify_release(fl_round / "release.safetensors", policy.server, policy.plan)
    return {name: bytes(tensor.data) for name, tensor in release.tensors.items()}


def test_the_next_release_is_that_of_a_round_with_all_in_time(tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]) -> None:
    _, expected = started(tmp_path / "whole", bundles, *CLIENTS)
    fl_round, first = started(tmp_path / "round", bundles, "south")
    assert origin(fl_round) == {"upload/south"}
    second = joined(fl_round, bundles, "west")
    found = coordinator.status(fl_round)
    assert origin(fl_round) == {"upload/south", "upload/west"} and found.supersedes == first and not found.late
    assert joined(fl_round, bundles, "north") == expected != second
    assert tensors(fl_round) == tensors(tmp_path / "whole")
    assert coordinator.status(fl_round).supersedes == second
    assert coordinator.make_release(fl_round, bundles[0]["server"], machine=ONE) == expected  # nobody new: it stands


def test_a_site_may_take_each_release(tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]) -> None:
    fl_round, _ = started(tmp_path / "round", bundles, "south", "north")
    server, work = bundles[0]["server"].public_hex, tmp_path / "work"
    command = (make_plan(), "south", fl_round / "release.safetensors", None, server, work)
    before = site.take_release(*command, machine=ONE).read_bytes()
    joined(fl_round, bundles, "west")
    assert site.take_release(*command, machine=ONE).read_bytes() != before


def test_the_superseded_release_is_named_and_is_no_forgery(tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]) -> None:
    fl_round, first = started(tmp_path / "round", bundles, "south", "north")
    old = tmp_path / "old.safetensors"
    old.write_bytes((fl_round / "release.safetensors").read_bytes())
    last = joined(fl_round, bundles, "west")
    policy = read_policy(fl_round)
    known = Known(policy.plan, policy.server, policy)
    before, after = examine([old, fl_round / "release.safetensors"], known)
    output = Check("a release of this round", "yes", f"superseded by {last}, which is made from upload/west, too")
    assert before.good and before.digest == first and output in before.checks
    assert after.good and not any("superseded" in check.why for check in after.checks)


def test_forgetting_who_joined_late_gives_the_release_before(tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]) -> None:
    fl_round, first = started(tmp_path / "round", bundles, "south", "north")
    joined(fl_round, bundles, "west")
    certificate = forget(fl_round, bundles[0]["server"], clients=["west"], machine=ONE)
    assert certificate["release"]["after"] == first
    assert all(finding.good for finding in verify(fl_round))


def test_who_joins_after_a_forgetting_keeps_its_proof(tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]) -> None:
    """The certificate names an older release; the one that stands is made again, and has nobody who was forgotten."""
    _, expected = started(tmp_path / "never", bundles, "north", "west")
    fl_round, first = started(tmp_path / "round", bundles, "south", "north")
    old = tmp_path / "old.safetensors"
    old.write_bytes((fl_round / "release.safetensors").read_bytes())
    certificate = forget(fl_round, bundles[0]["server"], clients=["south"], machine=ONE)
    assert certificate["release"]["before"] == first
    assert joined(fl_round, bundles, "west") == expected
    found = {finding.check: finding for finding in verify(fl_round)}
    assert all(finding.good for finding in found.values()) and "joined after the certified" in found["release"].detail
    forget(fl_round, bundles[0]["server"], clients=["west"], machine=ONE)
    assert all(finding.good for finding in verify(fl_round))
    policy = read_policy(fl_round)
    (verdict,) = examine([old], Known(policy.plan, policy.server, policy, withdrawn=policy.withdrawn))
    assert not verdict.good


def test_a_superseded_release_is_withdrawn_with_its_upload(tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]) -> None:
    fl_round, _ = started(tmp_path / "round", bundles, "south", "north")
    old = tmp_path / "old.safetensors"
    old.write_bytes((fl_round / "release.safetensors").read_bytes())
    joined(fl_round, bundles, "west")
    forget(fl_round, bundles[0]["server"], clients=["south"], machine=ONE)
    policy = read_policy(fl_round)
    (verdict,) = examine([old], Known(policy.plan, policy.server, policy, withdrawn=policy.withdrawn))
    assert not verdict.good and "withdrawn by forgotten/0001.json" in verdict.checks[-1].why


def test_a_late_upload_that_is_refused_leaves_the_release_as_it_is(
    tmp_path: Path, bundles: tuple[Keys, dict[str, Path]]
) -> None:
    known, files = bundles
    fl_round, first = started(tmp_path / "round", bundles, "south")
    good = Inbox(tmp_path / "aside", read_policy(fl_round)).receive(files["west"])
    bundle = Inbox(tmp_path / "aside", read_policy(fl_round)).bundle(good.client)
    tensors = from_raw(bundle.tensors)
    bad = pack("upload", "west", bundle.plan, to_raw({**tensors, "gram": -tensors["gram"]}), dict(bundle.facts), known["west"])
    coordinator.receive(fl_round, bad)
    with pytest.raises(RoundError, match="not those of any images") as caught:
        coordinator.make_release(fl_round, known["server"], machine=ONE)
    assert caught.value.client == "west"
    found = coordinator.status(fl_round)
    assert found.release == first and found.joining == ["west"] and found.failed and found.failed["client"] == "west"
    coordinator.receive(fl_round, files["north"])
    with pytest.raises(UsageError, match="the release has 'south'"):
        coordinator.make_release(fl_round, known["server"], machine=ONE, without=["south"])
    coordinator.make_release(fl_round, known["server"], machine=ONE, without=["west"])
    found = coordinator.status(fl_round)
    assert (
        origin(fl_round) == {"upload/south", "upload/north", "excluded/west"}
        and list(found.left_out) == ["west"]
        and not found.joining
    )
    assert coordinator.make_release(fl_round, known["server"], machine=ONE) == found.release != first


def test_where_the_plan_does_not_allow_it_a_late_upload_stays_out(tmp_path: Path) -> None:
    plan, known, sites = make_plan(late=False), keys(), make_sites(tmp_path / "sites", images=20)
    fl_round = opened(tmp_path / "round", plan, known)
    digests = []
    for client in ("north", "south"):
        coordinator.receive(
            fl_round, site.make_upload(plan, client, sites / client, known[client], tmp_path / "w", machine=ONE)
        )
        digests.append(coordinator.make_release(fl_round, known["server"], machine=ONE))
    found = coordinator.status(fl_round)
    assert digests[0] == digests[1] and list(found.late) == ["south"] and not found.joining and not found.supersedes


def test_a_plan_says_who_may_join_late(tmp_path: Path) -> None:
    plain, late = make_plan(late=False, quorum=0), make_plan()
    assert "round" not in plain.as_json() and late.as_json()["round"]["late"] is True and late.digest != plain.digest
    for plan in (plain, late):
        (tmp_path / "plan.toml").write_text(write_plan(plan))
        assert read_plan(tmp_path / "plan.toml") == plan
    assert "late" not in write_plan(make_plan("ensemble", late=False))
    with pytest.raises(UsageError, match=r"round\.late: the release of ensemble is no function of a sum"):
        check_plan(make_plan("ensemble"))
    with pytest.raises(UsageError, match=r"'round\.late': expected true or false"):
        plan_from({**plain.as_json(), "round": {"late": "yes"}}, "plan")


def test_with_shares_of_noise_there_is_one_release_also_where_its_file_is_gone(tmp_path: Path) -> None:
    """Two releases with and without a site would show its sums with a third of the noise."""
    known, sites = keys(), make_sites(tmp_path / "sites", images=20)
    settings = resolve_settings(load("onesum"), "smoke", load("onesum").PRIVATE)
    plan = replace(make_plan(late=False, quorum=2), settings=settings, privacy=Privacy(1e3, 1e-5, "share"))
    check_plan(plan)
    fl_round = opened(tmp_path / "round", plan, known)
    for client in CLIENTS:
        made = site.make_upload(plan, client, sites / client, known[client], tmp_path / client, machine=ONE)
        coordinator.receive(fl_round, made)
    first = coordinator.make_release(fl_round, known["server"], machine=ONE)
    (fl_round / "release.safetensors").unlink()
    with pytest.raises(RoundError, match="it gets no second one"):
        coordinator.make_release(fl_round, known["server"], machine=ONE, without=["west"])
    assert not (fl_round / "release.safetensors").exists()
    (fl_round / "journal.jsonl").write_text("")  # nobody remembers who was to be left out
    assert coordinator.make_release(fl_round, known["server"], machine=ONE) == first  # of the same uploads it is no second one
