"""Forgetting: exact, for clients, classes and cells, and refused with a reason where it cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import OsflError, Rejected, RoundError, UsageError
from osfl.deploy.flower.app import DONE
from osfl.roles import coordinator
from osfl.rounds.folder import existing_round, simulated_key
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.provenance import Known, examine
from osfl.rounds.state import INTENT, read_policy
from osfl.runtime.payloads import to_raw
from osfl.simulate.checks import files_with, never_joined, small_federation, windows_of
from osfl.simulate.compare import compare
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation
from osfl.wire.bundle import pack
from osfl.wire.inbox import Inbox
from tests.rounds.forgetting.conftest import ABOUT, APART, ONE, digest, failed, real_round

# --- exact --------------------------------------------------------------------------------------------------------------


def test_one_after_the_other_is_both_at_once_is_never_joined(rounds: Any, tmp_path: Path) -> None:
    one, both = rounds("ensemble", tmp_path / "one", clients=4), rounds("ensemble", tmp_path / "both", clients=4)
    for client in ("client-04", "client-02"):
        last = forget(one, clients=[client], machine=ONE)
    at_once = forget(both, clients=["client-02", "client-04"], machine=ONE)
    never = never_joined(small_federation("ensemble", clients=4), both / "inbox", tmp_path / "never")
    assert last["release"]["after"] == at_once["release"]["after"] == never
    assert last["number"] == 2 and failed(one) == failed(both) == []


def test_the_certificate_says_what_to_replace_and_nothing_is_left(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    before = digest(folder)
    body = (folder / "inbox" / "client-02.safetensors").read_bytes()[-4000:]
    windows = [body[i : i + 32] for i in range(0, 3968, 64)]
    assert files_with(windows, folder)
    certificate = forget(folder, clients=["client-02"], machine=ONE)
    assert certificate["release"] == {"before": before, "after": digest(folder)}
    assert [row["who"] for row in certificate["replace"]] == ["client-01", "client-02", "client-03"]
    assert {row["delete"] for row in certificate["replace"]} == {before}
    assert [row["fetch"] for row in certificate["replace"]] == [digest(folder), "", digest(folder)]
    assert not files_with(windows, folder)
    named = {p.name for p in folder.rglob("*") if p.is_file() and b"client-02" in p.read_bytes()}
    assert named == {"plan.json", "enrolled.json", "0001.json"} and set(certificate["still_named"]) >= named - {"0001.json"}
    for name in ("results.json", "model_card.md", "report", "models", "figures", "scratch"):
        assert not (folder / name).exists()


def test_the_same_options_evaluate_what_is_left(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    certificate = forget(folder, clients=["client-02"], machine=ONE)
    assert certificate["again"] == ABOUT["command"]
    result = run_federation(small_federation("ensemble"), folder, ABOUT, machine=ONE)
    assert result["release_digest"] == certificate["release"]["after"]
    assert [row["client"] for row in result["clients"]] == ["client-01", "client-03"]
    assert set(result["costs"]["upload_bytes_by_client"]) == set(result["costs"]["download_bytes_by_client"])
    assert failed(folder) == []


def test_a_comparison_keeps_models_on_a_shelf_that_the_certificate_names(tmp_path: Path) -> None:
    simulation = Simulation("fedavg", "digits", 3, "dirichlet:0.5", "smoke", samples=120, image_size=8)
    compare(simulation, ["fedavg", "ensemble"], [0], tmp_path / "pair", machine=ONE)
    certificate = forget(tmp_path / "pair" / "ensemble" / "seed0", clients=["client-01"], machine=ONE)
    assert [Path(path).parent for path in certificate["elsewhere"]] == [Path("../../cache")]


# --- classes and cells ----------------------------------------------------------------------------------------------------


def test_classes_go_in_any_order_and_the_upload_that_is_left_stands(rounds: Any, tmp_path: Path) -> None:
    one, other = rounds(APART, tmp_path / "one"), rounds(APART, tmp_path / "other")
    first, second = "2", "8"
    for class_name in (first, second):
        forward = forget(one, class_name=class_name, machine=ONE)
    for class_name in (second, first):
        backward = forget(other, class_name=class_name, machine=ONE)
    assert forward["release"]["after"] == backward["release"]["after"]
    assert failed(one) == failed(other) == []
    changed = [client for client, upload in forward["uploads"].items() if upload["after"]]
    assert changed
    path, policy = one / "inbox" / f"{changed[0]}.safetensors", read_policy(one)
    assert path.stat().st_mode & 0o077 == 0
    verdict = examine([path], Known(policy.plan, policy.server, policy))[0]
    assert verdict.good and verdict.digest == forward["uploads"][changed[0]]["after"]


def test_what_is_left_of_an_upload_must_be_what_was_certified(rounds: Any, tmp_path: Path) -> None:
    folder = rounds(APART, tmp_path / "round")
    original = {path.name: path.read_bytes() for path in (folder / "inbox").iterdir()}
    certificate = forget(folder, class_name="2", machine=ONE)
    client = next(iter(certificate["uploads"]))
    with pytest.raises(Rejected, match="a class of its upload was forgotten"):
        Inbox(folder / "inbox", read_policy(folder)).receive(original[f"{client}.safetensors"])
    server = simulated_key(0, "server")
    plan = small_federation(APART).plan
    invented = pack("upload", client, plan.digest, {}, {"class_counts": [0] * 10, "samples": 1}, server)
    (folder / "inbox" / f"{client}.safetensors").write_bytes(invented)  # by the server, but not what it certified
    assert "uploads" in failed(folder)
    (folder / "inbox" / f"{client}.safetensors").write_bytes(original[f"{client}.safetensors"])
    assert {"uploads", "release", "bytes"} <= set(failed(folder))


def test_a_client_of_one_class_goes_with_it(rounds: Any, tmp_path: Path) -> None:
    folder = rounds(APART, tmp_path / "round", partition="silos", clients=None)
    certificate = forget(folder, class_name="3", machine=ONE)
    (client,) = certificate["uploads"]
    assert certificate["uploads"][client]["after"] == "" and not (folder / "inbox" / f"{client}.safetensors").exists()
    assert failed(folder) == []


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"class_name": "eleven"}, RoundError, "no class 'eleven'"),
        ({}, UsageError, "nothing was named"),
    ],
)
def test_options_that_mean_nothing_here(
    rounds: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    folder = rounds(APART, tmp_path / "round")
    with pytest.raises(error, match=message):
        forget(folder, **options)
    assert not (folder / INTENT).exists()


def test_methods_that_send_one_model_of_all_classes_say_which_can(rounds: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)uploads of ensemble cannot be taken apart.*federated_factory"):
        forget(rounds("ensemble", tmp_path / "round"), class_name="3")


# --- refusals -------------------------------------------------------------------------------------------------------------


def refused(folder: Path, message: str, **options: Any) -> OsflError:
    """The refusal names everything, and nothing was touched."""
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    with pytest.raises(RoundError, match=message) as caught:
        forget(folder, machine=ONE, **options)
    facts = caught.value.as_json()
    assert {"field", "expected", "got", "fix"} <= facts.keys(), facts
    assert {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()} == before
    return caught.value


def test_unknown_and_forgotten_clients(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    refused(folder, r"(?s)took no part in this round.*Did you mean 'client-02'", clients=["client-2"])
    forget(folder, clients=["client-02"], machine=ONE)
    refused(folder, "'client-02' was forgotten already", clients=["client-02"])


def test_the_last_upload_goes_only_with_withdraw(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    everybody = ["client-01", "client-02", "client-03"]
    error = refused(folder, "it is the last upload", clients=everybody)
    assert "--withdraw" in str(error)
    certificate = forget(folder, clients=everybody, withdraw=True, machine=ONE)
    assert certificate["release"]["after"] == "" and not (folder / "release.safetensors").exists()
    assert {row["fetch"] for row in certificate["replace"]} == {""} and failed(folder) == []
    with pytest.raises(RoundError, match="every client was forgotten"):
        run_federation(small_federation("ensemble"), folder, ABOUT, machine=ONE)


def test_what_the_method_needs_is_asked_before(rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    monkeypatch.setattr("osfl.methods.ensemble.EnsembleOfClients.problems", lambda self, n: ["it needs 3"] if n < 3 else [])
    refused(folder, "it needs 3", clients=["client-02"])
    assert forget(folder, clients=["client-02"], withdraw=True, machine=ONE)["release"]["after"] == ""


def test_a_folder_without_certificates_has_nothing_to_verify(rounds: Any, tmp_path: Path) -> None:
    with pytest.raises(RoundError, match="nothing was forgotten"):
        verify(rounds("ensemble", tmp_path / "round"))
    with pytest.raises(RoundError, match="is missing"):
        forget(tmp_path, clients=["client-01"])


# --- real rounds ----------------------------------------------------------------------------------------------------------


def test_a_real_round_wants_its_servers_key_and_keeps_the_forgotten_out(tmp_path: Path) -> None:
    fl_round, known, bundles = real_round(tmp_path)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    with pytest.raises(UsageError, match="real round"):
        forget(fl_round, clients=["south"])
    with pytest.raises(UsageError, match="not the server's"):
        forget(fl_round, known["north"], clients=["south"])
    (fl_round / DONE).touch()
    assert not read_policy(fl_round).gone
    certificate = forget(fl_round, known["server"], clients=["south"], machine=ONE)
    assert read_policy(fl_round).gone == ["south"] and not (fl_round / DONE).exists()  # nobody has the new release yet
    with pytest.raises(Rejected, match="this client was forgotten in this round"):
        coordinator.receive(fl_round, bundles["south"])
    assert not (fl_round / "inbox" / "south.safetensors").exists()
    found = coordinator.status(fl_round)
    assert found.forgotten == ["south"] and not found.missing and found.release == certificate["release"]["after"]
    assert failed(fl_round) == []  # the refusal is noted, with nothing of the upload


def test_what_flower_keeps_of_an_upload_is_named(tmp_path: Path) -> None:
    opened_here, known, bundles = real_round(tmp_path)
    fl_round, link = tmp_path / "coordinator" / "rounds" / "one", tmp_path / "coordinator" / "link"
    fl_round.parent.mkdir(parents=True)
    opened_here.rename(fl_round)
    link.mkdir()
    (link / "state.db").write_bytes(b"pages" + bundles["south"].read_bytes()[-2000:])
    (link / "registered-south").touch()
    assert forget(fl_round, known["server"], clients=["south"], machine=ONE)["elsewhere"] == ["../../link/state.db"]


def test_before_the_release_forgetting_lets_the_round_go_on(tmp_path: Path) -> None:
    fl_round, known, bundles = real_round(tmp_path, deliver=("north", "south"))
    certificate = forget(fl_round, known["server"], clients=["south"], machine=ONE)
    assert certificate["release"] == {"before": "", "after": ""} and not certificate["replace"]
    assert coordinator.status(fl_round).missing == ["west"]
    coordinator.receive(fl_round, bundles["west"])
    assert coordinator.status(fl_round).ready
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    assert failed(fl_round) == []
    with pytest.raises(RoundError, match="has no upload"):
        other, more, _ = real_round(tmp_path / "other", deliver=("north",))
        forget(other, more["server"], clients=["south"])


def test_an_upload_that_came_late_stays_out(tmp_path: Path) -> None:
    fl_round, known, bundles = real_round(tmp_path, deliver=("north", "south"), quorum=1)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    coordinator.receive(fl_round, bundles["west"])
    certificate = forget(fl_round, known["server"], clients=["south"], machine=ONE)
    assert coordinator.status(fl_round).late == ["west"] and failed(fl_round) == []
    again = forget(fl_round, known["server"], clients=["west"], machine=ONE)
    assert again["release"] == {"before": certificate["release"]["after"], "after": certificate["release"]["after"]}
    assert again["replace"] == []


def test_below_the_quorum(tmp_path: Path) -> None:
    fl_round, known, _ = real_round(tmp_path, quorum=3)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    refused(fl_round, "quorum is 3", server_key=known["server"], clients=["south"])
    forget(fl_round, known["server"], clients=["south"], withdraw=True, machine=ONE)
    found = coordinator.status(fl_round)
    assert not found.released and not found.ready and "2 of the 3 uploads" in found.waits_for


def test_an_upload_that_arrives_while_its_client_is_forgotten_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate looked before the forgetting began, and stores afterwards."""
    fl_round, known, bundles = real_round(tmp_path)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    policy, stale = read_policy(fl_round), [True]
    forget(fl_round, known["server"], clients=["south"], machine=ONE)
    monkeypatch.setattr(coordinator, "read_policy", lambda folder: policy if stale and stale.pop() else read_policy(folder))
    with pytest.raises(Rejected, match="was forgotten"):
        coordinator.receive(fl_round, bundles["south"])
    assert not (fl_round / "inbox" / "south.safetensors").exists() and failed(fl_round) == []
    Inbox(fl_round / "inbox", policy).receive(bundles["south"])  # killed before it looked again
    assert failed(fl_round) == ["uploads", "bytes"] and "south" not in coordinator.status(fl_round).delivered
    coordinator.receive(fl_round, bundles["north"])  # whatever is received next
    assert failed(fl_round) == []


