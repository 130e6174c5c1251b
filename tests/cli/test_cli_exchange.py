"""Neighbors on the command line: a schedule becomes a plan, bundles are exchanged as files, encounters follow each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import CommandResult, Osfl

SCHEDULE = "a,b,start,seconds,bytes_per_second,encounter\n"
WIDE = SCHEDULE + "north,south,2026-12-24T18:00:00Z,60,1e6,1\nnorth,south,2026-12-24T20:00:00Z,60,1e6,2\n"
NARROW = SCHEDULE + "north,south,2026-12-24T18:00:00Z,6,1000,1\n"
NEW = "new --method fol --dataset digits --clients north,south,west --samples 150 --image-size 8 --smoke --force"


def open_plan(osfl: Osfl, schedule: str) -> None:
    Path("contacts.csv").write_text(schedule)
    result = osfl(f"{NEW} --sites sites --contacts contacts.csv --out plan.toml")
    assert result.code == 0, result.err
    assert osfl("keys north south west --out keys").code == 0


def client(osfl: Osfl, name: str, plan: str = "plan.toml") -> CommandResult:
    return osfl(f"client {plan} --client {name} --data sites/{name} --key keys/{name}.key --out usb/{name}.safetensors")


def test_two_encounters_by_hand(osfl: Osfl) -> None:
    open_plan(osfl, WIDE)
    assert osfl("new --after plan.toml --out second.toml").code == 0
    for plan in ("plan.toml", "second.toml"):
        for name in ("north", "south"):
            result = client(osfl, name, plan)
            assert result.code == 0, result.err
            assert f"give it to {'south' if name == 'north' else 'north'}, on any medium" in " ".join(result.out.split())
        for name in ("north", "south"):
            result = osfl(
                f"exchange {plan} usb --client {name} --keys keys --data sites/{name} --out models/{name} --format json"
            )
            assert result.code == 0 and result.json["missing"] == [] and len(result.json["received"]) == 1, result.err
    assert osfl("predict --run models/north sites/north").code == 0
    refused = osfl("new --after second.toml --out third.toml")
    assert refused.code == 2 and "has 2 encounter(s)" in refused.err
    assert osfl("new --after plan.toml --method fol --out third.toml").code == 2


def test_who_is_missing_or_no_neighbor_is_named(osfl: Osfl) -> None:
    open_plan(osfl, WIDE)
    client(osfl, "north")
    exchange = "exchange plan.toml usb --client north --keys keys --data sites/north"
    result = osfl(exchange)
    assert result.code == 1 and "south missing" in result.err
    Path("usb/half.safetensors").write_bytes(Path("usb/north.safetensors").read_bytes()[:1000])
    result = osfl(f"{exchange} --format json")
    assert result.code == 1 and result.json["missing"] == ["south"] and "south missing" in result.json["reason"]
    assert [Path(entry["path"]).name for entry in result.json["refused"]] == ["half.safetensors"]  # not only that it is missing
    result = osfl(f"{exchange} --without-missing --format json")
    assert result.code == 0 and result.json["received"] == [] and result.json["missing"] == ["south"]
    assert [Path(entry["path"]).name for entry in result.json["refused"]] == ["half.safetensors"]
    result = osfl(f"{exchange} suoth.safetensors --without-missing")
    assert result.code == 2 and "there is no suoth.safetensors" in result.err  # not a model that silently lacks it
    nobody = osfl("exchange plan.toml --client west --keys keys --data sites/west")  # it meets nobody, and keeps its own
    assert nobody.code == 0 and "Received nobody" in nobody.out


def test_waiting_judges_a_file_once_and_again_when_it_has_changed(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    open_plan(osfl, WIDE)
    client(osfl, "north")
    client(osfl, "south")
    whole, there = Path("usb/south.safetensors").read_bytes(), Path("usb/south.safetensors")
    there.write_bytes(whole[:1000])
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            there.write_bytes(whole)

    monkeypatch.setattr("osfl.cli.exchange.time.sleep", sleep)
    result = osfl("exchange plan.toml usb --client north --keys keys --data sites/north --wait --format json")
    assert result.code == 0 and result.json["received"] == ["south"] and result.json["refused"] == [] and len(looks) == 3
    noted = [path.read_text().splitlines() for path in Path("work").rglob("rejected.jsonl")]
    assert [len(lines) for lines in noted] == [1]  # the half copy, once, and not the site's own bundle


def test_a_schedule_is_planned_before_anybody_travels(osfl: Osfl) -> None:
    open_plan(osfl, NARROW)
    result = osfl("estimate --plan plan.toml --format json").json
    assert [way["sender"] for way in result["passes"]] == ["north", "south"] and not any(
        way["arrives"] for way in result["passes"]
    )
    assert {site["client"]: site["expected"] for site in result["done"]} == {"north": 1, "south": 1, "west": 0}
    text = " ".join(osfl("estimate --plan plan.toml").out.split())
    assert "will be refused before the contact" in text and "--set wire=float16" in text and "has no neighbor" in text
    promised = result["passes"][0]["bundle_bytes"] - result["passes"][0]["halving"]
    assert f"about {promised:,} bytes, which does not fit either" in text
    assert osfl(f"{NEW} --sites half --set wire=float16 --contacts contacts.csv --out half.toml").code == 0
    halved = osfl("estimate --plan half.toml --format json").json["passes"][0]
    assert 0 <= promised - halved["bundle_bytes"] < 300 and halved["halving"] == 0  # offsets of the tensors get shorter, too
    assert "float16" not in osfl("estimate --plan half.toml").out  # it is on already
    refused = client(osfl, "north")
    assert refused.code == 1 and "does not fit into the window with south" in refused.err
    assert "at most 6,000 bytes" in refused.err and not Path("usb").exists()


def test_a_sealed_copy_must_fit_as_well(osfl: Osfl) -> None:
    open_plan(osfl, WIDE)
    assert client(osfl, "north").code == 0
    size = Path("usb/north.safetensors").stat().st_size
    open_plan(osfl, SCHEDULE + f"north,south,2026-12-24T18:00:00Z,1,{size + 10},1\n")  # as it is, and hardly more
    assert client(osfl, "north").code == 0
    command = "client plan.toml --client north --data sites/north --key keys/north.key"
    alone = osfl("client plan.toml --client west --data sites/west --key keys/west.key --out usb/west")
    assert "No site receives this upload" in alone.out
    refused = osfl(f"{command} --seal keys/south.pub --out usb/sealed")
    assert refused.code == 1 and "does not fit into the window with south" in refused.err
    assert f"at most {size + 10:,} bytes" in refused.err and not Path("usb/sealed").exists()
    plain, sealed = (osfl(f"estimate --plan plan.toml --format json {word}").json["passes"][0] for word in ("", "--sealed"))
    assert plain["arrives"] and not sealed["arrives"] and sealed["bundle_bytes"] - plain["bundle_bytes"] == 80 + 16


def test_a_simulation_takes_a_schedule_and_its_command_repeats_it(osfl: Osfl) -> None:
    Path("passes.csv").write_text("a,b,start,seconds,bytes_per_second\nclient-01,client-02,2026-12-24T18:00:00Z,60,100000\n")
    command = "--dataset digits --clients 3 --samples 120 --smoke --contacts passes.csv --out here --format json"
    result = osfl(f"run --method fol {command}").json
    assert result["command"].endswith("--contacts passes.csv --out here") and result["topology"]["topology"] == "contacts"
    both = osfl(f"compare --methods local_only,fol {command.replace('here', 'both')}").json
    assert "--contacts passes.csv" in both["command"]


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("run --method fedavg --smoke --topology ring", "in fedavg every client reaches a server"),
        ("run --method fol --smoke --topology star", "expected mesh, ring or random:K"),
        ("run --method fol --smoke --topology random:9", "expected 1 to 4"),
        ("new --method fol --contacts contacts.csv --topology ring", "already defines the topology"),
        ("new --method fol --contacts nowhere.csv", "there is no contact schedule at nowhere.csv"),
        ("estimate --method fol --smoke --sealed", "planned for contact windows, and there are none"),
        ("exchange plan.toml --client north --keys nowhere", "there is no plan"),
        ("exchange plan.toml --client north --keys nowhere --wait --without-missing", "waits for everybody"),
    ],
)
def test_mistakes_are_reported(osfl: Osfl, command: str, result: str) -> None:
    found = osfl(command)
    assert found.code == 2 and result in " ".join(found.err.split())


def test_options_of_a_topology_reach_the_plan_and_its_command(osfl: Osfl) -> None:
    result = osfl("new --method fol --dataset digits --smoke --topology random:2 --encounters 3 --out ring.toml --format json")
    assert result.json["plan"]["topology"] | {"contacts": []} == {
        "kind": "random",
        "peers": 2,
        "contacts": [],
        "encounters": 3,
        "encounter": 1,
        "after": "",
    }


def test_an_estimate_includes_what_follows_an_exchange_and_refuses_exchanges_of_nobody(
    osfl: Osfl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("osfl.simulate.rehearsal.MOST", 4)
    monkeypatch.setattr("osfl.simulate.rehearsal.FIRST", 4)
    command = "estimate --dataset digits --samples 120 --image-size 8 --smoke --clients 3"
    once, twice = (
        osfl(f"{command} --method fol,fedavg --topology ring --encounters {n} --format json").json[0]["phases"] for n in (1, 2)
    )
    assert once["client"]["flops"] == twice["client"]["flops"] > 0  # students of the first encounter begin the second
    assert twice["personalize"]["flops"] > 1.5 * once["personalize"]["flops"] > 0
    refused = osfl(f"{command} --method fedavg --topology ring")
    assert refused.code == 2 and "none of these methods lets neighbors exchange" in refused.err


def test_other_images_than_those_of_the_upload_are_refused(osfl: Osfl) -> None:
    open_plan(osfl, WIDE)
    client(osfl, "north")
    client(osfl, "south")
    for journal in Path("work").rglob("journal.jsonl"):
        journal.write_bytes(journal.read_bytes() + b'{"phase": "cli')  # torn by a crash
    result = osfl("exchange plan.toml usb --client north --keys keys --data sites/south")
    assert (
        result.code == 1 and "not the images that the upload was made from" in result.err and "osfl client --data" in result.err
    )
    assert osfl("exchange plan.toml usb --client north --keys keys --data sites/north").code == 0


def test_advice_is_for_the_bundle_that_fits_worst(osfl: Osfl) -> None:
    """The smaller window may belong to the smaller model: what helps there does not help the other one."""
    Path("c.csv").write_text(
        "a,b,start,seconds,bytes_per_second\n"
        "client-01,client-03,2026-12-24T18:00:00Z,1,29000\n"
        "client-02,client-03,2026-12-24T19:00:00Z,1,60000\n"
    )
    command = "--method fol --dataset digits --clients 3 --samples 120 --image-size 8 --smoke --contacts c.csv"
    command += " --set architecture=client-01:cnn-w8,client-02:resnet18-w4,*:cnn-w4"
    result = osfl(f"run {command} --out here")
    assert result.code == 1 and "sent by 'client-02'" in result.err and "Nor does what client-01 would send fit" in result.err
    assert "The tightest, client-02 to client-03" in " ".join(osfl(f"estimate {command}").out.split())


def test_what_comes_late_does_not_change_what_was_spoken_of(osfl: Osfl) -> None:
    """North goes on without south and sends in the second encounter; south's first bundle comes after that."""
    open_plan(osfl, WIDE)
    assert osfl("new --after plan.toml --out second.toml").code == 0
    exchange = "exchange plan.toml usb --client north --keys keys --data sites/north"
    assert client(osfl, "north").code == 0 and osfl(f"{exchange} --without-missing").code == 0
    assert client(osfl, "north", "second.toml").code == 0
    (first,) = (path for path in Path("work").glob("*/north/made_from.json"))
    before = first.read_bytes()
    assert client(osfl, "south").code == 0
    result = osfl(exchange)
    assert result.code == 1 and "has uploaded in the next encounter" in result.err and "cannot be used any more" in result.err
    assert first.read_bytes() == before


