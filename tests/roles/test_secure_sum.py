"""Secure sums through real files, a simulation and the network's protocol: releases are those of the open sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.core.errors import Rejected, RoundError, UsageError
from osfl.core.types import ClientId, Limits, Payload, Plan, Privacy
from osfl.deploy.flower import messages
from osfl.deploy.flower.collector import Collector
from osfl.deploy.flower.messages import MessageBody
from osfl.deploy.flower.site_node import SiteNode
from osfl.roles import coordinator, peer, site
from osfl.roles.inspection.known import Known
from osfl.roles.inspection.look import look
from osfl.roles.repair import make_repair
from osfl.rounds.forgetting import forget
from osfl.rounds.provenance import Known as Provenance
from osfl.rounds.provenance import examine
from osfl.rounds.state import read_policy
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import from_raw, payload_digest
from osfl.simulate.run import run, run_federation
from osfl.simulate.simulation import Simulation, rehearsal
from osfl.wire.gate import verify_release
from osfl.wire.repair import REQUEST, RepairRequest, RequestRejected, sign_request
from osfl.wire.signing import SigningKey
from tests.faults.machines import CLASSES, make_plan, make_sites
from tests.faults.network import QUICK, Clock, Faults, Network

SITES = ("east", "north", "south", "up", "west")
ONE = Machine(workers=1)
KEYS = {name: SigningKey.from_seed(name.encode().ljust(32)) for name in (*SITES, "server")}
PUBLIC = {name: KEYS[name].public_hex for name in SITES}
SERVER = KEYS["server"].public_hex
PLAN = replace(make_plan("onesum", SITES), quorum=2, secure_sum=True, limits=Limits(share=1.0))
OPEN = replace(PLAN, secure_sum=False, settings=replace(PLAN.settings, readable="send"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each site's folder of work with its masked and its open upload."""
    folder = tmp_path_factory.mktemp("made")
    data = make_sites(folder / "data", SITES)
    for plan in (PLAN, OPEN):
        for client in SITES:
            upload(plan, client, data, folder / client)
    return folder


def upload(plan: Plan, client: ClientId, data: Path, work: Path) -> Path:
    keys = PUBLIC if plan.secure_sum else {}
    return site.make_upload(plan, client, data / f"{client}.npz", KEYS[client], work, machine=ONE, keys=keys)


def test_a_site_is_reported_that_an_open_sum_of_few_images_shows_each(made: Path, tmp_path: Path) -> None:
    """By lattice reduction (benchmarks/exact_sums.py); a masked sum shows nothing, and nothing is said of it."""
    for plan, expected in ((OPEN, 1), (PLAN, 0)):
        notices: list[str] = []
        keys = PUBLIC if plan.secure_sum else {}
        site.make_upload(
            plan, SITES[0], tmp_path, KEYS[SITES[0]], made / SITES[0], machine=ONE, notice=notices.append, keys=keys
        )
        assert len([line for line in notices if "secure_sum = true" in line]) == expected
        seen = look(uploaded(made, SITES[0], plan), Known(plan.as_json(), clients=PUBLIC), name="x", draw=True)
        assert len([f for f in seen["findings"] if f["check"] == "What a reader can compute"]) == expected


def opened(folder: Path, plan: Plan, made: Path, among: Sequence[ClientId]) -> Path:
    coordinator.open_new(folder, plan, PUBLIC, SERVER)
    for client in among:
        coordinator.receive(folder, uploaded(made, client, plan))
    return folder


def uploaded(made: Path, client: ClientId, plan: Plan = PLAN) -> Path:
    return site.work_folder(plan, client, made / client) / "upload.safetensors"


def server_phase(folder: Path) -> Payload:
    coordinator.make_release(folder, KEYS["server"], machine=ONE)
    policy = read_policy(folder)
    release = verify_release(folder / "release.safetensors", policy.server, policy.plan)
    return Payload(from_raw(release.tensors), dict(release.facts))


def same(one: Payload, other: Payload) -> bool:
    """To the last bit: tensors, names and facts."""
    return payload_digest(one) == payload_digest(other)


def repaired(made: Path, client: ClientId, request: bytes, tmp: Path) -> Path:
    """The answer of a site, from a copy of its work folder."""
    folder = tmp / client
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "upload.safetensors").write_bytes(uploaded(made, client).read_bytes())
    return make_repair(PLAN, client, request, KEYS[client], PUBLIC, SERVER, folder)


