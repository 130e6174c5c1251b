"""The coordinator's program of a run, before it asks anybody."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from threading import Thread

import pytest

from osfl.core.errors import RoundError
from osfl.deploy.flower import app
from osfl.rounds.lock import folder_lock


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(app.HOME, str(tmp_path))
    found = tmp_path / "rounds" / "first"
    found.mkdir(parents=True)
    (found / "plan.json").write_text("{}")
    return found


def test_a_run_waits_for_one_that_is_at_work(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A program that outlived its SuperLink may finish the round: then there is nobody left to ask."""
    output: list[bool] = []
    with folder_lock(folder, ".flower.lock"):
        second = Thread(target=lambda: output.append(app.collect(None, {"round": "first"})))
        second.start()
        time.sleep(0.3)
        assert second.is_alive() and not output
        (folder / app.DONE).touch()
    second.join(10)
    assert output == [True] and "waiting for it" in capsys.readouterr().out


def test_a_run_that_had_nobody_to_wait_for_begins(folder: Path) -> None:
    """Even if everyone has the release: a site may have lost it."""
    (folder / app.DONE).touch()
    with contextlib.ExitStack() as stack:
        assert not app._waited_for_others(folder, stack)
        with pytest.raises(RoundError):
            stack.enter_context(folder_lock(folder, ".flower.lock"))


def test_a_round_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(RoundError, match="no round 'second'"):
        app.collect(None, {"round": "second"})
