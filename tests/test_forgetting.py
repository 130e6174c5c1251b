"""Forgetting: exact, resumable after a kill anywhere, provable, and refused with a reason where it cannot be."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl import coordinator, site
from osfl.checks import files_with, never_joined, small_federation
from osfl.errors import OsflError, Rejected, RoundError, UsageError
from osfl.flower_app import DONE, counter_of
from osfl.forgetting import forget, verify
from osfl.forgetting.asking import MADE_OF_IT
from osfl.phases import Machine, computing
from osfl.protocol import Plan, canonical
from osfl.provenance import Known, examine
from osfl.round import simulated_key, standing_round
from osfl.run import compare, load_model, walk
from osfl.simulation import Federation, Simulation
from osfl.storage import to_raw
from osfl.wire.agreed import INTENT, certificates, standing_desk
from osfl.wire.bundle import pack
from osfl.wire.gate import verify_release
from osfl.wire.inbox import JOURNAL, Inbox
from tests.test_roles import keys, make_plan, make_sites, opened

ONE = Machine(workers=1)
ABOUT = {"preset": "smoke", "command": "osfl run --method fedavg"}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Finished rounds, walked once; every test works in a copy."""
    kept = tmp_path_factory.mktemp("rounds")

    def copy(method: str, to: Path, **words: Any) -> Path:
        original = kept / "-".join([method, *map(str, words.values())])
        if not original.exists():
            walk(small_federation(method, **words), original, ABOUT, machine=ONE)
        return Path(shutil.copytree(original, to))

    return copy


def failed(folder: Path) -> list[str]:
    return [finding.check for finding in verify(folder) if not finding.good]


def digest(folder: Path, method: str = "ensemble", **words: Any) -> str:
    with standing_round(folder, small_federation(method, **words).plan) as round:
        published = round.release()
    assert published is not None
    return published[1]


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


