"""What the server signed of a round folder: edits, deletions and older states show."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from osfl.cli.main import answer
from osfl.core.errors import Rejected
from osfl.core.types import canonical, digest_of
from osfl.roles import coordinator
from osfl.rounds.folder import simulated_key
from osfl.rounds.forgetting import forget
from osfl.rounds.head import read_head
from osfl.rounds.state import read_policy
from osfl.runtime.machine import Machine
from osfl.wire import refusals
from osfl.wire.refusals import HEAD, JOURNAL
from osfl.wire.signing import SigningKey, save_public
from tests.rounds.forgetting.conftest import ONE, real_round, rounds

__all__ = ["rounds"]  # a fixture
Verify = Callable[..., tuple[int, str]]


@pytest.fixture
def verify(capfd: pytest.CaptureFixture[str]) -> Verify:
    """Exit code and everything that `osfl verify` prints, on one line."""

    def call(*options: object) -> tuple[int, str]:
        capfd.readouterr()
        code = answer(["verify", *map(str, options)])
        captured = capfd.readouterr()
        assert "Traceback" not in captured.err
        return code, " ".join((captured.out + captured.err).split())

    return call


def edited(path: Path) -> None:
    """One digit of the first line becomes another one: a figure that nobody would miss."""
    data = bytearray(path.read_bytes())
    place = next(i for i, byte in enumerate(data) if chr(byte) in "12345678")
    data[place] += 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["journal.jsonl", "contract.json", "plan.json"])
def test_an_edit_is_named(rounds: Callable[..., Path], tmp_path: Path, verify: Verify, name: str) -> None:
    folder = rounds("fedavg", tmp_path / "round")
    assert verify("--round", folder)[0] == 0
    edited(folder / name)
    code, printed = verify("--round", folder)
    assert code == 1 and (name in printed or "another round" in printed)


@pytest.mark.parametrize("made_to_break", ["[" * 100_000, f'{{"head": {"1" * 5_000}}}'], ids=["depth", "endless number"])
@pytest.mark.parametrize("name", [HEAD, "enrolled.json"])
def test_json_that_breaks_its_reader_is_damage(
    rounds: Callable[..., Path], tmp_path: Path, verify: Verify, name: str, made_to_break: str
) -> None:
    folder = rounds("fedavg", tmp_path / "round")
    (folder / name).write_text(made_to_break)
    code, printed = verify("--round", folder)
    assert code == 1 and f"{name} is damaged" in printed


def test_lines_that_come_later_are_no_edit(rounds: Callable[..., Path], tmp_path: Path, verify: Verify) -> None:
    folder = rounds("fedavg", tmp_path / "round")
    with (folder / "journal.jsonl").open("ab") as journal:
        journal.write(b'{"client":"","phase":"later"}\n')
    assert verify("--round", folder)[0] == 0


def test_an_older_folder_shows_beside_a_copy_of_the_head(rounds: Callable[..., Path], tmp_path: Path, verify: Verify) -> None:
    folder = rounds("fedavg", tmp_path / "round")
    old = Path(shutil.copytree(folder, tmp_path / "old"))
    forget(folder, clients=["client-02"], machine=ONE)
    assert verify("--round", old)[0] == 0  # from inside an older state nothing shows
    code, printed = verify("--round", old, "--head", folder / HEAD)
    assert code == 1 and "the folder was put back" in printed
    code, printed = verify(folder / "release.safetensors", "--round", old)  # nor the release that a site has
    assert code == 1 and "put back to an older state" in printed
    assert verify("--round", folder, "--head", old / HEAD)[0] == 0


def test_the_newest_certificate_cannot_be_deleted_in_silence(
    rounds: Callable[..., Path], tmp_path: Path, verify: Verify
) -> None:
    folder = rounds("ensemble", tmp_path / "round", clients=4)
    for client in ("client-01", "client-02"):
        forget(folder, clients=[client], machine=ONE)
    (folder / "forgotten" / "0002.json").unlink()
    code, printed = verify("--round", folder)
    assert code == 1 and "certificates of forgetting are those that it names: it is not" in printed


def test_heads_form_a_chain_and_a_fork_shows(rounds: Callable[..., Path], tmp_path: Path, verify: Verify) -> None:
    folder, key = rounds("fedavg", tmp_path / "round"), simulated_key(0, "server")
    first = read_head(folder / HEAD, key.public_hex)
    forget(folder, clients=["client-01"], machine=ONE)
    last = read_head(folder / HEAD, key.public_hex)
    assert first["number"] == 1 and first["before"] == "" and last["number"] == 3  # the new release, then the certificate
    fork = {**last, "before": digest_of(first)}
    (tmp_path / HEAD).write_text(json.dumps({"head": fork, "signature": key.sign(canonical(fork))}))
    code, printed = verify("--round", folder, "--head", tmp_path / HEAD)
    assert code == 1 and "two different heads with number 3" in printed


def test_a_head_of_somebody_else_is_refused(rounds: Callable[..., Path], tmp_path: Path, verify: Verify) -> None:
    folder = rounds("fedavg", tmp_path / "round")
    content = json.loads((folder / HEAD).read_text())
    content["head"]["number"] = 7
    (folder / HEAD).write_text(json.dumps(content))
    assert verify("--round", folder)[0] == 1
    content["signature"] = SigningKey.generate().sign(canonical(content["head"]))
    (folder / HEAD).write_text(json.dumps(content))
    code, printed = verify("--round", folder)
    assert code == 1 and "head.json is not what the server signed" in printed
    (folder / HEAD).unlink()
    assert verify("--round", folder)[0] == 1


def test_another_key_of_the_server_is_no_silence(rounds: Callable[..., Path], tmp_path: Path, verify: Verify) -> None:
    folder = rounds("fedavg", tmp_path / "round")
    save_public(tmp_path / "server.pub", SigningKey.generate().public_hex)
    code, printed = verify("--round", folder, "--server", tmp_path / "server.pub")
    assert code == 1 and "another key of the server" in printed
    save_public(tmp_path / "right.pub", read_policy(folder).server)
    assert verify("--round", folder, "--server", tmp_path / "right.pub")[0] == 0


def test_signed_refusals_stay_when_the_log_is_shortened(
    tmp_path: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, known, bundles = real_round(tmp_path)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(bundles["north"].read_bytes()[:-1] + b"?")

    def refuse(times: int) -> None:
        for _ in range(times):
            with pytest.raises(Rejected):
                coordinator.receive(folder, damaged)

    refuse(3)
    coordinator.make_release(folder, known["server"], machine=Machine(workers=1))
    monkeypatch.setattr(refusals, "MOST_BYTES", 1000)
    refuse(refusals.KEPT + 10)
    assert verify("--round", folder)[0] == 0
    assert sum(map(refusals.times, refusals.entries(folder / JOURNAL))) == refusals.KEPT + 13
    edited(folder / JOURNAL)
    code, printed = verify("--round", folder)
    assert code == 1 and "rejected.jsonl begins as it did: it is not" in printed


def test_forging_needs_the_servers_key(rounds: Callable[..., Path], tmp_path: Path) -> None:
    folder: Any = rounds("fedavg", tmp_path / "round")
    with pytest.raises(Exception, match="not what the server signed"):
        read_head(folder / HEAD, SigningKey.generate().public_hex)
