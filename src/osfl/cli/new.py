"""`osfl new`: write a commented plan.toml, which every participant of a round needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import DEFAULT_METHOD, Mistakes, RunOptions, names, needs_path, parse_options, with_smoke
from osfl.cli.terminal import echo, put_json
from osfl.core.errors import UsageError
from osfl.data.reading import Reading

if TYPE_CHECKING:
    from osfl.core.types import Plan
    from osfl.simulate.simulation import Simulation

EXAMPLES = (
    "osfl new --method fedavg --dataset digits --out plan.toml --force",
    "osfl new --method ensemble --classes cat,dog --clients north,south,west --out pets.toml --force",
    "osfl new --method fedavg --dataset digits --clients north,south --smoke --sites sites --out real.toml --force",
)
FEWEST = 3  # sites of a plan that gets a secure sum without being asked
PLACEHOLDERS = ("first-class", "second-class")

Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset",
        "-d",
        metavar="NAME|PATH",
        autocompletion=options.complete_datasets,
        show_default=False,
        rich_help_panel=options.WHAT,
        help="Fill the plan from a dataset; without one it is a template.",
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes",
        metavar="A,B,C",
        rich_help_panel=options.WHAT,
        show_default=False,
        help="Names of the classes, in a template.",
    ),
]
Multilabel = Annotated[
    bool,
    typer.Option(
        "--multilabel",
        rich_help_panel=options.WHAT,
        help="In a template: an image may have several of the classes, or none. A dataset says so itself.",
    ),
]
Clients = Annotated[
    str | None,
    typer.Option(
        "--clients",
        "-n",
        metavar="N|A,B,C",
        rich_help_panel=options.WHAT,
        show_default=False,
        help="How many sites, default 5; or their names, for a real round.",
    ),
]
Sites = Annotated[
    Path | None,
    typer.Option(
        "--sites",
        metavar="DIR",
        parser=options.new_folder,
        rich_help_panel=options.WHAT,
        show_default=False,
        help="Rehearse a real round: split the dataset into image folders, DIR/NAME/class/*.",
    ),
]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", parser=options.new_file, help="Where the plan goes.")]
After = Annotated[
    Path | None,
    typer.Option(
        "--after",
        metavar="plan.toml",
        show_default=False,
        help="Write the plan of the encounter after this one; nothing else changes.",
    ),
]
Quorum = Annotated[
    int,
    typer.Option(
        "--quorum", metavar="Q", min=0, help="So many uploads are needed for the server phase; 0: one of each client."
    ),
]
SumKind = Annotated[
    bool | None,
    typer.Option(
        "--secure-sum/--open-sum",
        show_default=False,
        rich_help_panel=options.WHAT,
        help="Mask uploads: the server learns their sum only. For methods whose server only adds; sets limits.share = 1. "
        "Without either, a plan for three or more real sites has it where open sums could show single images.",
    ),
]
Force = Annotated[bool, typer.Option("--force", "-f", help="Replace a plan that is there.")]


MASKED = (
    "Uploads are masked (secure_sum = true), because open sums can show single images: the server learns the sum only, and "
    "each site needs the others' public keys (`osfl client --keys`). What it costs stands in the plan; `--open-sum` leaves it "
    "out."
)
OPEN_SUMS = (
    "Sums are sent openly: a site where they show a single image stops and sends nothing. `--secure-sum` shows the server only "
    "the total, `--epsilon 8 --delta 1e-5` adds noise: choose one for a real round with small sites."
)


def _refuse_own(method: str | None) -> None:
    """A plan is for several machines, and a file of one of them is not there on the others."""
    from osfl.core.registry import is_own

    if method is not None and is_own(method):
        raise UsageError(
            f"a plan cannot name a method by its file: the other sites would not have {method!r}",
            field="method",
            fix="Install it at every site, with an entry point in the group osfl.methods; see docs/architecture.md.",
        )


def new(
    method: options.Method = None,
    dataset: Dataset = None,
    clients: Clients = None,
    partition: options.Partition = "dirichlet:0.1",
    preset: options.Preset = "cpu",
    seed: options.Seed = 0,
    out: Out = Path("plan.toml"),
    force: Force = False,
    changes: options.Changes = None,
    smoke: options.Smoke = False,
    samples: options.Samples = None,
    classes: Classes = None,
    multilabel: Multilabel = False,
    sites: Sites = None,
    group: options.Group = "",
    slices: options.Slices = "",
    window: options.Window = "",
    image_size: options.ImageSize = None,
    channels: options.Channels = None,
    topology: options.Topology = None,
    encounters: options.Encounters = 1,
    contacts: options.Contacts = None,
    secure_sum: SumKind = None,
    private_randomness: options.PrivateRandomness = False,
    quorum: Quorum = 0,
    epsilon: options.Epsilon = None,
    delta: options.Delta = None,
    noise: options.Noise = None,
    colluders: options.Colluders = 0,
    after: After = None,
    output_format: options.Format = "text",
) -> None:
    """Write a plan.toml in which every setting of the method is explained. Without --method it is one of OneSum."""
    from osfl.core.plan import check_plan
    from osfl.simulate.simulation import prepare

    if after is not None:
        _free(out, force)
        _write(_next(after), out, output_format)
        return
    mistakes = Mistakes()
    with mistakes.noted():
        _refuse_own(method)
    named: Sequence[str] = ()
    number = None
    with mistakes.noted():
        _free(out, force)
    with mistakes.noted():
        named, number = _clients(clients)
    args = RunOptions(
        [method or DEFAULT_METHOD],
        dataset or "digits",
        number,
        partition,
        with_smoke(preset, smoke),
        seed,
        changes or (),
        samples,
        image_size,
        channels,
        topology=topology,
        encounters=encounters,
        contacts=contacts,
        reading=Reading(group, "", slices, window),
        secure_sum=bool(secure_sum),
        private_randomness=private_randomness,
        epsilon=epsilon,
        delta=delta,
        noise=noise,
        colluders=colluders,
    )
    with mistakes.noted():
        _consistent(dataset, classes, named, sites, multilabel)
        simulation = parse_options(args)
    mistakes.check()
    if sites is not None:
        plan = _dealt_out(simulation, named, sites)
    else:
        plan = prepare(simulation).plan if dataset else _template(simulation, classes, named, multilabel)
    plan = replace(plan, quorum=quorum)
    check_plan(plan)
    chosen = secure_sum is None and (sites is not None or not dataset)
    plan = _without_open_sums(plan) if chosen else plan
    _write(plan, out, output_format)
    if output_format == "json":
        return
    if sites is not None:
        echo(f"Images of {', '.join(plan.clients)} are in {sites}. Rehearse it with `osfl run --plan {out} --sites {sites}`.")
    elif dataset:
        at = f" --dataset {shlex.quote(dataset)}" if needs_path(dataset) else ""
        echo(f"Look at its clients with `osfl check {out}{at}`, run it with `osfl run --plan {out}{at}`.")
    else:
        echo(f"{_still_open(classes, image_size, clients)} with `osfl check {out}`.")
    if chosen and plan.secure_sum:
        echo(MASKED)
    elif not dataset and _has_open_sums(plan):
        echo(OPEN_SUMS)


def _has_open_sums(plan: Plan) -> bool:
    """Sites of this plan send sums that a reader may open, and stop where single images would be shown."""
    return getattr(plan.settings, "readable", "") == "stop" and not plan.secure_sum and plan.privacy is None


def _without_open_sums(plan: Plan) -> Plan:
    """With a secure sum, where real sites would else often stop and send nothing, and where the plan can have one: in a sum
    of two sites each could compute the other's numbers, and peers, say, need uploads that can be read."""
    from osfl.core.plan import check_plan

    masked = replace(plan, secure_sum=True, limits=replace(plan.limits, share=1.0))
    if (plan.quorum or len(plan.clients)) < FEWEST or not _has_open_sums(plan):
        return plan
    try:
        check_plan(masked)
    except UsageError:
        return plan
    return masked


