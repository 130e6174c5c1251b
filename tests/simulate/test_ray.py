"""Clients and the server's parts on Ray give what they give in the embedded default, byte for byte."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from osfl.core.errors import TrainingError, UsageError
from osfl.core.method import Context
from osfl.core.types import Dataset
from osfl.runtime.machine import Machine
from osfl.simulate import ray as ray_engine
from osfl.simulate import run as stages
from osfl.simulate.ray import require_ray
from osfl.simulate.run import run
from osfl.simulate.simulation import Federation, Simulation, prepare

METHODS = ("fedavg", "fedbicross", "federated_factory", "fedmitr")
APART: Mapping[
    str, tuple[Mapping[str, Any], list[int]]
] = {  # methods whose server phase has parts that others can compute: settings, and the parts of a round of two clients
    "fedbicross": ({}, [2, 2]),  # clusters, in two repetitions
    "fedisca": ({"invert": "clients", "repetitions": 2}, [2, 2]),
    "deepinversion": ({"invert": "clients"}, [2, 2]),  # makers, in two rounds; the second one against the student
    "federated_factory": ({}, [4, 0]),  # generators; nothing is drawn again to judge their images
    "fedmitr": ({}, [2, 2]),  # clients, in two epochs
    "fedlmg": ({}, [4]),  # classes of clients
}
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
            few = {"least": 3} if method == "federated_factory" else {}
            options = {"samples": 120, "image_size": 8, "clients": 3, "partition": "iid"}
            simulation = Simulation(method, preset="smoke", changes=few, **options)  # type: ignore[arg-type]
            here = run(simulation, tmp_path / "here" / method)
            there = run(simulation, tmp_path / "there" / method, machine=Machine(engine="ray"))
            assert there["release_digest"] == here["release_digest"], method
            assert there["models_digest"] == here["models_digest"], method
            assert there["costs"]["upload_bytes"] == here["costs"]["upload_bytes"]
            for phase in ("client", "server"):
                assert there["costs"]["phases"][phase]["flops"] == here["costs"]["phases"][phase]["flops"], method
            assert " --engine ray" in there["command"]
        simulation = Simulation("fedavg", preset="smoke", samples=60, image_size=8, clients=2, partition="iid")
        exact, *narrow = (
            run(simulation, tmp_path / f"{engine}-{precision}", machine=Machine(engine=engine, precision=precision))  # type: ignore[arg-type]
            for engine, precision in (("local", "fp32"), ("local", "bf16"), ("ray", "bf16"))  # what changes bits goes along
        )
        assert narrow[0]["release_digest"] == narrow[1]["release_digest"] != exact["release_digest"]
    finally:
        ray.shutdown()


class InProcess:
    """What is used of Ray, in this process: the functions of its workers run on copies of what would travel."""

    def __init__(self) -> None:
        self.parts: list[int] = []

    def remote(self, function: Callable[..., Any]) -> Any:
        self.parts.append(0)

        def run_it(*given: Any) -> Any:
            self.parts[-1] += 1
            return function(*given)

        return SimpleNamespace(remote=run_it)

    def put(self, value: Any) -> Any:
        return value

    get = put

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 1.0}


@pytest.mark.parametrize("method", APART)
def test_parts_of_the_server_phase_need_nothing_but_what_travels(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bytes and equal operations, whoever computes them; and what was finished is not asked for again."""
    changes, parts = APART[method]
    monkeypatch.setattr(stages, "write_report", lambda *_: None)
    shown = Simulation(method, preset="smoke", samples=160, image_size=8, clients=2, partition="iid", changes=changes)
    federation = two_classes(prepare(replace(shown, test_samples=10)))
    here = run(shown, tmp_path / "here", federation=federation, machine=Machine(workers=1))
    fake = InProcess()

    @contextlib.contextmanager
    def parts_in_process(ctx: Context, machine: Machine) -> Iterator[Context]:
        yield replace(ctx, elsewhere=functools.partial(ray_engine._spread, fake, machine))

    monkeypatch.setattr(stages, "server_parts_on_ray", parts_in_process)
    monkeypatch.setattr(stages, "run_client_phases_on_ray", lambda *_: iter(()))
    shutil.copytree(tmp_path / "here" / "inbox", tmp_path / "there" / "inbox")
    there = run(shown, tmp_path / "there", federation=federation, machine=Machine(workers=1, engine="ray"))
    assert (there["release_digest"], there["models_digest"]) == (here["release_digest"], here["models_digest"])
    assert there["costs"]["phases"]["server"]["flops"] == here["costs"]["phases"]["server"]["flops"]
    assert fake.parts == parts


def test_a_refusal_of_a_worker_is_its_sentence_alone() -> None:
    class RayTaskError(TrainingError):  # as Ray wraps what a worker raised
        cause = TrainingError("it diverged", client="a", fix="Lower lr.")

        def __str__(self) -> str:
            return "Traceback of the worker"

    def fails(reference: object) -> None:
        raise RayTaskError("wrapped")

    with pytest.raises(TrainingError) as caught:
        ray_engine._result(SimpleNamespace(get=fails), None)
    assert str(caught.value) == "Training 'a': it diverged.\nLower lr."


def two_classes(federation: Federation) -> Federation:
    """Fewer cells, so that this takes a second."""
    few = [replace(s, train=_few(s.train), val=_few(s.val)) for s in federation.shards]
    return replace(federation, shards=few)


def _few(data: Dataset) -> Dataset:
    return Dataset(data.images, data.labels % 2)


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="Ray is not installed") as caught:
        require_ray()
    assert "pip install 'osfl[ray]'" in str(caught.value)
