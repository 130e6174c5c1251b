"""What a run costs besides training: against a bare loop that trains the same models, and the worker pool against one process.

python -m benchmarks.run_speed
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measuring import medians, sgemm_gflops
from osfl.core.method import Context
from osfl.evaluation.scores import probabilities
from osfl.ingredients.training.local import fit
from osfl.models.build import build_model
from osfl.models.flops import training_flops
from osfl.models.naming import named
from osfl.runtime.machine import Machine
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare


def overhead() -> dict[str, float]:
    """Plan, contract, signatures, gate, inbox, journal, release, results and report, against training and testing alone."""
    # 60 epochs of 1,346 images: as many passes as the cpu preset makes over 4,000 real ones. That cost is a few tenths
    # of a second whatever the job: with the preset's 20 epochs (8 s) a first measurement gave 7.7 %, above the aim of 3 %.
    simulation = Simulation("fedavg", "digits", 5, "dirichlet:0.5", "cpu", image_size=28, changes={"epochs": "60"})
    federation = prepare(simulation)
    scratch = Path(tempfile.mkdtemp())
    number = iter(range(10_000))

    def shared_costs() -> None:
        folder = scratch / str(next(number))
        run_federation(federation, folder, {"preset": "cpu", "command": ""}, machine=Machine(workers=1))

    seconds = medians({"run": shared_costs, "bare": lambda: bare(federation)}, rounds=2)
    shutil.rmtree(scratch)
    return {
        "run_seconds": seconds["run"],
        "bare_loop_seconds": seconds["bare"],
        "overhead_seconds": seconds["run"] - seconds["bare"],
        "overhead_percent": 100 * (seconds["run"] / seconds["bare"] - 1),
    }


def bare(federation: Federation) -> None:
    """The same training and the same test, with nothing around them."""
    plan = federation.plan
    ctx = Context(plan, torch.device("cpu"))
    with compute_threads(1):
        models = []
        for shard in federation.shards:
            model = build_model(plan.settings.architecture, plan.task, ctx.generator("init", plan.settings.architecture))
            fit(model, shard.train, plan.settings, ctx.generator("local", shard.client))
            models.append(model)
        members = [named(model, "model") for model in models]
        mean = {name: torch.stack([m[name].double() for m in members]).mean(0) for name in members[0]}
        models[0].load_state_dict({name.removeprefix("model/"): tensor for name, tensor in mean.items()}, strict=True)
        probabilities(models[0], federation.test.images, torch.device("cpu"), Workers(1).map)


def pool(architecture: str, epochs: int = 2) -> dict[str, float]:
    """Clients in two workers of one thread, against one after the other with two threads (in both layouts)."""
    federation = prepare(
        Simulation("fedavg", "digits", 4, "iid", "cpu", image_size=28, channels=3, changes={"architecture": architecture})
    )
    settings = replace(federation.plan.settings, epochs=epochs, batch_size=64)
    ctx = Context(federation.plan, torch.device("cpu"))

    def train(client: int, layout: torch.memory_format) -> None:
        model = build_model(architecture, federation.plan.task, ctx.generator("init")).to(memory_format=layout)  # type: ignore[call-overload]
        fit(model, federation.shards[client].train, settings, ctx.generator("local", client))

    clients = range(len(federation.shards))

    def one_process(layout: torch.memory_format) -> None:
        with compute_threads(2):
            for client in clients:
                train(client, layout)

    last, first = torch.channels_last, torch.contiguous_format
    seconds = medians(
        {
            "pool": lambda: Workers(2).map(lambda client: train(client, last), clients),
            "one_process": lambda: one_process(last),
            "one_process_nchw": lambda: one_process(first),
        },
        rounds=3,
    )
    images = sum(len(shard.train) for shard in federation.shards) * epochs
    flops = training_flops(build_model(architecture, federation.plan.task), federation.plan.task.image) * images
    return {
        "images_per_second": images / seconds["pool"],
        "times_one_process": seconds["one_process"] / seconds["pool"],
        "times_one_process_nchw": seconds["one_process_nchw"] / seconds["pool"],
        "gflops": flops / seconds["pool"] / 1e9,
    }


def embedded_start() -> float:
    """Milliseconds until the embedded engine has started, done nothing for two clients, and ended."""
    return 1000 * medians({"start": lambda: Workers().map(lambda client: client, range(2))}, rounds=20)["start"]


def run() -> dict[str, Any]:
    return {
        "embedded_engine_starts_in_milliseconds": round(embedded_start(), 2),
        "sgemm_gflops": {"1 thread": sgemm_gflops(1), "2 threads": sgemm_gflops(2)},
        "run": overhead(),
        "pool": {name: pool(name, epochs) for name, epochs in (("cnn-w16", 4), ("resnet18-w16", 1))},
    }


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
