"""The coordinator and its sites over networks that fail in every way; the same protocol as over Flower, without Flower."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import RoundError
from osfl.deploy.flower import messages
from osfl.deploy.flower.messages import MessageBody
from osfl.rounds.judgment import ask
from osfl.wire.refusals import JOURNAL
from osfl.wire.sealing import sealed_size
from osfl.wire.signing import SigningKey
from tests.faults import network as net
from tests.faults.network import QUICK, Clock, Faults, Network, Scenario, judge
from tests.faults.scenario import _KEYS, CLIENTS, POLICY, upload

CLEAN = {"lost": 0, "missing": 0, "made_twice": 0, "pieces_left": 0}


def test_a_round(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    network = scenario.network(Clock(), Faults())
    assert scenario.log(network=network) and judge(scenario) == CLEAN
    assert set(scenario.receipts) == set(scenario.clients)
    first = scenario.site(CLIENTS[0]).folder(POLICY.plan)
    assert (first / "release.safetensors").read_bytes() == net.RELEASE
    assert json.loads((first / "receipt.json").read_text())["digest"] == scenario.receipts[CLIENTS[0]]
    pieces = -(-len(upload(CLIENTS[0])) // QUICK.chunk)
    assert network.tally[messages.CHUNK] == (pieces - 1) * 3  # the first piece comes with the announcement


@pytest.mark.parametrize("fault", ["lost", "repeated", "late", "damaged", "cut", "away"])
def test_a_network_that_always_fails_in_one_way(tmp_path: Path, fault: str) -> None:
    scenario = Scenario(tmp_path)
    faults = Faults()
    setattr(faults, fault, 0.4)
    network = scenario.network(Clock(), faults)
    assert scenario.log(network=network) and judge(scenario) == CLEAN
    assert network.tally[fault] > 0


def test_networks_that_fail_in_all_ways(tmp_path: Path) -> None:
    found = net.bad_networks(tmp_path, 5)
    assert found["rounds"] == 5 and found["network_damaged"] and found["network_repeated"]
    assert {key: found[key] for key in CLEAN} == CLEAN and not found["not_finished"]


def test_killed_at_many_steps(tmp_path: Path) -> None:
    """Whoever dies, wherever: started again it goes on, and what was acknowledged is there."""
    found = net.killed_at_every_step(tmp_path, every=5)  # all of them in `make bench`
    assert found["points"] >= 20 and not found.get("not_killed")
    assert not any(found.get(key) for key in ("lost", "missing", "pieces_left", "not_finished")), found


def undecided(folder: Path, key: SigningKey, *, progress: object) -> None:
    ask([{"client": CLIENTS[0], "rule": "contradiction", "text": "calls classes otherwise"}], [], folder)


def test_a_suspected_site_lets_the_release_wait_for_the_coordinator(tmp_path: Path) -> None:
    """Whoever decides with `osfl server` makes the release; the same run then brings it to all sites."""
    scenario, clock, tries, lines = Scenario(tmp_path), Clock(), [0], list[str]()

    def make_release(folder: Path, key: SigningKey, *, progress: object) -> None:
        tries[0] += 1
        undecided(folder, key, progress=progress)

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        release = tmp_path / "round" / "release.safetensors"
        if clock() > 100 and not release.exists():  # the coordinator has decided elsewhere
            release.write_bytes(net.RELEASE)

    with scenario.role(make_release=make_release):
        program = scenario.collector(scenario.network(clock, Faults()), replace(QUICK, wait=1000.0, linger=100.0), sleep)
        program.log = lines.append
        assert program.run()
    assert judge(scenario) == CLEAN and set(scenario.receipts) == set(scenario.clients)
    assert tries == [1] and sum("waits for a decision" in line and "--exclude" in line for line in lines) == 1


def test_without_a_decision_a_run_ends_and_says_why(tmp_path: Path) -> None:
    scenario, clock, lines = Scenario(tmp_path), Clock(), list[str]()
    with scenario.role(make_release=undecided):
        program = scenario.collector(scenario.network(clock, Faults()), replace(QUICK, wait=200.0))
        program.log = lines.append
        assert not program.run()
    assert "nothing is lost" in lines[-1] and f"--keep {CLIENTS[0]}" in lines[-1]
    assert not (tmp_path / "round" / "release.safetensors").exists() and set(scenario.receipts) == set(scenario.clients)
    assert scenario.log()  # started again, with the decision made


def test_all_sites_at_once(tmp_path: Path) -> None:
    assert net.many_at_once(tmp_path, 24) == {"sites": 24, "finished": 1, **CLEAN}


@pytest.mark.parametrize("server", [None, net.SERVER], ids=["open", "sealed"])
def test_a_new_program_asks_only_for_what_is_missing(tmp_path: Path, server: SigningKey | None) -> None:
    scenario = Scenario(tmp_path, server=server)
    clock = Clock()
    network = scenario.network(clock, Faults())
    network.dead = {12}  # the third site is away for the whole first run
    assert not scenario.log(network=network, collector_config=replace(QUICK, wait=100.0))
    assert len(scenario.inbox.delivered()) == 2
    again = scenario.network(Clock(), Faults())
    assert scenario.log(network=again) and judge(scenario) == CLEAN
    size = len(upload(CLIENTS[0]))
    pieces = -(-(sealed_size(size) if server else size) // QUICK.chunk)
    assert again.tally[messages.CHUNK] == pieces - 1  # of the third site only


def test_a_receipt_that_was_lost_with_its_program_is_sent_by_the_next(tmp_path: Path) -> None:
    """The last upload starts the server phase: the program may die after the release and before that receipt."""
    scenario = Scenario(tmp_path)
    assert scenario.log()
    receipts = [scenario.site(client).folder(POLICY.plan) / "receipt.json" for client in scenario.clients]
    before = [path.read_bytes() for path in receipts]
    for path in receipts:
        path.unlink()
    assert scenario.log() and [path.read_bytes() for path in receipts] == before


def test_pieces_survive_the_program(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, CLIENTS[:1])
    asked: list[int] = []

    def answer(kind: str, body: MessageBody) -> MessageBody:
        if kind == messages.CHUNK:
            asked.append(messages.number(body, "offset"))
            if len(asked) == 3:
                raise net.Killed
        return scenario.site(CLIENTS[0]).handle(kind, body)

    network = Network({10: answer}, Clock())
    with pytest.raises(net.Killed):
        scenario.log(network=network, collector_config=replace(QUICK, window=1))
    assert scenario.log(network=Network({10: answer}, Clock()), collector_config=replace(QUICK, window=1))
    assert asked == [1000, 2000, 3000, 3000, 4000]  # the piece that never came is asked for again, no other


def test_a_late_site_delivers_hours_later(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    clock = Clock()
    network = scenario.network(clock, Faults())
    network.dead = {12}
    sleep = clock.sleep

    def hours(seconds: float) -> None:
        sleep(seconds * 600)
        if clock.now > 5 * 3600:
            network.dead = set()

    collector_config = replace(QUICK, wait=86400.0, linger=86400.0)
    with scenario.role():
        assert scenario.collector(network, collector_config, hours).run()
    assert clock.now > 5 * 3600 and judge(scenario) == CLEAN


def test_nobody_waits_for_the_forgotten(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    assert scenario.log()
    network = scenario.network(Clock(), Faults())
    network.dead = {12}  # it took its upload back, and left

    def run(gone: list[str]) -> bool:
        policy = replace(scenario.policy, forgotten=dict.fromkeys(gone, ""))
        with scenario.role(policy):
            return scenario.collector(network).run()

    assert not run([]) and run([CLIENTS[2]])
    network.dead, network.tally = set(), type(network.tally)()
    assert run([CLIENTS[2]]) and network.tally[messages.TAKE] == 2  # the forgotten one is there, and is brought nothing


def test_a_release_that_is_made_again_is_brought_to_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something is forgotten while the program still waits for a site that is away."""
    scenario = Scenario(tmp_path)
    network = scenario.network(Clock(), Faults())
    sleep, path = network.clock.sleep, tmp_path / "round" / "release.safetensors"

    def pass_time(seconds: float) -> None:
        sleep(seconds)
        if path.exists() and not network.dead and len(collector.took) == 0:
            network.dead = {12}
        elif len(collector.took) == 2 and net.RELEASE[:3] != b"new":
            monkeypatch.setattr(net, "RELEASE", b"new" + net.RELEASE)
            path.write_bytes(net.RELEASE)
            network.dead = {99}

    with scenario.role():
        collector = scenario.collector(network, sleep=pass_time)
        assert collector.run()
    for client in scenario.clients:
        assert (scenario.site(client).folder(POLICY.plan) / "release.safetensors").read_bytes() == net.RELEASE
    assert net.RELEASE[:3] == b"new"