def _still_open(classes: str | None, image_size: int | None, clients: str | None) -> str:
    """An error for what a template needs and no option gave."""
    given = {"the classes": classes, "the image size": image_size, "the clients": clients}
    missing = [what for what, value in given.items() if value is None]
    if not missing:
        return "Nothing is left to fill in; look at it"
    return f"Fill in {' and '.join(filter(None, (', '.join(missing[:-1]), missing[-1])))}, then look at it"


def _next(after: Path) -> Plan:
    from osfl.core.plan import read_plan
    from osfl.core.topology import next_encounter

    options.refuse_beside_plan(f"--after {after}")
    return next_encounter(read_plan(after))


def _write(plan: Plan, out: Path, output_format: str) -> None:
    from osfl.core.plan import write_plan

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(write_plan(plan), encoding="utf-8")
    if output_format == "json":
        put_json({"path": str(out), "digest": plan.digest, "plan": plan.as_json()})
        return
    topology = plan.topology
    which = f", encounter {topology.encounter} of {topology.encounters}" if topology and topology.encounters > 1 else ""
    echo(f"Wrote {out}, round {plan.digest[:12]}{which}.")


def _clients(text: str | None) -> tuple[Sequence[str], int | None]:
    """`3`, or `north,south,west`."""
    if text is None:
        return (), None
    if text.strip().lstrip("-").isdigit():
        number = int(text)
        if number < 1:
            raise UsageError(f"--clients {text}: expected at least 1", field="clients")
        return (), number
    found = names(text, "--clients", "client")
    return found, len(found)