def test_the_same_words_evaluate_what_is_left(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    certificate = forget(folder, clients=["client-02"], machine=ONE)
    assert certificate["again"] == ABOUT["command"]
    result = walk(small_federation("ensemble"), folder, ABOUT, machine=ONE)
    assert result["release_digest"] == certificate["release"]["after"]
    assert [row["client"] for row in result["clients"]] == ["client-01", "client-03"]
    assert set(result["costs"]["upload_bytes_by_client"]) == set(result["costs"]["download_bytes_by_client"])
    assert failed(folder) == []


def test_a_comparison_keeps_models_on_a_shelf_that_the_certificate_names(tmp_path: Path) -> None:
    simulation = Simulation("fedavg", "digits", 3, "dirichlet:0.5", "smoke", samples=120, image_size=8)
    compare(simulation, ["fedavg", "ensemble"], [0], tmp_path / "pair", machine=ONE)
    certificate = forget(tmp_path / "pair" / "ensemble" / "seed0", clients=["client-01"], machine=ONE)
    assert [Path(path).parent for path in certificate["elsewhere"]] == [Path("../../shelf")]


# --- classes and cells ----------------------------------------------------------------------------------------------------

APART = "fedpft"  # a quick one of those that send classes apart; the shared checks do it for all


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
    path, desk = one / "inbox" / f"{changed[0]}.safetensors", standing_desk(one)
    assert path.stat().st_mode & 0o077 == 0
    verdict = examine([path], Known(desk.plan, desk.server, desk))[0]
    assert verdict.good and verdict.digest == forward["uploads"][changed[0]]["after"]


def test_what_is_left_of_an_upload_must_be_what_was_certified(rounds: Any, tmp_path: Path) -> None:
    folder = rounds(APART, tmp_path / "round")
    original = {path.name: path.read_bytes() for path in (folder / "inbox").iterdir()}
    certificate = forget(folder, class_name="2", machine=ONE)
    client = next(iter(certificate["uploads"]))
    with pytest.raises(Rejected, match="a class of its upload was forgotten"):
        Inbox(folder / "inbox", standing_desk(folder)).receive(original[f"{client}.safetensors"])
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


@pytest.mark.parametrize(("words", "error", "says"), [
    ({"class_name": "eleven"}, RoundError, "no class 'eleven'"),
    ({}, UsageError, "nothing was named"),
])  # fmt: skip
def test_words_that_mean_nothing_here(rounds: Any, tmp_path: Path, words: dict[str, str], error: type, says: str) -> None:
    folder = rounds(APART, tmp_path / "round")
    with pytest.raises(error, match=says):
        forget(folder, **words)
    assert not (folder / INTENT).exists()


def test_methods_that_send_one_model_of_all_classes_say_which_can(rounds: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)uploads of ensemble cannot be taken apart.*federated_factory"):
        forget(rounds("ensemble", tmp_path / "round"), class_name="3")


# --- refusals -------------------------------------------------------------------------------------------------------------


def refused(folder: Path, says: str, **words: Any) -> OsflError:
    """The refusal names everything, and nothing was touched."""
    before = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    with pytest.raises(RoundError, match=says) as caught:
        forget(folder, machine=ONE, **words)
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
        walk(small_federation("ensemble"), folder, ABOUT, machine=ONE)


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


def real_round(tmp_path: Path, deliver: tuple[str, ...] = ("north", "south", "west"), **more: Any) -> Any:
    plan, sites, known = make_plan(**more), make_sites(tmp_path / "sites"), keys()
    round = opened(tmp_path / "round", plan, known)
    bundles = {c: site.make_upload(plan, c, sites / c, known[c], tmp_path / c, machine=ONE) for c in plan.clients}
    for client in deliver:
        coordinator.receive(round, bundles[client])
    return round, known, bundles


def test_a_real_round_wants_its_servers_key_and_keeps_the_forgotten_out(tmp_path: Path) -> None:
    round, known, bundles = real_round(tmp_path)
    coordinator.serve(round, known["server"], machine=ONE)
    with pytest.raises(UsageError, match="real round"):
        forget(round, clients=["south"])
    with pytest.raises(UsageError, match="not the server's"):
        forget(round, known["north"], clients=["south"])
    (round / DONE).touch()
    counter = counter_of(round, tmp_path / "unused.key")
    assert not counter.forgotten()
    certificate = forget(round, known["server"], clients=["south"], machine=ONE)
    assert counter.forgotten() == ["south"] and not (round / DONE).exists()  # nobody has the new release yet
    with pytest.raises(Rejected, match="this client was forgotten in this round"):
        coordinator.receive(round, bundles["south"])
    assert not (round / "inbox" / "south.safetensors").exists()
    found = coordinator.status(round)
    assert found.forgotten == ["south"] and not found.missing and found.release == certificate["release"]["after"]
    assert failed(round) == []  # the refusal is noted, with nothing of the upload


def test_what_flower_keeps_of_an_upload_is_named(tmp_path: Path) -> None:
    opened_here, known, bundles = real_round(tmp_path)
    round, link = tmp_path / "coordinator" / "rounds" / "one", tmp_path / "coordinator" / "link"
    round.parent.mkdir(parents=True)
    opened_here.rename(round)
    link.mkdir()
    (link / "state.db").write_bytes(b"pages" + bundles["south"].read_bytes()[-2000:])
    (link / "registered-south").touch()
    assert forget(round, known["server"], clients=["south"], machine=ONE)["elsewhere"] == ["../../link/state.db"]


def test_before_the_release_forgetting_lets_the_round_go_on(tmp_path: Path) -> None:
    round, known, bundles = real_round(tmp_path, deliver=("north", "south"))
    certificate = forget(round, known["server"], clients=["south"], machine=ONE)
    assert certificate["release"] == {"before": "", "after": ""} and not certificate["replace"]
    assert coordinator.status(round).missing == ["west"]
    coordinator.receive(round, bundles["west"])
    assert coordinator.status(round).ready
    coordinator.serve(round, known["server"], machine=ONE)
    assert failed(round) == []
    with pytest.raises(RoundError, match="has said nothing"):
        other, more, _ = real_round(tmp_path / "other", deliver=("north",))
        forget(other, more["server"], clients=["south"])


def test_an_upload_that_came_late_stays_out(tmp_path: Path) -> None:
    round, known, bundles = real_round(tmp_path, deliver=("north", "south"), quorum=1)
    coordinator.serve(round, known["server"], machine=ONE)
    coordinator.receive(round, bundles["west"])
    certificate = forget(round, known["server"], clients=["south"], machine=ONE)
    assert coordinator.status(round).late == ["west"] and failed(round) == []
    again = forget(round, known["server"], clients=["west"], machine=ONE)
    assert again["release"] == {"before": certificate["release"]["after"], "after": certificate["release"]["after"]}
    assert again["replace"] == []


def test_below_the_quorum(tmp_path: Path) -> None:
    round, known, _ = real_round(tmp_path, quorum=3)
    coordinator.serve(round, known["server"], machine=ONE)
    refused(round, "quorum is 3", server_key=known["server"], clients=["south"])
    forget(round, known["server"], clients=["south"], withdraw=True, machine=ONE)
    found = coordinator.status(round)
    assert not found.released and not found.ready and "2 of the 3 uploads" in found.waits_for


def test_an_upload_that_arrives_while_its_client_is_forgotten_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate looked before the forgetting began, and stores afterwards."""
    round, known, bundles = real_round(tmp_path)
    coordinator.serve(round, known["server"], machine=ONE)
    desk, stale = standing_desk(round), [True]
    forget(round, known["server"], clients=["south"], machine=ONE)
    monkeypatch.setattr(coordinator, "standing_desk", lambda folder: desk if stale and stale.pop() else standing_desk(folder))
    with pytest.raises(Rejected, match="was forgotten"):
        coordinator.receive(round, bundles["south"])
    assert not (round / "inbox" / "south.safetensors").exists() and failed(round) == []
    Inbox(round / "inbox", desk).receive(bundles["south"])  # killed before it looked again
    assert failed(round) == ["uploads", "bytes"] and "south" not in coordinator.status(round).delivered
    coordinator.receive(round, bundles["north"])  # whatever is received next
    assert failed(round) == []


# --- the proof fails where it should -----------------------------------------------------------------------------------------


def test_left_over_files_are_found(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    upload, release = ((folder / name).read_bytes() for name in ("inbox/client-02.safetensors", "release.safetensors"))
    forget(folder, clients=["client-02"], machine=ONE)
    now = (folder / "release.safetensors").read_bytes()
    for name, content, checks in (
        ("personal/client-02.safetensors", upload, ["parts", "bytes"]),
        ("inbox/client-02.safetensors", upload, ["uploads", "bytes"]),
        ("inbox/.client-02.safetensors.0123.tmp", upload[: len(upload) // 2], ["bytes"]),
        ("notes.bin", b"x" * 17 + upload[-1000:], ["bytes"]),
        ("release.safetensors", release, ["release", "bytes"]),
        ("release.safetensors", now[:-1] + bytes([now[-1] ^ 1]), ["release", "parts"]),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        assert failed(folder) == checks, name
        (folder / name).unlink()
        (folder / "release.safetensors").write_bytes(now)
    assert failed(folder) == []


def test_half_a_transfer_goes_too(rounds: Any, tmp_path: Path) -> None:
    """At the desk, and over a network; what is remembered of whole ones is whose it is."""
    folder = rounds("ensemble", tmp_path / "round")
    names = (".desk/incoming-0123.part", "partial/client-02.0123456789abcdef.part", "partial/client-02.came")
    half = (folder / "inbox/client-02.safetensors").read_bytes()[:-1000]
    for name in (*names, "partial/client-01.came"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(half if name.endswith(".part") else b"0" * 64)
    forget(folder, clients=["client-02"], machine=ONE)
    assert not any((folder / name).exists() for name in names) and failed(folder) == []
    assert (folder / "partial/client-01.came").exists()


def test_certificates_cannot_be_edited_or_lost(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round", clients=4)
    for client in ("client-01", "client-02"):
        forget(folder, clients=[client], machine=ONE)
    path = folder / "forgotten" / "0002.json"
    good = path.read_bytes()
    for key, value in (("time", "2001-01-01T00:00:00+00:00"), ("uploads", {}), ("traces", [])):
        content = json.loads(good)
        content["certificate"][key] = value
        path.write_text(json.dumps(content))
        with pytest.raises(RoundError, match=r"forgotten/0002.json is not what the server signed"):
            verify(folder)
    content = json.loads(good)
    content["signature"] = simulated_key(0, "client-03").sign(canonical(content["certificate"]))
    path.write_text(json.dumps(content))
    with pytest.raises(RoundError, match="not what the server signed"):
        verify(folder)
    path.write_bytes(good)
    (folder / "forgotten" / "0001.json").unlink()
    assert "certificates" in failed(folder)


def test_files_that_others_put_into_the_folder_stop_the_certificate(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    shutil.copy(folder / "inbox" / "client-02.safetensors", folder / "my-copy.bin")
    with pytest.raises(RoundError, match=r"still in my-copy\.bin"):
        forget(folder, clients=["client-02"], machine=ONE)
    assert not (folder / "forgotten").exists() and (folder / INTENT).exists()
    (folder / "my-copy.bin").unlink()
    forget(folder, clients=["client-02"], machine=ONE)
    assert failed(folder) == []


# --- the certificate, line by line -------------------------------------------------------------------------------------------


def test_the_certificate_tells_digests_files_and_machine(rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = rounds("ensemble", tmp_path / "round")
    before = Inbox(folder / "inbox", standing_desk(folder)).digest("client-02")
    made = {path.name for path in folder.iterdir()} & {"release.safetensors", *MADE_OF_IT}
    certificate = forget(folder, clients=["client-02"], machine=Machine(workers=1, threads=2))
    assert certificate["uploads"] == {"client-02": {"before": before, "after": ""}}
    assert set(certificate["removed"]) == {*made, "inbox/client-02.safetensors"} and "results.json" in made
    assert certificate["machine"] == {"device": "cpu", "threads": 2} and certificate["stays"] == ""
    used: list[Machine] = []

    def watched(plan: Plan, machine: Machine, *rest: Any) -> Any:
        used.append(machine)
        return computing(plan, machine, *rest)

    monkeypatch.setattr("osfl.forgetting.proof.computing", watched)
    assert failed(folder) == [] and [(machine.device, machine.threads) for machine in used] == [("cpu", 2)]


def test_personal_parts_are_named_for_those_who_hold_them(tmp_path: Path) -> None:
    federation = small_federation("federated_factory")
    peers = replace(federation, plan=replace(federation.plan, settings=replace(federation.plan.settings, mode="peer")))
    folder = tmp_path / "round"
    walk(peers, folder, ABOUT, machine=ONE)
    server, clients = standing_desk(folder).server, peers.plan.clients
    parts = {c: verify_release(folder / "personal" / f"{c}.safetensors", server, peers.plan.digest).digest for c in clients}
    expert = (folder / "models" / "client-02.safetensors").read_bytes()
    certificate = forget(folder, clients=["client-02"], machine=ONE)
    assert {row["who"]: row["delete_personal"] for row in certificate["replace"]} == parts
    assert failed(folder) == []
    (folder / "copy.bin").write_bytes(expert)  # what the client had made of the release
    assert failed(folder) == ["bytes"]


def test_certificates_go_on_from_each_other(rounds: Any, tmp_path: Path) -> None:
    """Also those that the server signed itself."""
    folder = rounds("ensemble", tmp_path / "round", clients=4)
    for client in ("client-01", "client-02"):
        forget(folder, clients=[client], machine=ONE)
    path, server = folder / "forgotten" / "0002.json", simulated_key(0, "server")
    good = json.loads(path.read_bytes())["certificate"]
    for wrong in ({"number": 3}, {"plan": "0" * 64}, {"release": {**good["release"], "before": "0" * 64}}):
        other = {**good, **wrong}
        path.write_text(json.dumps({"certificate": other, "signature": server.sign(canonical(other))}))
        assert failed(folder) == ["certificates"], wrong


def test_a_release_that_the_uploads_do_not_give_is_found(tmp_path: Path) -> None:
    """Made after the forgetting, so no certificate names it; signed by the server all the same."""
    round, known, _ = real_round(tmp_path)
    forget(round, known["server"], clients=["south"], machine=ONE)
    coordinator.serve(round, known["server"], machine=ONE)
    assert failed(round) == []
    with standing_round(round, make_plan(), known["server"]) as standing:
        published, (_, made_from) = standing.release(), standing.uploads()
        assert published is not None
        shared = published[0].shared
        changed = {name: value + 1 if value.is_floating_point() else value for name, value in shared.tensors.items()}
        standing.publish(replace(published[0], shared=replace(shared, tensors=changed)), made_from)
    assert failed(round) == ["release"]


def test_what_has_seen_the_class_and_stays_is_said(rounds: Any, tmp_path: Path) -> None:
    certificate = forget(rounds("falcon", tmp_path / "round"), class_name="2", machine=ONE)
    assert "classifiers" in certificate["stays"]


def test_a_copy_of_the_old_release_is_found(rounds: Any, tmp_path: Path) -> None:
    """Averages of models hold no bytes of an upload; they are looked for all the same."""
    folder = rounds("fedavg", tmp_path / "round")
    old = (folder / "release.safetensors").read_bytes()
    forget(folder, clients=["client-02"], machine=ONE)
    (folder / "copy.bin").write_bytes(b"x" * 5 + old)
    assert failed(folder) == ["bytes"]


def test_what_was_refused_before_is_not_remembered_either(tmp_path: Path) -> None:
    round, known, bundles = real_round(tmp_path)
    for client in ("north", "south"):
        damaged = tmp_path / f"{client}.damaged"
        damaged.write_bytes(bundles[client].read_bytes()[:-1] + b"?")
        with pytest.raises(Rejected):
            coordinator.receive(round, damaged)
    noted = (round / JOURNAL).read_text()
    assert "north" in noted and "south" in noted
    forget(round, known["server"], clients=["south"], machine=ONE)
    noted = (round / JOURNAL).read_text()
    assert "north" in noted and "south" not in noted


# --- kills ----------------------------------------------------------------------------------------------------------------

DURABLE = ("fsync", "replace", "rename", "unlink", "rmdir", "chmod")


class Killed(BaseException):
    """The process is dead: nothing that it might still want to do happens."""


@contextmanager
def dying_at(step: int) -> Iterator[list[int]]:
    """From the given durable call on, every one of them raises before it does anything, as for a dead process."""
    count, real = [0], {name: getattr(os, name) for name in DURABLE}

    def through(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if step and count[0] >= step:
                raise Killed
            return real[name](*args, **options)

        return call

    try:
        for name in DURABLE:
            setattr(os, name, through(name))
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)


@pytest.mark.parametrize(("method", "words"), [
    ("fedavg", {"clients": ["client-02"]}),
    (APART, {"class_name": "2"}),
])  # fmt: skip
def test_a_kill_anywhere_costs_nothing(rounds: Any, tmp_path: Path, method: str, words: dict[str, Any]) -> None:
    whole = rounds(method, tmp_path / "whole")
    before = digest(whole, method)
    with dying_at(0) as count:
        expected = forget(whole, machine=ONE, **words)["release"]["after"]
    steps = range(1, count[0] + 1, 1 if method == "fedavg" else 20)  # what differs between them is near the beginning
    assert count[0] > 30
    for step in steps:
        folder = rounds(method, tmp_path / f"killed-{step}")
        with dying_at(step), pytest.raises(Killed):
            forget(folder, machine=ONE, **words)
        _half_is_never_taken_for_whole(folder, method, before, expected)
        if not certificates(folder, standing_desk(folder).server) or (folder / INTENT).exists():
            assert forget(folder, machine=ONE, **words)["release"]["after"] == expected, step
        assert not (folder / INTENT).exists() and (step % 10 or failed(folder) == []), step
        assert digest(folder, method) == expected
        shutil.rmtree(folder)


def _half_is_never_taken_for_whole(folder: Path, method: str, before: str, after: str) -> None:
    found = coordinator.status(folder)
    if (folder / INTENT).exists():
        assert not found.released and not found.ready
        with pytest.raises(RoundError, match=r"in the middle of forgetting|holds no finished round"):
            load_model(folder)
        with pytest.raises(RoundError, match="in the middle of forgetting"):
            walk(small_federation(method), folder, ABOUT, machine=ONE)
    else:
        assert found.release in (before, after)


def test_an_unfinished_forgetting_is_finished_before_another_begins(
    rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rounds("ensemble", tmp_path / "round")

    def broken(*_: Any) -> None:
        raise RoundError("the server phase does not work any more")

    monkeypatch.setattr("osfl.methods.ensemble.EnsembleOfClients.server_phase", broken)
    with pytest.raises(RoundError, match="does not work any more"):
        forget(folder, clients=["client-02"], machine=ONE)
    with pytest.raises(RoundError, match=r"another forgetting .*--client client-02.*--client client-03"):
        forget(folder, clients=["client-03"], machine=ONE)
    with pytest.raises(RoundError, match="in the middle of forgetting"):
        verify(folder)
    certificate = forget(folder, clients=["client-02"], withdraw=True, machine=ONE)  # the way out
    assert certificate["release"]["after"] == "" and failed(folder) == []


def test_late_words_change_nothing_that_was_agreed(rounds: Any, tmp_path: Path) -> None:
    """A round of another plan is not opened in a folder because somebody was forgotten there."""
    folder = rounds("ensemble", tmp_path / "round")
    forget(folder, clients=["client-02"], machine=ONE)
    federation = small_federation("ensemble")
    stays = tuple(client for client in federation.plan.clients if client != "client-02")
    with pytest.raises(RoundError, match="holds another round"):
        walk(replace(federation, plan=replace(federation.plan, clients=stays)), folder, ABOUT, machine=ONE)


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
    walk(federation, tmp_path / "round", ABOUT, machine=ONE)
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
    walk(replace(federation, shards=shards), tmp_path / "round", ABOUT, machine=ONE)
    certificate = forget(tmp_path / "round", clients=["client-03"], class_name=str(label), machine=ONE)
    assert certificate["uploads"]["client-03"]["after"] != "" and failed(tmp_path / "round") == []


def test_withdraw_means_the_same_after_a_kill(rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = rounds("ensemble", tmp_path / "whole"), rounds("ensemble", tmp_path / "killed")
    expected = forget(whole, clients=["client-02"], withdraw=True, machine=ONE)["release"]["after"]

    def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("osfl.forgetting.carrying_out._replay", dies)
        forget(killed, clients=["client-02"], withdraw=True, machine=ONE)
    assert forget(killed, clients=["client-02"], withdraw=True, machine=ONE)["release"]["after"] == expected != ""


@pytest.mark.parametrize("facts", [{}, {"class_counts": [9] * 10, "samples": 1}])
def test_odd_facts_of_one_client_do_not_keep_a_class_from_being_forgotten(tmp_path: Path, facts: dict[str, Any]) -> None:
    federation = small_federation("federated_factory")
    folder = tmp_path / "round"
    walk(federation, folder, ABOUT, machine=ONE)
    with standing_round(folder, federation.plan) as round:
        said = next(upload.payload for upload in round.uploads()[0] if upload.client == "client-02")
    (folder / "release.safetensors").unlink()
    (folder / "inbox" / "client-02.safetensors").unlink()
    key = simulated_key(0, "client-02")
    odd = pack("upload", "client-02", federation.plan.digest, to_raw(said.tensors), facts, key)
    Inbox(folder / "inbox", standing_desk(folder)).receive(odd)  # the gate lets it in
    label = next(name.removeprefix("class-").split("/")[0] for name in said.tensors)
    assert "client-02" in forget(folder, class_name=label, machine=ONE)["uploads"]


def test_peers_whose_experts_see_the_class_at_home_are_told(tmp_path: Path) -> None:
    federation = few_images("client-03", 4, mode="peer")
    walk(federation, tmp_path / "round", ABOUT, machine=ONE)
    assert forget(tmp_path / "round", class_name="3", machine=ONE)["stays"]


@pytest.mark.parametrize("said_before", [False, True])
def test_a_replay_that_cannot_work_says_how_to_end_without_a_release(tmp_path: Path, said_before: bool) -> None:
    """The only client with generators goes: what is left are uploads of which nothing can be made."""
    federation = few_images("client-02", 1)
    shards = [few_images("client-03", 1).shards[2] if s.client == "client-03" else s for s in federation.shards]
    folder = tmp_path / "round"
    walk(replace(federation, shards=shards), folder, ABOUT, machine=ONE)
    for _ in range(1 if said_before else 2):  # also when it is repeated
        with pytest.raises(OsflError, match="no client has sent a generator") as error:
            forget(folder, clients=["client-01"], withdraw=said_before, machine=ONE)
        assert "the same command with --withdraw" in (error.value.fix or "")
    certificate = forget(folder, clients=["client-01"], withdraw=True, machine=ONE)
    assert certificate["release"]["after"] == "" and failed(folder) == []
