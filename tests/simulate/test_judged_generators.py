"""A simulated round of generators ends with a judgment of their images; other rounds do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.cli.summary import show_run
from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.result import Result, read_result
from osfl.core.types import Dataset, Upload
from osfl.methods.federated_factory import FederatedFactory
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare

SMALL = Simulation("federated_factory", "digits", None, "silos", "smoke", samples=300, image_size=8)


@pytest.fixture(autouse=True)
def _no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random features on every machine."""
    monkeypatch.setenv("OSFL_DATA", str(tmp_path / "none"))


def without_time(result: Result) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in ("costs", "command", "environment")}


def test_only_methods_that_show_images_are_judged() -> None:
    assert load("federated_factory").provides("samples") and not load("fedavg").provides("samples")


def test_a_round_of_generators_is_judged_the_same_by_any_number_of_workers(tmp_path: Path) -> None:
    result = run(SMALL, tmp_path / "one", machine=Machine(workers=1))
    found = result["generators"]
    assert found["space"].startswith("fixed random") and set(found["classes"]) == {str(digit) for digit in range(10)}
    assert all(row["synthetic"] > 0 and row["frechet"] is not None for row in found["classes"].values())
    assert read_result(tmp_path / "one") == result
    assert "Synthetic images compared with real ones" in (tmp_path / "one" / "report" / "index.html").read_text(
        encoding="utf-8"
    )
    assert without_time(run(SMALL, tmp_path / "two", machine=Machine(workers=2))) == without_time(result)
    other = run(Simulation("fedavg", "digits", 2, "iid", "smoke", samples=80, image_size=8), tmp_path / "fedavg")
    assert "generators" not in other


def test_a_factory_that_hands_out_training_images_is_caught_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shards = prepare(SMALL).shards

    def copied(self: FederatedFactory, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        return Dataset(torch.cat([s.train.images for s in shards]), torch.cat([s.train.labels for s in shards]))

    monkeypatch.setattr(FederatedFactory, "samples", copied)
    result = run(SMALL, tmp_path / "copied")
    rows = result["generators"]["classes"].values()
    assert {row["verdict"] for row in rows} == {"copies"} and all(row["nearest_ratio"] == 0 for row in rows)
    show_run(result, tmp_path / "copied")
    assert "Generators copy training images of 0, 1, 2" in " ".join(capsys.readouterr().out.split())
    report = (tmp_path / "copied" / "report" / "index.html").read_text(encoding="utf-8")
    assert "whoever has the generator has these images" in report
