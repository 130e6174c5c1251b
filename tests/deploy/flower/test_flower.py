"""Rounds over Flower between real processes: SuperLink and SuperNodes with TLS and authentication, killed on the way."""

from __future__ import annotations

import builtins
import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from osfl.core.errors import Rejected, RoundError, UsageError
from osfl.core.registry import load
from osfl.core.result import read_result
from osfl.core.types import Limits, Payload, Plan, Privacy
from osfl.deploy.flower.grid import require_flower
from osfl.deploy.flower.tls import make_node_key
from osfl.models.inputs import to_input
from osfl.roles import coordinator, site
from osfl.rounds.forgetting import forget
from osfl.rounds.state import read_policy
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import from_raw
from osfl.wire.gate import verify_release
from osfl.wire.repair import REPAIRS, REQUEST
from osfl.wire.signing import SigningKey
from tests.faults.machines import CLIENTS, SETTINGS, Machines, machines, make_plan, make_sites
from tests.faults.misuse import misuses
from tests.faults.ways import by_files, by_memory, released

# one shared model, in two pieces each way; and a smaller one with a part for each site
PLANS = (make_plan("fedavg"), make_plan("fedbicross", architecture="cnn-w4"))
# a secure sum, one of whose sites never comes: the others repair the sum
MISSING = "away"
SUM = make_plan("onesum", (MISSING, *CLIENTS), filters=1, thumbnail=2)
SUM = replace(SUM, quorum=len(CLIENTS), secure_sum=True, limits=Limits(share=1.0))
# the same with shares of the noise, one of which other sites may know
PRIVATE = replace(SUM, settings=replace(SUM.settings, dimensions=8), privacy=Privacy(1e4, 1e-5, "share", 1))


def name_of(plan: Plan) -> str:
    return f"{plan.method}-{plan.digest[:8]}"


def check_round(net: Machines, plan: Plan, tmp_path: Path) -> None:
    """The digest of the simulation and of carried files; each site trained once, has its receipt and its model."""
    found = released(net.round(name_of(plan)), plan)
    assert found == by_memory(tmp_path / "memory" / plan.method, plan, net.data)
    assert found == by_files(tmp_path / "files" / plan.method, plan, net.data)
    for client in CLIENTS:
        work = net.folder / "sites" / client / "work" / plan.digest[:16] / client
        journal = [json.loads(line)["phase"] for line in (work / "journal.jsonl").read_text().splitlines()]
        assert journal.count("client") == 1, "a finished upload is sent again, never made again"
        assert json.loads((work / "receipt.json").read_text())["digest"]
        assert (work / "model.safetensors").exists()


def payload_of(fl_round: Path) -> Payload:
    """What a round's release says, without who made it of what."""
    policy = read_policy(fl_round)
    release = verify_release(fl_round / "release.safetensors", policy.server, policy.plan)
    return Payload(from_raw(release.tensors), dict(release.facts))


def check_secure_round(net: Machines, tmp_path: Path) -> None:
    """One site was missing and the others repaired the sum: the release has the content of an open simulation of the others."""
    fl_round = net.round(name_of(SUM))
    request = json.loads((fl_round / REQUEST).read_text())
    assert request["request"]["missing"] == [MISSING]
    assert sorted(path.stem for path in (fl_round / REPAIRS).iterdir()) == sorted(CLIENTS)
    simulated = replace(SUM, clients=CLIENTS, quorum=0, secure_sum=False)
    by_memory(tmp_path / "memory" / "secure", simulated, net.data)
    content = read_result(tmp_path / "memory" / "secure")["content_digest"]
    assert coordinator.status(fl_round).content == content


def check_private_round(net: Machines, tmp_path: Path) -> None:
    """Shares of the noise under masks, and a missing site repaired: the release says for which sum epsilon holds and answers
    right; nobody joins it late, and forgetting takes it back."""
    fl_round, key = net.round(name_of(PRIVATE)), SigningKey.load(net.coordinator / "keys" / "server.key")
    assert json.loads((fl_round / REQUEST).read_text())["request"]["missing"] == [MISSING]
    release = payload_of(fl_round)
    stated = release.facts["privacy"]
    assert isinstance(stated, dict) and (stated["sites"], stated["epsilon"], stated["secure_sum"]) == (len(CLIENTS), 1e4, True)
    plain = replace(PRIVATE, clients=CLIENTS, quorum=0, secure_sum=False, privacy=None)
    by_memory(tmp_path / "memory" / "exact", plain, net.data)
    exact = payload_of(tmp_path / "memory" / "exact")
    assert not torch.equal(release.tensors["head/weight"], exact.tensors["head/weight"]), "there is noise in the sum"
    with np.load(net.data / f"{CLIENTS[0]}.npz") as data:
        images, labels = torch.from_numpy(data["train_images"])[:, None], torch.from_numpy(data["train_labels"])
    answers = load("onesum")(PRIVATE.task, PRIVATE.settings).build(release)(to_input(images, torch.device("cpu"))).argmax(1)
    assert (answers == labels).float().mean() > 0.9
    public = read_policy(fl_round).enrolled
    late = SigningKey.load(net.folder / "sites" / MISSING / "site.key")
    data_of_missing = make_sites(tmp_path / "late", (MISSING,)) / f"{MISSING}.npz"
    upload = site.make_upload(PRIVATE, MISSING, data_of_missing, late, tmp_path / "work", machine=Machine(1), keys=public)
    with pytest.raises(Rejected, match="asked to take this site's masks out"):
        coordinator.receive(fl_round, upload)
    with pytest.raises(RoundError, match="nobody knows what it added"):
        forget(fl_round, key, clients=[CLIENTS[0]], machine=Machine(1))
    forget(fl_round, key, clients=[CLIENTS[0]], withdraw=True, machine=Machine(1))
    assert not (fl_round / "release.safetensors").exists()