def _consistent(dataset: str | None, classes: str | None, named: Sequence[str], sites: Path | None, multilabel: bool) -> None:
    problems = []
    if dataset and multilabel:
        problems.append("--multilabel is for templates; a dataset says itself whether an image has several labels")
    if dataset and classes:
        problems.append("--classes is for templates; a dataset names its classes itself")
    if dataset and named and sites is None:
        problems.append("--clients with names is for templates and --sites; simulated clients are numbered")
    if sites is not None and not dataset:
        problems.append("--sites deals out a dataset: give --dataset, too")
    if problems:
        raise UsageError(
            problems,
            field="classes" if classes else "clients",
            fix="A template: --classes and --clients with names. A dataset that is dealt out: --dataset, "
            "--clients with names and --sites DIR.",
        )


def _free(out: Path, force: bool) -> None:
    if out.exists() and not force:
        raise UsageError(
            f"{out} exists, and a plan that others hold should not change",
            field="out",
            fix="Choose another --out, or replace it with --force.",
        )


def _dealt_out(simulation: Simulation, named: Sequence[str], sites: Path) -> Plan:
    """A plan without data of its own, and each client's images where a site would have them."""
    from osfl.core.plan import check_plan
    from osfl.data.export import write_images
    from osfl.data.source import together
    from osfl.simulate.simulation import prepare

    topology, simulation = simulation.topology, replace(simulation, topology=None)  # a schedule knows the sites by their names
    federation = prepare(simulation)
    chosen = tuple(sorted(named)) or federation.plan.clients
    if len(chosen) != len(federation.shards):
        raise UsageError(
            f"this partition makes {len(federation.shards)} clients, and {len(chosen)} are named",
            field="clients",
            fix="Name as many, or choose another --partition.",
        )
    plan = replace(federation.plan, clients=chosen, data={}, topology=topology)
    check_plan(plan)
    for name, shard in zip(chosen, federation.shards, strict=True):
        write_images(sites / name, together([shard.train, shard.val]), plan.task.classes)
    return plan


def _template(simulation: Simulation, classes: str | None, clients: Sequence[str], multilabel: bool) -> Plan:
    from osfl.core.plan import check_plan
    from osfl.core.registry import load
    from osfl.core.settings import resolve_settings
    from osfl.core.types import Limits, Plan, Task
    from osfl.data.partition import client_names
    from osfl.models.input_facts import encoder_side

    names = tuple(name.strip() for name in classes.split(",")) if classes else PLACEHOLDERS
    method = load(simulation.method)
    private = method.PRIVATE if simulation.privacy else {}
    settings = resolve_settings(method, simulation.preset, {**private, **simulation.changes})
    side = simulation.image_size or encoder_side(settings) or 32  # an encoder gets the detail that files have
    task = Task("my-task", names, (simulation.channels or 3, side, side), "multilabel" if multilabel else "multiclass")
    plan = Plan(
        task,
        simulation.method,
        settings,
        tuple(sorted(clients)) or tuple(client_names(simulation.clients or 5)),
        Limits(share=1.0) if simulation.secure_sum else Limits(),
        seed=simulation.seed,
        topology=simulation.topology,
        data=simulation.reading.as_facts(),
        secure_sum=simulation.secure_sum,
        private_randomness=simulation.private_randomness,
        privacy=simulation.privacy,
    )
    check_plan(plan)
    return plan