@pytest.mark.parametrize("missing", [(), ("up",), ("east", "west"), ("north", "south", "up")], ids=len)
def test_the_release_is_that_of_the_open_sum(made: Path, tmp_path: Path, missing: tuple[ClientId, ...]) -> None:
    """To the last bit, with one to n - 2 sites missing; and nobody who is missing can come back."""
    among = [client for client in SITES if client not in missing]
    fl_round = opened(tmp_path / "round", PLAN, made, among)
    assert coordinator.status(fl_round).asks is bool(missing)
    if missing:
        with pytest.raises(RoundError, match=r"masks shared with .* have not delivered") as caught:
            server_phase(fl_round)
        assert "--without-missing" in str(caught.value)
        coordinator.request_repairs(fl_round, KEYS["server"])
        assert list(coordinator.status(fl_round).repairs_due) == among
        with pytest.raises(Rejected, match="asked to take this site's masks out"):
            coordinator.receive(fl_round, uploaded(made, missing[0]))
        for number, client in enumerate(among):
            with pytest.raises(RoundError, match=f"{number} of the {len(among)} repairs"):
                server_phase(fl_round)
            answer = repaired(made, client, (fl_round / REQUEST).read_bytes(), tmp_path / "work")
            assert coordinator.receive(fl_round, answer).client == client
        assert coordinator.receive(fl_round, answer).client == client  # again changes nothing
    assert coordinator.status(fl_round).ready
    in_the_open = opened(tmp_path / "open", OPEN, made, among)
    assert same(server_phase(fl_round), server_phase(in_the_open))
    secure, plain = coordinator.status(fl_round), coordinator.status(in_the_open)
    assert secure.content == plain.content and secure.release != plain.release  # which names the plan and the masked uploads
    assert known_content(fl_round) == secure.content


def known_content(fl_round: Path) -> str:
    """What `osfl verify` says about the release."""
    policy, path = read_policy(fl_round), fl_round / "release.safetensors"
    return examine([path], Provenance(policy.plan, policy.server, policy))[0].content


def test_a_simulation_of_the_same_plan_has_the_content_of_the_real_round(made: Path, tmp_path: Path) -> None:
    """Masks come from each round's keys, so that uploads and the release's digest are others; the sum is the same."""
    data = make_sites(tmp_path / "data", SITES)
    simulated = run_federation(rehearsal(PLAN, data), tmp_path / "memory", {"preset": "", "command": ""}, machine=ONE)
    fl_round = opened(tmp_path / "round", PLAN, made, SITES)
    server_phase(fl_round)
    found = coordinator.status(fl_round)
    assert simulated["content_digest"] == found.content and simulated["release_digest"] != found.release
    other = run_federation(
        rehearsal(replace(PLAN, seed=1), data), tmp_path / "other", {"preset": "", "command": ""}, machine=ONE
    )
    assert other["content_digest"] != found.content


def test_a_private_sum_over_files_says_what_epsilon_is_without_the_missing(tmp_path: Path) -> None:
    """Sites mask their share of the noise; with sites missing and repaired at least the quorum's noise is in the sum."""
    privacy = Privacy(1e4, 1e-5, "share", 1)
    settings = replace(PLAN.settings, dimensions=16)
    plan = replace(PLAN, settings=settings, quorum=3, privacy=privacy)
    data, stated = make_sites(tmp_path / "data", SITES), {}
    for client in SITES:
        upload(plan, client, data, tmp_path / client)
    for missing in ((), ("up",), ("north", "west")):
        among = [client for client in SITES if client not in missing]
        fl_round = opened(tmp_path / f"round{len(missing)}", plan, tmp_path, among)
        if missing:
            coordinator.request_repairs(fl_round, KEYS["server"])
            for client in among:
                folder = tmp_path / f"work{len(missing)}" / client
                folder.mkdir(parents=True)
                (folder / "upload.safetensors").write_bytes(uploaded(tmp_path, client, plan).read_bytes())
                request = (fl_round / REQUEST).read_bytes()
                coordinator.receive(fl_round, make_repair(plan, client, request, KEYS[client], PUBLIC, SERVER, folder))
        stated[len(among)] = server_phase(fl_round).facts["privacy"]
    assert [stated[n]["sites"] for n in (5, 4, 3)] == [5, 4, 3]
    assert stated[5]["epsilon"] < stated[4]["epsilon"] < stated[3]["epsilon"] == 1e4 == stated[3]["epsilon_site"]
    assert all(one["secure_sum"] and one["adversary"].startswith("the server and whoever") for one in stated.values())
    with pytest.raises(RoundError, match="nobody knows what it added"):
        forget(fl_round, KEYS["server"], clients=["east"], machine=ONE)


