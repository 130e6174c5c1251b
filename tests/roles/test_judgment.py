"""A site that lies: it is suspected before the release, the coordinator decides, and the release says what was decided."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from osfl.cli.main import answer
from osfl.core.errors import RoundError
from osfl.deploy.flower.collector import Collector, CollectorConfig
from osfl.deploy.flower.messages import MessageBody, Reply
from osfl.roles import coordinator
from osfl.rounds.folder import simulated_key
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.state import read_policy
from osfl.runtime.machine import Machine
from osfl.wire.gate import verify_release
from tests.rounds.judging.uploads import lying_round

ONE, LIAR = Machine(workers=1), "client-01"


@pytest.fixture(scope="module")
def delivered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lying_round(tmp_path_factory.mktemp("judged") / "round", LIAR)


@pytest.fixture
def folder(delivered: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(delivered, tmp_path / "round"))


KEY = simulated_key(0, "server")


def made_from(folder: Path) -> dict[str, str]:
    policy = read_policy(folder)
    return dict(verify_release(folder / "release.safetensors", policy.server, policy.plan).made_from)


def test_the_server_phase_waits_for_a_decision(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RoundError, match="waits for a decision: client-01 calls classes otherwise") as caught:
        coordinator.make_release(folder, KEY, machine=ONE)
    assert caught.value.client == LIAR and "--exclude client-01" in str(caught.value) and "--keep" in str(caught.value)
    assert not (folder / "release.safetensors").exists()
    found = coordinator.status(folder)
    assert {(one["client"], one["rule"]) for one in found.suspicions} == {(LIAR, "contradiction")}
    assert answer(["show", str(folder)]) == 0
    assert coordinator.status(folder).failed is None
    assert (
        "Suspected" in (printed := capfd.readouterr().out)
        and "client-01, to decide" in printed
        and "--exclude client-01" in printed
    )


def test_who_is_left_out_is_signed_and_seen_by_verify(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RoundError):
        coordinator.make_release(folder, KEY, machine=ONE)
    coordinator.make_release(folder, KEY, machine=ONE, without=[LIAR])
    origin, found = made_from(folder), coordinator.status(folder)
    assert f"upload/{LIAR}" not in origin and origin[f"excluded/{LIAR}"] == found.digests[LIAR]
    assert found.left_out == [LIAR] and found.suspicions[0]["client"] == LIAR  # the reason stays
    assert answer(["verify", "--round", str(folder)]) == 0
    assert f"left out by the coordinator: {LIAR}" in capfd.readouterr().out
    notes = [json.loads(line) for line in (folder / "journal.jsonl").read_bytes().splitlines()]
    assert [note["rules"] for note in notes if note["phase"] == "left out"] == [["contradiction"]]


def test_who_is_kept_is_noted(folder: Path) -> None:
    coordinator.make_release(folder, KEY, machine=ONE, keep=[LIAR])
    assert f"upload/{LIAR}" in made_from(folder) and coordinator.status(folder).kept == [LIAR]


def test_forgetting_after_an_exclusion_is_exact(folder: Path) -> None:
    """Another site goes: the one that was left out stays left out. That one goes, too: nothing names it any more."""
    coordinator.make_release(folder, KEY, machine=ONE, without=[LIAR])
    forget(folder, clients=["client-03"], machine=ONE)
    assert all(finding.good for finding in verify(folder))
    assert {name for name in made_from(folder) if "upload" not in name} == {f"excluded/{LIAR}"}
    forget(folder, clients=[LIAR], machine=ONE)
    assert all(finding.good for finding in verify(folder))
    assert set(made_from(folder)) == {f"upload/client-0{n}" for n in (2, 4, 5)}
    texts = [path.read_bytes() for path in folder.glob("*.json*") if path.name not in ("plan.json", "enrolled.json")]
    assert not any(LIAR.encode() in text for text in texts)


def test_a_judgment_of_other_uploads_is_not_shown(folder: Path) -> None:
    with pytest.raises(RoundError):
        coordinator.make_release(folder, KEY, machine=ONE)
    kept = json.loads((folder / "judgment.json").read_bytes())
    for one in kept["suspicions"]:
        one["upload"] = "0" * 64
    (folder / "judgment.json").write_text(json.dumps(kept))
    assert not coordinator.status(folder).suspicions
    (folder / "judgment.json").write_text("{")
    assert not coordinator.status(folder).suspicions


class _Quiet:
    """A channel on which nobody answers: all have delivered already."""

    def nodes(self) -> list[int]:
        return []

    def replies(self) -> Iterator[Reply]:
        return iter(())

    def send(self, node: int, kind: str, body: MessageBody) -> str:
        raise AssertionError(f"{kind} to {node}")


def test_over_a_network_the_finding_is_shown_before_the_release_and_the_decision_is_signed(
    folder: Path, tmp_path: Path
) -> None:
    """The collector's own server phase stops; `osfl show` names the site; `osfl server --exclude` ends it."""
    KEY.save(tmp_path / "server.key")
    lines, now, seen = list[str](), [0.0], list[set[str]]()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if not seen and any("waits for a decision" in line for line in lines):
            seen.append({str(one["client"]) for one in coordinator.status(folder).suspicions})
            assert not (folder / "release.safetensors").exists()
            coordinator.make_release(folder, KEY, machine=ONE, without=[LIAR])

    config = CollectorConfig(wait=100.0, linger=1.0, poll=1.0)
    collector = Collector(
        folder, tmp_path / "server.key", _Quiet(), config, log=lines.append, clock=lambda: now[0], sleep=sleep
    )
    assert not collector.run()  # nobody was there to take it
    assert seen == [{LIAR}]
    assert made_from(folder)[f"excluded/{LIAR}"] == coordinator.status(folder).digests[LIAR]
    assert f"upload/{LIAR}" not in made_from(folder)
