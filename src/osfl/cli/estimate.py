"""`osfl estimate`: traffic, time and memory of a run, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import DEFAULT_METHOD, RunOptions, machine_for, names, parse_options, with_smoke
from osfl.cli.terminal import echo, errors, escape, output, put_json
from osfl.core.errors import OsflError
from osfl.data.reading import Reading

if TYPE_CHECKING:
    from osfl.rounds.contacts import Done, Pass
    from osfl.simulate.estimate import Estimate

EXAMPLES = (
    "osfl estimate --method fedavg",
    "osfl estimate --method dense,fedavg_rounds --smoke",
    "osfl estimate --method fedavg --smoke --set architecture=resnet18-w16",
    "osfl estimate --method fol --smoke --topology random:2 --encounters 2",
)

Methods = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        metavar="A,B",
        autocompletion=options.complete_methods,
        rich_help_panel=options.WHAT,
        help="One method or several of `osfl ls methods`; default onesum.",
    ),
]

Sealed = Annotated[
    bool,
    typer.Option(
        "--sealed",
        rich_help_panel=options.HOW,
        help="Contact windows carry sealed bundles (`osfl client --seal`; over Flower always).",
    ),
]


def estimate(
    method: Methods = None,
    dataset: options.Dataset = "digits",
    clients: options.Clients = None,
    partition: options.Partition = "dirichlet:0.1",
    preset: options.Preset = "cpu",
    seed: options.Seed = 0,
    changes: options.Changes = None,
    smoke: options.Smoke = False,
    samples: options.Samples = None,
    group: options.Group = "",
    slices: options.Slices = "",
    window: options.Window = "",
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    evaluate_on: options.EvaluateOn = "test",
    topology: options.Topology = None,
    encounters: options.Encounters = 1,
    contacts: options.Contacts = None,
    plan: options.PlanFile = None,
    sealed: Sealed = False,
    workers: options.Workers = None,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    no_cache: options.NoCache = False,
    output_format: options.Format = "text",
) -> None:
    """Estimate what a run will send, how long it will take and how much memory it needs.

    All of it is measured in short runs with a few images: client phase, server phase and personalization. A plan that
    cannot fit its device or this computer is refused. With --contacts, or --plan of a
    real round, it shows what fits into each window and when each site has received its neighbors' uploads.
    """
    if plan is not None:
        _plan_ahead(plan, sealed, output_format)
        return
    wanted = names(method or DEFAULT_METHOD, "--method")
    args = RunOptions(
        wanted,
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
        topology=topology,
        encounters=encounters,
        contacts=contacts,
        reading=Reading(group, "", slices, window),
    )
    simulation = parse_options(args)

    from osfl.simulate.estimate import estimate as measured
    from osfl.simulate.simulation import for_methods

    found: dict[str, Estimate] = {}
    failed: dict[str, OsflError] = {}
    machine = machine_for(device, precision, memory, workers=workers)
    for label, variant in zip(wanted, for_methods(simulation, wanted), strict=True):
        errors().print(f"rehearsing {escape(label)} …", style="dim")
        try:
            found[label] = measured(variant, machine, sealed=sealed)
        except OsflError as error:
            failed[label] = error
    if not found:
        raise failed[wanted[0]]
    if output_format == "json":
        values = [found[name].as_json() if name in found else {"method": name, **failed[name].as_json()} for name in wanted]
        put_json(values[0] if len(values) == 1 else values)
    else:
        _show(list(found), list(found.values()))
        for label, why in failed.items():
            echo(f"[red]{escape(label)}[/]: {escape(str(why))}")


def _plan_ahead(path: Path, sealed: bool, output_format: str) -> None:
    """The contact schedule of a plan, without anybody's images."""
    from dataclasses import asdict

    from osfl.core.plan import read_plan
    from osfl.simulate.estimate import planned_exchanges

    options.refuse_beside_plan(f"--plan {path}")
    passes, done = planned_exchanges(read_plan(path), sealed=sealed)
    if output_format == "json":
        put_json({"passes": [asdict(way) for way in passes], "done": [asdict(site) for site in done]})
    else:
        _show_passes(passes, done)


