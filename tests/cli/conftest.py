"""Commands are called in this process, each test in an empty folder; torch is imported once for all of them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from osfl.cli.main import answer


@dataclass(frozen=True)
class CommandResult:
    """What a command answered."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Osfl = Callable[[str], CommandResult]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("OSFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()


@pytest.fixture
def osfl(capfd: pytest.CaptureFixture[str]) -> Osfl:
    """`osfl("run --method fedavg")` is the command line without its first word."""

    def call(command: str) -> CommandResult:
        capfd.readouterr()
        code = answer(shlex.split(command))
        captured = capfd.readouterr()
        return CommandResult(code, captured.out, captured.err)

    return call


def new_plan(sites: Sequence[str]) -> str:
    """The options that write a small plan and the folders of its sites."""
    data = f"--dataset digits --clients {','.join(sites)} --partition iid --samples {50 * len(sites)}"
    return f"new --method fedavg {data} --smoke --sites sites"


def round_with_bundles(folder: Path, sites: Sequence[str]) -> None:
    """A plan, folders of sites, keys, an open round, and every site's bundle in `usb`."""
    client = "client plan.toml --client {0} --data sites/{0} --key keys/{0}.key --out usb/{0}.safetensors"
    with chdir(folder):
        for command in [
            new_plan(sites),
            f"keys server {' '.join(sites)} --out keys",
            "enroll plan.toml --keys keys --out round",
            *(client.format(site) for site in sites),
        ]:
            assert answer(command.split()) == 0, command
