"""`osfl demo`: compare local training, one-shot methods and references on embedded images, in two minutes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.progress import by_run, progress_display
from osfl.cli.summary import show_comparison
from osfl.cli.terminal import echo, output, put_json
from osfl.core.types import Json

EXAMPLES = (
    "osfl demo",
    "osfl demo --smoke --out runs/demo-smoke",
    "osfl demo --smoke --out runs/demo-smoke --format json",
)
ACCURACY = "scores.global.accuracy"
INFORMED = "ensemble@ensemble=class_count"  # each site votes on a class with the weight of what it has seen of it
FACTORY = "federated_factory"
OURS = "onesum"
METHODS = (OURS, "local_only", "ensemble", INFORMED, "fedavg", FACTORY, "fedavg_rounds", "centralized")
# The same sites with vision transformers, which start from one file that is a part of this package: what a server can do with
# models and class counts. Written digits are not mirrored.
ODDS, VITS = "ensemble@ensemble=odds", {"architecture": "vit", "augment": "none", "pretrained": "vit_signs"}
TRANSFORMERS = ("local_only", ODDS, "fedavg", "deepinversion_vit", "fedmitr")

Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, help="Where runs and report go.")]


def demo(
    out: Out = Path("runs/demo"),
    smoke: options.Smoke = False,
    workers: options.Workers = None,
    output_format: options.Format = "text",
) -> None:
    """Compare methods on five sites that hold different digits: OneSum, local training, one round, many rounds, pooled images,
    generators, and vision transformers that the server inverts."""
    from osfl.ingredients.training.uploaded_vits import tuned_alike
    from osfl.runtime.machine import Machine
    from osfl.simulate.compare import compare
    from osfl.simulate.simulation import Simulation

    simulation = Simulation(METHODS[0], "digits", 5, "dirichlet:0.1", preset="smoke" if smoke else "cpu")
    uploaded = replace(simulation, changes=VITS if smoke else {**tuned_alike(), **VITS})

    def compared(simulation: Simulation, methods: Sequence[str], out: Path) -> dict[str, Json]:
        with progress_display(output_format == "json") as progress:
            return compare(simulation, methods, [0], out, machine=Machine(workers=workers), progress=by_run(progress))

    if output_format == "json":
        found = {**compared(simulation, METHODS, out), "transformers": compared(uploaded, TRANSFORMERS, out / "transformers")}
        put_json(found)
        return
    echo("Five sites hold digits, unevenly (Dirichlet 0.1), and each may upload once.\n")
    first = compared(simulation, METHODS, out)
    show_comparison(first, out / "report" / "index.html")
    output().print("\n" + reading(first["methods"]))
    echo("\nThe same sites fine-tune vision transformers from one start and send these, with their class counts.\n")
    second = compared(uploaded, TRANSFORMERS, out / "transformers")
    show_comparison(second, out / "transformers" / "report" / "index.html")
    output().print("\n" + read_transformers(second["methods"]))


def reading(methods: Mapping[str, Json]) -> str:
    """What the table shows, in numbers of the table."""
    from osfl.reports.text import percent

    def value(name: str, metric: str = ACCURACY) -> float:
        return float(methods[name][metric]["mean"])

    single, rounds, pooled, together = (value(name) for name in ("fedavg", "fedavg_rounds", "centralized", INFORMED))
    verb = "collapses to" if single < 0.6 * rounds else "reaches"
    messages = int(value("fedavg_rounds", "costs.messages_per_client"))
    text = (
        f"OneSum reaches [bold]{percent(value(OURS))}[/]: its sites send sums of features, and nothing is trained. FedAvg in "
        f"one round {verb} [bold]{percent(single)}[/]; in {messages} rounds it reaches {percent(rounds)}, and all "
        f"images in one place give {percent(pooled)}. The models that FedAvg averages are not bad: each is right on "
        f"{percent(value('local_only', 'scores.clients.own.mean'))} of what its own site holds"
    )
    if together > 1.2 * single:
        text += f", and asked together (ensemble weighted by class counts) they reach {percent(together)}"
    text += ". Closing this gap with one message a site is what one-shot methods are for. "
    return f"{text}FederatedFactory, whose sites send generators instead, reaches [bold]{percent(value(FACTORY))}[/]."


def read_transformers(methods: Mapping[str, Json]) -> str:
    """What the second table shows, in numbers of the table."""
    from osfl.reports.text import percent

    averaged, distilled, relabeled, together = (
        percent(float(methods[name][ACCURACY]["mean"])) for name in ("fedavg", "deepinversion_vit", "fedmitr", ODDS)
    )
    return (
        f"Averaged, they reach {averaged}. FedMITR's server makes images from the models, patch by patch, and teaches the "
        f"average with them: [bold]{relabeled}[/]. The same without labels for patches (DeepInversion) reaches {distilled}, "
        f"and all models asked together are right on {together}."
    )
