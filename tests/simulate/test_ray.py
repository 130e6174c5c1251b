"""Clients on Ray say what they say in the embedded default, byte for byte."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path

import pytest

from osfl.core.errors import UsageError
from osfl.runtime.machine import Machine
from osfl.simulate.ray import require_ray
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

METHODS = ("fedavg", "fedbicross")
HAS_RAY = importlib.util.find_spec("ray") is not None


@pytest.mark.skipif(not HAS_RAY, reason="needs osfl[ray]")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray leaves sockets to the garbage collector
def test_the_same_digests_as_the_embedded_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        for method in METHODS:
            simulation = Simulation(method, preset="smoke", samples=120, image_size=8, clients=3, partition="iid")
            here = run(simulation, tmp_path / "here" / method)
            there = run(simulation, tmp_path / "there" / method, machine=Machine(engine="ray"))
            assert there["release_digest"] == here["release_digest"], method
            assert there["models_digest"] == here["models_digest"], method
            assert there["costs"]["upload_bytes"] == here["costs"]["upload_bytes"]
            assert there["costs"]["phases"]["client"]["flops"] == here["costs"]["phases"]["client"]["flops"]
            assert " --engine ray" in there["command"]
        simulation = Simulation("fedavg", preset="smoke", samples=60, image_size=8, clients=2, partition="iid")
        exact, *narrow = (
            run(simulation, tmp_path / f"{engine}-{precision}", machine=Machine(engine=engine, precision=precision))  # type: ignore[arg-type]
            for engine, precision in (("local", "fp32"), ("local", "bf16"), ("ray", "bf16"))  # what changes bits goes along
        )
        assert narrow[0]["release_digest"] == narrow[1]["release_digest"] != exact["release_digest"]
    finally:
        ray.shutdown()


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        require_ray()
    assert "pip install 'osfl[ray]'" in str(caught.value)
