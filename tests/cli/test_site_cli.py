"""Output of the site's commands and of `verify`: sizes, places, releases."""

from __future__ import annotations

import errno
import os
import re
import shutil
from contextlib import chdir
from pathlib import Path

import pytest

from osfl.cli.main import answer
from tests.cli.conftest import Osfl, round_with_bundles

TAKE = "personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A round of two sites with its release, made once; every test works in a copy."""
    folder = tmp_path_factory.mktemp("made")
    round_with_bundles(folder, ("north", "south"))
    with chdir(folder):
        assert answer(["receive", "round", "usb"]) == 0
        assert answer(["server", "round", "--key", "keys/server.key"]) == 0
    return folder


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


# --- the site's images ---------------------------------------------------------------------------------------------------


def test_the_folder_above_all_sites_is_not_one_sites_images(osfl: Osfl, here: Path) -> None:
    """Else the others' images are trained on, as if their folders were scanners of this site."""
    for command in ("client plan.toml --key keys/north.key --work new", "check plan.toml"):
        result = osfl(f"{command} --client north --data sites")
        assert result.code == 1 and "sites holds folders of other sites: south" in result.err, result.err
        assert "sites/north" in result.err and not Path("new").is_file()
    assert not list(Path().glob("new/*/north/upload.safetensors"))


# --- a release that was refused ----------------------------------------------------------------------------------------


def test_advice_about_a_release_is_for_whoever_holds_one(osfl: Osfl, here: Path) -> None:
    whole = Path("round/release.safetensors").read_bytes()
    Path("damaged.safetensors").write_bytes(whole[:-1] + b"\x07")
    Path("whole.safetensors").write_bytes(whole)
    Path("other.toml").write_text(Path("plan.toml").read_text().replace("seed = 0 ", "seed = 1 "))
    advice = {
        "plan.toml damaged server": "copy it again from the coordinator",
        "other.toml whole server": "Ask the coordinator for the release of this round",
        "plan.toml whole south": "server.pub is the public key of this round's coordinator",
        "plan.toml gone server": "`osfl server`",
    }
    for command, piece in advice.items():
        plan, file, key = command.split()
        taken = osfl(f"personalize {plan} --client north --release {file}.safetensors --server keys/{key}.pub")
        asked = osfl(f"verify {file}.safetensors --plan {plan} --server keys/{key}.pub")
        assert taken.code == asked.code == 1 and "Upload rejected" not in taken.err + asked.out
        assert piece in taken.err and piece in asked.out, command


def test_a_personal_part_that_would_be_ignored_is_refused(osfl: Osfl, here: Path) -> None:
    result = osfl(f"{TAKE} --personal usb/south.safetensors")
    assert result.code == 2 and "the release has no personal parts, so there is nothing to give" in result.err
    assert osfl(f"{TAKE} --personal gone.safetensors").code == 2
    assert not list(Path("work").glob("*/north/model.safetensors")) and osfl(TAKE).code == 0


# --- the file that leaves ----------------------------------------------------------------------------------------------

CLIENT = "client plan.toml --client north --key keys/north.key"


def test_the_size_is_that_of_the_file_that_leaves(osfl: Osfl, here: Path) -> None:
    for command, out in ((CLIENT, "usb/plain.safetensors"), (f"{CLIENT} --seal keys/server.pub", "usb/sealed.safetensors")):
        text = osfl(f"{command} --out {out}").out
        size = Path(out).stat().st_size
        assert f"one file of {size:,} bytes" in text
        assert osfl(f"{command} --out {out} --format json").json["bytes"] == size
    assert Path("usb/sealed.safetensors").stat().st_size > Path("usb/plain.safetensors").stat().st_size
    assert osfl(f"{CLIENT} --format json").json["bytes"] == Path("usb/plain.safetensors").stat().st_size


def test_a_folder_is_no_file_and_the_file_is_suggested(osfl: Osfl, here: Path) -> None:
    result = osfl(f"{CLIENT} --out usb/")
    assert result.code == 2 and "--out usb is a folder" in result.err and "--out usb/north.safetensors" in result.err
    result = osfl("inspect usb/north.safetensors --html usb")
    assert result.code == 2 and "usb/page.html" in result.err


def test_a_medium_that_cannot_be_written_is_named_as_it_was_given(
    osfl: Osfl, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def read_only(path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if Path(path).parent.name == "stick" and flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    Path("stick").mkdir()
    monkeypatch.setattr(os, "open", read_only)
    result = osfl(f"{CLIENT} --out stick/n.safetensors")
    assert result.code == 1 and "stick/n.safetensors: Read-only file system" in result.err and ".tmp" not in result.err


# --- before the round --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("", "Fill in the classes, the image size and the clients, then look at it with `osfl check plan.toml`."),
        ("--classes a,b", "Fill in the image size and the clients, then"),
        ("--classes a,b --clients north,south", "Fill in the image size, then"),
        ("--classes a,b --clients 2 --image-size 32", "Nothing is left to fill in; look at it with `osfl check plan.toml`."),
    ],
)
def test_a_template_names_what_is_left_to_fill_in(osfl: Osfl, command: str, sentence: str) -> None:
    assert osfl(f"new --method fedavg {command}").out.splitlines()[-1].startswith(sentence)


@pytest.mark.parametrize(("deadline", "over"), [("2001-01-01T00:00:00Z", True), ("2199-01-01T00:00:00Z", False), ("", False)])
def test_a_deadline_that_is_over_is_warned_of(osfl: Osfl, here: Path, deadline: str, over: bool) -> None:
    text = Path("plan.toml").read_text()
    Path("late.toml").write_text(text.replace('deadline = ""', f'deadline = "{deadline}"').replace("quorum = 0", "quorum = 1"))
    result = osfl("enroll late.toml --keys keys --out late")
    assert result.code == 0 and result.out.startswith("Opened late")
    assert ("Warning: the deadline 2001-01-01T00:00:00Z is over" in result.err) is over and (result.err == "") is not over
    warnings = osfl("enroll late.toml --keys keys --out late --format json").json["warnings"]
    assert ("as soon as 1 of 2 uploads" in " ".join(warnings)) is over and len(warnings) == over


# --- anybody -----------------------------------------------------------------------------------------------------------


def test_the_commands_of_the_page_for_anybody_work(osfl: Osfl, here: Path) -> None:
    """With what an auditor holds: a copy of the round's folder, the plan and public keys."""
    page = (Path(__file__).parents[2] / "docs" / "anybody.md").read_text(encoding="utf-8")
    shutil.copy("round/release.safetensors", "release.safetensors")
    shutil.copy("usb/north.safetensors", "north.safetensors")
    shutil.copy("keys/server.pub", "server.pub")
    for private in (*Path("keys").glob("*.key"), Path("usb"), Path("sites"), Path("work")):
        shutil.rmtree(private) if private.is_dir() else private.unlink()
    made = next(row["digest"] for row in osfl("verify --round round --format json").json["files"] if row["kind"] == "release")
    commands = [line for block in re.findall(r"```\n(.*?)```", page, flags=re.S) for line in block.splitlines()]
    assert {line.split()[1] for line in commands} == {"verify", "inspect", "keys", "enroll", "receive", "server"}
    for line in commands:
        command = [" ".join(map(str, Path().glob(word))) if "*" in word else word for word in line.split()[1:]]
        result = osfl(" ".join(command))
        assert result.code == 0, f"{line}\n{result.out}\n{result.err}"
    assert made in result.out  # computed again with another key: the same release
