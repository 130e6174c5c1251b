"""The coordinator's program of a run, before it asks anybody."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from threading import Thread

import pytest

from osfl import flower_app
from osfl.errors import RoundError
from osfl.wire.agreed import alone


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(flower_app.HOME, str(tmp_path))
    found = tmp_path / "rounds" / "first"
    found.mkdir(parents=True)
    (found / "plan.json").write_text("{}")
    return found


def test_a_run_waits_for_one_that_is_at_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that outlived its SuperLink may finish the round: then there is nobody left to ask."""
    said: list[bool] = []
    with alone(folder, ".flower.lock"):
        second = Thread(target=lambda: said.append(flower_app.collect(None, {"round": "first"})))
        second.start()
        time.sleep(0.3)
        assert second.is_alive() and not said
        (folder / flower_app.DONE).touch()
    second.join(10)
    assert said == [True] and "waiting for it" in capsys.readouterr().out


def test_a_run_that_had_nobody_to_wait_for_begins(folder: Path) -> None:
    """Even if everyone has the release: a site may have lost it."""
    (folder / flower_app.DONE).touch()
    with contextlib.ExitStack() as stack:
        assert not flower_app._waited_for_others(folder, stack)
        with pytest.raises(RoundError):
            stack.enter_context(alone(folder, ".flower.lock"))


def test_a_round_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(RoundError, match="no round 'second'"):
        flower_app.collect(None, {"round": "second"})
