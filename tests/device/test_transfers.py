"""Loops do not make a device wait: more steps of the same work need no more transfers between it and the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.evaluation.embedding import random_space
from osfl.methods.federated_factory.diffusion import Diffusion, DiffusionSettings
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.device.pretend import DEVICE, NAME, pretend

LOOPS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # few steps, and many
    "fedavg": ({"batch_size": 22}, {"batch_size": 4}),
    "dense": ({"generator_steps": 2}, {"generator_steps": 8}),
    "deepinversion": ({"steps": 2}, {"steps": 8}),
    "fedisca": ({"steps": 4}, {"steps": 12}),
    "fedbicross": ({"steps": 4}, {"steps": 12}),
    "fedmitr": ({"steps": 4, "stops": "2:0.3"}, {"steps": 12, "stops": "2:0.3"}),
    "falcon": ({"generator_batch": 32, "batch_size": 32}, {"generator_batch": 4, "batch_size": 4}),
    "fol": ({"align_batch": 22, "student_batch": 22, "rate_steps": 0}, {"align_batch": 4, "student_batch": 4, "rate_steps": 0}),
}


def transfers(method: str, changes: Mapping[str, Any], out: Path) -> tuple[int, Mapping[tuple[str, str, str], int]]:
    simulation = Simulation(method, "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=20, changes=changes)
    with pretend() as log:
        run(simulation, out, machine=Machine(workers=1, device=NAME))
    return log.transferred(), log.transfers


@pytest.mark.parametrize("method", LOOPS)
def test_more_steps_need_no_more_transfers(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.evaluation.generators.available_space", random_space)
    for place in ("planes", "generator_figures"):
        monkeypatch.setattr(f"osfl.evaluation.{place}.plane", lambda parts, seed, note: {"kind": "scatter", "series": {}})
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    few, many = LOOPS[method]
    expected, before = transfers(method, few, tmp_path / "few")
    found, after = transfers(method, many, tmp_path / "many")
    grown = {line: n - before.get(line, 0) for line, n in after.items() if n > before.get(line, 0)}
    assert found <= expected, grown


def test_a_diffusion_model_learns_longer_without_more_transfers() -> None:
    images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8)
    found = []
    for steps in (2, 8):
        settings = DiffusionSettings(unet="w8-m1.2-b1", edm_images=32 * steps, edm_batch=32, edm_rampup=64)
        with pretend() as log:
            Diffusion(settings, (1, 8, 8), "flip", DEVICE).fit(images, torch.Generator().manual_seed(0), lambda *_: None)
        found.append(log.transferred())
    assert found[1] == found[0]
