"""The certificate: what it says, and that its proof fails where it should."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.core.errors import Rejected, RoundError
from osfl.core.types import Plan, canonical
from osfl.roles import coordinator
from osfl.rounds.folder import existing_round, simulated_key
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.forgetting.request import MADE_OF_IT
from osfl.rounds.phases import computing
from osfl.rounds.state import INTENT, read_policy
from osfl.runtime.machine import Machine
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation
from osfl.wire.gate import verify_release
from osfl.wire.inbox import Inbox
from osfl.wire.refusals import JOURNAL
from tests.roles.test_roles import make_plan
from tests.rounds.forgetting.conftest import ABOUT, ONE, failed, real_round

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
        ("release.safetensors", release, ["release", "parts", "bytes"]),
        ("release.safetensors", now[:-1] + bytes([now[-1] ^ 1]), ["release", "parts"]),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
        assert failed(folder) == checks, name
        (folder / name).unlink()
        (folder / "release.safetensors").write_bytes(now)
    assert failed(folder) == []


def test_half_a_transfer_goes_too(rounds: Any, tmp_path: Path) -> None:
    """At the coordinator, and over a network; what is remembered of whole ones is whose it is."""
    folder = rounds("ensemble", tmp_path / "round")
    names = (".dashboard/incoming-0123.part", "partial/client-02.0123456789abcdef.part", "partial/client-02.sha256")
    half = (folder / "inbox/client-02.safetensors").read_bytes()[:-1000]
    for name in (*names, "partial/client-01.sha256"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(half if name.endswith(".part") else b"0" * 64)
    forget(folder, clients=["client-02"], machine=ONE)
    assert not any((folder / name).exists() for name in names) and failed(folder) == []
    assert (folder / "partial/client-01.sha256").exists()


def test_what_the_page_showed_of_the_server_phase_goes_too(rounds: Any, tmp_path: Path) -> None:
    """Its steps and errors name clients."""
    folder = rounds("ensemble", tmp_path / "round")
    (folder / ".dashboard").mkdir()
    names = [folder / ".dashboard" / name for name in ("phase.json", "phase.log")]
    for path in names:
        path.write_text('{"state": "failed", "error": {"client": "client-02"}}')
    forget(folder, clients=["client-02"], machine=ONE)
    assert not any(path.exists() for path in names)


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
    before = Inbox(folder / "inbox", read_policy(folder)).digest("client-02")
    made = {path.name for path in folder.iterdir()} & {"release.safetensors", *MADE_OF_IT}
    certificate = forget(folder, clients=["client-02"], machine=Machine(workers=1, threads=2))
    assert certificate["uploads"] == {"client-02": {"before": before, "after": ""}}
    assert set(certificate["removed"]) == {*made, "inbox/client-02.safetensors"} and "results.json" in made
    assert certificate["machine"] == {"device": "cpu", "threads": 2} and certificate["stays"] == ""
    used: list[Machine] = []

    def watched(plan: Plan, machine: Machine, *rest: Any) -> Any:
        used.append(machine)
        return computing(plan, machine, *rest)

    monkeypatch.setattr("osfl.rounds.forgetting.proof.computing", watched)
    assert failed(folder) == [] and [(machine.device, machine.threads) for machine in used] == [("cpu", 2)]


def test_personal_parts_are_named_for_those_who_hold_them(tmp_path: Path) -> None:
    federation = small_federation("federated_factory")
    peers = replace(federation, plan=replace(federation.plan, settings=replace(federation.plan.settings, mode="peer")))
    folder = tmp_path / "round"
    run_federation(peers, folder, ABOUT, machine=ONE)
    server, clients = read_policy(folder).server, peers.plan.clients
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
    fl_round, known, _ = real_round(tmp_path)
    forget(fl_round, known["server"], clients=["south"], machine=ONE)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    assert failed(fl_round) == []
    with existing_round(fl_round, make_plan(), known["server"]) as opened:
        published, (_, made_from) = opened.release(), opened.uploads()
        assert published is not None
        shared = published[0].shared
        changed = {name: value + 1 if value.is_floating_point() else value for name, value in shared.tensors.items()}
        opened.publish(replace(published[0], shared=replace(shared, tensors=changed)), made_from)
    assert failed(fl_round) == ["release"]


def test_what_has_seen_the_class_and_stays_is_stated(rounds: Any, tmp_path: Path) -> None:
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
    fl_round, known, bundles = real_round(tmp_path)
    for client in ("north", "south"):
        damaged = tmp_path / f"{client}.damaged"
        damaged.write_bytes(bundles[client].read_bytes()[:-1] + b"?")
        with pytest.raises(Rejected):
            coordinator.receive(fl_round, damaged)
    noted = (fl_round / JOURNAL).read_text()
    assert "north" in noted and "south" in noted
    forget(fl_round, known["server"], clients=["south"], machine=ONE)
    noted = (fl_round / JOURNAL).read_text()
    assert "north" in noted and "south" not in noted