def test_the_request_is_final(made: Path, tmp_path: Path) -> None:
    fl_round = opened(tmp_path / "round", PLAN, made, SITES[:3])
    with pytest.raises(UsageError, match="not the server's"):
        coordinator.request_repairs(fl_round, KEYS["north"])
    request = coordinator.request_repairs(fl_round, KEYS["server"])
    assert coordinator.request_repairs(fl_round, KEYS["server"]) == request and request.missing == ("up", "west")
    whole = opened(tmp_path / "whole", PLAN, made, SITES)
    with pytest.raises(RoundError, match="nobody is missing"):
        coordinator.request_repairs(whole, KEYS["server"])
    few = opened(tmp_path / "few", PLAN, made, SITES[:1])
    with pytest.raises(RoundError, match="1 of the 2 uploads that are needed"):
        coordinator.request_repairs(few, KEYS["server"])


def test_a_site_answers_one_request_that_fits_what_it_knows(made: Path, tmp_path: Path) -> None:
    fl_round = opened(tmp_path / "round", PLAN, made, SITES[:4])
    request = coordinator.request_repairs(fl_round, KEYS["server"])
    data = (fl_round / REQUEST).read_bytes()
    first = repaired(made, "north", data, tmp_path).read_bytes()
    assert repaired(made, "north", data, tmp_path).read_bytes() == first  # the same question has the same answer
    digests = dict(request.delivered)
    other = replace(request, missing=("south", "west"), delivered={c: digests[c] for c in ("east", "north", "up")})
    with pytest.raises(RequestRejected, match="contradicts the request that this site has answered") as caught:
        repaired(made, "north", sign_request(other, KEYS["server"]), tmp_path)
    assert "could read its upload" in str(caught.value)
    assert len(list((tmp_path / "north").glob("refused-*.json"))) == 1 and (tmp_path / "north" / REQUEST).read_bytes() == data
    contradiction = sign_request(other, KEYS["server"])
    with pytest.raises(RequestRejected, match="says that this site has not delivered"):
        repaired(made, "south", contradiction, tmp_path)
    wrong = replace(request, delivered={**digests, "up": "ab" * 32})
    with pytest.raises(RequestRejected, match="names another upload of this site"):
        repaired(made, "up", sign_request(wrong, KEYS["server"]), tmp_path)
    with pytest.raises(RequestRejected, match="signed by the server"):
        repaired(made, "east", sign_request(request, KEYS["west"]), tmp_path)
    assert not (tmp_path / "east" / "repair.safetensors").exists()


def test_a_site_answers_no_request_below_the_quorum(tmp_path: Path) -> None:
    """A server that says so few have delivered could take all masks out of this site's upload but one colluder's."""
    delivered = dict.fromkeys(("east", "north"), "ab" * 32)
    for quorum in (0, 3):  # 0: all are needed, so nobody may be missing
        strict = replace(PLAN, quorum=quorum)
        request = sign_request(RepairRequest(strict.digest, delivered, ("south", "up", "west")), KEYS["server"])
        folder = tmp_path / str(quorum)
        with pytest.raises(RequestRejected, match="the plan allows no release"):
            make_repair(strict, "east", request, KEYS["east"], PUBLIC, SERVER, folder)
        assert not (folder / "repair.safetensors").exists() and len(list(folder.glob("refused-*.json"))) == 1


def test_who_was_stated_to_be_missing_uploads_nothing(made: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    folder = site.work_folder(PLAN, "west", work)
    fl_round = opened(tmp_path / "round", PLAN, made, SITES[:4])
    coordinator.request_repairs(fl_round, KEYS["server"])
    with pytest.raises(RequestRejected):
        make_repair(PLAN, "west", (fl_round / REQUEST).read_bytes(), KEYS["west"], PUBLIC, SERVER, folder)
    with pytest.raises(RoundError, match="its upload could be read"):
        upload(PLAN, "west", made / "data", work)


def test_a_site_needs_the_keys_of_all(made: Path, tmp_path: Path) -> None:
    arguments = (PLAN, "north", made / "data" / "north.npz", KEYS["north"], tmp_path)
    few = {name: PUBLIC[name] for name in SITES if name != "west"}
    for keys, command in (
        (few, "no key for 'west'"),
        ({**few, "west": PUBLIC["east"]}, "two sites have one key"),
        ({**PUBLIC, "north": SERVER}, "the key for 'north' is not the public half"),
    ):
        with pytest.raises(UsageError, match=command):
            site.make_upload(*arguments, machine=ONE, keys=keys)


def test_an_upload_masked_with_other_keys_is_refused(made: Path, tmp_path: Path) -> None:
    keys = {**PUBLIC, "west": SERVER}  # somebody has exchanged a key on its way
    strange = site.make_upload(
        PLAN, "north", made / "data" / "north.npz", KEYS["north"], tmp_path / "w", machine=ONE, keys=keys
    )
    with pytest.raises(Rejected, match="masked with other keys") as caught:
        coordinator.receive(opened(tmp_path / "round", PLAN, made, ()), strange)
    assert caught.value.field == "facts.keys" and caught.value.client == "north"


def test_nothing_takes_one_site_out_of_a_secure_sum(made: Path, tmp_path: Path) -> None:
    fl_round = opened(tmp_path / "round", PLAN, made, SITES)
    with pytest.raises(UsageError, match="'west' cannot be left out"):
        coordinator.make_release(fl_round, KEYS["server"], machine=ONE, without=["west"])
    server_phase(fl_round)
    with pytest.raises(RoundError, match="nobody knows what it added"):
        forget(fl_round, KEYS["server"], clients=["west"], machine=ONE)
    with pytest.raises(UsageError, match="cannot be taken apart by class"):
        forget(fl_round, KEYS["server"], class_name=CLASSES[0], machine=ONE)
    certificate = forget(fl_round, KEYS["server"], clients=["west"], withdraw=True, machine=ONE)
    assert certificate["release"]["after"] == "" and not (fl_round / "release.safetensors").exists()
    with pytest.raises(RoundError, match="its masks stay in the sum: open a new round"):
        server_phase(fl_round)


def test_peers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="this round's uploads are masked"):
        peer.own_inbox(PLAN, "north", PUBLIC, tmp_path)


