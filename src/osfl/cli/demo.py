"""`osfl demo`: the problem that one-shot methods solve, on embedded images, in two minutes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from osfl.cli import options
from osfl.cli.progress import by_run, telling
from osfl.cli.summary import show_comparison
from osfl.cli.terminal import say

EXAMPLES = (
    "osfl demo",
    "osfl demo --smoke --out runs/demo-smoke",
    "osfl demo --smoke --out runs/demo-smoke --format json",
)
METHODS = ("local_only", "ensemble", "fedavg", "fedavg_rounds", "centralized")

Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="Where runs and report go.")]


def demo(
    out: Out = Path("runs/demo"),
    smoke: options.Smoke = False,
    workers: options.Workers = None,
    format: options.Format = "text",
) -> None:
    """Five sites that hold different digits: alone, together in one round, in many rounds, and pooled."""
    from osfl.run import Machine, compare
    from osfl.simulation import Simulation

    simulation = Simulation(METHODS[0], "digits", 5, "dirichlet:0.1", preset="smoke" if smoke else "cpu")
    if format == "text":
        say("Five sites hold handwritten digits, unevenly: Dirichlet 0.1. Each may speak once.\n")
    with telling(format == "json") as progress:
        comparison = compare(simulation, METHODS, [0], out, machine=Machine(workers), progress=by_run(progress))
    if format == "json":
        sys.stdout.write((out / "comparison.json").read_text(encoding="utf-8"))
        return
    show_comparison(comparison, out / "report" / "index.html")
    say()
    say(reading(comparison["methods"]))


def reading(methods: Mapping[str, Any]) -> str:
    """What the table shows, in numbers of the table."""
    from osfl.reports.words import percent

    def accuracy(name: str) -> float:
        return float(methods[name]["scores.global.accuracy"]["mean"])

    once, rounds, pooled = accuracy("fedavg"), accuracy("fedavg_rounds"), accuracy("centralized")
    messages = int(methods["fedavg_rounds"]["costs.messages_per_client"]["mean"])
    verb = "collapses to" if once < 0.5 * rounds else "reaches"
    return (
        f"FedAvg in one round {verb} {percent(once)}; it needs {messages} rounds for {percent(rounds)}, and all images in one "
        f"place give {percent(pooled)}.\nThe models it averages are not bad: asked together (ensemble) they reach "
        f"{percent(accuracy('ensemble'))}. Closing that gap in one round is what the methods here are for."
    )