def test_a_neighbor_that_was_left_out_is_named(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    open_plan(osfl, WIDE)
    client(osfl, "north")
    client(osfl, "south")
    monkeypatch.setattr("osfl.models.output_checks.SANE", 1e-9)  # everybody's answers are beyond that
    exchange = "exchange plan.toml usb --client north --keys keys --data sites/north"
    result = osfl(exchange)
    assert result.code == 0 and "Left out south" in result.out and "align_lr" in result.out
    assert osfl(f"{exchange} --format json").json["left_out"] == ["south"]


def test_everybody_whose_bundle_does_not_fit_is_named_before_anybody_trains(osfl: Osfl) -> None:
    open_plan(osfl, NARROW.replace(",6,1000", ",30,1000"))  # a model of 30.6 kB, of which 25.5 are weights
    result = osfl("run --plan plan.toml --sites sites --out rehearsed")
    text = " ".join(result.err.split())
    assert result.code == 1 and "Nothing was sent by 'north'" in text
    assert "at most 30,000 bytes, got at least 30,624 bytes" in text, text
    assert "Nor does what south would send fit." in text and "west" not in text
    assert not list(Path("rehearsed/scratch").rglob("*.safetensors"))  # nobody trained


def test_half_precision_is_promised_only_where_it_fits(osfl: Osfl) -> None:
    """12.8 kB of half-precision weights, 5.1 kB of names and hashes."""
    for seconds, command in ((17, "does not fit either"), (21, "which fits")):
        open_plan(osfl, NARROW.replace(",6,1000", f",{seconds},1000"))
        result = client(osfl, "north")
        assert result.code == 1 and command in " ".join(result.err.split()), result.err
        assert osfl(f"{NEW} --sites sites --set wire=float16 --contacts contacts.csv --out half.toml").code == 0
        assert client(osfl, "north", "half.toml").code == (0 if command == "which fits" else 1)


def test_what_arrives_after_midnight_says_the_day(osfl: Osfl) -> None:
    open_plan(osfl, SCHEDULE + "north,south,2026-12-24T23:59:50Z,60,1e3,1\n")
    lines = [line for line in osfl("estimate --plan plan.toml").out.splitlines() if "north → south" in line]
    assert len(lines) == 1 and "2026-12-24 23:59:50" in lines[0] and "2026-12-25 00:00:2" in lines[0]
    open_plan(osfl, SCHEDULE + "north,south,2026-12-24T18:00:00Z,60,1e3,1\n")
    lines = [line for line in osfl("estimate --plan plan.toml").out.splitlines() if "north → south" in line]
    assert lines[0].count("2026-12-24") == 1 and " 18:00:3" in lines[0]
