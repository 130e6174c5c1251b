"""Every method and phase on the pretend accelerator: nothing mixes devices, the work is done there, results are the CPU's.

Rounds are tiny (two clients, images of 8 x 8 pixels), so what a phase does once weighs more here than in earnest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from osfl.core.registry import names
from osfl.core.result import Result
from osfl.evaluation.embedding import random_space
from osfl.runtime import devices
from osfl.runtime.machine import Machine
from osfl.simulate import run as stages
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.device.pretend import NAME, Log, pretend

ROUNDS: Mapping[str, Mapping[str, Any]] = {name: {} for name in names()} | {
    "fedcgs": {"ridge": 0.1},  # with less, rounding of the features grows in the inverse of their covariance
    "fedcgs, personal": {"personal": True, "ridge": 0.1},
    "federated_factory": {"least": 3},
    "federated_factory, vae": {"factory": "vae", "least": 3},
    "federated_factory, edm": {"factory": "edm", "least": 3},
    "fedmitr, as one": {"invert": "ensemble", "order": "images_first", "student_epochs": 1, "ensemble": "odds", "balance": 0.5},
    "dense, images first": {"order": "images_first", "student_epochs": 1},
    "fedbicross, alone": {"server": "none"},
}

# What stays on the CPU on purpose, by the file that does it: the reason, and the most FLOPs in any of these rounds.
ON_THE_CPU: Mapping[str, tuple[str, float]] = {
    "ingredients/statistics/kmeans.py": ("each choice decides the next; a small part of the mixture that it starts", 1e6),
    "ingredients/statistics/shrinkage.py": ("one eigendecomposition a round, in 64 bits", 1e6),
    "methods/onesum/head.py": ("one system of equations a round, in 64 bits", 1e6),
    "methods/onesum/terms.py": ("what an upload claims is checked once, in 64 bits", 2e6),
    "methods/fedcgs.py": ("the same", 3e6),
    "methods/onesum/features.py": ("the filters are drawn once", 1e5),
    "methods/fol/selection.py": ("weights of a few members, in 64 bits, from answers that are there", 1e5),
    "methods/fol/bounds.py": ("measures a theorem to 1e-10, in 64 bits, on the last layer", 1e8),
    "methods/fol/__init__.py": ("sums of answers that are there", 1e5),
    "evaluation/distances.py": ("closed forms in 64 bits, of at most 1,600 samples however many there are", 1e8),
    "evaluation/bound.py": ("the same", 1e7),
    "rounds/exposure.py": ("closed forms of the egress check, in 64 bits", 1e7),
    "evaluation/privacy/signals.py": ("an audit's distances and closed forms, of few images", 1e5),
    "evaluation/privacy/similarity.py": ("the same, in 64 bits", 5e5),
    "methods/federated_factory/mixtures.py": ("centers as pixels, which the egress check and an audit look at", 1e5),
}
# Copies between CPU and device in one of these rounds, at most: what moves once (images, models, answers), as counted, and a
# tenth more. `test_transfers.py` shows that more steps of the same work add none.
TRANSFERS: Mapping[str, int] = {
    "centralized": 80,
    "centralized_tokens": 70,
    "coboosting": 550,
    "dafl": 560,
    "deepinversion": 550,  # models on the way among them, of which there are at most twenty
    "deepinversion_vit": 1010,
    "dense": 550,
    "ensemble": 150,
    "falcon": 450,
    "fedavg": 130,
    "fedavg_rounds": 270,
    "fedbicross": 640,
    "fedcgs": 40,
    "feddyn": 410,
    "federated_factory": 460,
    "fedftg": 520,
    "fedisca": 470,  # these, too
    "fedlmg": 650,
    "fedmitr": 1050,
    "fedpft": 190,
    "fedprox": 360,
    "fol": 600,
    "local_only": 150,
    "onesum": 80,
    "scaffold": 320,
    "fedcgs, personal": 70,
    "federated_factory, vae": 640,
    "federated_factory, edm": 4100,
    "fedmitr, as one": 810,
    "dense, images first": 510,
    "fedbicross, alone": 270,
}
PHASES = {
    "run_client_phase": "client",
    "run_server_phase": "server",
    "_reference": "server",
    "run_personalization": "personalize",
    "evaluate": "evaluate",
}


@pytest.fixture(autouse=True)
def _small_judges(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cheapest space to judge images in, no t-SNE, and tokens that nobody has encoded yet."""
    monkeypatch.setattr("osfl.evaluation.generators.available_space", random_space)
    for place in ("planes", "generator_figures"):
        monkeypatch.setattr(f"osfl.evaluation.{place}.plane", lambda parts, seed, note: {"kind": "scatter", "series": {}})
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    # diffusion draws its noise on the device, from a generator of its own: here the CPU has one of the same seed
    monkeypatch.setattr("osfl.methods.federated_factory.diffusion._on", own_generator)


