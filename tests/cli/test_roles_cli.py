"""A real round by verbs: processes that share a folder, every answer as text and JSON, and mistakes that say what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import CommandResult, Osfl, new_plan, round_with_bundles

SITES = ("north", "south", "west")
NEW = new_plan(SITES)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, site folders, keys and three finished bundles, made once; every test works in a copy."""
    folder = tmp_path_factory.mktemp("made")
    round_with_bundles(folder, SITES)
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    import shutil

    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def started(command: str, folder: Path) -> subprocess.Popen[str]:
    """The command as a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "osfl", *command.split()], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def ended(process: subprocess.Popen[str]) -> CommandResult:
    out, err = process.communicate(timeout=1800)
    return CommandResult(process.returncode, out, err)


def in_process(command: str, folder: Path) -> Any:
    result = ended(started(f"{command} --format json", folder))
    assert result.code == 0, result.out + result.err
    return result.json


def test_processes_that_share_nothing_but_a_folder(osfl: Osfl, tmp_path: Path) -> None:
    """The server waits in one process while sites train in others; the release is that of a simulation."""
    places = {name: tmp_path / name for name in (*SITES, "coordinator", "shared")}
    for place in places.values():
        place.mkdir()
    assert osfl(f"{NEW} --out shared/plan.toml").code == 0
    for site in SITES:
        (tmp_path / "sites" / site).rename(places[site] / "images")
        assert osfl(f"keys {site} --out {site}").code == 0
        (places[site] / f"{site}.pub").rename(places["shared"] / f"{site}.pub")
    assert osfl("keys server --out coordinator").code == 0
    assert osfl("enroll shared/plan.toml --server coordinator/server.key --keys shared --out coordinator/round").code == 0
    server = started("server round --key server.key --wait --format json", places["coordinator"])
    client = "client ../shared/plan.toml --client {0} --data images --key {0}.key --out ../shared/inbox/{0}.safetensors"
    sites = [started(client.format(site), places[site]) for site in SITES]
    assert [ended(process).code for process in sites] == [0, 0, 0]
    receipts = in_process("receive round ../shared/inbox", places["coordinator"])
    assert [row["client"] for row in receipts["accepted"]] == list(SITES) and not receipts["refused"]
    result = ended(server)
    assert result.code == 0 and "waiting: 0 of the 3 uploads" in result.err
    for site in SITES:
        (places[site] / "images").rename(tmp_path / "sites" / site)
    rehearsed = osfl("run --plan shared/plan.toml --sites sites --out rehearsal --format json").json
    assert result.json["release"] == rehearsed["release_digest"]


def test_a_round_from_plan_to_prediction(osfl: Osfl, here: Path) -> None:
    reported = osfl("receive round usb")
    assert reported.code == 0 and [line.split()[:2] for line in reported.out.splitlines()] == [
        ["accepted", site] for site in SITES
    ]
    assert "may begin" in osfl("show round").out
    release = osfl("server round --key keys/server.key --format json").json
    assert release["late"] == [] and release["personal"] == []
    assert osfl("server round --key keys/server.key").out.startswith(f"Release  {release['release']}")  # it stands
    shown = osfl("show round --format json").json
    assert shown["release"] == release["release"] and shown["missing"] == []
    command = "personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub --out model"
    assert osfl(f"{command} --format json").json["release"] == release["release"]
    result = osfl("predict --run model sites/north --format json").json
    assert len(result["predictions"]) == 50 and not result["failed"]
    kept = next((here / "work").glob("*/north"))
    assert osfl(f"predict --run {kept} sites/north/1").code == 0
    assert "Every signature is good" in osfl("verify --round round").out


def test_a_method_with_personal_parts(osfl: Osfl) -> None:
    assert osfl(f"{NEW.replace('fedavg', 'fedbicross')}").code == 0
    osfl("keys server north south west --out keys")
    osfl("enroll plan.toml --keys keys --out round")
    for site in SITES:
        command = f"client plan.toml --client {site} --data sites/{site} --key keys/{site}.key --out usb/{site}.safetensors"
        assert osfl(command).code == 0
    osfl("receive round usb")
    assert osfl("server round --key keys/server.key --format json").json["personal"] == list(SITES)
    take = "personalize plan.toml -c north --data sites/north --release round/release.safetensors --server keys/server.pub"
    result = osfl(take)
    assert result.code == 2 and "Fetch personal/north.safetensors" in result.err
    result = osfl(f"{take} --personal round/personal/south.safetensors")
    assert result.code == 1 and "another receiver" in result.err
    assert osfl(f"{take} --personal round/personal/north.safetensors --out model").code == 0
    assert osfl("predict --run model sites/north/1").code == 0
    assert osfl("verify round/personal/north.safetensors round/release.safetensors --round round").code == 0


# --- keys and enrollment ------------------------------------------------------------------------------------------------


def test_keys_are_private_and_never_replaced(osfl: Osfl) -> None:
    first = osfl("keys north --out k --format json").json["keys"][0]
    private = Path("k/north.key")
    assert private.stat().st_mode & 0o777 == 0o600 and Path("k/north.pub").read_text() == first["public_key"] + "\n"
    content = private.read_bytes()
    again = osfl("keys north --out k")
    assert again.code == 0 and "kept" in again.out and first["public_key"] in again.out and private.read_bytes() == content
    Path("k/north.pub").unlink()
    assert osfl("keys north --out k").code == 0 and Path("k/north.pub").exists()
    Path("k/north.pub").write_text("3d" + "0" * 62 + "\n")
    result = osfl("keys north --out k")
    assert result.code == 2 and "holds another key" in result.err
    result = osfl("keys ../north")
    assert result.code == 2 and "cannot be a client's name" in result.err
    secret = content.decode().splitlines()[1]
    assert secret not in again.out + again.err


@pytest.mark.parametrize(
    ("command", "code", "pieces"),
    [
        ("enroll plan.toml --keys keys --out round", 0, ["Opened round"]),  # the same again
        ("enroll plan.toml --keys nowhere --out r2", 2, ["--keys nowhere is not a folder", "server.pub"]),
        ("enroll plan.toml --server keys/server.pub --client north=keys/north.pub --out r2", 2, ["no key for 'south'"]),
        ("enroll plan.toml --keys keys --client north=keys/south.pub --out r2", 2, ["two clients share one key"]),
        ("enroll plan.toml --keys keys --client north=keys/server.pub --out r2", 2, ["'north' has the server's key"]),
        ("enroll plan.toml --keys keys --client mallory=keys/north.pub --out r2", 2, ["'mallory' is no client of this plan"]),
        ("enroll plan.toml --keys keys --client north --out r2", 2, ["expected NAME=FILE"]),
        ("enroll plan.toml --keys keys --server plan.toml --out r2", 2, ["holds no public key", "64 lower-case hex digits"]),
        ("enroll plan.toml --client north=keys/north.pub --out r2", 2, ["the server's key is missing"]),
        ("server round --key keys/north.key", 2, ["not the server's"]),
        ("server round --key keys/server.pub", 2, ["holds no private key", "not the .pub file"]),
        ("server round --key gone.key", 2, ["cannot be read", "osfl keys"]),
        ("server nowhere --key keys/server.key", 1, ["nowhere/plan.json is missing"]),
        ("show nowhere", 1, ["nowhere/plan.json is missing", "There is no folder nowhere"]),
        ("receive nowhere usb", 1, ["nowhere/plan.json is missing"]),
        ("receive round gone.safetensors", 1, ["gone.safetensors: there is no such file"]),
        ("receive round keys", 1, ["Nothing to receive", "not called *.safetensors"]),
        ("client plan.toml --client east --data sites/north --key keys/north.key", 2, ["'east' is no client", "north, south"]),
        ("client plan.toml --client north --key keys/north.key --work w", 2, ["--data is missing"]),
        ("client plan.toml --client north --data gone --key keys/north.key --work w", 1, ["there is no data at gone"]),
        ("client plan.toml --client north --data sites/north --key keys/south.key", 1, ["signature", "delete that file"]),
        ("check plan.toml --data sites/north --client east", 1, ["'east' is no client"]),
        ("check plan.toml --data gone --client north", 1, ["there is no data at gone"]),
        ("check plan.toml --data sites/north", 2, ["--client is missing"]),
        ("verify", 2, ["which round?", "--plan"]),
        ("verify --plan plan.toml", 2, ["no file to verify"]),
        ("run --sites sites", 2, ["--sites needs the plan"]),
        ("run --plan plan.toml", 2, ["has no [data] table", "--sites"]),
        ("run --plan plan.toml --sites keys", 1, ["there is no data of 'north' in keys"]),
        ("new --method fedavg --dataset digits --clients a,b --out p", 2, ["simulated clients are numbered"]),
        ("new --method fedavg --classes a,b --clients a,a --out p", 2, ["a is named twice", "each client once"]),
        ("new --method fedavg --classes a,b --clients a,server --out p", 2, ["'server' is not a client name"]),
        ("new --method fedavg --classes a,b --clients a,b --sites s --out p", 2, ["give --dataset"]),
        ("new --method fedavg --classes a,b --clients 0 --out p", 2, ["at least 1"]),
    ],
)
def test_mistakes_say_what_to_do(osfl: Osfl, here: Path, command: str, code: int, pieces: list[str]) -> None:
    result = osfl(command)
    text = result.out + result.err
    assert result.code == code, text
    assert all(piece in text for piece in pieces), text
    as_json = osfl(f"{command} --format json")
    assert as_json.code == code and json.loads(as_json.out)
    if code and "receive round" not in command:
        assert {"error", "reason"} <= as_json.json.keys() and as_json.json.get("fix", as_json.json.get("problems"))


# --- receiving ---------------------------------------------------------------------------------------------------------


def test_every_file_gets_its_line(osfl: Osfl, here: Path) -> None:
    whole = Path("usb/west.safetensors").read_bytes()
    Path("usb/west.safetensors").write_bytes(whole[:20_000])
    Path("usb/north.safetensors").rename("usb/copy of the file.safetensors")
    Path("usb/link.safetensors").symlink_to("/etc/passwd")
    result = osfl("receive round usb")
    assert result.code == 1
    assert [line.split()[1] for line in result.out.splitlines()] == ["north", "south"]
    assert "incomplete copy (expected 34480 bytes, got 20000)" in result.err and "Copy it again" in result.err
    assert "link.safetensors: a link, not a file" in result.err and "root:" not in result.err
    shown = osfl("show round").out
    assert "missing    west" in shown and "size: incomplete copy" in shown
    result = osfl("server round --key keys/server.key")
    assert result.code == 1 and "2 of the 3 uploads" in result.err and "expected uploads from west" in result.err
    Path("usb/west.safetensors").write_bytes(whole)
    again = osfl("receive round usb --format json")
    assert again.code == 0 and len(again.json["accepted"]) == 3  # again, in any order, is nothing new
    assert [entry["field"] for entry in osfl("show round --format json").json["refused"]] == ["size"]


def test_refusals_name_who_field_expected_got_and_fix(osfl: Osfl, here: Path) -> None:
    osfl("receive round usb/north.safetensors")
    text = Path("plan.toml").read_text()
    Path("other.toml").write_text(text.replace("seed = 0 ", "seed = 1 "))
    osfl("client other.toml --client north --data sites/north --key keys/north.key --out other.safetensors")
    osfl("keys mallory --out keys")
    forged = Path("usb/south.safetensors").read_bytes().replace(b'\\"client\\":\\"south\\"', b'\\"client\\":\\"north\\"')
    Path("forged.safetensors").write_bytes(forged)
    refused = osfl("receive round other.safetensors forged.safetensors --format json").json["refused"]
    assert [row["field"] for row in refused] == ["plan", "signature"]
    for row in refused:
        assert {"path", "client", "field", "expected", "got", "fix", "reason"} <= row.keys() and row["client"] == "north"


def test_file_names_cannot_steer_a_terminal(osfl: Osfl, here: Path) -> None:
    (here / "drop").mkdir()
    whole = Path("usb/north.safetensors").read_bytes()
    for name, content in ((b"\x1b[2J\xff[red].safetensors", whole), (b"\x1b]0;title\x07.safetensors", whole[:9])):
        Path(os.fsdecode(os.fsencode(here) + b"/drop/" + name)).write_bytes(content)
    result = osfl("receive round drop")
    assert result.code == 1 and "[red].safetensors" in result.out and "incomplete copy" in result.err
    assert not any(mark in result.out + result.err + osfl("show round").out for mark in ("\x1b", "\x07"))
    again = osfl("receive round drop --format json")
    assert again.code == 1 and len(again.json["accepted"]) == 1 and "\x1b" not in again.out


def test_the_dashboard_needs_no_torch_to_receive_and_show(here: Path) -> None:
    code = (
        "import sys, osfl.cli.main as m\n"
        "for words in (['receive', 'round', 'usb'], ['show', 'round'], ['verify', '--round', 'round'], ['keys', 'east']):\n"
        "    assert m.answer(words) == 0\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=here).splitlines()[-1] == "False"


# --- quorum, deadline, clocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("deadline", "begins"), [("2001-01-01T00:00:00Z", True), ("2199-01-01T00:00:00+05:00", False)])
def test_the_deadline_is_read_on_the_coordinator_s_clock(osfl: Osfl, here: Path, deadline: str, begins: bool) -> None:
    text = Path("plan.toml").read_text()
    Path("plan.toml").write_text(text.replace("quorum = 0", "quorum = 2").replace('deadline = ""', f'deadline = "{deadline}"'))
    osfl("enroll plan.toml --keys keys --out waiting")
    for site in SITES:
        osfl(f"client plan.toml --client {site} --data sites/{site} --key keys/{site}.key --out usb/{site}.safetensors")
        os.utime(f"usb/{site}.safetensors", (0, 0))  # a site whose clock stands in 1970
    assert osfl("receive waiting usb/north.safetensors usb/south.safetensors").code == 0
    result = osfl("server waiting --key keys/server.key")
    assert result.code == (0 if begins else 1)
    shown = osfl("show waiting").out
    assert "Needed     2 uploads" in shown and "this clock says 20" in shown
    if begins:
        late = osfl("receive waiting usb/west.safetensors")
        assert late.code == 0 and "has no part of it" in late.err.replace("\n", " ")
        assert osfl("receive waiting usb --format json").json["late"] == ["west"]
        assert "too late for the release" in osfl("show waiting").out
        checks = osfl("verify --round waiting --format json").json
        west = next(row for row in checks["files"] if row["client"] == "west")
        assert checks["good"] and west["checks"][1]["answer"] == "not checked"
    else:
        assert "1 more may deliver until 2199" in result.err and "1 more may deliver" in shown


# --- verification ------------------------------------------------------------------------------------------------------


def test_an_auditor_s_own_keys_are_compared_with_the_round_s(osfl: Osfl, here: Path) -> None:
    osfl("receive round usb")
    assert osfl("verify --round round --keys keys").code == 0
    Path("mine").mkdir()
    osfl("keys north --out mine")
    result = osfl("verify --round round --keys mine")
    assert result.code == 1 and "another key of north than yours" in result.err.replace("\n", " ")


def test_verify_says_what_it_could_not_check(osfl: Osfl, here: Path) -> None:
    osfl("receive round usb")
    osfl("server round --key keys/server.key")
    release = "round/release.safetensors --plan plan.toml"
    result = osfl(f"verify {release}")
    assert result.code == 1 and "not checked" in result.out and "give --server" in result.out
    result = osfl(f"verify {release} --server keys/server.pub")
    assert result.code == 0 and result.out.count("not checked") == 4 and "Not checked: 4." in result.out
    result = osfl(f"verify {release} usb/north.safetensors --keys keys --format json").json
    assert result["good"] and [c["answer"] for c in result["files"][0]["checks"]] == ["yes", "yes", *["not checked"] * 3, "yes"]
    result = osfl(f"verify {release} --server keys/north.pub")
    assert result.code == 1 and "signature" in result.out
    Path("usb/north.safetensors").write_bytes(Path("usb/north.safetensors").read_bytes()[:-1] + b"\x07")
    result = osfl("verify usb/north.safetensors --round round")
    assert result.code == 1 and "not what was signed" in result.out
    (here / "other.toml").write_text(Path("plan.toml").read_text().replace("seed = 0 ", "seed = 1 "))
    assert osfl("verify --plan other.toml --round round").code == 1


# --- files at a site ---------------------------------------------------------------------------------------------------


def test_a_finished_bundle_stands_and_can_be_copied_again(osfl: Osfl, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Path("usb/north.safetensors").read_bytes()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)  # exFAT
    result = osfl("client plan.toml --client north --key keys/north.key --out stick/n.safetensors")
    assert result.code == 0 and "nothing was computed again" in result.out
    assert Path("stick/n.safetensors").read_bytes() == first
    assert osfl("receive round stick/n.safetensors").code == 0


def test_check_shows_a_site_its_own_data(osfl: Osfl, here: Path) -> None:
    result = osfl("check plan.toml --data sites/north --client north")
    assert result.code == 0 and "46 images to learn from, 4 held out" in result.out and "No problem found" in result.out
    Path("sites/north/1/broken.png").write_bytes(b"\x89PNG no")
    facts = osfl("check plan.toml --data sites/north --client north --format json").json
    assert sum(facts["counts"]) == 50 and facts["findings"][0]["examples"] == ["1/broken.png"]
    Path("sites/north/1").rename("sites/north/one")
    result = osfl("check plan.toml --data sites/north --client north")
    assert result.code == 1 and "classes that the plan does not know" in result.err and "got one" in result.err


def test_site_folders_are_not_mixed_up(osfl: Osfl, here: Path) -> None:
    again = f"{NEW} --force"
    assert osfl(again).code == 0  # the same images over themselves
    result = osfl(again.replace("--samples 150", "--samples 90"))
    assert result.code == 1 and "holds other files" in result.err


def test_a_sealed_bundle_is_read_by_the_server_alone(osfl: Osfl, here: Path) -> None:
    command = "client plan.toml --client north --key keys/north.key"
    assert "--out is missing" in osfl(f"{command} --seal keys/server.pub").err
    result = osfl(f"{command} --seal keys/server.pub --out usb/sealed.safetensors").out
    assert "only the server can read it" in result.replace("\n", " ")
    sealed, kept = (here / "usb/sealed.safetensors").read_bytes(), (here / "usb/north.safetensors").read_bytes()
    assert b"north" not in sealed and kept[-64:] not in sealed
    assert not list((here / "work").rglob("*seal*"))  # where a site at the network keeps what it sealed

    looked = osfl("inspect usb/sealed.safetensors --plan plan.toml")
    assert looked.code != 0 and "only who has the key can open it" in looked.err.replace("\n", " ")
    shut = osfl("receive round usb/sealed.safetensors usb/south.safetensors")  # the others are received all the same
    assert shut.code == 1 and "--key server.key" in shut.err
    assert [path.stem for path in (here / "round/inbox").glob("*.safetensors")] == ["south"]
    other = osfl("receive round usb/sealed.safetensors --key keys/south.key")
    assert other.code == 2 and "this key is not the server's" in other.err.replace("\n", " ")
    took = osfl("receive round usb/sealed.safetensors --key keys/server.key --format json").json
    assert [row["client"] for row in took["accepted"]] == ["north"]
    assert (here / "round/inbox/north.safetensors").read_bytes() == kept
    assert not (here / "round/rejected.jsonl").exists()  # that nobody gave the key is no fault of the bundle
