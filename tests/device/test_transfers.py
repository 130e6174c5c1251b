"""Loops do not make a device wait: more steps of the same work need no more transfers between it and the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.registry import names
from osfl.methods.federated_factory.diffusion import Diffusion, DiffusionSettings
from osfl.runtime.machine import Machine
from osfl.simulate import run as stages
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.device.pretend import DEVICE, NAME, pretend

EPOCHS: tuple[Mapping[str, Any], Mapping[str, Any]] = {"batch_size": 22}, {"batch_size": 4}
LOOPS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {  # few steps, and many
    "centralized": EPOCHS,
    "centralized_tokens": EPOCHS,
    "coboosting": ({"generator_steps": 2}, {"generator_steps": 8}),
    "dafl": ({"server_steps": 2}, {"server_steps": 8}),
    "deepinversion": ({"steps": 2}, {"steps": 8}),
    "deepinversion_vit": ({"steps": 4}, {"steps": 12}),
    "dense": ({"generator_steps": 2}, {"generator_steps": 8}),
    "ensemble": EPOCHS,
    "falcon": ({"generator_batch": 32, "batch_size": 32}, {"generator_batch": 4, "batch_size": 4}),
    "fedavg": EPOCHS,
    "fedavg_rounds": EPOCHS,
    "fedbicross": ({"steps": 4}, {"steps": 12}),
    "fedcgs": ({"personal": True, "personal_epochs": 1}, {"personal": True, "personal_epochs": 4}),
    "feddyn": EPOCHS,
    "federated_factory": ({"least": 3, "batch_size": 22}, {"least": 3, "batch_size": 4}),
    "fedftg": ({"generator_steps": 2}, {"generator_steps": 8}),
    "fedisca": ({"steps": 4}, {"steps": 12}),
    "fedlmg": ({"diffusion_steps": 4}, {"diffusion_steps": 12}),
    "fedmitr": ({"steps": 4, "stops": "2:0.3"}, {"steps": 12, "stops": "2:0.3"}),
    "fedmitr, as one": (
        {"steps": 4, "stops": "2:0.3", "invert": "ensemble", "ensemble": "odds", "balance": 0.5},
        {"steps": 12, "stops": "2:0.3", "invert": "ensemble", "ensemble": "odds", "balance": 0.5},
    ),
    "fedpft": ({"batch_size": 32}, {"batch_size": 4}),
    "fedprox": EPOCHS,
    "fol": ({"align_batch": 22, "student_batch": 22, "rate_steps": 0}, {"align_batch": 4, "student_batch": 4, "rate_steps": 0}),
    "local_only": EPOCHS,
    "scaffold": EPOCHS,
}
NO_LOOPS = {"onesum"}  # one pass over the images; `test_rounds.py` bounds its transfers


class Evaluated(Exception):
    """Raised where the evaluation would begin: it has no loop of steps."""


def transfers(
    method: str, changes: Mapping[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, Mapping[tuple[str, str, str], int]]:
    def stop(*_: Any) -> None:
        raise Evaluated

    monkeypatch.setattr(stages, "evaluate", stop)
    monkeypatch.setenv("OSFL_CACHE", str(out / "cache"))
    simulation = Simulation(method, "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=20, changes=changes)
    with pretend() as log, pytest.raises(Evaluated):
        run(simulation, out / "round", machine=Machine(workers=1, device=NAME))
    return log.transferred(), log.transfers


@pytest.mark.parametrize("case", LOOPS)
def test_more_steps_need_no_more_transfers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = LOOPS[case]
    method = case.partition(",")[0]
    expected, before = transfers(method, few, tmp_path / "few", monkeypatch)
    found, after = transfers(method, many, tmp_path / "many", monkeypatch)
    grown = {line: n - before.get(line, 0) for line, n in after.items() if n > before.get(line, 0)}
    assert 0 < found <= expected, grown


def test_every_method_is_here() -> None:
    assert {case.partition(",")[0] for case in LOOPS} | NO_LOOPS == set(names())


def test_a_diffusion_model_learns_longer_without_more_transfers() -> None:
    images = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8)
    found = []
    for steps in (2, 8):
        settings = DiffusionSettings(unet="w8-m1.2-b1", edm_images=32 * steps, edm_batch=32, edm_rampup=64)
        with pretend() as log:
            Diffusion(settings, (1, 8, 8), "flip", DEVICE).fit(images, torch.Generator().manual_seed(0), lambda *_: None)
        found.append(log.transferred())
    assert found[1] == found[0]
