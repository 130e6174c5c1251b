"""What was forgotten and put back: signed as well as ever, and refused by every reader that has the certificate at hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.cli.main import answer
from osfl.core.errors import Rejected, RoundError
from osfl.core.plan import write_plan
from osfl.core.types import Topology, canonical
from osfl.roles import coordinator
from osfl.roles.inspection.known import gather
from osfl.roles.inspection.look import look, worst
from osfl.rounds.finished import load_model
from osfl.rounds.folder import simulated_key
from osfl.rounds.forgetting import forget
from osfl.rounds.state import read_policy
from osfl.runtime.machine import Machine
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Simulation, prepare
from osfl.wire.gate import read_manifest, verify_release
from osfl.wire.signing import save_public
from tests.rounds.forgetting.conftest import ABOUT, APART, ONE, real_round

Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def verify(capfd: pytest.CaptureFixture[str]) -> Verify:
    """Exit code and everything that `osfl verify` prints, on one line."""

    def call(*command: object) -> tuple[int, str]:
        capfd.readouterr()
        code = answer(["verify", *map(str, command)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, " ".join((captured.out + captured.err).split())

    return call


def after_forgetting(rounds: Any, tmp_path: Path, **asked: Any) -> tuple[Path, Path, dict[str, Any]]:
    """A round that has forgotten a client, and a copy of the folder as it was before."""
    folder = rounds("ensemble", tmp_path / "round")
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    return folder, old, forget(folder, **(asked or {"clients": ["client-02"]}), machine=ONE)


def put_back(old: Path, folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(old / name, folder / name)


RELEASE, UPLOAD = "release.safetensors", "inbox/client-02.safetensors"


def test_after_forgetting_all_that_is_left_is_good(rounds: Any, tmp_path: Path, verify: Verify) -> None:
    folder, _, _ = after_forgetting(rounds, tmp_path)
    code, output = verify("--round", folder)
    assert code == 0 and "certificates read: 1" in output and "Nothing was withdrawn." in output


@pytest.mark.parametrize("names", [(RELEASE,), (UPLOAD,), (RELEASE, UPLOAD)], ids=["release", "upload", "both"])
@pytest.mark.parametrize("named", [False, True], ids=["all", "named"])
def test_verify_refuses_what_was_put_back(
    rounds: Any, tmp_path: Path, verify: Verify, names: tuple[str, ...], named: bool
) -> None:
    folder, old, certificate = after_forgetting(rounds, tmp_path)
    put_back(old, folder, *names)
    code, output = verify(*([folder / name for name in names] if named else []), "--round", folder)
    assert code == 1 and "Every signature is good" not in output
    assert output.count("withdrawn by forgotten/0001.json") == len(names)
    assert certificate["time"] in output and "client 'client-02' was forgotten" in output
    assert RELEASE not in names or f"use the release {certificate['release']['after']}" in output
    assert UPLOAD not in names or "nothing is left of it" in output


def test_copies_outside_the_folder_are_refused_too(rounds: Any, tmp_path: Path, verify: Verify) -> None:
    """By --round, by certificates kept elsewhere, and by certificates that lie beside the file."""
    folder, old, _ = after_forgetting(rounds, tmp_path)
    for name in (RELEASE, UPLOAD):
        assert verify(old / name, "--round", folder)[0] == 1
    save_public(tmp_path / "server.pub", read_policy(folder).server)
    (tmp_path / "plan.toml").write_text(write_plan(small_federation("ensemble").plan))
    site = ("--plan", tmp_path / "plan.toml", "--server", tmp_path / "server.pub")
    code, output = verify(old / RELEASE, *site)
    assert code == 0 and "not checked not withdrawn" in output and "give --round or --certificates" in output
    assert "Nothing was withdrawn" not in output
    for place in (folder / "forgotten", folder / "forgotten" / "0001.json"):
        code, output = verify(old / RELEASE, *site, "--certificates", place)
        assert code == 1 and "withdrawn by forgotten/0001.json" in output
        assert verify(folder / RELEASE, *site, "--certificates", place)[0] == 0
    shutil.copytree(folder / "forgotten", old / "forgotten")
    assert verify(old / RELEASE, *site)[0] == 1
    code, output = verify(old / RELEASE, *site, "--certificates", tmp_path / "nowhere")
    assert code == 2 and "there are no certificates at" in output


def test_a_certificate_is_believed_only_with_the_servers_signature(rounds: Any, tmp_path: Path, verify: Verify) -> None:
    folder, old, certificate = after_forgetting(rounds, tmp_path)
    path = folder / "forgotten" / "0001.json"
    forged = {**certificate, "release": {"before": certificate["release"]["after"], "after": ""}}
    key = simulated_key(0, "client-01")
    path.write_text(json.dumps({"certificate": forged, "signature": key.sign(canonical(forged))}))
    code, output = verify("--round", folder)
    assert code == 1 and "forgotten/0001.json is not what the server signed" in output
    save_public(tmp_path / "server.pub", read_policy(old).server)
    (tmp_path / "plan.toml").write_text(write_plan(small_federation("ensemble").plan))
    site = ("--plan", tmp_path / "plan.toml", "--server", tmp_path / "server.pub")
    code, output = verify(old / RELEASE, *site, "--certificates", path)
    assert code == 1 and "is not what the server signed" in output


def test_deleted_certificates_are_noticed_by_a_later_one_or_a_copy(rounds: Any, tmp_path: Path, verify: Verify) -> None:
    folder = rounds("ensemble", tmp_path / "round", clients=4)
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    for client in ("client-01", "client-02"):
        forget(folder, clients=[client], machine=ONE)
    copies = shutil.copytree(folder / "forgotten", tmp_path / "copies")
    code, output = verify(old / RELEASE, "--round", folder)
    assert code == 1 and "withdrawn by forgotten/0001.json" in output and "use the release" in output
    (folder / "forgotten" / "0001.json").unlink()
    code, output = verify("--round", folder)
    assert code == 1 and "lacks certificates" in output and "number 1" in output
    shutil.rmtree(folder / "forgotten")
    put_back(old, folder, RELEASE, "inbox/client-01.safetensors", UPLOAD)
    code, output = verify("--round", folder)
    assert code == 1 and "certificates of forgetting are those that it names: it is not" in output
    put_back(old, folder, "head.json", "journal.jsonl")
    assert verify("--round", folder)[0] == 0  # nothing inside the folder tells (docs/threat-model.md)
    code, output = verify("--round", folder, "--certificates", copies)
    assert code == 1 and "lacks certificates" in output and "number 1, 2" in output


def test_a_certificate_of_another_round_withdraws_nothing(rounds: Any, tmp_path: Path, verify: Verify) -> None:
    folder, old, certificate = after_forgetting(rounds, tmp_path)
    other = {**certificate, "plan": "0" * 64}
    signed = {"certificate": other, "signature": simulated_key(0, "server").sign(canonical(other))}
    (tmp_path / "other.json").write_text(json.dumps(signed))
    save_public(tmp_path / "server.pub", read_policy(folder).server)
    (tmp_path / "plan.toml").write_text(write_plan(small_federation("ensemble").plan))
    site = ("--plan", tmp_path / "plan.toml", "--server", tmp_path / "server.pub")
    assert verify(old / RELEASE, *site, "--certificates", tmp_path / "other.json")[0] == 0
    (folder / "forgotten" / "0001.json").write_text(json.dumps(signed))
    code, output = verify("--round", folder)
    assert code == 1 and "certificates of another round" in output


def test_every_other_reader_of_the_folder_refuses(rounds: Any, tmp_path: Path) -> None:
    folder, old, _ = after_forgetting(rounds, tmp_path)
    assert coordinator.release_files(folder, "client-01") is not None
    new = (folder / RELEASE).read_bytes()
    put_back(old, folder, RELEASE, UPLOAD)
    for work in (
        lambda: load_model(folder, "client-01"),
        lambda: coordinator.make_release(folder, simulated_key(0, "server"), machine=ONE),
        lambda: coordinator.status(folder),
        lambda: run_federation(small_federation("ensemble"), folder, ABOUT, machine=ONE),
        lambda: forget(folder, clients=["client-01"], machine=ONE),
    ):
        with pytest.raises((RoundError, Rejected), match=r"withdrawn by forgotten/0001\.json"):
            work()
    assert coordinator.release_files(folder, "client-01") is None  # over Flower nobody fetches it
    for name in (RELEASE, UPLOAD):
        seen = look(folder / name, gather(folder / name), name=name, draw=False)
        assert worst(seen) == "serious"
        assert [f["check"] for f in seen["findings"] if f["severity"] == "serious"] == ["Forgotten"]
    with pytest.raises(Rejected, match="was forgotten in this round"):
        coordinator.receive(folder, old / UPLOAD)
    (folder / RELEASE).write_bytes(new)
    seen = look(folder / RELEASE, gather(folder / RELEASE), name="", draw=False)
    assert [f["severity"] for f in seen["findings"] if f["check"] == "Forgotten"] == ["good"]
    assert coordinator.status(folder).released


def test_a_model_made_of_a_withdrawn_release_is_not_asked(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("fedbicross", tmp_path / "round")
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    forget(folder, clients=["client-02"], machine=ONE)
    shutil.copytree(old / "models", folder / "models", dirs_exist_ok=True)
    with pytest.raises(RoundError, match=r"models/.* was made of a release that was withdrawn by forgotten/0001\.json"):
        load_model(folder, "client-01")


def test_a_class_that_was_forgotten(rounds: Any, tmp_path: Path, verify: Verify) -> None:
    """The old upload and the old release are refused; what is left, signed by the server, is good."""
    folder = rounds(APART, tmp_path / "round")
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    certificate = forget(folder, class_name="2", machine=ONE)
    assert verify("--round", folder)[0] == 0
    client, left = next((client, upload["after"]) for client, upload in certificate["uploads"].items() if upload["after"])
    put_back(old, folder, upload := f"inbox/{client}.safetensors")
    code, output = verify("--round", folder)
    assert code == 1 and "class '2' of every client was forgotten" in output and f"what is left of it is {left}" in output
    assert verify(old / RELEASE, "--round", folder)[0] == 1
    seen = look(folder / upload, gather(folder / upload), name="", draw=False)
    assert [f["check"] for f in seen["findings"] if f["severity"] == "serious"] == ["Forgotten"]


def test_personal_parts_of_an_old_release(tmp_path: Path, verify: Verify) -> None:
    federation = small_federation("federated_factory", samples=400)
    peers = replace(federation, plan=replace(federation.plan, settings=replace(federation.plan.settings, mode="peer")))
    run_federation(peers, folder := tmp_path / "round", ABOUT, machine=ONE)
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    forget(folder, clients=["client-02"], machine=ONE)
    assert verify("--round", folder)[0] == 0
    assert verify(folder / "personal/client-01.safetensors", "--round", folder)[0] == 0
    code, output = verify(old / "personal/client-01.safetensors", "--round", folder)
    assert code == 1 and "withdrawn by forgotten/0001.json" in output


def test_a_site_with_the_certificate_takes_no_withdrawn_release(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fl_round, known, _ = real_round(tmp_path)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    shutil.copy(fl_round / RELEASE, old := tmp_path / "old.safetensors")
    forget(fl_round, known["server"], clients=["west"], machine=Machine(workers=1))
    plan = coordinator.read_round_plan(fl_round)
    (tmp_path / "plan.toml").write_text(write_plan(plan))
    save_public(tmp_path / "server.pub", known["server"].public_hex)
    command = [
        "personalize",
        str(tmp_path / "plan.toml"),
        "--client",
        "north",
        "--server",
        str(tmp_path / "server.pub"),
        "--work",
        str(tmp_path / "work"),
    ]
    capfd.readouterr()
    assert answer([*command, "--release", str(old), "--certificates", str(fl_round / "forgotten")]) == 1
    assert "withdrawn by forgotten/0001.json" in " ".join(capfd.readouterr().err.split())
    assert answer([*command, "--release", str(old)]) == 0  # nobody at this site knows of it
    assert answer([*command, "--release", str(fl_round / RELEASE)]) == 0
    shutil.copy(old, fl_round / RELEASE)  # the certificates lie beside it
    assert answer([*command, "--release", str(fl_round / RELEASE)]) == 1
    with pytest.raises(Rejected, match="withdrawn"):
        verify_release(old, known["server"].public_hex, plan.digest, withdrawn=read_policy(fl_round).withdrawn)


def test_a_release_made_again_from_a_forgotten_upload_is_refused(rounds: Any, tmp_path: Path) -> None:
    """No certificate names its digest, but it names the client whose upload it was made from."""
    folder, old, _ = after_forgetting(rounds, tmp_path)
    manifest = {**read_manifest(old / RELEASE), "facts": {"another": 1}}
    found = read_policy(folder).withdrawn.of(manifest)
    assert found is not None and found.certificate == "forgotten/0001.json" and "use the release" in found.instead


def test_where_clients_exchange_several_times_the_first_encounter_counts(tmp_path: Path) -> None:
    more = {"clients": 4, "samples": 120, "image_size": 8, "topology": Topology("ring", encounters=2)}
    federation = prepare(Simulation("fol", "digits", partition="dirichlet:0.5", preset="smoke", **more))  # type: ignore[arg-type]
    run_federation(federation, folder := tmp_path / "round", ABOUT, machine=ONE)
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    forget(folder, clients=["client-02"], machine=ONE)
    run_federation(federation, folder, ABOUT, machine=ONE)
    withdrawn = read_policy(folder).withdrawn
    assert withdrawn.of(read_manifest(old / UPLOAD)) is not None and withdrawn.of(read_manifest(old / RELEASE)) is not None
    assert withdrawn.of(read_manifest(folder / RELEASE)) is None
