"""Finished rounds to forget from, and what is asked of them afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from osfl.roles import coordinator, site
from osfl.rounds.folder import existing_round
from osfl.rounds.forgetting import verify
from osfl.runtime.machine import Machine
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation
from tests.roles.test_roles import keys, make_plan, make_sites, opened

ONE = Machine(workers=1)
APART = "fedpft"  # a quick one of those that send classes apart; the shared checks do it for all
ABOUT = {"preset": "smoke", "command": "osfl run --method fedavg"}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Finished rounds, run once; every test works in a copy."""
    kept = tmp_path_factory.mktemp("rounds")

    def copy(method: str, to: Path, **options: Any) -> Path:
        original = kept / "-".join([method, *map(str, options.values())])
        if not original.exists():
            run_federation(small_federation(method, **options), original, ABOUT, machine=ONE)
        return Path(shutil.copytree(original, to))

    return copy


def failed(folder: Path) -> list[str]:
    return [finding.check for finding in verify(folder) if not finding.good]


def digest(folder: Path, method: str = "ensemble", **options: Any) -> str:
    with existing_round(folder, small_federation(method, **options).plan) as fl_round:
        published = fl_round.release()
    assert published is not None
    return published[1]


def real_round(tmp_path: Path, deliver: tuple[str, ...] = ("north", "south", "west"), **more: Any) -> Any:
    plan, sites, known = make_plan(**more), make_sites(tmp_path / "sites"), keys()
    fl_round = opened(tmp_path / "round", plan, known)
    bundles = {c: site.make_upload(plan, c, sites / c, known[c], tmp_path / c, machine=ONE) for c in plan.clients}
    for client in deliver:
        coordinator.receive(fl_round, bundles[client])
    return fl_round, known, bundles
