"""`osfl forget`: what it prints, what scripts get, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Osfl

ROUND = "run --method ensemble --clients 3 --samples 120 --image-size 8 --smoke --out r"


@pytest.fixture(autouse=True)
def _finished(osfl: Osfl) -> None:
    assert osfl(ROUND).code == 0


def test_forget_then_verify_then_the_same_options(osfl: Osfl) -> None:
    output = osfl("forget r --client client-02")
    assert output.code == 0, output.err
    for word in (
        "client-02: forgotten",
        "Release",
        "To replace   client-01, client-02, client-03",
        "forgotten/0001.json",
        "osfl forget r --verify",
        "osfl run --method ensemble",
    ):
        assert word in output.out
    assert osfl("forget r --verify").out.count("PASS") == 5
    shown = osfl("show r --format json").json
    assert shown["forgotten"] == ["client-02"] and len(shown["delivered"]) == 2
    assert "forgotten  client-02" in osfl("show r").out
    result = osfl(f"{ROUND} --format json").json
    assert len(result["clients"]) == 2 and osfl("verify --round r").code == 0


def test_json_and_exit_codes(osfl: Osfl) -> None:
    certificate = osfl("forget r --client client-01 --format json").json
    assert certificate["path"] == "r/forgotten/0001.json" and certificate["release"]["after"]
    assert osfl("forget r --verify --format json").json["good"] is True
    Path("r/inbox/client-01.safetensors").write_bytes(b"back again")
    output = osfl("forget r --verify --format json")
    assert output.code == 1 and [row["check"] for row in output.json["checks"] if not row["good"]] == ["uploads"]


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("forget r", 2, "nothing was named"),
        ("forget r --verify --client client-01", 2, "forgets nothing"),
        ("forget r --verify", 1, "nothing was forgotten"),
        ("forget r --client nobody", 1, "took no part"),
        ("forget r --class 3", 2, "cannot be taken apart by class"),
        ("forget elsewhere --client client-01", 1, "is missing"),
        ("forget r --client client-01 --key no.key", 2, "no.key"),
    ],
)
def test_mistakes(osfl: Osfl, command: str, code: int, message: str) -> None:
    output = osfl(command)
    assert output.code == code and message in output.err, output.err
