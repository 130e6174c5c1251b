"""`osfl demo`: the problem that one-shot methods solve, on embedded images, in a minute."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from osfl.cli import options
from osfl.cli.progress import by_run, telling
from osfl.cli.summary import show_comparison
from osfl.cli.terminal import answers, say

EXAMPLES = (
    "osfl demo",
    "osfl demo --smoke --out runs/demo-smoke",
    "osfl demo --smoke --out runs/demo-smoke --format json",
)
INFORMED = "ensemble@combine=class_count"  # each site votes on a class with the weight of what it has seen of it
FACTORY = "federated_factory"
METHODS = ("local_only", "ensemble", INFORMED, "fedavg", FACTORY, "fedavg_rounds", "centralized")

Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, help="Where runs and report go.")
]


def demo(
    out: Out = Path("runs/demo"),
    smoke: options.Smoke = False,
    workers: options.Workers = None,
    format: options.Format = "text",
) -> None:
    """Five sites that hold different digits: alone, together in one round, in many rounds, pooled, and with generators."""
    from osfl.phases import Machine
    from osfl.run import compare
    from osfl.simulation import Simulation

    simulation = Simulation(METHODS[0], "digits", 5, "dirichlet:0.1", preset="smoke" if smoke else "cpu")
    if format == "text":
        say("Five sites hold digits, unevenly (Dirichlet 0.1), and each may speak once.\n")
    with telling(format == "json") as progress:
        comparison = compare(simulation, METHODS, [0], out, machine=Machine(workers=workers), progress=by_run(progress))
    if format == "json":
        sys.stdout.write((out / "comparison.json").read_text(encoding="utf-8"))
        return
    show_comparison(comparison, out / "report" / "index.html")
    answers().print("\n" + reading(comparison["methods"]))


def reading(methods: Mapping[str, Any]) -> str:
    """What the table shows, in numbers of the table."""
    from osfl.reports.words import percent

    def value(name: str, metric: str = "scores.global.accuracy") -> float:
        return float(methods[name][metric]["mean"])

    once, rounds, pooled, together = (value(name) for name in ("fedavg", "fedavg_rounds", "centralized", INFORMED))
    verb = "collapses to" if once < 0.6 * rounds else "reaches"
    messages = int(value("fedavg_rounds", "costs.messages_per_client"))
    text = (
        f"FedAvg in one round {verb} [bold]{percent(once)}[/]; in {messages} rounds it reaches {percent(rounds)}, and all "
        f"images in one place give {percent(pooled)}. The models that it averages are not bad: each is right on "
        f"{percent(value('local_only', 'scores.clients.own.mean'))} of what its own site holds"
    )
    if together > 1.2 * once:
        text += f", and asked together (ensemble weighted by class counts) they reach {percent(together)}"
    text += ". Closing this gap with one message a site is what one-shot methods are for: "
    return f"{text}FederatedFactory, whose sites send generators instead, reaches [bold]{percent(value(FACTORY))}[/]."
