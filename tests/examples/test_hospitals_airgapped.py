"""The example plays a whole round as separate processes; its README can be followed by copy and paste."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from osfl.cli.main import answer

FOLDER = Path(__file__).parents[2] / "examples" / "hospitals_airgapped"


def test_it_ends_with_one_line_that_says_what_was_shown(tmp_path: Path) -> None:
    found_there = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([FOLDER / "run.sh", tmp_path / "play"], capture_output=True, text=True, env=found_there)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("Shown: 3 hospitals and a coordinator shared nothing but files") and "bit for bit" in last
    assert "incomplete copy" in done.stdout
    carried = {path.name for path in (tmp_path / "play" / "usb").rglob("*") if path.is_file()}
    names = ("north", "south", "west")
    signed = {f"{name}.safetensors" for name in (*names, "release")}
    assert carried == signed | {f"{name}.pub" for name in (*names, "server")} | {"plan.toml"}


def test_its_readme_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one folder, in order; what is shown for the north is done for the others, too."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```\n(.*?)```", (FOLDER / "README.md").read_text(), flags=re.S)
    commands = [line for block in blocks for line in block.splitlines() if line.startswith("osfl ")]
    assert len(commands) == 12
    for command in commands:
        verb = command.split()[1]
        others = ("south", "west") if " north" in command and verb in ("keys", "client") else ()
        for arguments in (command, *(command.replace("north", other) for other in others)):
            assert answer(shlex.split(arguments)[1:]) == 0, arguments
