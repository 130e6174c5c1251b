"""`osfl results`: verify the result summaries of sites, and show them as a table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, errors, escape, output, put_json
from osfl.core.types import Json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EXAMPLES = (
    "osfl new --method fedavg --dataset digits --clients north --samples 150 --smoke --sites sites --force",
    "osfl keys server north --out keys",
    "osfl enroll plan.toml --keys keys --out round",
    "osfl client plan.toml --client north --data sites/north --key keys/north.key --out usb/north.safetensors",
    "osfl receive round usb",
    "osfl server round --key keys/server.key",
    "osfl personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub --out model",
    "osfl evaluate model --data sites/north --client north --key keys/north.key --out measured",
    "osfl results round measured",
)

Summaries = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE|DIR...]", show_default=False, help="summary.json files of sites, or folders that hold them."),
]


def results(round_folder: options.RoundFolder, summaries: Summaries = None, output_format: options.Format = "text") -> None:
    """Collect what sites measured: each summary is verified with the site's enrolled key, kept, and put into one table.

    A summary holds scores and counts, no image. Exit code 1 if one was refused.
    """
    from osfl.roles.summaries import receive_summaries

    kept, refused = receive_summaries(round_folder, summaries or ())
    if output_format == "json":
        put_json({"summaries": kept, "refused": [{"file": one.file, **one.why.as_json()} for one in refused]})
    else:
        _show(kept)
    for one in refused:
        errors().print(f"[red]Refused:[/] {escape(one.file)}: {escape(str(one.why))}", soft_wrap=True)
    if refused:
        raise typer.Exit(1)


def _show(kept: Sequence[Mapping[str, Json]]) -> None:
    from rich.table import Table

    from osfl.reports.evaluation import cell

    if not kept:
        echo("No summary yet. A site makes one with `osfl evaluate MODEL --data DIR --client NAME --key NAME.key`.")
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    several = any("ap" in one["metrics"] for one in kept)  # all are of one round, and so of one kind
    read = ("auroc", "ap") if several else ("balanced_accuracy", "accuracy")
    titles = ("AUROC", "Average precision", "Constant") if several else ("Balanced accuracy", "Accuracy", "One class")
    for name in ("Site", "Images", "Part", *titles, "Model"):
        table.add_column(name, justify="left" if name in ("Site", "Part", "Model") else "right")
    for one in kept:
        cells = [cell(name, one["metrics"][name]) for name in read]
        values = [f"{found['value']}\n[dim]{found['interval']}[/]" for found in cells]
        images = f"{one['images']:,}"
        table.add_row(
            one["client"], images, one["part"], *values, f"{100 * one['majority']:.1f}\N{NO-BREAK SPACE}%", one["weights"][:8]
        )
    output().print(table)
    echo("[dim]Second lines: 95 % bootstrap intervals. Part: of the site's images. Model: equal texts are equal weights.[/]")
