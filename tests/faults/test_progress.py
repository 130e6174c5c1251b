"""Waiting ends when it is true, or when nothing new happens; not because a machine is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.progress import signs, wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(clock: Clock, until: float, last_progress: float) -> None:
    """Something new every 50 seconds until `last_progress`; true at `until`."""
    wait_until(
        "it",
        lambda: clock.now >= until,
        lambda: frozenset(map(str, range(int(min(clock.now, last_progress) // 50)))),
        lambda: "what the logs say",
        patience=100.0,
        clock=lambda: clock.now,
        sleep=clock.sleep,
    )


def test_a_slow_machine_is_waited_for() -> None:
    clock = Clock()
    waited(clock, until=5000.0, last_progress=5000.0)
    assert clock.now >= 5000


def test_nothing_new_ends_it_and_shows_why() -> None:
    clock = Clock()
    with pytest.raises(TimeoutError, match=r"it: nothing new for 100.0 s\nwhat the logs say"):
        waited(clock, until=5000.0, last_progress=1000.0)
    assert 1000 < clock.now < 1200


def test_the_same_failure_again_and_again_is_nothing_new(tmp_path: Path) -> None:
    log = tmp_path / "link.log"
    log.write_text("2026-11-18T08:51:17.165Z 127.0.0.1:36478 token 7be43fff3713 failed\n")
    before = signs([log], tmp_path.glob("*.safetensors"))
    log.write_text(log.read_text() + "2026-11-18T08:52:49.165Z 127.0.0.1:47466 token b6320fd904b5 failed\n")
    assert signs([log], tmp_path.glob("*.safetensors")) == before
    (tmp_path / "north.safetensors").write_bytes(b"new")
    assert signs([log], tmp_path.glob("*.safetensors")) > before
