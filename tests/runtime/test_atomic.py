"""Whole or absent, with hard links and without."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from osfl.runtime import atomic
from tests.faults.traps import fail, trapped, without_links


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_created_once(tmp_path: Path, links: bool) -> None:
    path = tmp_path / "file"
    with without_links(not links):
        assert atomic.create_once(path, b"first")
        assert not atomic.create_once(path, memoryview(b"second"))
        assert atomic.supports_hard_links(tmp_path) is links
    assert path.read_bytes() == b"first"
    assert set(names(tmp_path)) - {".lock"} == {"file"}


def test_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    atomic.replace_atomically(path, b"old")
    atomic.replace_atomically(path, b"new")
    with trapped(2, fail(28)), pytest.raises(OSError):
        atomic.replace_atomically(path, b"newest")
    assert path.read_bytes() == b"new" and names(tmp_path) == ["state.json"]


def test_refusals_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """Not the temporary one beside it: a folder that may not be written, a full disk, a name that is taken."""
    path = tmp_path / "file"
    (tmp_path / "taken" / "inside").mkdir(parents=True)
    for step in (1, 2, 3):
        with trapped(step, fail(30)), pytest.raises(OSError) as caught:
            atomic.replace_atomically(path, b"new")
        assert caught.value.filename == str(path)
    with pytest.raises(OSError) as caught:
        atomic.replace_atomically(tmp_path / "taken", b"")
    assert caught.value.filename == str(tmp_path / "taken") and caught.value.filename2 is None
    with pytest.raises(OSError) as caught:
        atomic.create_once(tmp_path / "nowhere" / "file", b"")
    assert caught.value.filename == str(tmp_path / "nowhere" / "file")


def test_other_files_keep_their_names_in_refusals(tmp_path: Path) -> None:
    def pieces() -> Iterator[bytes]:
        yield b"begin"
        yield (tmp_path / "gone").read_bytes()

    with pytest.raises(OSError) as caught:
        atomic.replace_in_pieces(tmp_path / "file", pieces())
    assert str(caught.value.filename) == str(tmp_path / "gone") and names(tmp_path) == []


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:3]))
    atomic.replace_atomically(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_other_link_errors_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError):
        atomic.create_once(tmp_path / "file", b"")
    with pytest.raises(OSError):
        atomic.supports_hard_links(tmp_path)
    assert names(tmp_path) == []


def test_only_old_leftovers_are_swept(tmp_path: Path) -> None:
    young, old, other = (tmp_path / name for name in (".a.1.tmp", ".b.2.tmp", "c.tmp"))
    for path in (young, old, other):
        path.write_text("")
        os.utime(path, (0, 0))
    os.utime(young, (time.time(), time.time()))
    atomic.sweep(tmp_path)
    assert names(tmp_path) == [".a.1.tmp", "c.tmp"]


def test_folders_are_made_with_those_above(tmp_path: Path) -> None:
    atomic.make_folder(tmp_path / "a" / "b")
    atomic.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_lines_are_added(tmp_path: Path) -> None:
    for line in (b"one", b"two"):
        atomic.append_line(tmp_path / "log", line)
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_a_folder_below_one_that_nobody_may_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = atomic.sync_folder

    def refuse(folder: Path) -> bool:
        if folder == tmp_path:
            raise PermissionError(13, "Permission denied", str(folder))
        return real(folder)

    monkeypatch.setattr(atomic, "sync_folder", refuse)
    atomic.make_folder(tmp_path / "alice" / "round")
    assert (tmp_path / "alice" / "round").is_dir()
