"""`osfl ls`: list methods, datasets, architectures, partitions and presets. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeAlias

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, escape, output, put_json
from osfl.core.types import Json

EXAMPLES = ("osfl ls", "osfl ls methods", "osfl ls datasets --format json")
What: TypeAlias = Literal["methods", "datasets", "architectures", "encoders", "weights", "partitions", "presets"]
Rows: TypeAlias = list[dict[str, Json]]

PARTITIONS = {
    "iid": "equal shares, shuffled",
    "dirichlet:0.1": "each class spread over the clients by Dir(0.1), the usual label skew; small is skewed",
    "dirichlet-client:0.3": "each client draws its own class mixture; sizes are equal",
    "dirichlet-client:0.3:0.5": "the same, and client sizes are log-normal with sigma 0.5",
    "classes:3": "each client holds three classes",
    "silos": "one class a client",
    "domains": "one domain (site, style) a client",
    "by:scanner": "one value of a column of the CSV a client: scanner, ward, hospital, ...",
}
PRESETS = {
    "cpu": "small networks and short training, for two cores; the default",
    "paper": "the settings that were published; wants a GPU for most methods",
    "smoke": "one pass through everything in seconds; numbers mean nothing",
}


def ls(
    what: Annotated[What | None, typer.Argument(help="One list; all of them if left out.", show_default=False)] = None,
    output_format: options.Format = "text",
) -> None:
    """List methods, datasets, architectures, encoders, weights to start from, partitions and presets."""
    listed = {name: rows() for name, rows in _LISTS.items() if what in (None, name)}
    if output_format == "json":
        put_json(listed[what] if what else listed)
        return
    for name, rows in listed.items():
        if not what:
            echo(f"[bold]{name}[/]")
        _show(name, rows)


def _methods() -> Rows:
    from osfl.core.registry import describe, names

    return [{"name": name, "description": describe(name)} for name in names()]


def _described(table: Mapping[str, str]) -> Rows:
    return [{"name": name, "description": text} for name, text in table.items()]


def _architectures() -> Rows:
    from osfl.models.architectures import architectures

    return _described(architectures())


def _encoders() -> Rows:
    from osfl.models.encoder_table import ENCODERS

    return [{"name": name, "description": sheet.description, "width": sheet.width} for name, sheet in ENCODERS.items()]


def _weights() -> Rows:
    from osfl.models.weights_table import KNOWN

    return [
        {
            "name": name,
            "architecture": one.architecture,
            "sha256": one.sha256,
            "license": one.license,
            "available": "yes" if one.path().is_file() else "no",
            "description": f"{one.origin}; architecture {one.architecture}, {one.license}"
            + ("" if one.path().is_file() else f"; not here: {one.path()}"),
        }
        for name, one in KNOWN.items()
    ]


def _datasets() -> Rows:
    from osfl.data.catalog import sheets

    return [
        {
            "name": sheet.name,
            "description": sheet.title,
            "source": sheet.source,
            "license": sheet.license,
            "classes": list(sheet.classes),
            "counts": dict(sheet.counts),
            "image": list(sheet.native),
            "size": sheet.size,
            "domains": list(sheet.domains),
            "available": _available(sheet),
            "notes": sheet.notes,
            "ethics": sheet.ethics,
        }
        for sheet in sheets().values()
    ]


def _available(sheet: Any) -> str:
    """yes; download: it is fetched when it is used; no: the user has to bring the files."""
    from osfl.data.places import find_file, find_folder

    if sheet.layout == "folder":
        return "yes" if find_folder(sheet) else "no"
    if sheet.layout == "embedded" or all(find_file(sheet, file.name) for file in sheet.files):
        return "yes"
    return "download" if all(file.url for file in sheet.files) else "no"


_LISTS: Mapping[What, Callable[[], Rows]] = {
    "methods": _methods,
    "datasets": _datasets,
    "architectures": _architectures,
    "encoders": _encoders,
    "weights": _weights,
    "partitions": lambda: _described(PARTITIONS),
    "presets": lambda: _described(PRESETS),
}


# --- as tables ---------------------------------------------------------------------------------------------------------


def _show(name: str, rows: Rows) -> None:
    from rich.table import Table

    if name == "datasets":
        _show_datasets(rows)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(ratio=1)
    for row in rows:
        table.add_row(escape(row["name"]), escape(row["description"]))
    output().print(table)
    echo()


_HERE = {"yes": "[green]here[/]", "download": "fetched when used", "no": "not here"}


def _show_datasets(rows: Rows) -> None:
    """Three lines a dataset: what it is called and holds, what it shows, who made it and what is allowed."""
    from rich.padding import Padding

    console = output()
    for row in _folded(rows):
        channels, height, width = row["image"]
        facts = (
            f"{len(row['classes'])} classes",
            f"{sum(row['counts'].values()):,} images",
            f"{width} × {height} {'gray' if channels == 1 else 'RGB'}",
            _HERE[row["available"]],
        )
        console.print(f"[cyan]{escape(row['name'])}[/]  {', '.join(facts)}")
        console.print(Padding(escape(row["description"]), (0, 0, 0, 2)))
        console.print(Padding(escape(f"{row['license']} · {row['source']}"), (0, 0, 0, 2)), style="dim")
    echo("\nAny .npz, .zip, .csv or folder of images can be used by its path; --format json shows the whole sheets.")


def _folded(rows: Rows) -> Rows:
    """The larger versions of a dataset in one line with it: bloodmnist, _64, _128, _224."""
    known = {row["name"]: {**row} for row in rows}
    for name in list(known):
        base, _, size = name.rpartition("_")
        if base in known and size.isdecimal():
            known[base]["name"] += f", _{size}"
            del known[name]
    return list(known.values())
