"""`osfl inspect` as text, as JSON and as a page; its mistakes. `osfl dashboard` before it opens."""

from __future__ import annotations

from pathlib import Path

import pytest

from osfl.wire.signing import SigningKey
from tests.cli.conftest import Osfl

UPLOAD = "runs/seen/inbox/client-01.safetensors"


@pytest.fixture
def finished(osfl: Osfl) -> None:
    result = osfl("run --method fedavg --smoke --samples 120 --image-size 8 --clients 2 --out runs/seen")
    assert result.code == 0, result.err


def test_inspect(osfl: Osfl, finished: None, tmp_path: Path) -> None:
    result = osfl(f"inspect {UPLOAD}")
    assert result.code == 0
    for command in (
        "upload from client-01 to the server",
        "weights of the network",
        "Signed with the key of 'client-01'",
        "What was not checked",
        "model/head.bias",
    ):
        assert command in result.out
    seen = osfl(f"inspect {UPLOAD} --format json --html page.html").json
    assert seen["kind"] == "upload" and seen["method"] == "fedavg" and seen["bytes"] == Path(UPLOAD).stat().st_size
    assert {f["severity"] for f in seen["findings"]} <= {"good", "note", "caution"}
    page = Path("page.html").read_text()
    assert page.startswith("<!doctype html>") and "What client-01 sends" in page and "<script" not in page
    assert osfl("inspect runs/seen/release.safetensors").code == 0

    Path("alone.safetensors").write_bytes(Path(UPLOAD).read_bytes())
    result = osfl("inspect alone.safetensors")
    assert result.code == 0 and "WHO MADE THIS FILE IS NOT KNOWN" in result.out
    assert "Signed with the key of" in osfl("inspect alone.safetensors --round runs/seen").out
    SigningKey.generate().save(Path("mine.key"))
    result = osfl("inspect alone.safetensors --key mine.key")
    assert result.code == 1 and "THE SIGNATURE IS NOT BY THE KEY THAT YOU NAMED" in result.out
    assert "PRIVATE" not in result.out


MISTAKES = {
    "inspect nothing.safetensors": (1, "cannot be read"),
    "inspect .": (1, "not a regular file"),
    "inspect junk.bin": (1, "rejected"),
    "inspect text.toml": (1, "File rejected: this is not a bundle"),
    "inspect junk.bin --plan plan.toml": (2, "there is no plan"),
    "inspect junk.bin --round .": (1, "plan.json is missing"),
    "inspect junk.bin --key nothing.pub": (2, "cannot be read"),
    "inspect junk.bin --data .": (2, "--data needs the round's plan"),
    "inspect junk.bin --html data": (2, "is a folder"),
    "dashboard nowhere": (1, "plan.json is missing"),
    "dashboard . --port 70000": (2, "70000"),
    "dashboard . --host 0.0.0.0 --token short": (2, "too easy to guess"),
}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes(osfl: Osfl, command: str) -> None:
    Path("junk.bin").write_bytes(b"\x00" * 100)
    Path("text.toml").write_text("# A one-shot round of fedavg.")
    result = osfl(command)
    code, text = MISTAKES[command]
    assert result.code == code and text in result.err and "Traceback" not in result.err
    assert osfl(f"{command} --format json").json["error"]


def test_a_dashboard_wants_the_right_key_at_once(osfl: Osfl, finished: None) -> None:
    SigningKey.generate().save(Path("mine.key"))
    result = osfl("dashboard runs/seen --key mine.key")
    assert result.code == 2 and "not the server's" in result.err
