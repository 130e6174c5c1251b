"""Who hears whom, contact schedules with their mistakes, and several encounters in one folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import RoundError, UploadBlocked, UsageError
from osfl.core.method import Context, relayed
from osfl.core.plan import plan_from, read_plan, write_plan
from osfl.core.registry import load
from osfl.core.result import Result, read_result
from osfl.core.settings import resolve_settings
from osfl.core.topology import all_encounters, is_contact, neighbors, next_encounter, parse_topology, read_contacts
from osfl.core.types import Contact, Limits, Payload, Plan, Task, Topology, Upload
from osfl.rounds import forgetting
from osfl.runtime.machine import Machine
from osfl.simulate.checks import Interrupted
from osfl.simulate.encounters import after_encounters
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, for_methods, prepare
from tests.gossip import Gossip, enter

NAMES = ("east", "north", "south", "west")
SMALL = Simulation("gossip", "digits", 4, "dirichlet:0.5", "smoke", samples=120, image_size=8)


@pytest.fixture(autouse=True)
def gossip(monkeypatch: pytest.MonkeyPatch) -> None:
    enter(monkeypatch)


def make_plan(topology: Topology | None, method: str = "gossip", clients: tuple[str, ...] = NAMES, seed: int = 0) -> Plan:
    settings = resolve_settings(load(method), "smoke")
    return Plan(Task("t", ("a", "b"), (1, 8, 8)), method, settings, clients, Limits(), seed, topology=topology)


def contact(a: str, b: str, minute: int = 0, encounter: int = 1, seconds: float = 60, rate: float = 1e6) -> Contact:
    return Contact(a, b, f"2026-12-24T18:{minute:02}:00Z", seconds, rate, encounter)


# --- who hears whom -------------------------------------------------------------------------------------------------------


def test_without_a_topology_everybody_is_received_and_no_digest_changes() -> None:
    assert neighbors(make_plan(None), "north") == ("east", "south", "west")
    assert "topology" not in make_plan(None).as_json()
    assert make_plan(Topology("mesh")).digest != make_plan(None).digest
    assert neighbors(make_plan(Topology("mesh")), "north") == neighbors(make_plan(None), "north")


@pytest.mark.parametrize(
    ("clients", "received"),
    [
        (("a", "b", "c", "d"), ("b", "d")),
        (("a", "b", "c"), ("b", "c")),
        (("a", "b"), ("b",)),
        (("a",), ()),
    ],
)
def test_a_ring_has_two_sides(clients: tuple[str, ...], received: tuple[str, ...]) -> None:
    assert neighbors(make_plan(Topology("ring"), clients=clients), "a") == received


def test_random_neighbors_follow_seed_and_encounter_and_nobody_elses_leaving() -> None:
    many = tuple(f"c{i:02}" for i in range(20))
    plan = make_plan(Topology("random", peers=5, encounters=2), clients=many)
    received = neighbors(plan, "c00")
    assert len(received) == 5 and "c00" not in received and received == tuple(sorted(received)) == neighbors(plan, "c00")
    assert neighbors(replace(plan, seed=1), "c00") != received != neighbors(next_encounter(plan), "c00")
    left = neighbors(replace(plan, clients=tuple(c for c in many if c != received[0])), "c00")
    assert set(received) - set(left) == {received[0]} and len(left) == 5


def test_contacts_are_received_in_their_encounter_and_both_ways() -> None:
    topology = Topology("contacts", contacts=(contact("east", "north"), contact("north", "west", 30, 2)), encounters=2)
    plan = make_plan(topology)
    assert neighbors(plan, "north") == ("east",) and neighbors(plan, "east") == ("north",)
    assert neighbors(plan, "south") == ()
    assert neighbors(next_encounter(plan), "north") == ("west",)


class Counted(Sequence[Upload]):
    """Uploads that tell how often they were opened."""

    def __init__(self, uploads: Sequence[Upload]) -> None:
        self.uploads, self.opened = uploads, 0

    def __len__(self) -> int:
        return len(self.uploads)

    def __getitem__(self, index: Any) -> Any:
        found = self.uploads[index]
        self.opened += 1
        return found


def test_a_relay_gives_each_sender_what_its_neighbors_sent_and_opens_each_upload_once() -> None:
    plan = make_plan(Topology("ring"))
    output = Counted([Upload(name, plan.digest, Payload({})) for name in ("west", "north", "east")])  # south sent nothing
    gossip = Gossip(plan.task, plan.settings)
    release = relayed(gossip, output, Context(plan, torch.device("cpu")))
    assert {name: part.facts["received"] for name, part in release.personal.items()} == {
        "west": ["east"],
        "north": ["east"],
        "east": ["north", "west"],
    }
    assert output.opened == 3 and gossip.provides("relay")


# --- options, plans and schedules -------------------------------------------------------------------------------------------


def test_a_plan_with_contacts_reads_back_to_the_same_digest(tmp_path: Path) -> None:
    topology = Topology("contacts", contacts=(contact("east", "north"), contact("north", "west", 30, 2, 12.5)), encounters=2)
    plan = make_plan(topology)
    (tmp_path / "plan.toml").write_text(write_plan(plan))
    assert read_plan(tmp_path / "plan.toml") == plan
    assert plan_from(json.loads(json.dumps(plan.as_json())), "plan.json").digest == plan.digest
    for other in (Topology("ring"), Topology("random", peers=2, encounters=3)):
        (tmp_path / "other.toml").write_text(write_plan(make_plan(other)))
        assert read_plan(tmp_path / "other.toml").digest == make_plan(other).digest


def test_options_of_a_topology() -> None:
    assert parse_topology("random:5", 3) == Topology("random", peers=5, encounters=3)
    assert parse_topology("ring") == Topology("ring")
    for wrong in ("star", "random", "random:0", "random:x", "ring:2", "contacts", ""):
        with pytest.raises(UsageError):
            parse_topology(wrong)
    simulation = replace(SMALL, topology=Topology("random", peers=2, encounters=3))
    assert "--topology random:2 --encounters 3" in simulation.command("x")


BAD_PLANS = {
    "too many peers": (Topology("random", peers=4), "expected 1 to 3"),
    "an unknown client": (Topology("contacts", contacts=(contact("east", "nowhere"),)), "'nowhere' is no client"),
    "itself": (Topology("contacts", contacts=(contact("east", "east"),)), "cannot be its own neighbor"),
    "no zone": (Topology("contacts", contacts=(Contact("east", "west", "2026-12-24T18:00:00", 1, 1),)), "with its zone"),
    "no contacts": (Topology("contacts"), "a schedule belongs"),
    "contacts of a ring": (Topology("ring", contacts=(contact("east", "west"),)), "a schedule belongs"),
    "too late an encounter": (Topology("contacts", contacts=(contact("east", "west", 0, 2),)), "at most 1, got 2"),
    "second without first": (Topology("ring", encounters=2, encounter=2), "digest of the plan before"),
    "encounter zero": (Topology("contacts", contacts=(contact("east", "west", 0, 0),)), "encounter: expected 1 to 1000, got 0"),
    "first after another": (Topology("ring", encounters=2, after="ab" * 32), "digest of the plan before"),
    "after the last": (Topology("ring", encounters=2, encounter=3, after="ab" * 32), "expected 1 to 2, got 3"),
    "nobody in between": (
        Topology("contacts", contacts=(contact("east", "west"), contact("east", "west", 30, 3)), encounters=3),
        "no window belongs to encounter 2",
    ),
    "a capital": (Topology("contacts", contacts=(contact("East", "west"),)), "Did you mean 'east'"),
    "too many": (Topology("ring", encounters=10**9), "at most 1000"),
    "the end of time": (Topology("contacts", contacts=(Contact("east", "west", "9999-12-31T23:59:59Z", 60, 1),)), "1 and 9999"),
    "more than can be counted": (
        Topology("contacts", contacts=(Contact("east", "west", "2026-12-24T18:00:00Z", 100.5, 1e308),)),
        "bytes_per_second: expected a rate whose window can be counted, got 1e.308",
    ),
    "forever": (Topology("contacts", contacts=(Contact("east", "west", "2026-12-24T18:00:00Z", 1e300, 1),)), "1 and 9999"),
    "a line twice": (
        Topology("contacts", contacts=(contact("east", "west"), contact("north", "west"), contact("west", "east"))),
        r"numbers 1 and 3 \(west and east\): the window at .* is still open",
    ),
    "inside a longer one": (
        Topology(
            "contacts",
            contacts=(contact("east", "west", 0, seconds=600), contact("east", "west", 2), contact("east", "west", 8)),
        ),
        "numbers 1 and 3",
    ),
    "overlap": (
        Topology("contacts", contacts=(contact("east", "west", 5, 1), contact("north", "west", 5, 2)), encounters=2),
        "'west' begins encounter 2 .* before its window of encounter 1",
    ),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_topologies_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    topology, arguments = BAD_PLANS[name]
    (tmp_path / "plan.toml").write_text(write_plan(make_plan(topology)))
    with pytest.raises(UsageError, match=arguments):
        read_plan(tmp_path / "plan.toml")


def test_a_topology_needs_a_method_that_passes_things_on(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(write_plan(make_plan(Topology("ring"), "fedavg")))
    with pytest.raises(UsageError, match="in fedavg every client reaches a server"):
        read_plan(tmp_path / "plan.toml")
    assert Gossip.provides("relay")
    variants = for_methods(replace(SMALL, topology=Topology("ring")), ["fedavg", "gossip"])
    assert [variant.topology for variant in variants] == [None, Topology("ring")]


def test_variants_of_a_comparison_may_exchange_otherwise() -> None:
    labels = ["gossip@encounters=2", "gossip@topology=random:2@lr=0.5", "gossip@topology=ring@encounters=1", "gossip"]
    twice, random, ring, plain = for_methods(replace(SMALL, topology=Topology("ring")), labels)
    assert twice.topology == Topology("ring", encounters=2) and plain.topology == ring.topology == Topology("ring")
    assert random.topology == Topology("random", peers=2) and random.changes == {"lr": "0.5"}
    for wrong in ("gossip@encounters=0", "gossip@encounters=x", "gossip@topology=star", "fedavg@encounters=2"):
        with pytest.raises(UsageError):
            for_methods(SMALL, [wrong])
    with pytest.raises(UsageError, match="already defines the topology"):
        for_methods(replace(SMALL, topology=Topology("contacts", contacts=(contact("a", "b"),))), ["gossip@encounters=2"])


def test_a_schedule_is_read_from_csv_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "contacts.csv"
    path.write_text(
        "a, b, start, seconds, bytes_per_second, encounter\n"
        "north,west,2026-12-24T19:30:00+01:00,12.5,2000,2\n"
        "east,north,2026-12-24T18:00:00Z,60,1e6,\n"
    )
    topology = read_contacts(path)
    assert topology.encounters == 2
    assert topology.contacts[0] == Contact("east", "north", "2026-12-24T18:00:00Z", 60, 1_000_000, 1)
    assert topology.contacts[1].encounter == 2 and topology.contacts[1].seconds == 12.5


def test_every_mistake_of_a_schedule_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "contacts.csv"
    path.write_text(
        "a,b,start,seconds,bytes_per_second\neast,west,2026-12-24T18:00:00Z,60,100\n"
        "east,east,2026-12-24T18:00:00Z,60,100\neast,west,tomorrow,sixty,100\neast,west,tomorrow,60,-1\n"
        "east,,2026-12-24T18:00:00Z,60,100\neast,west,2026-12-24T18:00:00Z,60,100,1,2\n"
    )
    with pytest.raises(UsageError) as caught:
        read_contacts(path)
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert all(f"line {number}: " in text for number in (3, 4, 5, 6, 7))
    assert "cannot be its own neighbor" in text and "'sixty'" in text and "'tomorrow'" in text and "b is empty" in text


@pytest.mark.parametrize(
    ("content", "arguments"),
    [
        (None, "there is no contact schedule"),
        ("a,b,start,seconds\n", "no column 'bytes_per_second'"),
        ("a,b,start,seconds,bytes_per_second,when\n", "unknown column 'when'"),
        ("", "no column 'a'"),
        ("a,b,start,seconds,bytes_per_second\n", "holds no contact"),
        ("\xff\xfe", "cannot be read|no column"),
    ],
)
def test_files_that_are_no_schedule(tmp_path: Path, content: str | None, arguments: str) -> None:
    path = tmp_path / "contacts.csv"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    with pytest.raises(UsageError, match=arguments):
        read_contacts(path)


# --- encounters -------------------------------------------------------------------------------------------------------------


def test_each_encounter_has_a_plan_that_names_the_one_before() -> None:
    first, second, third = all_encounters(make_plan(Topology("ring", encounters=3)))
    assert [p.topology.encounter for p in (first, second, third) if p.topology] == [1, 2, 3]
    assert second.topology and second.topology.after == first.digest
    assert third.topology and third.topology.after == second.digest
    assert all_encounters(make_plan(None)) == [make_plan(None)]
    with pytest.raises(UsageError, match="has 3 encounter"):
        next_encounter(third)
    with pytest.raises(UsageError, match="plan of the first one"):
        all_encounters(second)


MEETING = replace(SMALL, topology=Topology("ring", encounters=2))


def digests(result: Result) -> list[tuple[str, str]]:
    return [(row["release_digest"], row["models_digest"]) for row in result["encounters"]]


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "gossip"
    with pytest.MonkeyPatch.context() as patch:
        enter(patch)
        run(MEETING, folder, machine=Machine(workers=1))
    return folder


def test_encounters_are_rounds_in_one_folder(exchanged: Path) -> None:
    result = read_result(exchanged)
    first, rows = read_result(exchanged / "encounters" / "1"), result["encounters"]
    assert [row["models_digest"] for row in rows] == [first["models_digest"], result["models_digest"]]
    assert rows[0]["models_digest"] != rows[1]["models_digest"] and rows[0]["release_digest"] != rows[1]["release_digest"]
    assert result["costs"]["messages_per_client"] == 2 and result["topology"] == {"topology": "ring", "encounters": 2}
    assert result["costs"]["upload_bytes"] == sum(row["upload_bytes"] for row in rows) > rows[0]["upload_bytes"] > 0
    plan = json.loads((exchanged / "plan.json").read_text())
    assert plan["topology"]["after"] == rows[0]["plan_digest"] == first["plan_digest"] and plan["topology"]["encounter"] == 2
    page = (exchanged / "report" / "index.html").read_text()
    assert "2\xa0times, with exactly one upload each in every encounter" in page and "Accuracy by encounter" in page


def test_encounters_are_the_same_with_any_workers_and_after_any_interruption(exchanged: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def stop_once(what: str, done: int, total: int) -> None:
        if (what, done, total) not in seen:
            seen.append((what, done, total))
            raise Interrupted

    result = None
    for _ in range(100):
        try:
            result = run(MEETING, tmp_path / "parts", machine=Machine(workers=2), progress=stop_once)
            break
        except Interrupted:
            continue
    assert result is not None and len(seen) > 8
    assert digests(result) == digests(read_result(exchanged))


def test_a_lost_model_of_the_encounter_before_is_missed(exchanged: Path, tmp_path: Path) -> None:
    folder = tmp_path / "round"
    shutil.copytree(exchanged, folder)
    (folder / "results.json").unlink()
    (folder / "encounters/1/models/client-02.safetensors").unlink()
    shutil.rmtree(folder / "inbox")
    (folder / "release.safetensors").unlink()
    with pytest.raises(RoundError, match=r"client-02.*is lost"):
        run(MEETING, folder, machine=Machine(workers=1))


def test_forgetting_reaches_all_encounters(exchanged: Path, tmp_path: Path) -> None:
    """Who is forgotten is so from the first encounter on, and the others' later models are made again without it."""
    folder = tmp_path / "met"
    shutil.copytree(exchanged, folder)
    strays = [folder / "thesis.txt", folder / "photos" / "cat.png", folder / "encounters" / "notes.txt"]  # as in `--out .`
    strays[1].parent.mkdir()
    for stray in strays:
        stray.write_text("mine")
    certificate = forgetting.forget(folder, clients=["client-02"])
    assert all(stray.exists() for stray in strays)
    assert {path.name for path in folder.iterdir()} == {"thesis.txt", "photos", "encounters", ".lock"}
    assert certificate["release"]["before"] == read_result(exchanged)["encounters"][0]["release_digest"]
    assert not list(folder.rglob("client-02.safetensors")) and not (folder / "results.json").exists()
    with pytest.raises(RoundError, match="forgotten already"):
        forgetting.forget(folder, clients=["client-02"])
    result = run(MEETING, folder, machine=Machine(workers=1))
    assert [row["client"] for row in result["clients"]] == ["client-01", "client-03", "client-04"]
    assert not list(folder.rglob("client-02.safetensors"))
    assert all(finding.good for finding in forgetting.verify(folder))
    assert result["costs"]["download_bytes_by_client"].keys() == {"client-01", "client-03", "client-04"}


