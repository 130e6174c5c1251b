"""Several devices: clients are spread over them, and the bits are those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from osfl.core.errors import UsageError
from osfl.runtime.environment import devices_named
from osfl.runtime.machine import Machine
from osfl.simulate import run as stages
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.device.pretend import NAME, Log, pretend
from tests.device.test_rounds import same_files, watch

BOTH = f"{NAME}:1,{NAME}:2"


def on(device: str, method: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Log, str]:
    simulation = Simulation(method, "digits", 3, "iid", "smoke", samples=60, image_size=8, test_samples=10)
    with pretend() as log, monkeypatch.context() as patches:
        watch(log, patches)
        return log, run(simulation, out, machine=Machine(workers=1, device=device))["models_digest"]


@pytest.mark.parametrize(
    ("method", "phase", "least"),
    [
        ("fedavg", "client", 0.2),  # two clients and one
        ("fol", "personalize", 0.2),
        ("scaffold", "server", 0.2),
        ("fedmitr", "server", 0.2),
        ("fedbicross", "server", 0.1),  # clusters' images; their students learn on the first device
    ],
)
def test_clients_are_spread_over_all_devices(
    method: str, phase: str, least: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "write_report", lambda *_: None)
    _, alone = on(NAME, method, tmp_path / "one", monkeypatch)
    log, together = on(BOTH, method, tmp_path / "both", monkeypatch)
    assert together == alone
    same_files(tmp_path / "both", tmp_path / "one")
    shares = {
        place: sum(n for (at, where, _), n in log.flops.items() if (at, where) == (phase, place)) for place in BOTH.split(",")
    }
    assert min(shares.values()) >= least * sum(shares.values()), shares
    moved = {line.rpartition(":")[0] for _, what, line in log.transfers if what == "to another device"}
    # models that the first device has checked, once; and finished lessons
    assert moved <= {"ingredients/distillation/token_relabel.py", "ingredients/inversion/trajectories.py"}


def test_a_list_of_devices_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    two = (torch.device("cuda:0"), torch.device("cuda:1"))
    assert devices_named("cuda:all") == devices_named("cuda:0, cuda:1") == two and devices_named("cpu") == (
        torch.device("cpu"),
    )
    for wrong in ("cuda:0,cpu", "cuda:1,cuda:1", "cuda,cuda:0"):
        with pytest.raises(UsageError, match="expected different devices of one kind"):
            devices_named(wrong)
    with pytest.raises(UsageError, match="no device 'cuda:2'"):
        devices_named("cuda:0,cuda:2")
