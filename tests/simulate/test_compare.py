"""A comparison notices that code changed since a run was made, and repeats it when asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.cli.main import answer
from osfl.core.code import code_digest
from osfl.core.errors import UsageError
from osfl.core.registry import load
from osfl.data import make_shards
from osfl.simulate import simulation
from osfl.simulate.compare import compare
from osfl.simulate.simulation import Simulation, prepare, prepare_all

SMALL = Simulation("fedavg", clients=2, partition="iid", preset="smoke", samples=60)


def test_changed_code_is_named_and_fresh_repeats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(SMALL, ["fedavg"], [0], tmp_path)["changed"] == []
    assert compare(SMALL, ["fedavg"], [0], tmp_path)["changed"] == []
    path = tmp_path / "fedavg" / "seed0" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": "0" * 64, "seed": 0}))
    reported = compare(SMALL, ["fedavg"], [0], tmp_path)
    assert reported["changed"] == ["fedavg"]
    assert "The code of fedavg changed" in (tmp_path / "report" / "index.html").read_text()
    again = compare(SMALL, ["fedavg"], [0], tmp_path, fresh=True)
    assert again["changed"] == [] and json.loads(path.read_text())["code"] == code_digest(load("fedavg"))


def test_the_digest_follows_imports_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = {name: code_digest(load(name)) for name in ("fedavg", "ensemble", "onesum")}
    assert len(set(digests.values())) == 3
    changed = "ingredients/training/local.py"
    monkeypatch.setattr("osfl.core.code._content", lambda path: "new" if str(path).endswith(changed) else "old")
    with_new = {name: code_digest(load(name)) for name in ("fedavg", "onesum")}
    monkeypatch.setattr("osfl.core.code._content", lambda path: "old")
    assert code_digest(load("fedavg")) != with_new["fedavg"]


def test_fresh_deletes_runs_only(tmp_path: Path) -> None:
    kept = tmp_path / "fedavg" / "seed0" / "notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    compare(SMALL, ["fedavg"], [0], tmp_path, fresh=True)
    assert kept.exists()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds with which shards were made, in order."""
    seeds: list[int] = []

    def counted(*args: Any, seed: int) -> Any:
        seeds.append(seed)
        return make_shards(*args, seed=seed)

    monkeypatch.setattr(simulation, "make_shards", counted)
    return seeds


def test_shards_are_made_once_for_each_seed_of_a_comparison(made: list[int], tmp_path: Path) -> None:
    options = "--clients 2 --partition iid --smoke --samples 60"
    assert answer(f"compare --methods ensemble,fedavg --seeds 0,1 {options} --out {tmp_path}".split()) == 0
    assert made == [0, 1]


def test_shards_are_made_once_in_a_run_of_a_plan(made: list[int], tmp_path: Path) -> None:
    new = f"new --method fedavg --dataset digits --clients 2 --smoke --samples 60 --out {tmp_path / 'plan.toml'}"
    assert answer(new.split()) == 0
    made.clear()
    assert answer(["run", "--plan", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "run")]) == 0
    assert made == [0]


def test_what_is_prepared_together_is_what_is_prepared_alone() -> None:
    variants = [replace(SMALL, method=name) for name in ("fedavg", "ensemble")]
    together = prepare_all(variants)
    for variant, federation in zip(variants, together, strict=True):
        alone = prepare(variant)
        assert federation.plan.digest == alone.plan.digest
        assert [shard.digest for shard in federation.shards] == [shard.digest for shard in alone.shards]
    assert together[0].shards is together[1].shards


def test_mistakes_of_all_plans_are_one_error_before_a_run_is_discarded(tmp_path: Path) -> None:
    compare(SMALL, ["fedavg"], [0], tmp_path)
    before = (tmp_path / "fedavg" / "seed0" / "results.json").stat().st_mtime_ns
    wrong = ["fedavg@epochs=0", "fedavg_rounds@rounds=0", "fedavg"]
    with pytest.raises(UsageError) as caught:
        compare(SMALL, wrong, [0], tmp_path, fresh=True)
    assert len(caught.value.problems) == 2
    assert (tmp_path / "fedavg" / "seed0" / "results.json").stat().st_mtime_ns == before
