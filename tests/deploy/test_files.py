"""Files that are carried by hand: copied whole or not at all, picked up with care, refused with the right message."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from osfl.core.errors import FilesError, Rejected
from osfl.deploy.files import carry, pick_up
from osfl.runtime.atomic import replace_in_pieces
from osfl.wire.inbox import Inbox
from tests.faults.traps import fail, trapped, without_links
from tests.wire.forge import CLIENT, OTHER, OTHER_KEY, POLICY, upload


def inbox(folder: Path) -> Inbox:
    return Inbox(folder / "inbox", POLICY)


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "exFAT"])
def test_a_copy_is_the_same_and_leaves_nothing_else(tmp_path: Path, links: bool) -> None:
    (tmp_path / "usb").mkdir()
    (tmp_path / "a").write_bytes(upload() * 3000)
    with without_links(not links):
        carry(tmp_path / "a", tmp_path / "usb" / "b")
        carry(tmp_path / "a", tmp_path / "usb" / "b")  # again
    assert (tmp_path / "usb" / "b").read_bytes() == (tmp_path / "a").read_bytes()
    assert [path.name for path in (tmp_path / "usb").iterdir()] == ["b"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_copy_that_fails_leaves_what_was_there(tmp_path: Path, number: int) -> None:
    """At every call in turn: the name holds the old content or the new, whole."""
    (tmp_path / "a").write_bytes(b"new" * 1000)
    target = tmp_path / "usb" / "b"
    target.parent.mkdir()
    with trapped(0, fail(number)) as trap:
        carry(tmp_path / "a", target)
    for step in range(1, trap.count + 1):
        target.write_bytes(b"old")
        with trapped(step, fail(number)):
            try:
                carry(tmp_path / "a", target)
                reported = ""
            except OSError as error:
                reported = str(error)
        assert target.read_bytes() in ((b"old", b"new" * 1000) if reported else (b"new" * 1000,))


def test_a_medium_that_lies_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake 2 TB stick takes everything and keeps half of it."""
    from osfl.deploy import files

    (tmp_path / "a").write_bytes(b"x" * 100)
    monkeypatch.setattr(
        files, "replace_in_pieces", lambda path, pieces: replace_in_pieces(path, [b"".join(pieces)[:50] + b"\0" * 50])
    )
    with pytest.raises(FilesError, match="differs") as caught:
        carry(tmp_path / "a", tmp_path / "b")
    assert caught.value.field == "out" and caught.value.fix


def test_folders_that_cannot_be_synced_are_media_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    (tmp_path / "a").write_bytes(b"x")
    monkeypatch.setattr(os, "fsync", refuse_folders)
    carry(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"x"


# --- picking up ------------------------------------------------------------------------------------------------------


def test_what_is_picked_up_and_what_is_left(tmp_path: Path) -> None:
    usb = tmp_path / "usb"
    (usb / "folder.safetensors").mkdir(parents=True)
    for name in ("b.safetensors", "a (1).SAFETENSORS", ".a.safetensors.0123.tmp", "a.safetensors.part", "notes.txt"):
        (usb / name).write_bytes(b"x")
    (usb / "link.safetensors").symlink_to(usb / "b.safetensors")
    os.mkfifo(usb / "pipe.safetensors")
    taken, left = pick_up([usb])
    assert [path.name for path in taken] == ["a (1).SAFETENSORS", "b.safetensors"]
    why = {file.path.name: file.why for file in left}
    assert why["link.safetensors"].startswith("a link") and "regular" in why["pipe.safetensors"]
    assert "hidden" in why[".a.safetensors.0123.tmp"] and "regular" in why["folder.safetensors"]
    assert set(why) == {
        "link.safetensors",
        "pipe.safetensors",
        "folder.safetensors",
        ".a.safetensors.0123.tmp",
        "a.safetensors.part",
        "notes.txt",
    }


def test_a_file_that_is_named_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    path = tmp_path / "from the hospital.bin"
    path.write_bytes(upload())
    assert pick_up([path, path]) == ([path], [])
    assert pick_up([tmp_path / "*.bin"]) == ([path], [])
    taken, (left,) = pick_up([path, tmp_path / "gone"])
    assert taken == [path] and left.absent and left.path == tmp_path / "gone"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert pick_up([link])[0] == []


def test_a_renamed_file_is_its_client_s(tmp_path: Path) -> None:
    path = tmp_path / f"{OTHER}.safetensors"
    path.write_bytes(upload(CLIENT))
    assert inbox(tmp_path).receive(path).client == CLIENT
    path.write_bytes(upload(OTHER, OTHER_KEY))
    assert inbox(tmp_path).receive(path).client == OTHER


# --- copies that broke off -------------------------------------------------------------------------------------------


def test_every_cut_is_an_incomplete_copy(tmp_path: Path) -> None:
    """A copy that broke off anywhere is called that, and the whole file is accepted afterwards."""
    whole, path = upload(), tmp_path / "upload.safetensors"
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(Rejected, match="incomplete copy") as caught:
            inbox(tmp_path).receive(path)
        assert caught.value.field in ("size", "header length") and "Copy it again" in str(caught.value.fix)
    path.write_bytes(whole)
    assert inbox(tmp_path).receive(path).client == CLIENT


def test_a_copy_with_room_that_was_not_filled_is_to_be_copied_again(tmp_path: Path) -> None:
    """Some programs reserve the whole size first; what was not copied yet reads as zeros."""
    whole = upload()
    for filled in range(0, len(whole) - 24, 7):
        with pytest.raises(Rejected) as caught:
            inbox(tmp_path).receive(whole[:filled] + bytes(len(whole) - filled))
        assert "copy it again" in str(caught.value.fix).lower(), (filled, caught.value)


# --- media and clocks ------------------------------------------------------------------------------------------------

WATCHED = """
import json, sys
from pathlib import Path
usb, round = sys.argv[1:]
touched = []
def watch(event, args):
    if event == "open" and str(args[0]).startswith(usb) and args[2] & 0o103:      # writing or creating
        touched.append([event, str(args[0])])
    if event in ("os.mkdir", "os.rename", "os.remove", "os.link", "os.truncate", "os.utime", "os.chmod", "os.symlink"):
        touched.extend([event, str(arg)] for arg in args if str(arg).startswith(usb))
sys.addaudithook(watch)
from osfl.deploy.files import pick_up
from osfl.wire.inbox import Inbox
from tests.wire.forge import POLICY
got = [Inbox(Path(round), POLICY).receive(path).client for path in pick_up([Path(usb)])[0]]
print(json.dumps([got, touched, "torch" in sys.modules]))
"""


def test_receiving_needs_nothing_but_reading(tmp_path: Path) -> None:
    """From a read-only medium, that is; modes alone would prove nothing to root, so every call is watched."""
    usb = tmp_path / "usb"
    usb.mkdir()
    (usb / "a.safetensors").write_bytes(upload())
    usb.chmod(0o555)
    try:
        output = subprocess.check_output([sys.executable, "-c", WATCHED, usb, tmp_path / "inbox"], text=True)
    finally:
        usb.chmod(0o755)
    assert json.loads(output) == [[CLIENT], [], False]


@pytest.mark.parametrize("seconds", [0, 315532800, 4354819199], ids=["1970", "1980", "2107"])
def test_a_file_s_time_does_not_matter(tmp_path: Path, seconds: int) -> None:
    path = tmp_path / "upload.safetensors"
    path.write_bytes(upload())
    os.utime(path, (seconds, seconds))
    assert inbox(tmp_path).receive(path).client == CLIENT
