"""`osfl compare`: run several methods on the same shards; one table and one figure."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import (
    DEFAULT_METHOD,
    SENSIBLE,
    Mistakes,
    RunOptions,
    machine_for,
    names,
    numbers,
    parse_options,
    sensible,
    with_smoke,
)
from osfl.cli.progress import by_run, progress_display
from osfl.cli.summary import show_comparison
from osfl.cli.terminal import note, put_json
from osfl.core.errors import UsageError
from osfl.data.reading import Reading

EXAMPLES = (
    "osfl compare --smoke",
    "osfl compare --methods onesum,fedavg,ensemble --smoke --out runs/three",
    "osfl compare --methods fedavg,ensemble --seeds 0,1 --smoke --out runs/two",
    "osfl compare --methods fedavg,ensemble@ensemble=size --smoke --out runs/size",
)

Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        "-m",
        metavar="A,B,C",
        rich_help_panel=options.WHAT,
        show_default=False,
        help="Names of `osfl ls methods`; ensemble@ensemble=size is a variant. Default: six that show what is possible.",
    ),
]
Seeds = Annotated[
    str, typer.Option("--seeds", "-s", metavar="0,1,2", rich_help_panel=options.WHAT, help="One run a method and seed.")
]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", metavar="DIR", parser=options.new_folder, help="Gets a folder METHOD/seedS for each run, and report/."
    ),
]

Fresh = Annotated[
    bool, typer.Option("--fresh", help="Repeat runs that are finished, such as after a change of a method's code.")
]


def _own(label: str) -> str:
    """`./mine.py@epochs=2` is a variant of a method of one's own."""
    name, at, rest = label.partition("@")
    return f"{options.own_method(name)}{at}{rest}"


def compare(
    methods: Methods = None,
    dataset: options.Dataset = "digits",
    clients: options.Clients = None,
    partition: options.Partition = "dirichlet:0.1",
    preset: options.Preset = "cpu",
    seeds: Seeds = "0",
    out: Out = Path("runs/compare"),
    changes: options.Changes = None,
    smoke: options.Smoke = False,
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
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    metric: options.Metric = "",
    fresh: Fresh = False,
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    no_cache: options.NoCache = False,
    log: options.Log = None,
    output_format: options.Format = "text",
) -> None:
    """Run several methods on the same shards and show them side by side.

    A client model that several methods upload is trained once. A setting applies to every method that has it, and the
    topology (--topology, --encounters, --contacts) to every method without a server phase of its own.
    """
    from osfl.core.headline import headline
    from osfl.simulate.compare import compare as compare_methods
    from osfl.simulate.tracking.tracker import Log, open_logs

    logs: list[Log] = []
    mistakes, wanted, chosen = Mistakes(), [DEFAULT_METHOD], [0]  # wrong names: the other options are checked all the same
    with mistakes.noted():
        headline([1, 1], metric)
    with mistakes.noted():
        logs = open_logs(log, note)
    with mistakes.noted():
        wanted = [_own(label) for label in names(methods, "--methods")] if methods is not None else list(SENSIBLE)
        if not wanted:
            raise UsageError(
                "--methods names none", field="methods", fix="`osfl ls methods` lists them; without --methods it is six."
            )
    with mistakes.noted():
        chosen = numbers(seeds, "--seeds")
    args = RunOptions(
        wanted,
        dataset,
        clients,
        partition,
        with_smoke(preset, smoke),
        chosen[0],
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
    )
    with mistakes.noted():
        simulation = parse_options(args)
    mistakes.check()
    wanted = wanted if methods is not None else sensible(simulation)
    machine = machine_for(device, precision, memory, workers=workers, threads=threads)
    with progress_display(output_format == "json") as progress:
        comparison = compare_methods(
            simulation, wanted, chosen, out, machine=machine, progress=by_run(progress), metric=metric, fresh=fresh, logs=logs
        )
    if output_format == "json":
        put_json(comparison)
    else:
        show_comparison(comparison, out / "report" / "index.html")