# --- small classes and odd uploads ----------------------------------------------------------------------------------------


def few_images(client: str, images: int, mode: str = "central") -> Federation:
    """Three clients, of whom one has so few images of two classes that it sends no generator."""
    federation = small_federation("federated_factory")
    shards = []
    for shard in federation.shards:
        if shard.client == client:
            labels = shard.train.labels
            kept = [int(i) for label in labels.unique()[:2] for i in torch.nonzero(labels == label).flatten()[:images]]
            shard = replace(shard, train=shard.train.subset(torch.tensor(kept)), digest=f"{shard.digest} few")
        shards.append(shard)
    settings = replace(federation.plan.settings, mode=mode)
    return replace(federation, shards=shards, plan=replace(federation.plan, settings=settings))


def test_a_class_goes_only_from_those_who_had_it(tmp_path: Path) -> None:
    """An upload without generators, of single images of other classes, says nothing of this class."""
    federation = few_images("client-03", 1)
    run_federation(federation, tmp_path / "round", ABOUT, machine=ONE)
    has = {int(label) for label in federation.shards[2].train.labels}
    label = next(label for label in range(10) if label not in has and federation.counts["client-01"][label] > 1)
    certificate = forget(tmp_path / "round", class_name=str(label), machine=ONE)
    assert "client-01" in certificate["uploads"] and "client-03" not in certificate["uploads"]


