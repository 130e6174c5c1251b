"""The plans of the papers' experiments: valid, with the papers' settings, and the same in small runs to its end."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from osfl.cli.main import answer
from osfl.core.errors import DeviceError, UsageError
from osfl.core.plan import plan_from
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import settings_as_json
from osfl.data.catalog import sheets
from osfl.data.partition import domain_clients, parse_partition
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

PLANS = {path.stem: path for path in sorted((Path(__file__).parents[2] / "benchmarks" / "plans").glob("*.toml"))}
PIN = "0123456789abcdef" * 4
ALLOWED = {  # what a plan may say besides the paper's defaults: which of its experiments it is, and which weights
    "federated_factory": {"mode", "augment", "fill", "unet", "edm_batch", "symmetry"},
    "falcon": {"encoder_weights", "encoder_sha256"},
    "fedmitr": {"pretrained", "pretrained_sha256", "pretrained_pixels"},  # the last follows from the first
    "fedbicross": {"clusters"},
    "fol": set(),
}
SMALL = {  # settings of the smoke preset that choose other weights or networks, beside its lengths and sizes
    "falcon": {"encoder_weights", "encoder_sha256"},
    "fedmitr": {"pretrained", "pretrained_sha256"},
    "federated_factory": {"unet", "edm_batch"},
}


def table_of(name: str) -> dict[str, Any]:
    """As somebody fills it in who has downloaded the weights."""
    table = tomllib.loads(PLANS[name].read_text(encoding="utf-8"))
    for key in ("encoder_sha256", "pretrained_sha256"):
        if key in table.get("settings", {}):
            assert table["settings"][key] == ""  # no hash that nobody has computed
            table["settings"][key] = PIN
    return table


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_valid_and_has_the_papers_settings(name: str) -> None:
    table = table_of(name)
    plan = plan_from(table, name)
    changes = table.get("settings", {})
    assert changes.keys() <= ALLOWED[plan.method]
    expected = settings_as_json(resolve_settings(load(plan.method), "paper", {}))
    found = settings_as_json(plan.settings)
    assert {key: value for key, value in found.items() if expected.get(key) != value}.keys() <= ALLOWED[plan.method]
    sheet = sheets()[plan.data["dataset"]]
    assert plan.task.classes == sheet.classes and plan.task.image[0] == sheet.channels
    parse_partition(plan.data["partition"])
    if plan.data["partition"] == "domains":
        assert plan.clients == tuple(sorted(domain_clients(sheet.domains).values()))
    assert f"--plan benchmarks/plans/{name}.toml" in PLANS[name].read_text()


@pytest.mark.parametrize("name", [name for name in PLANS if "sha256" in PLANS[name].read_text()])
def test_a_plan_without_the_hash_of_its_weights_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"_sha256': .*expected 64 lower-case hex digits"):
        plan_from(tomllib.loads(PLANS[name].read_text()), name)


@pytest.mark.parametrize(
    "name",
    [
        "cifar10-silos",
        "cifar10-silos-peer",
        "isic-silos",
        "falcon-pacs",
        "fedbicross-bloodmnist",
        "fedmitr-cifar10",
        "fol-cifar10",
    ],
)
def test_a_plan_in_small_runs_to_its_end(name: str, tmp_path: Path) -> None:
    """What differs is length and size (the smoke preset), the images, and that no weights are downloaded."""
    table = table_of(name)
    method, kept = table["method"], table.get("settings", {})
    changes = {key: value for key, value in kept.items() if key not in SMALL.get(method, ())}
    parts = {"partition": "iid" if table["data"]["partition"] == "domains" else table["data"]["partition"]}
    if method == "federated_factory":
        changes |= {"factory": load(method).Settings().factory}  # the paper's diffusion models, not the preset's mixtures
    clients = {"silos": 10, "iid": 4}.get(parts["partition"], 4)
    simulation = Simulation(
        method, "digits", clients, parts["partition"], "smoke", changes=changes, samples=240, test_samples=20, image_size=8
    )
    result = run(simulation, tmp_path / "run")
    assert result["method"] == method and all(result["settings"][key] == value for key, value in changes.items())


@pytest.mark.parametrize(("name", "least"), [("cifar10-silos", "4.3 GB"), ("isic-silos", "8.3 GB")])
def test_the_papers_diffusion_models_fit_a_gpu_in_parts_and_are_refused_where_they_cannot(name: str, least: str) -> None:
    """384 and 544 GB of activations for a whole batch; parts with the same effective batch need what there is."""
    plan = plan_from(table_of(name), name)
    method = load(plan.method)(plan.task, plan.settings)
    for memory in (24 * 10**9, 80 * 10**9):
        needs = method.device_bytes(5000, memory, False)
        assert needs is not None and memory / 2 < needs <= memory
    with pytest.raises(DeviceError, match=f"expected at least {least}, got 4.0 GB") as refused:
        method.device_bytes(5000, 4 * 10**9, False)
    assert "--memory" in str(refused.value) and "batch_size" in str(refused.value)


def test_check_opens_the_folder_that_a_large_plan_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`osfl check` on the plan: the folder's layout is the one that the sheet names, and it shows who holds what."""
    text = PLANS["isic-silos"].read_text(encoding="utf-8")
    sheet = sheets()[tomllib.loads(text)["data"]["dataset"]]
    rng = np.random.default_rng(0)
    for label in sheet.classes:
        place = tmp_path / "data" / sheet.name / label
        place.mkdir(parents=True)
        for number in range(14):
            Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(place / f"{number}.png")
    (tmp_path / "plan.toml").write_text(text, encoding="utf-8")
    monkeypatch.setenv("OSFL_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    assert answer(["check", str(tmp_path / "plan.toml")]) == 0
    shown = capsys.readouterr().out
    assert sheet.license in shown and "no checksum is known" in shown
    assert all(client in shown for client in tomllib.loads(text)["clients"])
