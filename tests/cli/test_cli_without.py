"""A server phase that fails at an upload: the site is named, `show` says so, and the round goes on without it."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from osfl.cli.main import answer
from osfl.methods.dense import Dense
from osfl.rounds.state import read_policy
from osfl.rounds.storage import payload_of
from osfl.runtime.payloads import to_raw
from osfl.wire.bundle import pack
from osfl.wire.gate import accept, verify_release
from osfl.wire.signing import SigningKey
from tests.cli.conftest import Osfl

SITES = ("north", "south", "west")
SERVER = "server round --key keys/server.key"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round of three sites; what south sends is signed, passes the gate, and cannot be learned from."""
    folder = tmp_path_factory.mktemp("made")
    client = "client plan.toml --client {0} --data sites/{0} --key keys/{0}.key --out usb/{0}.safetensors"
    with chdir(folder):
        for command in (
            f"new --method dense --dataset digits --clients {','.join(SITES)} --partition iid --samples 90 --smoke"
            " --sites sites",
            f"keys server {' '.join(SITES)} --out keys",
            "enroll plan.toml --keys keys --out round",
            *(client.format(site) for site in SITES),
        ):
            assert answer(command.split()) == 0, command
        path, policy = Path("usb/south.safetensors"), read_policy(Path("round"))
        payload = payload_of(accept(path, policy))
        huge = {name: value * 1e30 if value.is_floating_point() else value for name, value in payload.tensors.items()}
        key = SigningKey.load(Path("keys/south.key"))
        path.write_bytes(pack("upload", "south", policy.plan, to_raw(huge), dict(payload.facts), key))
        assert answer(["receive", "round", "usb"]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def made_from() -> set[str]:
    policy = read_policy(Path("round"))
    release = verify_release(Path("round/release.safetensors"), policy.server, policy.plan)
    return {name for name in release.made_from if name.startswith("upload/")}


def test_the_site_is_named_and_the_round_goes_on_without_it(osfl: Osfl, here: Path) -> None:
    failed = osfl(SERVER)
    assert failed.code == 1 and "south" in failed.err and "--exclude south" in failed.err
    assert "Traceback" not in failed.err and not Path("round/release.safetensors").exists()
    shown = osfl("show round")
    assert "Failed" in shown.out and "south: the model of south answers noise" in shown.out
    assert osfl("show round --format json").json["failed"]["client"] == "south"

    served = osfl(f"{SERVER} --exclude south")
    assert served.code == 0 and "made from 2 of 3 uploads, without south" in served.out
    assert made_from() == {"upload/north", "upload/west"}
    after = osfl("show round --format json").json
    assert after["failed"] is None
    assert {row["client"]: (row["late"], row["left_out"]) for row in after["delivered"]} == {
        "north": (False, False),
        "south": (False, True),
        "west": (False, False),
    }
    assert "left out of the release" in osfl("show round").out and "Failed" not in osfl("show round").out
    assert osfl("verify --round round").code == 0

    assert osfl("forget round --client west --key keys/server.key").code == 0  # made again of what it was made of
    assert made_from() == {"upload/north"} and "left out of the release" in osfl("show round").out


def test_what_cannot_be_left_out_is_stated(osfl: Osfl, here: Path) -> None:
    result = osfl(f"{SERVER} --exclude nobody")
    assert (
        result.code == 2 and "there is no upload of 'nobody' to leave out" in result.err and "north, south, west" in result.err
    )
    command = " ".join(f"--exclude {site}" for site in SITES)
    assert osfl(f"{SERVER} {command}").code == 1 and not Path("round/release.safetensors").exists()


def test_a_quorum_of_the_plan_holds_without_a_site(osfl: Osfl, here: Path) -> None:
    Path("plan.toml").write_text(Path("plan.toml").read_text().replace("quorum = 0", "quorum = 3"))
    shutil.rmtree("round")
    for command in (
        "enroll plan.toml --keys keys --out round",
        *(f"client plan.toml --client {s} --data sites/{s} --key keys/{s}.key --out other/{s}.safetensors" for s in SITES),
        "receive round other",
    ):
        assert osfl(command).code == 0
    result = osfl(f"{SERVER} --exclude south")
    assert result.code == 1 and "2 of the 3 uploads that are needed" in result.err


def test_an_error_that_nobody_foresaw_is_no_traceback(osfl: Osfl, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any, uploads: Any, ctx: Any) -> None:
        for upload in uploads:
            if upload.client == "south":
                _part(upload.payload)

    def _part(payload: Any) -> None:
        raise KeyError("class-3/scales")

    monkeypatch.setattr(Dense, "server_phase", broken)
    failed = osfl(SERVER)
    assert failed.code == 1 and "KeyError: 'class-3/scales'" in failed.err and "Traceback" not in failed.err
    assert "upload of 'south'" in failed.err and "--exclude south" in failed.err
    note = osfl("show round --format json").json["failed"]
    assert note["client"] == "south" and "in _part" in note["traceback"]
