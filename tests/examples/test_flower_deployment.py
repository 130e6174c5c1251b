"""The example plays a whole round over Flower as separate processes; its commands are those that exist."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from osfl.cli.main import answer
from tests.faults.progress import signs, wait_until

FOLDER = Path(__file__).parents[2] / "examples" / "flower_deployment"


def left_running(play: Path) -> list[str]:
    """Processes that still know this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.fsencode(play) in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_text())
    return found


def seen(folder: Path) -> frozenset[str]:
    state = ("play/*/node/work/**/*", "play/coordinator/deployed/coordinator/rounds/**/*", "play/rehearsal/**/*")
    logs = [*folder.glob("output.txt"), *folder.glob("play/*.txt")]
    return signs(logs, (path for place in state for path in folder.glob(place)))


def test_it_ends_with_one_line_that_says_what_was_shown(tmp_path: Path) -> None:
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(tmp_path / "flwr")}
    quiet |= {"OSFL_PATIENCE": "86400"}  # this test waits for as long as something happens
    found_there = {**os.environ, **quiet, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    with (tmp_path / "output.txt").open("w+") as output:  # not a pipe: whatever is left behind must not keep us waiting
        done = subprocess.Popen(
            [FOLDER / "run.sh", tmp_path / "play"],
            stdout=output,
            stderr=output,
            env=found_there,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            explain = (tmp_path / "output.txt").read_text
            wait_until("the end of run.sh", lambda: done.poll() is not None, lambda: seen(tmp_path), explain)
        finally:
            done.terminate()  # it stops what it started
            done.wait()
        output.seek(0)
        text = output.read()
    assert done.returncode == 0, text
    last = text.strip().splitlines()[-1]
    assert last.startswith("Shown: 3 sites and a coordinator exchanged messages over Flower with TLS") and "bit for bit" in last
    assert "PRIVATE KEY" not in text
    assert not left_running(tmp_path / "play"), "every program that was started was stopped"


def test_its_readme_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but what needs images: key, plan and deployment, in one folder, in order."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.S)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("osfl ") and "IMAGES" not in line]
    assert [command.split()[1] for command in commands] == ["keys", "new", "deploy"]
    (tmp_path / "public").mkdir()
    for command in commands:
        assert answer(shlex.split(command)[1:]) == 0, command
        if command.split()[1] == "keys":  # each site its own
            for site in ("north", "south", "west"):
                assert answer(["keys", site]) == 0
                (tmp_path / f"{site}.pub").rename(tmp_path / "public" / f"{site}.pub")
    assert (tmp_path / "deployed" / "sites" / "north" / "start.sh").exists()
    assert not (tmp_path / "deployed" / "sites" / "north" / "site.key").exists()  # it stayed at the site
