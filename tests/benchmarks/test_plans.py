"""Plans for those who have a GPU: they can be read, say what the papers say, and run where the data are."""

from dataclasses import fields
from pathlib import Path

import pytest

from osfl.cli.arguments import from_plan, same_plan
from osfl.core.errors import UsageError
from osfl.core.plan import read_plan, write_plan
from osfl.methods.federated_factory import Settings
from osfl.simulate.simulation import prepare

PLANS = sorted((Path(__file__).parents[2] / "benchmarks" / "plans").glob("*.toml"))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_plan_is_whole_and_changes_only_what_it_names(path: Path) -> None:
    plan = read_plan(path)
    assert len(plan.clients) == len(plan.task.classes) and plan.data["partition"] == "silos"
    changed = {f.name for f in fields(Settings) if getattr(plan.settings, f.name) != getattr(Settings(), f.name)}
    assert changed <= {"mode", "augment", "fill", "unet", "edm_batch", "symmetry"}
    simulation, _ = from_plan(path)
    assert simulation.method == "federated_factory" and simulation.image_size == plan.task.image[1]


def test_there_are_plans() -> None:
    assert {path.stem for path in PLANS} >= {"cifar10-silos", "cifar10-silos-peer", "isic-silos"}


def test_a_plan_without_a_digest_takes_the_data_that_are_here(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    text = PLANS[0].read_text(encoding="utf-8").split("[data]")[0]
    digits = "[data]\ndataset = 'digits'\npartition = 'silos'\nevaluated_on = 'test'\n"
    path.write_text(_for_digits(text) + digits, encoding="utf-8")
    simulation, plan = from_plan(path)
    found = prepare(simulation).plan
    same_plan(plan, found, path)
    path.write_text(write_plan(found).replace(found.data["digest"], "0" * 64), encoding="utf-8")
    with pytest.raises(UsageError, match="digest"):
        same_plan(from_plan(path)[1], found, path)


def _for_digits(text: str) -> str:
    task = {"name": "'digits'", "classes": str([str(i) for i in range(10)]), "image": "[1, 16, 16]"}
    rows = [row.partition(" = ") for row in text.splitlines()]
    return "".join(f"{key}{equals}{task.get(key, value)}\n" for key, equals, value in rows)
