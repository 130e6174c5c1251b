"""What follows a round, on the pretend accelerator: an audit, forgetting, and fusion of plain checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from osfl.core.registry import is_reference, load, names
from osfl.core.settings import resolve_settings
from osfl.core.types import Task
from osfl.evaluation.privacy.reconstruction import Effort
from osfl.ingredients.training.model_method import ModelMethod
from osfl.models.build import build_model
from osfl.models.naming import named
from osfl.roles.fusion import fuse
from osfl.rounds.forgetting import forget
from osfl.runtime.machine import Machine
from osfl.simulate.audit import Attempt, audit
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare
from tests.device.pretend import NAME, pretend
from tests.device.test_rounds import ROUNDS, numbers, own_generator, same_files, worked_there
from tests.roles.test_fusion import request, three_models

DEVICES = ("cpu", NAME)
FUSING = ("coboosting", "dafl", "deepinversion", "deepinversion_vit", "dense", "fedbicross", "fedisca", "fedmitr")


@pytest.fixture(autouse=True)
def _alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same noise of diffusion on both devices, and features that nobody has computed yet."""
    monkeypatch.setattr("osfl.methods.federated_factory.diffusion._on", own_generator)
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def small(method: str, clients: int, **changes: object) -> Simulation:
    return Simulation(method, "digits", clients, "iid", "smoke", samples=90, image_size=8, test_samples=20, changes=changes)


def on(device: str) -> Machine:
    return Machine(workers=1, device=device)


@pytest.mark.parametrize("method", ["falcon", "fedavg"])
def test_an_audit_finds_there_what_it_finds_on_the_cpu(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    found = []
    for device in DEVICES:
        run(small(method, 2), tmp_path / device)  # the same round: what is compared is the audit
        with pretend() as log:
            attack = {"effort": Effort(steps=5, most=20), "attempt": Attempt(shadows=0, images=10)}
            result = audit(tmp_path / device, prepare(small(method, 2)), machine=on(device), **attack)  # type: ignore[arg-type]
        found.append({"scores": result.get("reconstruction", {}), "generators": result["audit"]["membership"]})
    assert numbers(found[1]) == pytest.approx(numbers(found[0]), rel=2e-2, abs=2e-2)
    assert sum(flops for (_, place, _), flops in log.flops.items() if place == NAME) > 0


@pytest.mark.parametrize("method", ["fedavg", "dense"])
def test_forgetting_there_leaves_what_it_leaves_on_the_cpu(method: str, tmp_path: Path) -> None:
    for device in DEVICES:
        with pretend():
            run(small(method, 3), tmp_path / device, machine=on(device))
            certificate = forget(tmp_path / device, clients=["client-02"], machine=on(device))
        assert certificate["machine"]["device"] == device
    same_files(tmp_path / NAME, tmp_path / "cpu")


@pytest.mark.parametrize("method", names())
def test_audit_and_forgetting_work_there_for_every_method(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 99 % of their FLOPs are the device's, but for what stays on the CPU on purpose (`test_rounds.py`)."""
    for part in ("simulate.run", "simulate.audit", "rounds.forgetting.execution"):
        for draw in ("write_report", "write_model_card"):
            monkeypatch.setattr(f"osfl.{part}.{draw}", lambda *_, **__: None, raising=False)
    folder, simulation = tmp_path / "round", small(method, 3, **ROUNDS[method])
    shadows = 0 if method in FUSING else 2  # their clients train what FedAvg's do
    attempt = Attempt(shadows=shadows, canaries=2, images=5, inversion=2, minutes=0.0)
    effort = Effort(steps=2, most=5, side=8)
    with pretend() as log:
        run(simulation, folder, machine=on(NAME))
        log.flops.clear()
        with log.during("audit"):
            audit(folder, prepare(simulation), machine=on(NAME), effort=effort, attempt=attempt)
        if not is_reference(load(method)):
            with log.during("forget"):
                forget(folder, clients=["client-02"], machine=on(NAME))
    worked_there(log, rounds=12)  # an audit repeats client phases, and asks for the model of each upload


def test_no_method_that_computes_in_a_fusion_is_missing() -> None:
    """Those whose clients send a model alone, without class counts; three only average or pass models on."""
    task, name = Task("t", ("a", "b"), (3, 16, 16)), "vit-p4-w16-d1-h2"
    model = set(named(build_model(name, task), "model"))
    fusing = set()
    for method in names():
        made = load(method)(task, resolve_settings(load(method), "smoke", {}))
        if isinstance(made, ModelMethod) and set(made.contract(name)) == model and not made.needs_counts():
            fusing.add(method)
    assert fusing == {*FUSING, "ensemble", "fedavg", "fol"}


@pytest.mark.parametrize("method", FUSING)
def test_every_method_that_fuses_does_so_there(method: str, tmp_path: Path) -> None:
    models = three_models(tmp_path)
    with pretend() as log, log.during("fuse"):
        fuse(request(models, method=method), tmp_path / "fused", machine=on(NAME))
    worked_there(log)


def test_checkpoints_are_fused_there_as_on_the_cpu(tmp_path: Path) -> None:
    models = three_models(tmp_path)
    for device in DEVICES:
        with pretend():
            fuse(request(models, method="fedmitr"), tmp_path / device, machine=on(device))
    mine, theirs = (load_file(tmp_path / device / "release.safetensors") for device in (NAME, "cpu"))
    assert mine.keys() == theirs.keys()
    assert all(bool((mine[name] - theirs[name]).abs().max() < 1e-2) for name in mine)