def test_a_client_whose_other_class_is_too_small_for_a_generator_stays(tmp_path: Path) -> None:
    """It would have joined without the class, too: with an upload that says how many images it has, and no generator."""
    federation = few_images("client-03", 1)
    shard, rich = federation.shards[2], small_federation("federated_factory").shards[2]
    label, small = (int(one) for one in shard.train.labels.unique())
    places = [torch.nonzero(rich.train.labels == one).flatten() for one in (label, small)]
    kept = torch.cat([places[0], places[1][:1]])
    shards = [*federation.shards[:2], replace(shard, train=rich.train.subset(kept), digest="one large class")]
    run_federation(replace(federation, shards=shards), tmp_path / "round", ABOUT, machine=ONE)
    certificate = forget(tmp_path / "round", clients=["client-03"], class_name=str(label), machine=ONE)
    assert certificate["uploads"]["client-03"]["after"] != "" and failed(tmp_path / "round") == []


def test_odd_facts_of_one_client_do_not_keep_a_class_from_being_forgotten(tmp_path: Path) -> None:
    federation = small_federation("federated_factory")
    folder = tmp_path / "round"
    run_federation(federation, folder, ABOUT, machine=ONE)
    with existing_round(folder, federation.plan) as fl_round:
        who, output = next((upload.client, upload.payload) for upload in fl_round.uploads()[0] if upload.payload.tensors)
    (folder / "release.safetensors").unlink()
    (folder / "inbox" / f"{who}.safetensors").unlink()
    key = simulated_key(0, who)
    odd = pack("upload", who, federation.plan.digest, to_raw(output.tensors), {"class_counts": [9] * 10, "samples": 1}, key)
    Inbox(folder / "inbox", read_policy(folder)).receive(odd)  # the gate lets it in
    label = next(name.removeprefix("class-").split("/")[0] for name in output.tensors)
    assert who in forget(folder, class_name=label, machine=ONE)["uploads"]