def test_a_bundle_that_does_not_fit_is_refused_before_the_contact(tmp_path: Path) -> None:
    names = prepare(SMALL).plan.clients
    tight = contact(names[0], names[1], seconds=10, rate=1000)
    with pytest.raises(UploadBlocked) as caught:
        run(replace(SMALL, topology=Topology("contacts", contacts=(tight,))), tmp_path / "tight")
    output = str(caught.value)
    assert "does not fit into the window with client-0" in output and "at most 10,000 bytes" in output
    assert "float16" not in output and "of its weights" in output and "fewer neighbors" in output


def test_a_column_that_is_there_twice_and_a_speed_without_end_are_named(tmp_path: Path) -> None:
    path = tmp_path / "contacts.csv"
    path.write_text("a,b,start,seconds,bytes_per_second,a\nx,y,2026-12-24T18:00:00Z,60,1000,z\n")
    with pytest.raises(UsageError, match="line 1: column 'a' is there 2 times"):
        read_contacts(path)
    path.write_text("a,b,start,seconds,bytes_per_second\nx,y,2026-12-24T18:00:00Z,60,inf\n")
    with pytest.raises(UsageError, match="bytes_per_second: expected a finite number above 0, got inf"):
        read_contacts(path)


def test_windows_may_touch(tmp_path: Path) -> None:
    """One opens when another closes: of the same pair, and of a site between two encounters."""
    windows = (contact("east", "west", 0), contact("east", "west", 1), contact("north", "west", 2, 2))
    plan = make_plan(Topology("contacts", contacts=windows, encounters=2))
    (tmp_path / "plan.toml").write_text(write_plan(plan))
    assert read_plan(tmp_path / "plan.toml") == plan


