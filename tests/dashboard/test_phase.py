"""The server phase from the page: a process of its own that continues after a kill and ends in downloads."""

from __future__ import annotations

import json
import time
from pathlib import Path

from osfl.dashboard.phase import Phase, ProgressFile, try_lock
from osfl.dashboard.server import opened
from osfl.roles.coordinator import receive
from osfl.wire.gate import verify_release
from tests.dashboard.conftest import OpenDashboard, Visitor, World
from tests.roles.test_roles import CLIENTS


def deliver(dashboard: Visitor, world: World) -> None:
    for client in CLIENTS:
        assert dashboard.post("/bundles", world.bundles[client].read_bytes()).status == 200


def until(dashboard: Visitor, state: str, seconds: float = 600) -> dict[str, object]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = dashboard.state()
        if found["phase"]["state"] == state:
            return dict(found)
        time.sleep(0.2)
    raise AssertionError(f"never {state}: {found['phase']}")


def test_a_killed_phase_goes_on_with_the_next_dashboard(open_dashboard: OpenDashboard, world: World, tmp_path: Path) -> None:
    dashboard = open_dashboard(key=world.key_file)
    early = dashboard.post("/phase")
    assert early.status == 409 and "0 of the 3 uploads" in early.json["message"]
    deliver(dashboard, world)
    assert dashboard.state()["can_start"] and "can start" in dashboard.state()["headline"]
    assert dashboard.post("/phase").status == 202
    child = dashboard.server.controller.phase._child
    assert child is not None
    assert (
        dashboard.post("/phase").status == 202 and dashboard.server.controller.phase._child is child
    )  # it runs: nothing happens
    child.kill()
    child.wait()
    assert until(dashboard, "interrupted")["can_start"]
    dashboard.server.controller.resume()  # what the next dashboard does first
    found = until(dashboard, "finished")
    assert found["released"] and not found["can_start"]
    assert [row["name"] for row in found["downloads"]] == ["release.safetensors"]  # type: ignore[attr-defined]
    answer = dashboard.get("/download/release.safetensors")
    assert 'filename="release.safetensors"' in answer.headers["Content-Disposition"]
    assert verify_release(answer.body, world.keys["server"].public_hex, world.plan.digest).kind == "release"
    assert "What the server gives back" in dashboard.get("/release").body.decode()
    assert dashboard.get("/download/personal/north.safetensors").status == 404  # this method makes no personal parts
    for path in ("/", "/board", "/state"):
        assert b"PRIVATE KEY" not in dashboard.get(path).body and str(world.key_file).encode() not in dashboard.get(path).body


def test_the_next_dashboard_continues_by_itself(world: World, tmp_path: Path) -> None:
    fl_round = world.new_round(tmp_path / "round")
    for client in CLIENTS:
        receive(fl_round, world.bundles[client])
    with opened(fl_round, key=world.key_file) as first:
        first.controller.start_phase()
        assert first.controller.phase.alive()
    assert (
        not first.controller.phase.alive() and not (fl_round / "release.safetensors").exists()
    )  # it stopped with its dashboard
    with opened(fl_round) as blind:
        assert blind.controller.phase.state()["state"] == "interrupted"  # without the key nobody can go on
    with opened(fl_round, key=world.key_file) as second:
        assert second.controller.phase.state()["state"] == "running"


def test_without_a_key_it_only_receives(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard = open_dashboard()
    deliver(dashboard, world)
    assert not dashboard.state()["can_start"]
    answer = dashboard.post("/phase")
    assert answer.status == 409 and "without the server's key" in answer.json["reason"]


def test_a_failure_is_shown_and_can_be_tried_again(open_dashboard: OpenDashboard, world: World, tmp_path: Path) -> None:
    dashboard = open_dashboard(key=tmp_path / "no.key")
    deliver(dashboard, world)
    dashboard.post("/phase")
    found = until(dashboard, "failed")
    assert found["can_start"] and "no.key" in found["phase"]["error"]["reason"]  # type: ignore[index]
    assert "It failed:" in dashboard.get("/board").body.decode()


def test_progress_is_reported_as_a_file(tmp_path: Path) -> None:
    tell = ProgressFile(tmp_path)
    tell("distil", 0, 10)
    tell.written = 0.0
    tell("distil", 5, 10)
    reported = json.loads((tmp_path / "phase.json").read_text())
    assert reported["state"] == "running" and [(s["what"], s["done"], s["total"]) for s in reported["steps"]] == [
        ("distil", 5, 10)
    ]
    assert reported["steps"][0]["left"] > 0
    tell.written = 0.0
    tell("distil", 10, 10)
    assert json.loads((tmp_path / "phase.json").read_text())["steps"] == []


def test_whose_phase_it_was_does_not_matter(tmp_path: Path) -> None:
    """A dashboard that was killed leaves a process behind, which finishes; the next dashboard sees that it is alive."""
    ProgressFile(tmp_path)("distil", 0, 10)
    phase = Phase(tmp_path, tmp_path)
    assert phase.state()["state"] == "interrupted"
    with try_lock(tmp_path / "phase.lock") as free:
        assert free and phase.state()["state"] == "running"
    (tmp_path / "phase.json").write_text("{")
    assert phase.state()["state"] == "none"