def test_peers_whose_experts_see_the_class_at_home_are_reported(tmp_path: Path) -> None:
    federation = few_images("client-03", 4, mode="peer")
    run_federation(federation, tmp_path / "round", ABOUT, machine=ONE)
    assert forget(tmp_path / "round", class_name="3", machine=ONE)["stays"]
    assert failed(tmp_path / "round") == []


@pytest.mark.parametrize("changes", [{"mode": "peer"}, {"factory": "edm"}])
def test_a_client_is_forgotten_with_peers_and_with_the_diffusion_model_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The release is that of a round which the client never joined, and no byte of it is left."""
    federation = small_federation("federated_factory", samples=400)
    plan = replace(federation.plan, settings=replace(federation.plan.settings, **changes))
    federation, folder = replace(federation, plan=plan), tmp_path / "round"
    run_federation(federation, folder, ABOUT, machine=ONE)
    windows = windows_of("client-02", folder)
    certificate = forget(folder, clients=["client-02"], machine=ONE)
    assert certificate["release"]["after"] == never_joined(federation, folder / "inbox", tmp_path / "never")
    assert windows and files_with(windows, folder) == [] and failed(folder) == []


@pytest.mark.parametrize("output_before", [False, True])
def test_a_replay_that_cannot_work_says_how_to_end_without_a_release(tmp_path: Path, output_before: bool) -> None:
    """The only client with generators goes: what is left are uploads of which nothing can be made."""
    federation = few_images("client-02", 1)
    shards = [few_images("client-03", 1).shards[2] if s.client == "client-03" else s for s in federation.shards]
    folder = tmp_path / "round"
    run_federation(replace(federation, shards=shards), folder, ABOUT, machine=ONE)
    for _ in range(1 if output_before else 2):  # also when it is repeated
        with pytest.raises(OsflError, match="no client has sent a generator") as error:
            forget(folder, clients=["client-01"], withdraw=output_before, machine=ONE)
        assert "the same command with --withdraw" in (error.value.fix or "")
    certificate = forget(folder, clients=["client-01"], withdraw=True, machine=ONE)
    assert certificate["release"]["after"] == "" and failed(folder) == []
