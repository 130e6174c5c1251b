"""What osfl does where a system lacks hard links, synced folders or mallopt: it goes on, and `osfl doctor` says so."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from osfl.cli import doctor
from osfl.runtime import atomic, meter, workers


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


@pytest.mark.parametrize(("system", "most"), [("darwin", 3_000_000), ("freebsd", 3_000_000 * 1024)])
def test_a_system_without_proc(monkeypatch: pytest.MonkeyPatch, system: str, most: int) -> None:
    """Without /proc the high-water mark is that of the whole process, in the unit of the system."""

    def refuse(self: Path, *given: object, **more: object) -> str:
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr("osfl.runtime.meter.sys.platform", system)
    monkeypatch.setattr("osfl.runtime.meter.resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    meter.reset_peak_memory()
    assert meter.peak_memory() == most


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


WINDOWS = """
import sys
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None  # Windows' Python has none of these
import rich.console  # asks for Windows' own library while it is imported
from osfl.cli.main import answer
sys.platform = "win32"
sys.exit(answer(["run", "--smoke"]))
"""


def test_windows_is_answered_with_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1 and "Windows Subsystem for Linux (WSL 2)" in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == "" and not list(tmp_path.iterdir())