def add_unknown_node(net: Machines) -> None:
    """A machine that has the certificate and a key of its own making, which nobody registered."""
    folder = net.folder / "sites" / "stranger"
    shutil.copytree(net.folder / "sites" / "north", folder)
    (folder / "node.key").write_bytes(make_node_key()[0])


def check_misuses(net: Machines) -> None:
    """Whoever has no right to be there gets no identity; the one who has, does."""
    announced = misuses(net)
    assert announced.pop("none") == "accepted" and len(announced) >= 10
    assert not [what for what, output in announced.items() if output == "accepted"], announced
    certificates = ("another authority", "an expired certificate", "a self-signed certificate", "a name that is not")
    assert all("CERTIFICATE_VERIFY_FAILED" in output for what, output in announced.items() if what.startswith(certificates)), (
        announced
    )


def no_secrets(net: Machines) -> None:
    """What is private appears in no log."""
    private = [path.read_text() for path in net.folder.rglob("*.key")]
    bodies = [line for text in private for line in text.splitlines() if "-----" not in line and len(line) > 20]
    assert bodies and not [log for log in net.folder.glob("*.log") for body in bodies if body in net.log(log.stem)]


def test_rounds_between_processes_that_are_killed(tmp_path: Path) -> None:
    """All rounds are under way at the same time, and every kind of process dies while they are."""
    with machines(tmp_path, (*PLANS, SUM, PRIVATE)) as (net, (*plans, summed, private)):
        rounds = [net.round(name_of(plan)) for plan in plans]

        def uploads() -> list[int]:
            return [len(list((fl_round / "inbox").glob("*.safetensors"))) for fl_round in rounds]

        net.link()
        net.run(rounds[0].name)
        net.wait_registered()
        check_misuses(net)
        for client in CLIENTS:
            net.site(client)
        net.run(rounds[1].name)
        net.run(name_of(summed))
        net.run(name_of(private))
        net.wait_for("an upload", lambda: sum(uploads()) >= 1)
        assert net.kill("flower-supernode", "north"), "a site's node dies; its script starts it again"
        net.wait_for("three uploads", lambda: sum(uploads()) >= 3)
        assert net.kill("flower-superlink"), "the SuperLink dies, and with it the runs"
        begun = net.log("run").count("Successfully started run")
        net.link()
        add_unknown_node(net)
        unknown_sender = net.site("north", name="stranger")
        net.wait_for("another run", lambda: net.log("run").count("Successfully started run") > begun)
        assert net.kill("flwr-serverapp"), "the programs of runs die, the one that outlived the SuperLink too; others follow"
        net.wait_for("the refusal of a stranger", lambda: "code: 2004" in net.log("stranger"))
        net.stop(unknown_sender)
        net.wait_for("both releases everywhere", lambda: all((fl_round / "everyone-has-it").exists() for fl_round in rounds))
        work = [net.folder / "sites" / c / "work" / plan.digest[:16] / c for c in CLIENTS for plan in (summed, private)]
        models = [folder / "model.safetensors" for folder in work]
        net.wait_for("the releases of both secure sums at the sites that came", lambda: all(path.exists() for path in models))
        no_secrets(net)
        net.stop()
        largest = max(path.stat().st_size for path in (rounds[0] / "inbox").iterdir())
        assert SETTINGS["chunk"] < largest <= 2 * SETTINGS["chunk"], "the larger upload came in two pieces"
        for plan in plans:
            check_round(net, plan, tmp_path)
        check_secure_round(net, tmp_path)
        check_private_round(net, tmp_path)


def test_programs_that_start_slowly_keep_their_tasks(tmp_path: Path) -> None:
    """As on a busy machine: each needs longer to start than the heartbeat that Flower allows for it."""
    with machines(tmp_path, ["fedavg"], ("north", "south"), {"chunk": 1 << 20}) as (net, (plan,)):
        net.heartbeat, net.slow = 15, 22.0
        inbox = net.round(name_of(plan)) / "inbox"

        def lost() -> bool:
            return any("token authentication failed" in net.log(name) for name in ("link", "north"))

        net.link()
        net.run(name_of(plan))
        net.wait_registered()
        net.site("north")
        net.wait_for("an upload, or a lost task", lambda: any(inbox.glob("*.safetensors")) or lost())
        assert not lost(), "a program that starts slowly keeps its task"
        assert net.log("run").count("Start `flwr-serverapp` process") == 1, "no second one was started"


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Flower is not installed") as caught:
        require_flower()
    assert "pip install 'osfl[flower]'" in str(caught.value)


def test_our_files_import_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours names Flower before it is needed."""
    real = builtins.__import__

    def none(name: str, *args: object, **more: object) -> object:
        if name.split(".")[0] == "flwr":
            raise ModuleNotFoundError(name)
        return real(name, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", none)
    for module in ("osfl.deploy.flower.grid", "osfl.deploy.flower.app", "osfl.deploy.flower.deployment"):
        spec = importlib.util.find_spec(module)
        assert spec and spec.loader
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
