"""`osfl receive` after a release, where the plan lets sites join late: the next release, and what the commands say of it."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from osfl.cli.main import answer
from tests.cli.conftest import Osfl

SITES = ("north", "south", "west")
RECEIVE, SERVER = "receive round usb/{0}.safetensors", "server round --key keys/server.key"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A released round of two sites, the upload of a third, and a copy of the release."""
    folder = tmp_path_factory.mktemp("made")
    client = "client plan.toml --client {0} --data sites/{0} --key keys/{0}.key --out usb/{0}.safetensors"
    new = (
        f"new --method onesum --dataset digits --clients {','.join(SITES)} --partition iid --samples 150 --smoke --sites sites"
        " --open-sum"
    )
    with chdir(folder):
        assert answer(new.split()) == 0
        plan = Path("plan.toml").read_text()
        assert "late = false" in plan
        Path("plan.toml").write_text(plan.replace("late = false", "late = true").replace("quorum = 0", "quorum = 2"))
        for command in (
            f"keys server {' '.join(SITES)} --out keys",
            "enroll plan.toml --keys keys --out round",
            *(client.format(site) for site in SITES),
            *(RECEIVE.format(site) for site in SITES[:2]),
            SERVER,
        ):
            assert answer(command.split()) == 0, command
        shutil.copy("round/release.safetensors", "old.safetensors")
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_with_the_key_receiving_makes_the_next_release(osfl: Osfl, here: Path) -> None:
    first = osfl("show round --format json").json["release"]
    result = osfl(f"{RECEIVE.format('west')} --key keys/server.key --format json")
    assert result.code == 0 and result.json["late"] == ["west"] and result.json["release"] not in (None, first)
    shown = osfl("show round --format json").json
    assert (shown["release"], shown["supersedes"], shown["joining"]) == (result.json["release"], first, [])
    assert f"takes the place of {first}" in osfl("show round").out
    assert osfl("verify --round round").code == 0
    old = osfl("verify old.safetensors --round round")
    assert old.code == 0 and f"superseded by {result.json['release']}" in " ".join(old.out.split())


def test_without_the_key_it_is_kept_for_the_server(osfl: Osfl, here: Path) -> None:
    first = osfl("show round --format json").json["release"]
    result = osfl(RECEIVE.format("west"))
    assert result.code == 0 and "makes the next release with it" in " ".join(result.err.split())
    shown = osfl("show round")
    assert "joins the next one" in shown.out and "makes the next release, with west" in " ".join(shown.out.split())
    done = osfl(f"{SERVER} --format json")
    assert done.code == 0 and done.json["supersedes"] == first and done.json["late"] == []
    assert osfl(f"{SERVER} --format json").json["release"] == done.json["release"]


def test_text_names_both_releases(osfl: Osfl, here: Path) -> None:
    first = osfl("show round --format json").json["release"]
    result = osfl(f"{RECEIVE.format('west')} --key keys/server.key")
    assert result.code == 0 and "with west; takes the place of" in " ".join(result.out.split()) and first in result.out
