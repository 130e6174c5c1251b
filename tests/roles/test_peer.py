"""Neighbors without a server: the same gate, and the same bits as a round that was simulated."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.core.errors import Rejected, RoundError, UsageError
from osfl.core.method import Context
from osfl.core.plan import write_plan
from osfl.core.topology import neighbors, next_encounter
from osfl.core.types import Contact, Limits, Payload, Plan, Release, Shard, Topology
from osfl.deploy.flower import app
from osfl.deploy.flower.collector import Collector
from osfl.deploy.flower.messages import ANNOUNCE, MessageBody
from osfl.deploy.flower.site_node import SiteNode
from osfl.roles import coordinator, peer, site
from osfl.rounds.finished import load_model
from osfl.rounds.folder import encounter_folder
from osfl.rounds.storage import load_model_of
from osfl.runtime.payloads import payload_digest, to_raw
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import rehearsal
from osfl.wire.bundle import pack
from osfl.wire.sealing import seal
from osfl.wire.signing import SigningKey
from osfl.wire.window import look_at
from tests.faults.network import QUICK, SERVER, Clock, Network
from tests.gossip import Gossip, enter
from tests.roles.test_roles import CLIENTS, ONE, make_plan, make_sites

KEYS = {name: SigningKey.from_seed(bytes([number] * 32)) for number, name in enumerate((*CLIENTS, "mallory"), 1)}
PUBLIC = {name: key.public_hex for name, key in KEYS.items()}


@pytest.fixture(autouse=True)
def gossip(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sites(tmp_path_factory.mktemp("sites"))


def exchange_plan(topology: Topology | None = None, **settings: object) -> Plan:
    plan = make_plan("gossip", topology=topology)
    return replace(plan, settings=replace(plan.settings, **settings)) if settings else plan


def messages(plan: Plan, client: str, sites: Path, work: Path) -> Path:
    return site.make_upload(plan, client, sites / client, KEYS[client], work / client, machine=ONE)


def receive_all(plan: Plan, client: str, sites: Path, work: Path) -> Path:
    inbox = peer.own_inbox(plan, client, PUBLIC, work / client)
    for name in reversed(neighbors(plan, client)):
        bundle = messages(plan, name, sites, work)
        assert peer.receive_from_neighbor(plan, client, inbox, bundle) == peer.receive_from_neighbor(
            plan, client, inbox, bundle
        )  # twice counts once
    return peer.exchange(plan, client, inbox, work / client, data=sites / client, machine=ONE)


def test_two_encounters_without_a_server_give_the_bits_of_the_simulation(sites: Path, tmp_path: Path) -> None:
    first = exchange_plan(Topology("ring", encounters=2))
    second = next_encounter(first)
    run_federation(rehearsal(first, sites), tmp_path / "simulated", {"preset": "", "command": ""}, machine=ONE)
    folders = (encounter_folder(tmp_path / "simulated", 1), tmp_path / "simulated")
    for plan, folder in zip((first, second), folders, strict=True):
        for client in CLIENTS:
            made = load_model_of(receive_all(plan, client, sites, tmp_path))
            simulated = load_model_of(folder / "models" / f"{client}.safetensors")
            assert made and simulated and payload_digest(made[0]) == payload_digest(simulated[0])
    model = site.work_folder(second, "north", tmp_path / "north")
    assert load_model(model)[1] == first.task
    output = json.loads((model / "made_from.json").read_text())
    assert output["plan"] == second.digest and output["made_from"].keys() == {"upload/south", "upload/west", "previous"}
    before, file = site.work_folder(first, "north", tmp_path / "north"), model / "model.safetensors"
    kept = load_model_of(file)
    shutil.copyfile(before / "upload.safetensors", before / file.name)  # as if nothing had been received
    again = load_model_of(receive_all(second, "north", sites, tmp_path))  # the model before is another one, so this one is, too
    assert kept and again and again[1] != kept[1]
    assert json.loads((model / "made_from.json").read_text())["made_from"]["previous"] != output["made_from"]["previous"]


def test_the_next_encounter_needs_the_model_of_the_one_before(sites: Path, tmp_path: Path) -> None:
    second = next_encounter(exchange_plan(Topology("ring", encounters=2)))
    with pytest.raises(RoundError, match="encounter before is not here"):
        messages(second, "north", sites, tmp_path)


def test_a_coordinator_that_passes_things_on_gives_the_same_models_in_both_encounters(sites: Path, tmp_path: Path) -> None:
    first, public = exchange_plan(Topology("ring", encounters=2)), {name: PUBLIC[name] for name in CLIENTS}
    for number, plan in enumerate((first, next_encounter(first)), 1):
        fl_round = tmp_path / f"round{number}"
        coordinator.open_new(fl_round, plan, public, SERVER.public_hex)
        for client in CLIENTS:
            coordinator.receive(fl_round, messages(plan, client, sites, tmp_path / "served"))
        coordinator.make_release(fl_round, SERVER, machine=ONE)
        for client in CLIENTS:  # the second upload is what each made of the first release
            own = fl_round / "personal" / f"{client}.safetensors"
            taken = site.take_release(
                plan,
                client,
                fl_round / "release.safetensors",
                own,
                SERVER.public_hex,
                tmp_path / "served" / client,
                data=sites / client,
                machine=ONE,
            )
            given, exchanged = load_model_of(taken), load_model_of(receive_all(plan, client, sites, tmp_path / "met"))
            assert given and exchanged and payload_digest(given[0]) == payload_digest(exchanged[0])


def at_the_network(plan: Plan, sites: Path, folder: Path) -> dict[int, SiteNode]:
    """Every site as its own node opens it, with the plan among those that it agreed to."""
    nodes = {}
    for number, client in enumerate(CLIENTS):
        own = folder / client
        (own / "plans").mkdir(parents=True, exist_ok=True)
        (own / "plans" / f"{plan.digest[:8]}.toml").write_text(write_plan(plan))
        if not (own / "site.key").exists():
            KEYS[client].save(own / "site.key")
        config = {
            "client": client,
            "data": str(sites / client),
            "key": str(own / "site.key"),
            "work": str(own / "work"),
            "server": SERVER.public_hex,
            "plans": str(own / "plans"),
        }
        nodes[number] = app.open_site(config)
    return nodes


def test_two_encounters_over_the_network_give_the_same_models(sites: Path, tmp_path: Path) -> None:
    """The programs of both sides as Flower starts them, in two rounds, on messages that are handed over in this process."""
    first, public = exchange_plan(Topology("ring", encounters=2)), {name: PUBLIC[name] for name in CLIENTS}
    SERVER.save(tmp_path / "server.key")
    for number, plan in enumerate((first, next_encounter(first)), 1):
        fl_round, clock = tmp_path / f"round{number}", Clock()
        coordinator.open_new(fl_round, plan, public, SERVER.public_hex)
        nodes = at_the_network(plan, sites, tmp_path / "network")
        channel = Network({node: answers.handle for node, answers in nodes.items()}, clock)
        assert Collector(
            fl_round, tmp_path / "server.key", channel, QUICK, log=lambda body: None, clock=clock, sleep=clock.sleep
        ).run()
        for client in CLIENTS:
            work = site.work_folder(plan, client, tmp_path / "network" / client / "work")
            given = load_model_of(work / "model.safetensors")
            exchanged = load_model_of(receive_all(plan, client, sites, tmp_path / "met"))
            assert given and exchanged and payload_digest(given[0]) == payload_digest(exchanged[0])


def test_at_the_network_a_sealed_bundle_must_fit_into_its_window(sites: Path, tmp_path: Path) -> None:
    """Asked twice, it is refused twice, although the bundle itself, which would fit, was made and kept the first time."""
    size = messages(exchange_plan(), "north", sites, tmp_path).stat().st_size
    plan = exchange_plan(Topology("contacts", contacts=(Contact("north", "south", "2026-12-24T18:00:00Z", 1, size + 40),)))
    north = at_the_network(plan, sites, tmp_path / "network")[0]
    asked: MessageBody = {"round": plan.digest, "nonce": "ab", "wanted": 1, "length": 10, "plan": json.dumps(plan.as_json())}
    for _ in range(2):
        assert north.handle(ANNOUNCE, asked) == {"client": "north", "refused": "UploadBlocked (topology.contacts)"}
    assert not list(tmp_path.rglob("*.sealed"))


def test_who_is_missing_is_stated_and_what_came_is_kept(sites: Path, tmp_path: Path) -> None:
    plan = exchange_plan(Topology("mesh"))
    inbox = peer.own_inbox(plan, "north", PUBLIC, tmp_path / "north")
    peer.receive_from_neighbor(plan, "north", inbox, messages(plan, "south", sites, tmp_path))
    with pytest.raises(RoundError, match="west missing"):
        peer.exchange(plan, "north", inbox, tmp_path / "north", data=sites / "north", machine=ONE)
    again = peer.own_inbox(plan, "north", PUBLIC, tmp_path / "north")
    assert list(again.delivered()) == ["south"]
    path = peer.exchange(plan, "north", again, tmp_path / "north", data=sites / "north", without_missing=True, machine=ONE)
    alone = load_model_of(path)
    peer.receive_from_neighbor(
        plan, "north", again, messages(plan, "west", sites, tmp_path)
    )  # late, and the model is made anew
    both = load_model_of(peer.exchange(plan, "north", again, tmp_path / "north", data=sites / "north", machine=ONE))
    assert alone and both and alone[1] != both[1]


def test_nobody_exchanged_gives_the_local_model(sites: Path, tmp_path: Path) -> None:
    """South has no contact; it makes its model all the same, and it is the one that it would have sent."""
    pass_by = Contact("north", "west", "2026-12-24T18:00:00Z", 60, 1e6)
    plan = exchange_plan(Topology("contacts", contacts=(pass_by,)))
    local = load_model_of(receive_all(plan, "south", sites, tmp_path))
    output = load_model_of(messages(plan, "south", sites, tmp_path))
    assert local and output
    assert all(local[0].tensors[name].equal(tensor) for name, tensor in output[0].tensors.items())


def test_facts_are_read_as_if_they_had_traveled(sites: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relay, personalize, seen = Gossip.relay, Gossip.personalize, []

    def with_tuple(self: Gossip, *body: Any) -> Payload:
        part = relay(self, *body)
        return replace(part, facts={"received": tuple(part.facts["received"])})

    def watched(self: Gossip, release: Release, shard: Shard, ctx: Context) -> Payload:
        seen.append(release.for_client(shard.client).facts)
        return personalize(self, release, shard, ctx)

    monkeypatch.setattr(Gossip, "relay", with_tuple)
    monkeypatch.setattr(Gossip, "personalize", watched)
    receive_all(exchange_plan(Topology("mesh")), "north", sites, tmp_path)
    assert seen == [{"received": ["south", "west"]}]


def refused(plan: Plan, source: Path | bytes, work: Path) -> Rejected:
    inbox = peer.own_inbox(plan, "north", PUBLIC, work / "north")
    with pytest.raises(Rejected) as caught:
        peer.receive_from_neighbor(plan, "north", inbox, source)
    assert not inbox.delivered()
    return caught.value


def test_what_is_refused(sites: Path, tmp_path: Path) -> None:
    """Somebody unknown, one who is no neighbor, another round, damaged bytes, and every transfer that was cut."""
    north_west = Topology("contacts", contacts=(Contact("north", "west", "2026-12-24T18:00:00Z", 60, 1e6),))
    plan = exchange_plan(north_west)
    bundle = messages(plan, "west", sites, tmp_path)
    data = bundle.read_bytes()
    assert "accepts uploads of its neighbors only" in refused(plan, messages(plan, "south", sites, tmp_path), tmp_path).reason
    assert refused(plan, messages(replace(plan, seed=9), "west", sites, tmp_path), tmp_path).field == "plan"
    flipped = bytearray(data)
    flipped[-5] ^= 1
    assert refused(plan, bytes(flipped), tmp_path).field is not None
    for cut in (0, 7, 100, len(data) // 2, len(data) - 1):
        refused(plan, data[:cut], tmp_path)
    forged = site.make_upload(plan, "west", sites / "west", KEYS["mallory"], tmp_path / "mallory", machine=ONE)
    assert refused(plan, forged, tmp_path).field == "signature"
    unknown = refused(plan, pack("upload", "mallory", plan.digest, {}, {}, KEYS["mallory"]), tmp_path)
    assert unknown.field == "client" and "neighbors" not in unknown.reason
    unknown_sender = exchange_plan(Topology("mesh"))
    assert refused(plan, messages(unknown_sender, "west", sites, tmp_path / "s"), tmp_path).field == "plan"


def test_other_architectures_and_other_classes(sites: Path, tmp_path: Path) -> None:
    """What the plan allows is accepted; another architecture or another number of classes is refused by name."""
    plan = exchange_plan(Topology("mesh"))
    other = exchange_plan(Topology("mesh"), architecture="cnn-w4")
    larger = replace(plan, task=replace(plan.task, classes=(*plan.task.classes, "platelet")))
    no = refused(plan, signed_for(plan, messages(other, "west", sites, tmp_path / "other")), tmp_path)
    assert no.field == "facts.architecture"
    no = refused(plan, signed_for(plan, messages(larger, "west", sites, tmp_path / "larger")), tmp_path)
    assert no.field == "model/head.bias.shape"
    mixed = exchange_plan(Topology("mesh"), architecture="west:cnn-w4,*:cnn-w8")
    inbox = peer.own_inbox(mixed, "north", PUBLIC, tmp_path / "mixed")
    assert (
        peer.receive_from_neighbor(mixed, "north", inbox, messages(mixed, "west", sites, tmp_path / "mixed")).client == "west"
    )


def signed_for(plan: Plan, bundle: Path) -> bytes:
    """The same tensors and facts, signed by west for this round."""
    output = look_at(bundle).bundle
    kept = load_model_of(bundle)
    assert kept is not None
    return pack("upload", "west", plan.digest, to_raw(kept[0].tensors), dict(output.facts), KEYS["west"])


def test_a_bundle_sealed_to_a_neighbor_is_read_by_that_one_alone(sites: Path, tmp_path: Path) -> None:
    plan, letter = exchange_plan(Topology("mesh")), tmp_path / "west.sealed"
    seal(messages(plan, "west", sites, tmp_path), letter, PUBLIC["north"])
    inbox = peer.own_inbox(plan, "north", PUBLIC, tmp_path / "north")
    with pytest.raises(Rejected, match="it is sealed"):
        peer.receive_from_neighbor(plan, "north", inbox, letter)
    assert not inbox.folder.with_name("rejected.jsonl").exists()  # that nobody gave a key is no fault of the bundle
    with pytest.raises(Rejected):
        peer.receive_from_neighbor(plan, "north", inbox, letter, KEYS["south"])
    assert peer.receive_from_neighbor(plan, "north", inbox, letter, KEYS["north"]).client == "west"


def test_whose_bundle_a_file_says_it_is(sites: Path, tmp_path: Path) -> None:
    plan = exchange_plan(Topology("mesh"))
    inbox, odd = peer.own_inbox(plan, "north", PUBLIC, tmp_path), tmp_path / "odd"
    assert peer.sender(messages(plan, "west", sites, tmp_path), inbox) == "west" and peer.sender(odd, inbox) == ""
    for manifest in ("[]", "{}", "7", "no json"):
        head = json.dumps({"__metadata__": {"manifest": manifest, "signature": "00"}}).encode()
        odd.write_bytes(len(head).to_bytes(8, "little") + head)
        assert peer.sender(odd, inbox) == ""


def test_keys_of_all_neighbors_are_needed_and_methods_that_relay(tmp_path: Path) -> None:
    plan = exchange_plan(Topology("mesh"))
    with pytest.raises(UsageError, match="no key for 'west'"):
        peer.own_inbox(plan, "north", {"south": PUBLIC["south"]}, tmp_path)
    with pytest.raises(UsageError, match="fedavg needs a server"):
        peer.own_inbox(make_plan("fedavg"), "north", PUBLIC, tmp_path)


def test_the_plans_limits_hold_here_too(sites: Path, tmp_path: Path) -> None:
    plan = exchange_plan(Topology("mesh"))
    data = messages(plan, "west", sites, tmp_path).read_bytes()
    small = peer.own_inbox(replace(plan, limits=Limits(upload_bytes=len(data) - 1)), "north", PUBLIC, tmp_path / "n")
    with pytest.raises(Rejected, match="at most"):
        peer.receive_from_neighbor(plan, "north", small, data)