def refused(scenario: Scenario, client: str, change: Callable[[str, MessageBody, MessageBody], MessageBody]) -> Network:
    """A round in which one site does not play by the rules."""
    network = scenario.network(Clock(), Faults())
    node = 10 + scenario.clients.index(client)
    honest = network.sites[node]
    network.sites[node] = lambda kind, body: change(kind, body, honest(kind, body))
    return network


SHORT = replace(QUICK, wait=60.0)


def test_a_node_that_cannot_sign_is_never_asked_for_a_byte(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    unknown_sender = CLIENTS[5]  # has a key, but is not enrolled in this round

    def forged(kind: str, body: MessageBody, answer: MessageBody) -> MessageBody:
        return {**answer, "proof": _KEYS[unknown_sender].sign(b"something")} if kind == messages.ANNOUNCE else answer

    network = refused(scenario, CLIENTS[1], forged)
    network.sites[13] = scenario.answer(unknown_sender)
    assert not scenario.log(network=network, collector_config=SHORT)
    assert set(scenario.inbox.delivered()) == {CLIENTS[0], CLIENTS[2]}
    assert network.tally[messages.CHUNK] == 2 * 4
    assert len((tmp_path / "round" / JOURNAL).read_bytes().splitlines()) == 2  # both were written down, once


def test_an_old_proof_is_not_good_again(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, CLIENTS[:1])
    proofs: list[object] = []

    def replays(kind: str, body: MessageBody, answer: MessageBody) -> MessageBody:
        if kind == messages.ANNOUNCE:
            proofs.append(answer["proof"])
            return {**answer, "proof": "0" * 128} if len(proofs) == 1 else {**answer, "proof": str(proofs[0])}
        return answer

    assert not scenario.log(network=refused(scenario, CLIENTS[0], replays), collector_config=SHORT) and len(proofs) > 1
    assert not scenario.inbox.delivered()


def test_an_upload_that_the_gate_refuses_is_answered_with_the_reason(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    folder = scenario.site(CLIENTS[1]).folder(POLICY.plan)
    folder.mkdir(parents=True)
    (folder / "upload.safetensors").write_bytes(upload(CLIENTS[5]))  # somebody else's
    network = scenario.network(Clock(), Faults())
    assert not scenario.log(network=network, collector_config=SHORT)
    reported = json.loads((folder / "receipt.json").read_text())
    assert "no such client is enrolled" in reported["refused"]
    assert "digest" not in reported and CLIENTS[1] not in scenario.inbox.delivered()
    (folder / "upload.safetensors").write_bytes(upload(CLIENTS[1]))  # people at the site put it right
    assert scenario.log() and judge(scenario) == CLEAN


def test_a_second_different_upload_is_refused_and_the_first_stands(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)
    scenario.inbox.receive(upload(CLIENTS[0]))
    folder = scenario.site(CLIENTS[0]).folder(POLICY.plan)
    folder.mkdir(parents=True)
    (folder / "upload.safetensors").write_bytes(upload(CLIENTS[0], version=1))
    scenario.log(collector_config=replace(SHORT, linger=60.0))
    assert "the first one stands" in json.loads((folder / "receipt.json").read_text())["refused"]
    assert scenario.inbox.path(CLIENTS[0]).read_bytes() == upload(CLIENTS[0])


def test_too_large_is_refused_before_a_piece_is_asked_for(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, CLIENTS[:1])
    network = scenario.network(Clock(), Faults())
    small = replace(scenario.policy, limits=replace(scenario.policy.limits, upload_bytes=100))
    with scenario.role(small):
        scenario.collector(network, SHORT).run()
    assert not network.tally[messages.CHUNK] and not scenario.inbox.delivered()


def test_a_site_that_lost_its_upload_is_asked_from_the_beginning(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path, CLIENTS[:1])
    kept = scenario.site(CLIENTS[0]).folder(POLICY.plan) / "upload.safetensors"

    def forgets(kind: str, body: MessageBody, answer: MessageBody) -> MessageBody:
        if kind == messages.CHUNK and scenario.made[CLIENTS[0]] == 1:
            kept.unlink(missing_ok=True)
        return answer

    assert scenario.log(network=refused(scenario, CLIENTS[0], forgets))
    assert scenario.made[CLIENTS[0]] == 2 and scenario.inbox.delivered()


def test_a_full_disk_ends_the_run_and_nothing_is_acknowledged(tmp_path: Path) -> None:
    scenario = Scenario(tmp_path)

    def full(folder: Path, path: Path, key: SigningKey) -> object:
        raise RoundError("the disk failed", field="inbox")

    network = scenario.network(Clock(), Faults())
    with scenario.role(receive=full), pytest.raises(RoundError):
        scenario.collector(network).run()
    assert not scenario.receipts and not scenario.inbox.delivered()
    assert scenario.log() and judge(scenario) == CLEAN


def test_disks_that_are_full_at_many_points(tmp_path: Path) -> None:
    found = net.full_disks(tmp_path, 10)  # more of them in `make bench`
    assert found["points"] == 10 and found["stopped"] >= 8
    assert not any(found[key] for key in ("lost", "missing", "pieces_left", "not_finished")), found


def test_a_node_that_was_away_is_asked_again(tmp_path: Path) -> None:
    """A SuperNode that is restarted forgets the question and nobody says so."""
    scenario = Scenario(tmp_path, CLIENTS[:1])
    network = scenario.network(Clock(), Faults())
    send, nodes = network.send, network.nodes
    silent = [True]
    network.send = lambda node, kind, body: "never" if silent[0] else send(node, kind, body)  # type: ignore[method-assign]
    network.nodes = lambda: set() if 5 < network.clock() < 8 else nodes()  # type: ignore[method-assign]
    sleep = network.clock.sleep

    def pass_time(seconds: float) -> None:
        sleep(seconds)
        silent[0] = network.clock() < 6

    with scenario.role():
        assert scenario.collector(network, sleep=pass_time).run()
    assert network.clock() < 100


def test_a_site_answers_only_for_itself_and_says_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = Scenario(tmp_path).site(CLIENTS[0])
    about: MessageBody = {"round": POLICY.plan, "client": CLIENTS[1], "offset": 0, "length": 10}
    assert site.handle(messages.CHUNK, about) == {"client": CLIENTS[0], "refused": "UsageError (client)"}
    assert site.handle(messages.ANNOUNCE, {"round": "../../etc"})["refused"] == "UsageError (round)"
    assert site.handle(messages.CHUNK, {**about, "client": CLIENTS[0]})["refused"] == "UsageError (upload)"
    assert "there is no upload yet" in capsys.readouterr().out  # the reason stays at the site
