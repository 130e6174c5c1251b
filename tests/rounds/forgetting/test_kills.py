"""A forgetting that is killed anywhere is finished by the same command, or by the next."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.core.errors import RoundError
from osfl.roles import coordinator
from osfl.rounds.finished import load_model
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.state import INTENT, certificates, read_policy
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation
from tests.rounds.forgetting.conftest import ABOUT, APART, ONE, digest, failed

DURABLE = ("fsync", "replace", "rename", "unlink", "rmdir", "chmod")


class Killed(BaseException):
    """The process is dead: nothing that it might still want to do happens."""


@contextmanager
def dying_at(step: int) -> Iterator[list[int]]:
    """From the given durable call on, every one of them raises before it does anything, as for a dead process."""
    count, real = [0], {name: getattr(os, name) for name in DURABLE}

    def through(name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if step and count[0] >= step:
                raise Killed
            return real[name](*args, **options)

        return call

    try:
        for name in DURABLE:
            setattr(os, name, through(name))
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("fedavg", {"clients": ["client-02"]}),
        ("onesum", {"clients": ["client-02"]}),
        (APART, {"class_name": "2"}),
    ],
)
def test_a_kill_anywhere_costs_nothing(rounds: Any, tmp_path: Path, method: str, target: dict[str, Any]) -> None:
    whole = rounds(method, tmp_path / "whole")
    before = digest(whole, method)
    with dying_at(0) as count:
        expected = forget(whole, machine=ONE, **target)["release"]["after"]
    every = 1 if method == "fedavg" else 20  # what differs between them is near the beginning: there OneSum's sum is corrected
    steps = sorted({*range(1, count[0] + 1, every), *(range(1, 12) if method == "onesum" else ())})
    assert count[0] > 30
    for step in steps:
        folder = rounds(method, tmp_path / f"killed-{step}")
        with dying_at(step), pytest.raises(Killed):
            forget(folder, machine=ONE, **target)
        _half_is_never_taken_for_whole(folder, method, before, expected)
        if not certificates(folder, read_policy(folder).server) or (folder / INTENT).exists():
            assert forget(folder, machine=ONE, **target)["release"]["after"] == expected, step
        assert not (folder / INTENT).exists() and ((step % 10 and method != "onesum") or failed(folder) == []), step
        assert digest(folder, method) == expected
        shutil.rmtree(folder)


def _half_is_never_taken_for_whole(folder: Path, method: str, before: str, after: str) -> None:
    found = coordinator.status(folder)
    if (folder / INTENT).exists():
        assert not found.released and not found.ready
        with pytest.raises(RoundError, match=r"in the middle of forgetting|holds no finished round"):
            load_model(folder)
        with pytest.raises(RoundError, match="in the middle of forgetting"):
            run_federation(small_federation(method), folder, ABOUT, machine=ONE)
    else:
        assert found.release in (before, after)


def test_an_unfinished_forgetting_is_finished_before_another_begins(
    rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = rounds("ensemble", tmp_path / "round")

    def broken(*_: Any) -> None:
        raise RoundError("the server phase does not work any more")

    monkeypatch.setattr("osfl.methods.ensemble.EnsembleOfClients.server_phase", broken)
    with pytest.raises(RoundError, match="does not work any more"):
        forget(folder, clients=["client-02"], machine=ONE)
    with pytest.raises(RoundError, match=r"another forgetting .*--client client-02.*--client client-03"):
        forget(folder, clients=["client-03"], machine=ONE)
    with pytest.raises(RoundError, match="in the middle of forgetting"):
        verify(folder)
    certificate = forget(folder, clients=["client-02"], withdraw=True, machine=ONE)  # the way out
    assert certificate["release"]["after"] == "" and failed(folder) == []


def test_late_options_change_nothing_that_was_agreed(rounds: Any, tmp_path: Path) -> None:
    """A round of another plan is not opened in a folder because somebody was forgotten there."""
    folder = rounds("ensemble", tmp_path / "round")
    forget(folder, clients=["client-02"], machine=ONE)
    federation = small_federation("ensemble")
    stays = tuple(client for client in federation.plan.clients if client != "client-02")
    with pytest.raises(RoundError, match="holds another round"):
        run_federation(replace(federation, plan=replace(federation.plan, clients=stays)), folder, ABOUT, machine=ONE)


def test_withdraw_means_the_same_after_a_kill(rounds: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, killed = rounds("ensemble", tmp_path / "whole"), rounds("ensemble", tmp_path / "killed")
    expected = forget(whole, clients=["client-02"], withdraw=True, machine=ONE)["release"]["after"]

    def dies(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr("osfl.rounds.forgetting.execution._replay", dies)
        forget(killed, clients=["client-02"], withdraw=True, machine=ONE)
    assert forget(killed, clients=["client-02"], withdraw=True, machine=ONE)["release"]["after"] == expected != ""
