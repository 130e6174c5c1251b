"""`osfl inspect`: show everything that a bundle contains, before it is sent or after it arrived."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, escape, put_json
from osfl.core.errors import UsageError

if TYPE_CHECKING:
    from osfl.roles.inspection.look import Look

EXAMPLES = (
    "osfl run --method ensemble --smoke --out runs/seen",
    "osfl inspect runs/seen/inbox/client-01.safetensors",
    "osfl inspect runs/seen/release.safetensors --html release.html",
)
COLORS = {"serious": "bold red", "caution": "yellow", "note": "cyan", "good": "green"}
MOST_LINES = 40  # tensors in the terminal; the page and --format json list them all

Bundle = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A .safetensors file: an upload, a release or a personal part.")]
Plan = Annotated[
    Path | None,
    typer.Option("--plan", metavar="plan.toml", show_default=False, help="The round's plan: what the bundle should hold."),
]
Round = Annotated[
    Path | None,
    typer.Option(
        "--round",
        metavar="DIR",
        show_default=False,
        help="A round folder instead of a plan: it knows the keys, too. Found by itself for a bundle inside one.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "-k",
        metavar="FILE",
        show_default=False,
        help="The key that must have signed it: a .pub file, or your own .key.",
    ),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", show_default=False, help="Your images: is one of them inside? Needs a plan or round."
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        metavar="FILE",
        parser=lambda text: options.new_file(text, "page.html"),
        show_default=False,
        help="Write a page with pictures that opens offline and can be printed.",
    ),
]


def inspect(
    bundle: Bundle,
    plan: Plan = None,
    fl_round: Round = None,
    key: Key = None,
    data: Data = None,
    html: Html = None,
    output_format: options.Format = "text",
) -> None:
    """Show the contents of a bundle: every tensor and fact, who signed it, what was found, what was not checked.

    The file is read as untrusted input, whoever made it. Exit code 1 if it is no bundle or a finding is serious.
    """
    from osfl.roles.inspection.known import gather
    from osfl.roles.inspection.look import look, worst

    known = gather(bundle, plan, fl_round, key)
    if data is not None and known.plan is None:
        raise UsageError(
            "--data needs the round's plan, which gives the image size",
            field="data",
            fix="Give --plan plan.toml or --round DIR, too.",
        )
    seen = look(bundle, known, name=bundle.name, data=data, draw=html is not None or output_format == "json")
    if html is not None:
        from osfl.reports.inspection import write_inspection

        write_inspection(seen, html)
    if output_format == "json":
        put_json(seen)
    else:
        _show(seen, html)
    if worst(seen) == "serious":
        raise typer.Exit(1)


def _show(seen: Look, html: Path | None) -> None:
    echo(
        f"[bold]{escape(seen['file'])}[/]  {seen['kind']} from {seen['sender']} to {seen['receiver']}, {seen['bytes']:,} bytes"
    )
    if seen["method"]:
        echo(f"method {escape(seen['method'])}: {escape(seen['description'])}")
    echo(f"round  {seen['round']}")
    echo(f"digest {seen['digest']}\n")
    for sentence in seen["summary"]:
        echo(escape(sentence))
    echo("\n[bold]Findings[/]")
    for finding in seen["findings"]:
        color = COLORS[str(finding["severity"])]
        todo = f" [dim]{escape(finding['todo'])}[/]" if finding["todo"] else ""
        echo(f"  [{color}]{finding['severity']:<8}[/] {escape(finding['check'])}: {escape(finding['message'])}{todo}")
    _ratios(seen)
    echo("\n[bold]What was not checked[/]")
    for sentence in seen["not_checked"]:
        echo(f"  {escape(sentence)}")
    _facts(seen)
    _tensors(seen)
    if html is not None:
        echo(f"\nWith pictures: {escape(str(html))}")


def _ratios(seen: Look) -> None:
    """What the reconstruction attack found, a line a class."""
    classes: dict[int, list[dict[str, object]]] = {}
    for row in seen["ratios"]:
        classes.setdefault(int(row["class"]), []).append(row)
    if classes:
        echo("\n[bold]Distance ratios[/] of what can be read out, the least of each kind (0: a copy of a training image)")
    for label, rows in sorted(classes.items()):
        found = ", ".join(f"{row['what']} {row['ratio']:.2f}" for row in rows)
        images = f"{rows[0]['train']:,} training, {rows[0]['held_out']:,} held-out images"
        echo(f"  class {label}: {escape(found)} [dim]({images})[/]")


def _facts(seen: Look) -> None:
    echo("\n[bold]Facts[/], in plain text" if seen["facts"] else "\n[bold]Facts[/]: none")
    for fact in seen["facts"]:
        echo(f"  {escape(fact['name'])} = {escape(ascii(fact['value'])[:400])}  [dim]{escape(fact['what'])}[/]")


def _tensors(seen: Look) -> None:
    echo("\n[bold]Every tensor[/]")
    rows = [(row["name"], f"{row['dtype']} {row['shape']}", f"{row['bytes']:,}", row["what"]) for row in seen["tensors"]]
    wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
    for name, shape, size, what in rows[:MOST_LINES]:
        cells = f"{name:<{wide[0]}}  {shape:<{wide[1]}}  {size:>{wide[2]}} bytes"
        echo(f"  {escape(cells)}  [dim]{escape(what)}[/]")
    if len(rows) > MOST_LINES:
        echo(f"  and {len(rows) - MOST_LINES} more; --format json and --html list them all")
