"""Real rounds: site and coordinator share nothing but files, and reach the digests of the simulation."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.core.errors import DataError, Rejected, RoundError, UsageError
from osfl.core.plan import plan_from, read_plan, write_plan
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Plan, Task
from osfl.roles import coordinator, site
from osfl.rounds.finished import load_model
from osfl.runtime.machine import Machine
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import rehearsal
from osfl.wire.signing import SigningKey

CLIENTS = ("north", "south", "west")
ONE = Machine(workers=1)


def make_plan(method: str = "ensemble", **more: object) -> Plan:
    task = Task("cells", ("basophil", "eosinophil", "monocyte"), (1, 8, 8))
    changes = {"readable": "send"} if method == "onesum" else {}  # sites of sixteen images
    return Plan(task, method, resolve_settings(load(method), "smoke", changes), CLIENTS, seed=3, **more)  # type: ignore[arg-type]


def make_sites(folder: Path, images: int = 8) -> Path:
    """A folder of PNG files a site and class; brightness tells the class, and each site lacks another one."""
    for number, client in enumerate(CLIENTS):
        rng = np.random.default_rng(number)
        for label, name in enumerate(("basophil", "eosinophil", "monocyte")):
            if label == number:
                continue
            where = folder / client / name
            where.mkdir(parents=True)
            for i in range(images):
                pixels = np.clip(rng.normal(60 + 70 * label, 20, (8, 8)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(where / f"{i:02}.png")
    return folder


def keys() -> dict[str, SigningKey]:
    return {name: SigningKey.generate() for name in (*CLIENTS, "server")}


def opened(folder: Path, plan: Plan, known: dict[str, SigningKey]) -> Path:
    public = {client: known[client].public_hex for client in plan.clients}
    coordinator.open_new(folder, plan, public, known["server"].public_hex)
    return folder


@pytest.mark.parametrize("method", ["ensemble", "fedavg", "fedbicross"])
def test_files_and_simulation_give_the_same_release(tmp_path: Path, method: str) -> None:
    plan, sites, known = make_plan(method), make_sites(tmp_path / "sites"), keys()
    simulated = run_federation(rehearsal(plan, sites), tmp_path / "simulated", {"preset": "", "command": ""}, machine=ONE)
    fl_round = opened(tmp_path / "round", plan, known)
    for client in reversed(CLIENTS):
        bundle = site.make_upload(plan, client, sites / client, known[client], tmp_path / client, machine=ONE)
        assert coordinator.receive(fl_round, bundle).client == client
    digest = coordinator.make_release(fl_round, known["server"], machine=ONE)
    assert digest == simulated["release_digest"]
    assert coordinator.make_release(fl_round, known["server"], machine=ONE) == digest  # it stands
    own = fl_round / "personal" / "north.safetensors"
    model = site.take_release(
        plan,
        "north",
        fl_round / "release.safetensors",
        own if own.exists() else None,
        known["server"].public_hex,
        tmp_path / "north",
        data=sites / "north",
        machine=ONE,
    )
    network, task = load_model(model.parent)
    assert task == plan.task and network is not None
    if not own.exists():  # a part that lies there unasked, as a network may put it there, changes nothing
        stray = (plan, "north", fl_round / "release.safetensors", tmp_path / "stray", known["server"].public_hex)
        assert site.read_release(*stray, spare=True)[1] == digest
        with pytest.raises(UsageError, match="nothing to give"):
            site.read_release(*stray)


def test_a_finished_upload_is_given_again_without_the_data(tmp_path: Path) -> None:
    plan, sites, key = make_plan(), make_sites(tmp_path / "sites"), SigningKey.generate()
    first = site.make_upload(plan, "north", sites / "north", key, tmp_path / "work", machine=ONE)
    content = first.read_bytes()
    assert site.make_upload(plan, "north", tmp_path / "gone", key, tmp_path / "work") == first
    assert first.read_bytes() == content
    with pytest.raises(RoundError, match="signature"):
        site.make_upload(plan, "north", sites / "north", SigningKey.generate(), tmp_path / "work")


def test_the_server_phase_waits_for_quorum_and_deadline(tmp_path: Path) -> None:
    plan = make_plan(quorum=2, deadline="2026-12-24T18:00:00Z")
    sites, known = make_sites(tmp_path / "sites"), keys()
    fl_round = opened(tmp_path / "round", plan, known)
    early, late = datetime(2026, 12, 24, 17, tzinfo=UTC), datetime(2026, 12, 24, 19, tzinfo=UTC)
    for client, before, after in (("north", False, False), ("south", False, True)):
        bundle = site.make_upload(plan, client, sites / client, known[client], tmp_path / client, machine=ONE)
        coordinator.receive(fl_round, bundle)
        assert coordinator.status(fl_round, early).ready is before
        assert coordinator.status(fl_round, late).ready is after
    with pytest.raises(RoundError, match="1 more may deliver until"):
        coordinator.make_release(fl_round, known["server"], now=early)
    coordinator.make_release(fl_round, known["server"], machine=ONE, now=late)
    found = coordinator.status(fl_round, late)
    assert found.released and list(found.missing) == ["west"] and not found.late
    bundle = site.make_upload(plan, "west", sites / "west", known["west"], tmp_path / "west", machine=ONE)
    coordinator.receive(fl_round, bundle)
    assert coordinator.status(fl_round, late).late == ["west"]


def test_without_quorum_everybody_is_waited_for(tmp_path: Path) -> None:
    plan, sites, known = make_plan(), make_sites(tmp_path / "sites"), keys()
    fl_round = opened(tmp_path / "round", plan, known)
    with pytest.raises(RoundError, match="0 of the 3 uploads that are needed"):
        coordinator.make_release(fl_round, known["server"])
    bundle = site.make_upload(plan, "north", sites / "north", known["north"], tmp_path / "n", machine=ONE)
    unknown_sender = replace(plan, seed=4)
    other = site.make_upload(unknown_sender, "north", sites / "north", known["north"], tmp_path / "n", machine=ONE)
    with pytest.raises(Rejected, match="another round"):
        coordinator.receive(fl_round, other)
    coordinator.receive(fl_round, bundle)
    found = coordinator.status(fl_round)
    assert list(found.missing) == ["south", "west"] and [entry["field"] for entry in found.refused] == ["plan"]


def test_keys_are_agreed_when_the_round_opens(tmp_path: Path) -> None:
    plan, known = make_plan(), keys()
    fl_round = opened(tmp_path / "round", plan, known)
    opened(fl_round, plan, known)  # the same command again
    with pytest.raises(RoundError, match="other keys"):
        opened(fl_round, plan, keys())
    with pytest.raises(UsageError, match="no key for 'west'"):
        coordinator.open_new(tmp_path / "other", plan, {"north": "0" * 64, "south": "1" * 64}, known["server"].public_hex)
    with pytest.raises(UsageError, match="not the server's"):
        coordinator.make_release(fl_round, SigningKey.generate())
    with pytest.raises(UsageError, match="simulation only"):
        coordinator.open_new(tmp_path / "x", make_plan("centralized"), {}, known["server"].public_hex)


def test_a_class_that_the_plan_lacks_is_named(tmp_path: Path) -> None:
    plan, sites = make_plan(), make_sites(tmp_path / "sites")
    (sites / "north" / "monocyte").rename(sites / "north" / "Monocytes")
    with pytest.raises(DataError, match=r"(?s)Monocytes.*did you mean monocyte"):
        site.make_upload(plan, "north", sites / "north", SigningKey.generate(), tmp_path / "work")


def test_a_site_uses_all_its_images_unless_it_has_a_test_part(tmp_path: Path) -> None:
    plan, sites = make_plan(), make_sites(tmp_path / "sites")
    shard = site.open_shard(plan, "north", sites / "north")
    assert len(shard.train) + len(shard.val) == 16
    (sites / "split").mkdir()
    (sites / "north").rename(sites / "split" / "train")
    (sites / "south").rename(sites / "split" / "test")
    shard = site.open_shard(plan, "north", sites / "split")
    assert len(shard.train) + len(shard.val) == 16


def test_a_plan_keeps_its_digest_through_toml(tmp_path: Path) -> None:
    for plan in (make_plan(), make_plan(quorum=2, deadline="2026-12-24T18:00:00+01:00")):
        (tmp_path / "plan.toml").write_text(write_plan(plan))
        assert read_plan(tmp_path / "plan.toml").digest == plan.digest
    with pytest.raises(UsageError, match="at most 3"):
        plan_from({**make_plan().as_json(), "round": {"quorum": 4}}, "plan")
    with pytest.raises(UsageError, match="its zone"):
        plan_from({**make_plan().as_json(), "round": {"deadline": "2026-12-24T18:00:00"}}, "plan")