def own_generator(device: torch.device, rng: torch.Generator) -> torch.Generator:
    return torch.Generator(device).manual_seed(int(torch.randint(2**62, (1,), generator=rng)))


def watch(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell the log which phase runs."""
    for name, phase in PHASES.items():
        monkeypatch.setattr(stages, name, _watched(getattr(stages, name), phase, log))


def _watched(work: Any, phase: str, log: Log) -> Any:
    def watched(*args: Any, **options: Any) -> Any:
        with log.during(phase):
            return work(*args, **options)

    return watched


def simulated(case: str, out: Path, device: str) -> Result:
    method, changes = case.partition(",")[0], ROUNDS[case]
    simulation = Simulation(method, "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=20, changes=changes)
    return run(simulation, out, machine=Machine(workers=1, device=device))


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_runs_on_the_device_and_ends_as_on_the_cpu(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = simulated(case, tmp_path / "cpu", "cpu")
    with pretend() as log, monkeypatch.context() as patches:
        watch(log, patches)
        found = simulated(case, tmp_path / "device", NAME)
    worked_there(log)
    assert log.transferred() <= TRANSFERS[case], log.transfers.most_common(20)
    assert numbers(found) == pytest.approx(numbers(expected), rel=5e-3, abs=5e-3)
    same_files(tmp_path / "device", tmp_path / "cpu")


@pytest.mark.parametrize("case", ROUNDS)
def test_a_round_needs_no_64_bit_floats_of_the_device(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's devices have none. What asks for them is computed on the CPU, or in 32 bits."""
    monkeypatch.setattr(devices, "WITHOUT_FLOAT64", {NAME})
    for page in ("write_report", "write_model_card"):
        monkeypatch.setattr(stages, page, lambda *_: None)
    with pretend(float64=False) as log, monkeypatch.context() as patches:
        watch(log, patches)
        found = simulated(case, tmp_path / "device", NAME)
    if case != "onesum":  # whose features are of 64 bits: there the CPU computes them
        assert {phase for phase, place, _ in log.flops if place == NAME} & {"client", "server", "personalize"}
    assert all(math.isfinite(number) for number in numbers(found).values())


def worked_there(log: Log, rounds: int = 1) -> None:
    """At least 99 % of the FLOPs of each phase are the device's, but for those that stay on the CPU on purpose: so many
    rounds' worth.

    Only torch's own operations are seen: OneSum's sums are numpy's.
    """
    beside: dict[str, float] = {}
    for phase in {phase for phase, _, _ in log.flops}:
        done = dict.fromkeys((NAME, "cpu"), 0.0)
        for (_, place, line), flops in ((key, n) for key, n in log.flops.items() if key[0] == phase):
            file = line.rpartition(":")[0]
            if place == "cpu" and file in ON_THE_CPU:
                beside[file] = beside.get(file, 0.0) + flops
            else:
                done[place] += flops
        cpu = {line: n for (at, place, line), n in log.flops.items() if (at, place) == (phase, "cpu")}
        assert done[NAME] >= 0.99 * sum(done.values()), f"{phase}: {cpu}"
    assert all(flops <= rounds * ON_THE_CPU[file][1] for file, flops in beside.items()), beside


def numbers(result: Mapping[str, Any]) -> dict[str, float]:
    """All that was measured about the models and what they were made of, by its place in the results."""
    found: dict[str, float] = {}

    def collect(value: Any, place: str) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                if key not in ("figures", "seconds"):
                    collect(part, f"{place}/{key}")
        elif isinstance(value, list):
            for number, part in enumerate(value):
                collect(part, f"{place}/{number}")
        elif isinstance(value, int | float):
            found[place] = float(value)

    collect({key: result.get(key) for key in ("scores", "generators", "tokens", "course")}, "")
    return found


def same_files(folder: Path, expected: Path) -> None:
    """Release and models are the same up to rounding."""
    paths = [folder / "release.safetensors", *(folder / "models").glob("*.safetensors"), *(folder / "personal").glob("*")]
    for path in paths:
        mine, theirs = load_file(path), load_file(expected / path.relative_to(folder))
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.allclose(mine[name].double(), theirs[name].double(), rtol=1e-2, atol=1e-3), f"{path.name}: {name}"
