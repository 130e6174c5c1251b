"""`osfl run`: simulate one round, from images to a report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from osfl.cli import options
from osfl.cli.arguments import (
    DEFAULT_METHOD,
    RunOptions,
    from_plan,
    machine_for,
    parse_options,
    same_plan,
    with_smoke,
)
from osfl.cli.progress import progress_display
from osfl.cli.summary import show_run
from osfl.cli.terminal import errors, note, put_json
from osfl.core.errors import UsageError
from osfl.data.reading import Reading

if TYPE_CHECKING:
    from osfl.core.result import Result
    from osfl.runtime.machine import Machine
    from osfl.simulate.simulation import Federation, Simulation

EXAMPLES = (
    "osfl run --smoke",
    "osfl run --method ensemble --smoke",
    "osfl run --method fedavg --clients 3 --partition iid --smoke",
    "osfl run --method fedavg --smoke --set epochs=2 --out runs/trial",
    "osfl new --method fedavg --dataset digits --clients north,south --smoke --sites sites --out real.toml --force",
    "osfl run --plan real.toml --sites sites --out runs/rehearsal",
)

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        parser=options.new_folder,
        show_default=False,
        help="Where everything goes; default runs/METHOD-DATASET-PARTITION-seedS.",
    ),
]
Sites = Annotated[
    Path | None,
    typer.Option(
        "--sites",
        metavar="DIR",
        rich_help_panel=options.HOW,
        show_default=False,
        help="With --plan of a real round: rehearse it from the folders DIR/CLIENT.",
    ),
]


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
    sites: Sites = None,
    samples: options.Samples = None,
    test_samples: options.TestSamples = None,
    group: options.Group = "",
    slices: options.Slices = "",
    window: options.Window = "",
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    evaluate_on: options.EvaluateOn = "test",
    topology: options.Topology = None,
    encounters: options.Encounters = 1,
    contacts: options.Contacts = None,
    secure_sum: options.SecureSum = False,
    private_randomness: options.PrivateRandomness = False,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    colluders: options.Colluders = 0,
    engine: options.Engine = "local",
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    no_cache: options.NoCache = False,
    log: options.Log = None,
    output_format: options.Format = "text",
) -> None:
    """Simulate one round: every client uploads once, models are evaluated, and a report is written.

    Without --method it runs OneSum; `osfl advise` ranks the methods for what you know of your sites.
    The folder is the state: to continue after an interruption, run the same command again.
    """
    from osfl.simulate.run import run as simulate
    from osfl.simulate.simulation import default_folder
    from osfl.simulate.tracking.tracker import open_logs

    logs = open_logs(log, note)
    how: dict[str, Any] = {"workers": workers, "threads": threads, "engine": engine}
    if sites is not None:
        machine = machine_for(device, precision, memory, **how)
        folder, result, finished_before = _rehearsed(plan, sites, out, machine, output_format)
        for one in logs:
            one.run(result, folder)
    else:
        simulation, federation = _simulation(
            plan,
            RunOptions(
                [method or DEFAULT_METHOD],
                dataset,
                clients,
                partition,
                with_smoke(preset, smoke),
                seed,
                changes or (),
                samples,
                image_size,
                channels,
                evaluate_on,
                device,
                topology,
                encounters,
                contacts,
                test_samples,
                reading=Reading(group, "", slices, window),
                secure_sum=secure_sum,
                private_randomness=private_randomness,
                epsilon=epsilon,
                delta=delta,
                noise=noise,
                colluders=colluders,
            ),
        )
        machine = machine_for(device, precision, memory, **how)
        if method is None and plan is None:
            errors().print(f"No --method: this runs {DEFAULT_METHOD}. `osfl advise` ranks others.", style="dim")
        folder = out or default_folder(simulation)
        finished_before = (folder / "results.json").exists()
        with progress_display(output_format == "json") as progress:
            result = simulate(simulation, folder, machine=machine, progress=progress, federation=federation, logs=logs)
    if output_format == "json":
        put_json(result)
    else:
        show_run(result, folder, finished_before=finished_before)


def _simulation(plan: Path | None, args: RunOptions) -> tuple[Simulation, Federation | None]:
    """The simulation; of a plan, which is compared with the data that are here, also what was prepared."""
    from osfl.runtime.environment import device_named
    from osfl.simulate.simulation import prepare

    if plan is None:
        return parse_options(args), None
    simulation, round_plan = from_plan(plan, options.beside_plan(args.dataset, f"--plan {plan}"))
    device_named(args.device)
    federation = prepare(simulation)
    same_plan(round_plan, federation.plan, plan)
    return simulation, federation


def _rehearsed(
    plan: Path | None, sites: Path, out: Path | None, machine: Machine, output_format: str
) -> tuple[Path, Result, bool]:
    """Simulate a real round in one process: its release has the digest that the real one will have."""
    from osfl.core.plan import read_plan
    from osfl.runtime.environment import device_named
    from osfl.simulate.run import run_federation
    from osfl.simulate.simulation import rehearsal

    if plan is None:
        raise UsageError("--sites needs the plan of the round", field="plan", fix="Add --plan plan.toml.")
    options.refuse_beside_plan(f"--plan {plan}")
    device_named(machine.device)
    round_plan = read_plan(plan)
    folder = out or Path("runs") / f"{round_plan.method}-{round_plan.task.name}-sites-seed{round_plan.seed}"
    before = (folder / "results.json").exists()
    command = shlex.join(["osfl", "run", "--plan", str(plan), "--sites", str(sites), "--out", str(folder)]) + machine.options()
    with progress_display(output_format == "json") as progress:
        result = run_federation(
            rehearsal(round_plan, sites), folder, {"preset": "", "command": command}, machine=machine, progress=progress
        )
    return folder, result, before