@pytest.mark.parametrize(("method", "changes"), [("onesum", {}), ("fedcgs", {}), ("fedavg", {"weighting": "uniform"})])
def test_a_simulation_has_the_model_of_the_open_sum(method: str, changes: dict[str, str], tmp_path: Path) -> None:
    """OneSum to the last bit; the others within what fixed point rounds."""
    simulation = Simulation(
        method, "digits", 3, "iid", "smoke", changes=changes, samples=90, image_size=8, limits=Limits(share=1.0)
    )
    results = [run(replace(simulation, secure_sum=on), tmp_path / str(on), machine=ONE) for on in (True, False)]
    for digest in ("models_digest", "content_digest"):
        assert (results[0][digest] == results[1][digest]) is (method == "onesum")
    assert "--secure-sum" in results[0]["command"] and "--secure-sum" not in results[1]["command"]
    found = [released(tmp_path / str(on)) for on in (True, False)]
    for name, value in found[1].items():
        if value.is_floating_point():
            assert torch.allclose(found[0][name], value, rtol=1e-4, atol=1e-6), name


def released(folder: Path) -> dict[str, torch.Tensor]:
    policy = read_policy(folder)
    return from_raw(verify_release(folder / "release.safetensors", policy.server, policy.plan).tensors)


# --- the network's protocol, without Flower ----------------------------------------------------------------------------


def node(made: Path, client: ClientId, work: Path) -> SiteNode:
    def make(plan: str) -> Path:
        path = site.work_folder(PLAN, client, work) / "upload.safetensors"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(uploaded(made, client).read_bytes())
        return path

    def repair(plan: str, request: bytes) -> Path:
        return make_repair(PLAN, client, request, KEYS[client], PUBLIC, SERVER, site.work_folder(PLAN, client, work))

    return SiteNode(client, KEYS[client], work, make, lambda plan, release, personal: release, SERVER, repair)


def test_over_a_network_the_others_are_asked_for_repairs(made: Path, tmp_path: Path) -> None:
    """A site stays away; a network loses and repeats messages; the release is that of the open sum without the site."""
    fl_round, work = tmp_path / "round", tmp_path / "work"
    coordinator.open_new(fl_round, PLAN, PUBLIC, SERVER)
    KEYS["server"].save(tmp_path / "server.key")
    asked: list[ClientId] = []

    def answer(client: ClientId) -> Callable[[str, MessageBody], MessageBody]:
        def to(kind: str, body: MessageBody) -> MessageBody:
            asked.extend([client] * (kind == messages.REPAIR))
            return node(made, client, work).handle(kind, body)

        return to

    clock = Clock()
    network = Network({n: answer(client) for n, client in enumerate(SITES)}, clock, Faults(lost=0.2, repeated=0.2, seed=3))
    network.dead = {SITES.index("up")}
    config = replace(QUICK, chunk=1 << 20, linger=20.0)

    def collector() -> Collector:
        key = tmp_path / "server.key"
        return Collector(fl_round, key, network, config, log=lambda line: None, clock=clock, sleep=clock.sleep)

    assert not collector().run()  # the missing site has no release
    among = [client for client in SITES if client != "up"]
    assert set(asked) == set(among) and list(coordinator.status(fl_round).repaired) == among
    network.dead = set()
    collector().run()  # the site is back, and is not asked for its upload
    assert not (site.work_folder(PLAN, "up", work) / "upload.safetensors").exists()
    assert same(server_phase(fl_round), server_phase(opened(tmp_path / "open", OPEN, made, among)))