def test_what_has_the_form_of_a_contact() -> None:
    whole = {"a": "x", "b": "y", "start": "2026-12-24T18:00:00Z", "seconds": 1, "bytes_per_second": 2.5}
    assert is_contact(whole) and is_contact({**whole, "encounter": 2})
    for wrong in ({"seconds": True}, {"seconds": "1"}, {"encounter": 1.5}, {"encounter": False}, {"speed": 1}):
        assert not is_contact({**whole, **wrong})
    assert not is_contact({name: value for name, value in whole.items() if name != "start"}) and not is_contact("x")


def test_costs_add_up_but_for_the_peak_of_memory_and_what_is_paid_once() -> None:
    def one(n: int) -> Any:
        costs = {
            "upload_bytes": n,
            "download_bytes": n,
            "upload_bytes_by_client": {"a": n, f"only-{n}": n},
            "phases": {"client": {"seconds": 0.5 * n, "peak_bytes": n}},
            "inference_bytes": 7 * n,
        }
        scores = {"global": {"accuracy": n / 10}, "clients": {"own": {}, "everyone": {}}}
        return {"plan_digest": "p", "release_digest": "r", "models_digest": "m", "scores": scores, "costs": costs}

    found = after_encounters(one(1), [one(3), one(2)])
    assert found["costs"] == {
        "upload_bytes": 6,
        "download_bytes": 6,
        "upload_bytes_by_client": {"a": 6, "only-3": 3, "only-2": 2, "only-1": 1},
        "phases": {"client": {"seconds": 3.0, "peak_bytes": 3}},
        "inference_bytes": 7,
    }
    assert [(row["encounter"], row["accuracy"]) for row in found["encounters"]] == [(1, 0.3), (2, 0.2), (3, 0.1)]


def test_a_bad_number_does_not_accuse_a_good_time(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("a,b,start,seconds,bytes_per_second\neast,west,2026-12-24T18:00:00Z,nan,1\n")
    with pytest.raises(UsageError) as caught:
        read_contacts(tmp_path / "c.csv")
    assert caught.value.problems == [f"{tmp_path / 'c.csv'} line 2: seconds: expected a finite number above 0, got nan"]
