"""`osfl new`: a commented plan.toml, which everybody who takes part in a round needs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import put_json, say
from osfl.cli.words import Mistakes, Words, understand, with_smoke
from osfl.errors import UsageError

if TYPE_CHECKING:
    from osfl.protocol import Plan
    from osfl.simulation import Simulation

EXAMPLES = (
    "osfl new --method fedavg --dataset digits --out plan.toml --force",
    "osfl new --method ensemble --classes cat,dog --clients 3 --out pets.toml --force",
    "osfl check plan.toml",
)
PLACEHOLDERS = ("first-class", "second-class")

Dataset = Annotated[
    str | None,
    typer.Option("--dataset", "-d", metavar="NAME|PATH", autocompletion=options.complete_datasets, show_default=False,
                 rich_help_panel=options.WHAT, help="Fill the plan from a dataset; without one it is a template."),
]  # fmt: skip
Classes = Annotated[
    str | None,
    typer.Option("--classes", metavar="A,B,C", rich_help_panel=options.WHAT, show_default=False,
                 help="Names of the classes, in a template."),
]  # fmt: skip
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="FILE", parser=options.new_file, help="Where the plan goes.")
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace a plan that is there.")]


def new(
    method: options.Method = None,
    dataset: Dataset = None,
    clients: options.Clients = None,
    partition: options.Partition = "dirichlet:0.1",
    preset: options.Preset = "cpu",
    seed: options.Seed = 0,
    out: Out = Path("plan.toml"),
    force: Force = False,
    changes: options.Changes = None,
    smoke: options.Smoke = False,
    samples: options.Samples = None,
    classes: Classes = None,
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    format: options.Format = "text",
) -> None:
    """Write a plan.toml in which every setting of the method is explained."""
    from osfl.plan import write_plan
    from osfl.simulation import prepare

    mistakes = Mistakes()
    with mistakes.noted():
        _free(out, force)
    words = Words([method] if method else [], dataset or "digits", clients, partition, with_smoke(preset, smoke), seed,
                  changes or (), samples, image_size, channels)  # fmt: skip
    with mistakes.noted():
        if dataset and classes:
            raise UsageError("--classes is for templates; a dataset names its classes itself", field="classes")
        simulation = understand(words)
    mistakes.check()
    plan = prepare(simulation).plan if dataset else _template(simulation, classes)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(write_plan(plan), encoding="utf-8")
    if format == "json":
        put_json({"path": str(out), "digest": plan.digest, "plan": plan.as_json()})
        return
    say(f"Wrote {out}, round {plan.digest[:12]}.")
    if dataset:
        say(f"Look at its clients with `osfl check {out}`, run it with `osfl run --plan {out}`.")
    else:
        say("Fill in the classes, the image size and the clients, then look at it with `osfl check`.")


def _free(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise UsageError(f"{out} exists, and a plan that others hold should not change", field="out",
                         fix="Choose another --out, or replace it with --force.")  # fmt: skip


def _template(simulation: Simulation, classes: str | None) -> Plan:
    from osfl.data.partition import client_names
    from osfl.plan import check_plan, resolve_settings
    from osfl.protocol import Plan, Task
    from osfl.registry import load

    names = tuple(name.strip() for name in classes.split(",")) if classes else PLACEHOLDERS
    side = simulation.image_size or 32
    task = Task("my-task", names, (simulation.channels or 3, side, side))
    settings = resolve_settings(load(simulation.method), simulation.preset, simulation.changes)
    plan = Plan(task, simulation.method, settings, tuple(client_names(simulation.clients or 5)), seed=simulation.seed)
    check_plan(plan)
    return plan
