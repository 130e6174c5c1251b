"""`osfl check`: open the data, show the labels of each client, and list all findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import RunOptions, from_plan, parse_options, same_plan, with_smoke
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, escape, on_one_line, output, put_json
from osfl.core.errors import OsflError, UsageError
from osfl.core.result import finding_line
from osfl.core.types import Json
from osfl.data.reading import Reading, reading_of

if TYPE_CHECKING:
    from rich.text import Text

    from osfl.core.result import Finding, Inputs
    from osfl.core.types import Plan
    from osfl.data.source import Problem
    from osfl.simulate.simulation import Federation

EXAMPLES = (
    "osfl check --dataset digits",
    "osfl check --dataset digits --partition classes:3 --clients 10",
    "osfl new --method fedavg --dataset digits --out plan.toml --force",
    "osfl check plan.toml",
    "osfl new --method fedavg --dataset digits --clients north,south --smoke --sites sites --out real.toml --force",
    "osfl check real.toml --data sites/north --client north",
)
SHOWN = 3  # files of a finding that are named in the terminal
BLOCKS = " ▁▂▃▄▅▆▇█"
SHADES = ("grey27", "dark_cyan", "cyan3", "bright_cyan")

PlanArgument = Annotated[
    Path | None, typer.Argument(metavar="[plan.toml]", help="A plan to check instead of options.", show_default=False)
]
ClientName = Annotated[
    str | None,
    typer.Option(
        "--client", "-c", metavar="NAME", rich_help_panel=options.SITE, show_default=False, help="Who this site is in the plan."
    ),
]


def check(
    plan: PlanArgument = None,
    method: options.Method = None,
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
    data: options.Data = None,
    client: ClientName = None,
    no_cache: options.NoCache = False,
    output_format: options.Format = "text",
) -> None:
    """Open the data, draw the labels of each client, list every finding. Exit code 1 if a run could not start.

    With --data and --client: the same for one site's own images, before a real round.
    """
    from osfl.simulate.simulation import prepare

    if data is not None or client is not None:
        options.refuse_beside_plan(str(plan))
        _site(plan, data, client, output_format)
        return
    if plan is not None:
        federation = _plan(plan, options.beside_plan(dataset, str(plan)), output_format)
        if federation is None:
            return
    else:
        args = RunOptions(
            [method or "local_only"],
            dataset,
            clients,
            partition,
            with_smoke(preset, smoke),
            seed,
            changes or (),
            samples,
            image_size,
            channels,
            reading=Reading(group, "", slices, window),
        )
        federation = prepare(parse_options(args))
    if output_format == "json":
        put_json(_facts(federation))
        return
    _show(federation)


def _plan(path: Path, dataset: str, output_format: str) -> Federation | None:
    """The plan's federation; None where it says nothing about data. Its mistakes are failures, not wrong usage: exit 1."""
    from osfl.core.plan import read_plan
    from osfl.simulate.simulation import prepare

    try:
        plan = read_plan(path)
        if not plan.data.get("dataset"):
            _show_template(plan, path, output_format)
            return None
        simulation, _ = from_plan(path, dataset)
        federation = prepare(simulation)
        same_plan(plan, federation.plan, path)
    except UsageError as error:
        error.exit_code = OsflError.exit_code
        raise
    return federation