def _show_passes(passes: Sequence[Pass], done: Sequence[Done]) -> None:
    """Window by window, then site by site."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.reports.text import seconds, size
    from osfl.rounds.contacts import unmet, what_would_fit

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Opens (UTC)", no_wrap=True)
    table.add_column("From and to", overflow="fold")
    for title in ("For", "Carries", "To send", "There"):
        table.add_column(title, justify="right", no_wrap=True)
    for way in passes:
        opened, there = _moment(way.start), _moment(way.arrives) if way.fits else ""
        there = there.removeprefix(opened[:11])  # the day only where it is another
        arrives = there or "[bold red]not all[/]"
        table.add_row(
            opened,
            f"{way.sender} → {way.receiver}",
            seconds(way.seconds),
            size(way.window_bytes),
            size(way.bundle_bytes - way.carried_before),
            arrives,
        )
    output().print(table)
    for site in done:
        received = f"{site.received} of {site.expected} neighbors"
        at = f"done at {_moment(site.at)}" if site.at else "[bold red]never all of them[/]"
        at = at if site.expected else "[yellow]has no neighbor, and keeps its own model[/]"
        echo(f"{site.client:<16} encounter {site.encounter}: receives {received}, {at}")
    short = unmet(passes)
    if short:
        tight = min(short, key=lambda way: way.room / way.bundle_bytes)
        silent = ", ".join(sorted({way.sender for way in short}))
        echo(
            f"[yellow]{len(short)} bundle(s) will be refused before the contact; nobody receives the upload of {silent}.[/] "
            f"The tightest, {tight.sender} to {tight.receiver}: {what_would_fit(tight.size, tight.room)} "
            "Or leave these contacts out."
        )


def _moment(text: str) -> str:
    """A time in UTC as it is read: 2026-12-24 18:00:34."""
    from datetime import UTC, datetime

    return datetime.fromisoformat(text).astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def _show(labels: Sequence[str], found: Sequence[Estimate]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.reports.text import count, seconds, size

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=0)  # the box has a blank between columns: all fit into 80
    table.add_column("Method", overflow="fold", min_width=min(20, max(map(len, labels))))
    for title in ("Up, each", "Up, all", "Down, all", "Msgs", "Clients", "Server", "Wait", "Memory", "Tensors"):
        table.add_column(title, justify="right", overflow="fold")
    for label, one in zip(labels, found, strict=True):
        mark = "" if one.exact_bytes else "≥ "
        table.add_row(
            escape(label),
            mark + _range(list(one.upload_bytes.values())),
            mark + size(sum(one.upload_bytes.values())),
            size(sum(one.download_bytes.values())),
            count(one.messages_per_client),
            seconds(one.client_seconds),
            seconds(one.server_seconds),
            seconds(one.wall_seconds),
            size(one.memory_bytes),
            size(one.device_bytes),
        )
    output().print(table)
    echo("[dim]Measured in short rehearsals and continued to the whole run, without evaluation. A busy machine is slower.[/]")
    echo("[dim]Clients: all together, before and after the server. Wait: clients side by side, the server with one worker.[/]")
    echo("[dim]Memory: this process with all workers. Tensors: what one worker needs on its device, in the largest phase.[/]")
    for label, one in zip(labels, found, strict=True):
        if one.rehearsed:
            echo(f"[dim]{escape(label)}, rehearsed with → run: {escape('; '.join(one.rehearsed))}[/]")
        if one.kept_features:
            share = f"{one.kept_features:.0%}" if one.kept_features < 1 else "all"
            echo(
                f"{escape(label)}: features of {share} of the images that were tried are kept (`osfl cache`). "
                "A run does not encode those again, and is shorter than this."
            )
    for one in found:
        if one.passes:
            _show_passes(one.passes, one.done)
    if not all(one.exact_bytes for one in found):
        echo("[dim]≥ the size depends on the data or on settings; this is what the rehearsal sent.[/]")


def _range(values: Sequence[int]) -> str:
    from osfl.reports.text import size

    least, most = size(min(values)), size(max(values))
    return least if least == most else f"{least} to {most}"
