"""What finished runs look like in a terminal. Every number is one of results.json or comparison.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.cli.terminal import echo, escape, output
from osfl.core.result import finding_line
from osfl.core.types import Json

if TYPE_CHECKING:
    from rich.table import Table

    from osfl.core.result import Result

# The columns of a terminal, those that stay longest first: how many fit depends on its width. The report has them all.
_SHOWN = (
    "scores.global.accuracy",
    "scores.clients.own.mean",
    "costs.upload_bytes",
    "costs.download_bytes",
    "scores.clients.own.worst",
    "scores.global.auroc",
    "costs.messages_per_client",
)

_NAMES = 20  # characters of a method's name before it is folded


def show_run(result: Result, out: Path, *, finished_before: bool = False) -> None:
    """A run in a dozen lines."""
    from rich.table import Table

    from osfl.core.headline import SMOKE, is_smoke

    data = result["data"]
    echo(
        f"[bold]{result['method']}[/] on [bold]{escape(str(data.get('dataset', '')))}[/]: {len(result['clients'])} clients, "
        f"{escape(str(data.get('partition', '')))}, preset {result['preset']}, seed {result['seed']}"
    )
    if is_smoke(result):
        echo(f"[black on yellow] {SMOKE} [/]")
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold")
    table.add_column(style="dim")
    for row in _facts(result):
        table.add_row(*row)
    output().print(table)
    for warning in result["generators"]["warnings"] if "generators" in result else ():
        echo(f"[yellow]{escape(warning)}[/]")
    inputs = result.get("inputs")
    for line in inputs["lines"] if inputs else ():
        echo(f"[dim]{escape(line)}[/]")
    for line in inputs["cautions"] if inputs else ():
        echo(f"[yellow]{escape(line)}[/]")
    for finding in data.get("findings", ()):
        echo(f"[yellow]Data: {escape(finding_line(finding))}[/]")
    echo()
    echo(f"Results  {out / 'results.json'}")
    echo(f"Report   {out / 'report' / 'index.html'}")
    if finished_before:
        echo("[dim]This round was finished before; nothing was computed again.[/]")


def _facts(result: Result) -> list[tuple[str, str, str]]:
    from osfl.reports.text import decimal, many, percent, seconds, size

    scores, costs = result["scores"], result["costs"]
    own, metrics = scores["clients"]["own"], scores["global"]
    sent = costs["messages_per_client"]
    whose = "mean over the clients' own models" if scores["personalized"] else "the released model"
    joint = costs.get("inference_bytes")
    whose = whose if joint is None else "all clients' models together"
    first = [
        *_unbalanced(result),
        ("Accuracy", percent(metrics["accuracy"]), f"{whose}; always one class: {percent(scores['majority'])}"),
        ("AUROC", decimal(metrics["auroc"]), "macro, one class against the rest"),
    ]
    if "labels" in scores:
        first = [
            ("AUROC", decimal(metrics["auroc"]), f"{whose}; mean over classes, each yes or no"),
            ("Average precision", decimal(metrics["ap"]), "mean over classes"),
            ("F1", decimal(metrics["f1"]), "mean over classes, thresholds from validation images"),
            ("Accuracy", percent(metrics["accuracy"]), f"of all yes and no; always the same: {percent(scores['majority'])}"),
        ]
    return [
        *first,
        ("Own distribution", percent(own["mean"]), "mean over clients, each on the classes it holds"),
        *_weighed(result),
        ("Worst client", percent(own["worst"]), f"{own['worst_client']}, on its own distribution"),
        *_encounters(result),
        ("Sent up", size(costs["upload_bytes"]), f"by all clients, {many(sent, 'message')} each"),
        ("Sent down", size(costs["download_bytes"]), "to all clients"),
        *([] if joint is None else [("Sent to answer", size(joint), "each client's model to all others, after the round")]),
        ("Client time", seconds(costs["client_seconds"]), "summed over clients"),
        ("Server time", seconds(costs["server_seconds"]), f"{seconds(costs['wall_seconds'])} from command to report"),
    ]


def _unbalanced(result: Result) -> list[tuple[str, str, str]]:
    """Balanced accuracy first, where accuracy would mislead."""
    from osfl.core.headline import headline_of
    from osfl.reports.text import percent

    metric, why = headline_of(result)
    if metric in ("accuracy", "auroc"):
        return []
    return [("Balanced accuracy", percent(result["scores"]["global"]["balanced_accuracy"]), f"read it first: {why}")]


def _weighed(result: Result) -> list[tuple[str, str, str]]:
    """What sites reach that weigh the classes of the release as they have them."""
    from osfl.reports.text import percent

    clients = result["scores"]["clients"]
    if "weighed" not in clients:
        return []
    return [("  weighed by site", percent(clients["weighed"]["mean"]), "each weighs classes as it has them: --set prior=site")]


def _encounters(result: Result) -> list[tuple[str, str, str]]:
    """How the own-distribution accuracy grew from one encounter to the next."""
    from osfl.reports.text import percent

    rows = [
        ("Encounter", percent(row["own"]["mean"]), f"number {row['encounter']}, own distribution, mean over clients")
        for row in result.get("encounters", [])
    ]
    return rows


def comparison_table(comparison: Mapping[str, object], metrics: Sequence[str]) -> Table:
    """Methods as rows; the best of a column is green (training in one place and constant answers do not compete)."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.reports.columns import shown_columns, table_rows

    columns = shown_columns(comparison)
    shown = [index for index, column in enumerate(columns) if column.metric in metrics]
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Method", overflow="fold", min_width=min(_NAMES, _widest(comparison)))
    for index in shown:
        title = (
            columns[index]
            .title.replace("Messages", "Msgs")
            .replace("Balanced accuracy", "Balanced\naccuracy")
            .replace("Worst client", "Worst\nclient")
        )
        table.add_column(title, justify="right", no_wrap=True)
    for row in table_rows(comparison):
        cells = [row.cells[index] for index in shown]
        texts = [f"{cell.text}\n{cell.spread}".strip() for cell in cells]
        styled = [f"[bold green]{text}[/]" if c.best else text for text, c in zip(texts, cells, strict=True)]
        table.add_row(escape(row.method), *styled)
    return table