def _site(plan: Path | None, data: Path | None, client: str | None, output_format: str) -> None:
    """One site's images against the plan. What keeps it from taking part is a failure: exit 1."""
    from osfl.core.plan import read_plan
    from osfl.data.leakage import near_duplicates
    from osfl.data.site import open_site, site_problems
    from osfl.data.views import class_counts, make_shard
    from osfl.models.input_facts import describe_inputs
    from osfl.roles.site import check_own_folder, method_for
    from osfl.rounds.phases import check_claim

    if plan is None or data is None or client is None:
        missing = [option for option, given in (("plan.toml", plan), ("--data", data), ("--client", client)) if given is None]
        raise UsageError(
            f"{' and '.join(missing)} is missing",
            field="data",
            fix="For example: osfl check plan.toml --data images --client north",
        )
    try:
        plan_of_round = read_plan(plan)
        method_for(plan_of_round, client)
    except UsageError as error:
        error.exit_code = OsflError.exit_code
        raise
    check_own_folder(plan_of_round, client, data)
    with progress_display(output_format == "json") as progress:
        found = open_site(data, plan_of_round.task, progress, reading_of(plan_of_round.data))
    shard = make_shard(found.train, client, seed=plan_of_round.seed)
    check_claim(plan_of_round, shard)
    counts = class_counts(found.train.labels, len(plan_of_round.task.classes)).tolist()
    inputs = describe_inputs(plan_of_round.settings, plan_of_round.task.image[1], found.native)
    copies = near_duplicates(found.train, found.test) if found.test else []
    findings = _findings([*site_problems(found, client, plan_of_round.task), *copies], inputs)
    facts = {
        "plan": plan_of_round.digest,
        "client": client,
        "classes": list(plan_of_round.task.classes),
        "image": list(plan_of_round.task.image),
        "counts": counts,
        "train_images": len(shard.train),
        "val_images": len(shard.val),
        "test_images": len(found.test) if found.test else 0,
        "inputs": inputs,
        "findings": findings,
        **_claims({client: counts}, {client: len(found.train)}, plan_of_round),
    }
    if output_format == "json":
        put_json(facts)
        return
    unused = f", {facts['test_images']:,} in a test part that the round does not use" if found.test else ""
    echo(
        f"[bold]{escape(client)}[/] in round {plan_of_round.digest[:12]}: {len(shard.train):,} images to learn from, "
        f"{len(shard.val):,} held out for validation{unused}\n"
    )
    _lines(inputs)
    _heat_map(plan_of_round.task.classes, {client: counts}, {client: len(found.train)})
    _show_claims(facts)
    _show_findings(findings)


def _show_template(plan: Plan, path: Path, output_format: str) -> None:
    if output_format == "json":
        put_json({"plan": plan.digest, "clients": list(plan.clients), "findings": []})
        return
    echo(
        f"{path} is a good plan: {plan.method}, {len(plan.clients)} clients, {len(plan.task.classes)} classes, "
        f"round {plan.digest[:12]}."
    )
    echo("The plan has no [data], so there are no labels to show.")


def _findings(problems: Sequence[Problem], inputs: Inputs) -> list[Finding]:
    """What is wrong with how the files are opened, and with the files themselves: every file is named."""
    from osfl.data.findings import grouped
    from osfl.data.source import Problem

    cautions = [Problem("(all)", caution, "used as they are") for caution in inputs["cautions"]]
    return grouped([*cautions, *problems], examples=None)


def _facts(federation: Federation) -> dict[str, Json]:
    from osfl.data.leakage import near_duplicates
    from osfl.models.input_facts import describe_inputs

    source = federation.source
    inputs, images = describe_inputs(federation.plan.settings, source.image[1], source.native), _images(federation)
    return {
        "plan": federation.plan.digest,
        "dataset": source.name,
        "classes": list(source.classes),
        "image": list(source.image),
        "train_images": sum(images.values()),
        "test_images": len(federation.test),
        "clients": {client: list(counts) for client, counts in federation.counts.items()},
        "inputs": inputs,
        "findings": _findings([*federation.problems, *near_duplicates(source.train, source.test)], inputs),
        **_claims(federation.counts, images, federation.plan),
    }


def _images(federation: Federation) -> dict[str, int]:
    """Of each client; where an image has several classes, no sum of class counts."""
    return {shard.client: len(shard.train) + len(shard.val) for shard in federation.shards}


def _claims(counts: Mapping[str, Sequence[int]], images: Mapping[str, int], plan: Plan) -> dict[str, Json]:
    """The largest site, what the plan lets a site claim, and whose weight by counts the plan's cap lowers."""
    share = max(plan.limits.share, 1 / len(images))
    over = [client for client, n in images.items() if n > share * sum(images.values())]
    most = {"samples": max(images.values()), "class_samples": max(max(row) for row in counts.values())}
    allowed = {name: getattr(plan.limits, name) for name in most}
    return {
        "claims": {
            "found": most,
            "allowed": allowed,
            "closer": {name: 2 * n for name, n in most.items()},
            "share": plan.limits.share,
            "capped": over,
        }
    }


# --- in the terminal ---------------------------------------------------------------------------------------------------


