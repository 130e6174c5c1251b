"""What osfl does where a system lacks hard links, synced folders or mallopt: it goes on, and `osfl doctor` says so."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from osfl.cli import doctor
from osfl.runtime import atomic, workers


def test_a_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "link")  # not even the function
    assert not atomic.supports_hard_links(tmp_path)
    assert atomic.create_once(tmp_path / "file", b"first") and not atomic.create_once(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    found = doctor._links(tmp_path)
    assert found.verdict == "NOTE" and "a lock file is used instead" in found.found


@pytest.mark.parametrize("how", ["windows", "medium"])
def test_a_system_that_cannot_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    assert atomic.sync_folder(tmp_path) and doctor._folder_sync(tmp_path).verdict == "PASS"
    real = os.fsync

    def refuse(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(descriptor)

    if how == "windows":
        monkeypatch.setattr(atomic, "_OPENS_FOLDERS", False)
    else:
        monkeypatch.setattr(os, "fsync", refuse)
    assert not atomic.sync_folder(tmp_path) and atomic.create_once(tmp_path / "file", b"kept")
    found = doctor._folder_sync(tmp_path)
    assert found.verdict == "NOTE" and "power cut" in found.found and found.fix


@pytest.mark.parametrize("library", ["macos", "musl", "refuses"])
def test_a_system_without_mallopt(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    class Library:
        def __init__(self, name: str | None) -> None:
            if library == "refuses":
                self.mallopt = lambda *given: 0

    workers.keep_freed_memory.cache_clear()
    if library == "macos":
        monkeypatch.setattr("osfl.runtime.workers.sys.platform", "darwin")
    monkeypatch.setattr("osfl.runtime.workers.ctypes.CDLL", Library)
    try:
        assert not workers.keep_freed_memory()
        found = doctor._freed_memory()
        assert found.verdict == "NOTE" and "same bits" in found.found
        assert workers.Workers(2).map(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]
        workers.return_freed_memory()
    finally:
        workers.keep_freed_memory.cache_clear()
