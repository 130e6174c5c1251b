"""What making synthetic samples costs is counted by every method that makes some, and shown beside accuracy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from osfl.core.types import Payload
from osfl.evaluation.comparison import summarize
from osfl.ingredients.distillation.token_relabel import PatchServer
from osfl.reports.comparison import write_comparison
from osfl.runtime.meter import measure, spend
from osfl.runtime.payloads import PayloadCache
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation


def small(method: str, **changes: object) -> Simulation:
    return Simulation(method, "digits", 2, "iid", "smoke", samples=80, image_size=8, changes=changes)


def test_a_meter_tells_making_from_the_rest() -> None:
    with measure() as meter:
        spend(10.0)
        spend(6.0, makes=3)
    assert (meter.flops, meter.made, meter.made_flops) == (16.0, 3, 6.0)
    assert meter.as_json()["made"] == 3


def test_samples_that_are_reused_cost_what_they_cost_at_first(tmp_path: Path) -> None:
    def make() -> Payload:
        spend(6.0, makes=3)
        return Payload({})

    cache = PayloadCache(tmp_path)
    for _ in range(2):
        with measure() as meter:
            cache.get_or_compute("samples", make)
        assert (meter.flops, meter.made, meter.made_flops) == (6.0, 3, 6.0)


@pytest.mark.parametrize("method", ["federated_factory", "dense", "dafl", "fedftg", "deepinversion", "fedmitr"])
def test_generating_methods_count_their_samples(tmp_path: Path, method: str) -> None:
    simulation = replace(small(method), samples=400 if method == "federated_factory" else 80)  # ten images a class at least
    costs = run(simulation, tmp_path)["costs"]
    assert costs["generated"]["samples"] > 0
    assert 0 < costs["generated"]["flops"] < sum(phase["flops"] for phase in costs["phases"].values())


def test_the_comparison_draws_accuracy_against_the_price_of_a_sample(tmp_path: Path) -> None:
    results = [run(small(method), tmp_path / method) for method in ("falcon", "fedpft", "fedavg")]
    comparison = summarize(results)
    price = {name: row["costs.flops_per_sample"]["mean"] for name, row in comparison["methods"].items()}
    made = results[0]["costs"]["generated"]
    assert price["falcon"] == made["flops"] / made["samples"] and price["fedpft"] < price["falcon"] and price["fedavg"] is None
    page = write_comparison(comparison, results, tmp_path / "report").read_text(encoding="utf-8")
    assert "Cost of a synthetic sample" in page and "falcon: " in page
    assert "Cost of a synthetic sample" not in write_comparison(
        summarize(results[2:]), results[2:], tmp_path / "none"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize("method", ["fedmitr", "deepinversion_vit"])
def test_the_evaluation_takes_the_images_that_the_server_phase_kept(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not enter the server phase again, not even to read what that one kept."""
    servers: list[PatchServer] = []
    start = PatchServer.__init__

    def counted(self: PatchServer, *args: Any, **options: Any) -> None:
        servers.append(self)
        start(self, *args, **options)

    monkeypatch.setattr(PatchServer, "__init__", counted)
    result = run(small(method), tmp_path)
    (server,) = servers
    judged = result["generators"]["classes"].values()
    assert sum(row["synthetic"] for row in judged) == len(server.samples().tensors["labels"]) > 0