def _show(federation: Federation) -> None:
    facts = _facts(federation)
    channels, height, width = facts["image"]
    echo(
        f"[bold]{escape(facts['dataset'])}[/]: {len(facts['classes'])} classes, {facts['train_images']:,} training and "
        f"{facts['test_images']:,} test images of {width} × {height} {'gray' if channels == 1 else 'RGB'}"
    )
    sheet = federation.source.sheet
    if sheet is not None:
        echo(f"[dim]{escape(sheet.license)} · {escape(sheet.source)}[/]")
    echo()
    _lines(facts["inputs"])
    _heat_map(facts["classes"], facts["clients"], _images(federation))
    _show_claims(facts)
    _show_findings(facts["findings"])


def _lines(inputs: Inputs) -> None:
    """What a network gets to see of the images, where that is not what is in the files."""
    for line in inputs["lines"]:
        echo(escape(line))
    if inputs["lines"]:
        echo()


def _show_claims(facts: Mapping[str, Json]) -> None:
    """How far the plan relies on what sites claim, against what is there."""
    claims = facts["claims"]
    found, allowed, closer = claims["found"], claims["allowed"], claims["closer"]
    echo(
        f"\nThe largest site has {found['samples']:,} images, at most {found['class_samples']:,} of one class; the plan lets a "
        f"site claim {allowed['samples']:,} and {allowed['class_samples']:,}."
    )
    if any(allowed[name] > 10 * closer[name] for name in found):
        lines = ", ".join(f"{name} = {n}" for name, n in closer.items())
        echo(f"[dim]A closer bound for the plan, in its table limits: {lines} (twice what is here).[/]")
    for client in claims["capped"]:
        echo(
            f"[yellow]{escape(client)}[/] has more than {claims['share']:.0%} of all images: where sites weigh by their "
            "counts, it gets no more than that (limits.share)."
        )


def _heat_map(classes: Sequence[str], counts: Mapping[str, Sequence[int]], images: Mapping[str, int]) -> None:
    """Images by client and class: numbers where they fit, else one block a class."""
    from rich.table import Table
    from rich.text import Text

    console = output()
    most = max(max(row) for row in counts.values())
    wide = len(classes) * (max(len(str(most)), 3) + 2) <= console.width - 26
    table = Table.grid(padding=(0, 2))
    table.add_column("", style="bold")
    table.add_column("", justify="right")
    head: list[str | Text] = ["client", "images"]
    if wide:
        room = max(5, (console.width - 26) // len(classes) - 2)
        head += [Text(on_one_line(name)[:room], style="dim") for name in classes]
    else:
        head.append(Text(f"classes 1 to {len(classes)}, one block each", style="dim"))
    for _ in head[2:]:
        table.add_column("", justify="right" if wide else "left")
    table.add_row(*head)
    for client, row in counts.items():
        cells = [_number(n, most) for n in row] if wide else [_blocks(row, most)]
        table.add_row(client, f"{images[client]:,}", *cells)
    console.print(table)
    if not wide:
        console.print(Text("\n" + ", ".join(f"{i} {on_one_line(name)}" for i, name in enumerate(classes, 1)), style="dim"))


def _number(count: int, most: int) -> Text:
    from rich.text import Text

    if not count:
        return Text("·", style="dim")
    shade = SHADES[min(len(SHADES) - 1, count * len(SHADES) // (most + 1))]
    return Text(f"{count}{BLOCKS[_level(count, most)]}", style=shade)


def _blocks(row: Sequence[int], most: int) -> Text:
    from rich.text import Text

    return Text("".join(BLOCKS[_level(count, most)] if count else "·" for count in row), style="cyan")


def _level(count: int, most: int) -> int:
    """1 for a single image, 8 for the most that any client holds of a class."""
    return max(1, round(8 * count / most))


def _show_findings(findings: Sequence[Finding]) -> None:
    """One line a reason, with the first files; `--format json` names them all."""
    if not findings:
        echo("\n[green]No problem found.[/]")
        return
    echo(f"\n[yellow]{len(findings)} {'finding' if len(findings) == 1 else 'findings'}; a run can start all the same:[/]")
    for finding in findings:
        echo(f"  {escape(finding_line({**finding, 'examples': finding['examples'][:SHOWN]}))}")
    if any(len(finding["examples"]) > SHOWN for finding in findings):
        echo("[dim]With --format json every file is named.[/]")
