"""`osfl evaluate`: measure a finished model on labeled images."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.finished import ModelArchitecture, ModelChannels, ModelClasses, ModelPixels, ModelSize, OwnMethod, opened
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, escape, output, put_json
from osfl.core.errors import UsageError

if TYPE_CHECKING:
    from osfl.core.evaluated import Evaluation
    from osfl.roles.finished_model import FinishedModel
    from osfl.wire.signing import SigningKey

EXAMPLES = (
    "osfl run --method fedavg --clients 3 --partition iid --smoke --out runs/asked",
    "osfl evaluate runs/asked --data digits --out runs/measured",
)

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="The folder of a run, a fusion or a site's model; or a plain checkpoint.")
]
Data = Annotated[
    str,
    typer.Option(
        "--data", metavar="PATH|NAME", help="Labeled images: a folder or zip of class/*, a .csv, an .npz, or a known dataset."
    ),
]
Client = Annotated[
    str | None,
    typer.Option("--client", "-c", metavar="NAME", show_default=False, help="Whose model, where each has its own; who signs."),
]
Whole = Annotated[bool, typer.Option("--all", help="Use all images, also where a part is called test.")]
By = Annotated[
    str,
    typer.Option(
        "--by",
        metavar="COLUMN",
        show_default=False,
        help="Column of a CSV (scanner, ward, sex): scores for each of its values.",
    ),
]
Resamples = Annotated[
    int, typer.Option("--resamples", metavar="N", min=0, max=100_000, help="Bootstrap draws for the intervals; 0: none.")
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "-k",
        metavar="FILE",
        show_default=False,
        help="This site's private key: also write summary.json, signed, for the coordinator's `osfl results`.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        parser=options.new_folder,
        show_default=False,
        help="Gets evaluation.json and report/; default runs/evaluation-MODEL-DATA.",
    ),
]


def evaluate(
    model: Model,
    data: Data,
    client: Client = None,
    whole: Whole = False,
    group: options.Group = "",
    by: By = "",
    metric: options.Metric = "",
    resamples: Resamples = 1000,
    key: Key = None,
    out: Out = None,
    method: OwnMethod = None,
    architecture: ModelArchitecture = "",
    classes: ModelClasses = None,
    image_size: ModelSize = None,
    channels: ModelChannels = None,
    pixels: ModelPixels = None,
    device: options.Device = "cpu",
    no_cache: options.NoCache = False,
    output_format: options.Format = "text",
) -> None:
    """Measure any finished model on labeled images, an external test set too: all scores with intervals, by class and group.

    The part called test is used if there is one, else all images. Nothing is trained, and nothing is chosen by these images.
    """
    from osfl.core.headline import headline
    from osfl.data.labeled import open_labeled
    from osfl.roles.finished_model import evaluate_model, write_evaluation
    from osfl.rounds.state import check_holds_no_other
    from osfl.runtime.machine import Machine

    headline([1, 1], metric)  # a misspelled metric is refused before any work
    found = opened(model, client, architecture, classes, image_size, channels, pixels)
    reading = replace(found.reading, group=group or (found.reading.group if data.endswith(".csv") else ""), by=by)
    folder = out or Path("runs") / f"evaluation-{model.stem or 'model'}-{Path(data).stem}"
    check_holds_no_other(folder)
    signing = signing_key(key, client, found) if key else None
    arguments = ["osfl", "evaluate", str(model), "--data", data, *(["--client", client] if client else [])]
    for name, value in (("--group", group), ("--by", by), ("--metric", metric), ("--architecture", architecture)):
        arguments += [name, value] if value else []
    for name, given in (("--classes", classes), ("--image-size", image_size), ("--channels", channels), ("--pixels", pixels)):
        arguments += [name, str(given)] if given is not None else []
    arguments += ["--all"] if whole else []
    arguments += ["--resamples", str(resamples)] if resamples != 1000 else []
    with progress_display(output_format == "json") as progress:
        images = open_labeled(data, found.task, whole=whole, reading=reading, progress=progress)
        evaluation = evaluate_model(
            found,
            images,
            metric=metric,
            resamples=resamples,
            command=shlex.join([*arguments, "--out", str(folder)]),
            column=by,
            machine=Machine(device=device),
            progress=progress,
        )
    page = write_evaluation(evaluation, folder)
    summary = sign(evaluation, str(client), signing, folder) if signing else None
    if output_format == "json":
        put_json({**evaluation, "report": str(page), **({"summary": str(summary)} if summary else {})})
    else:
        show_evaluation(evaluation, folder)
        if summary:
            show_summary(summary)


def signing_key(key: Path, client: str | None, model: FinishedModel) -> SigningKey:
    """The key that signs the summary; what is wrong with it is reported before anything is measured."""
    from osfl.wire.signing import SigningKey

    if client is None:
        raise UsageError("--key signs a summary, and nobody is named who signs", field="client", fix="Add --client NAME.")
    if not model.about.get("round"):
        raise UsageError(
            "a plain checkpoint belongs to no round, so there is nobody to sign for", field="key", fix="Leave --key out."
        )
    return SigningKey.load(key)


def sign(evaluation: Evaluation, client: str, key: SigningKey, folder: Path) -> Path:
    """`summary.json`: the few numbers that the coordinator may have, signed by the site."""
    from osfl.runtime.atomic import replace_atomically
    from osfl.wire.summary import sign_summary, summary_of

    path = folder / "summary.json"
    replace_atomically(path, sign_summary(summary_of(evaluation, client), key))
    return path


def show_summary(path: Path) -> None:
    """All of it, for whoever decides whether it may leave."""
    echo(f"Summary  {escape(str(path))}: {path.stat().st_size:,} bytes, signed. All that it holds:")
    for name, value in json.loads(path.read_bytes())["summary"].items():
        echo(f"  [dim]{escape(name)}: {escape(json.dumps(value))}[/]")
    echo("Give it to the coordinator: `osfl results ROUND FILE...` verifies and tabulates.")


def show_evaluation(evaluation: Evaluation, folder: Path) -> None:
    from rich.table import Table

    from osfl.reports.evaluation import banner, below_constant, cell, heading, interval_sentence, labels_of, lede

    echo(f"[bold]{escape(heading(evaluation))}[/]")
    echo(escape(lede(evaluation)))
    table = Table.grid(padding=(0, 2))
    for name, (label, why) in labels_of(evaluation).items():
        found = cell(name, evaluation["metrics"][name])
        table.add_row(label, f"[bold]{found['value']}[/]", f"{found['interval']}", f"[dim]{why}[/]")
    for name, scored in evaluation["per_class"].items():
        found = cell("recall", scored["recall"])
        table.add_row(
            escape(name), f"[bold]{found['value']}[/]", found["interval"], f"[dim]recall, {scored['images']:,} images[/]"
        )
    for name, group in evaluation["groups"].items():
        found = cell(evaluation["headline"], group["metrics"][evaluation["headline"]])
        column = escape(str(evaluation["data"]["column"]))
        table.add_row(
            f"{column} {escape(name)}", f"[bold]{found['value']}[/]", found["interval"], f"[dim]{group['images']:,} images[/]"
        )
    output().print(table)
    echo(f"[dim]{interval_sentence(evaluation)}[/]")
    for sentence in filter(
        None, [banner(evaluation["model"]), evaluation.get("thresholds"), below_constant(evaluation), *evaluation["cautions"]]
    ):
        echo(f"[yellow]{escape(sentence)}[/]")
    echo(f"Results  {escape(str(folder / 'evaluation.json'))}")
    echo(f"Report   {escape(str(folder / 'report' / 'index.html'))}")
    echo(f"Card     {escape(str(folder / 'model_card.md'))}")
