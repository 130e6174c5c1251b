"""`osfl run`: one simulated round, from images to a report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.progress import telling
from osfl.cli.summary import show_run
from osfl.cli.words import Words, default_out, from_plan, same_plan, understand, with_smoke

EXAMPLES = (
    "osfl run --method ensemble --smoke",
    "osfl run --method fedavg --clients 3 --partition iid --smoke",
    "osfl run --method fedavg --smoke --set epochs=2 --out runs/trial",
)

Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, show_default=False,
                 help="Where everything goes; default runs/METHOD-DATASET-PARTITION-seedS."),
]  # fmt: skip


def run(
    method: options.Method = None,
    dataset: options.Dataset = "digits",
    clients: options.Clients = None,
    partition: options.Partition = "dirichlet:0.1",
    preset: options.Preset = "cpu",
    seed: options.Seed = 0,
    out: Out = None,
    changes: options.Changes = None,
    smoke: options.Smoke = False,
    plan: options.PlanFile = None,
    samples: options.Samples = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    evaluate_on: options.EvaluateOn = "test",
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    format: options.Format = "text",
) -> None:
    """Simulate one round: every client speaks once, then models are judged and a report is written.

    The folder is the state: to continue after an interruption, run the same command again.
    """
    from osfl.environment import device_named
    from osfl.phases import Machine
    from osfl.run import run as walk
    from osfl.simulation import prepare

    if plan is not None:
        options.refuse_beside_plan(f"--plan {plan}")
        device_named(device)
        simulation, agreed = from_plan(plan)
        same_plan(agreed, prepare(simulation).plan, plan)
    else:
        words = Words([method] if method else [], dataset, clients, partition, with_smoke(preset, smoke), seed,
                      changes or (), samples, image_size, channels, evaluate_on, device)  # fmt: skip
        simulation = understand(words)
    folder = out or default_out(simulation)
    finished_before = (folder / "results.json").exists()
    machine = Machine(workers=workers, threads=threads, device=device)
    with telling(format == "json") as progress:
        result = walk(simulation, folder, machine=machine, progress=progress)
    if format == "json":
        sys.stdout.write((folder / "results.json").read_text(encoding="utf-8"))
    else:
        show_run(result, folder, finished_before=finished_before)