def _widest(comparison: Mapping[str, Json]) -> int:
    return max(map(len, comparison["methods"]), default=0)


def show_comparison(comparison: Mapping[str, Json], report: Path) -> None:
    from osfl.core.headline import NAMES, SMOKE
    from osfl.reports.columns import headline_metric

    seeds = len({run["seed"] for run in comparison["runs"]})
    terminal = output()
    freely = terminal.options.update(max_width=10_000)  # else a table that is too wide claims to fit
    spare = max(0, _widest(comparison) - _NAMES)  # what the column of methods gives up, names folded
    wanted = list(dict.fromkeys([headline_metric(comparison), *_SHOWN]))
    table = comparison_table(comparison, wanted)
    for count in range(len(wanted) - 1, 0, -1):
        if terminal.measure(table, options=freely).maximum - spare <= terminal.width:
            break
        table = comparison_table(comparison, wanted[:count])
    terminal.print(table)
    if comparison["smoke"]:
        terminal.print(f"[black on yellow] {SMOKE} [/]")
    first = comparison["headline"]
    terminal.print(f"[dim]Read {NAMES[first['metric']]} first: {first['why']}.[/]")
    if comparison["below"]:
        names = escape(", ".join(comparison["below"]))
        terminal.print(f"[yellow]No better than always answering the most frequent class: {names}.[/]")
    for name in comparison.get("changed", ()):
        terminal.print(
            f"[yellow]{escape(name)}: its code changed since this run was made, and it was not repeated; --fresh repeats it.[/]"
        )
    if seeds > 1:
        echo(f"[dim]Mean ± sample standard deviation over {seeds} seeds.[/]")
    echo(f"Report  {report}")
