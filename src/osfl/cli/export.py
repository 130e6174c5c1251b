"""`osfl export`: a finished model as one file for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.finished import ModelArchitecture, ModelChannels, ModelClasses, ModelPixels, ModelSize, OwnMethod, opened
from osfl.cli.terminal import echo, escape, put_json

EXAMPLES = (
    "osfl run --method fedavg --clients 3 --partition iid --smoke --out runs/asked",
    "osfl export runs/asked --out model.pt2",
)

Model = Annotated[
    Path, typer.Argument(metavar="MODEL", help="The folder of a run, a fusion or a site's model; or a plain checkpoint.")
]
Client = Annotated[
    str | None,
    typer.Option("--client", "-c", metavar="NAME", show_default=False, help="Whose model, where each has its own."),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=lambda text: options.new_file(text, "model.pt2"),
        help="model.onnx (extra `onnx`), or model.pt2, a program of torch.export.",
    ),
]


def export(
    model: Model,
    out: Out = Path("model.pt2"),
    client: Client = None,
    method: OwnMethod = None,
    architecture: ModelArchitecture = "",
    classes: ModelClasses = None,
    image_size: ModelSize = None,
    channels: ModelChannels = None,
    pixels: ModelPixels = None,
    output_format: options.Format = "text",
) -> None:
    """Write a finished model as one file, with class names and preprocessing inside: uint8 pixels in, probabilities out.

    The file is opened again and asked; if its answers differ from the model's, it is not kept.
    """
    from osfl.roles.export import export_model

    found = opened(model, client, architecture, classes, image_size, channels, pixels)
    out.parent.mkdir(parents=True, exist_ok=True)
    exported = export_model(found, out)
    if output_format == "json":
        put_json({"path": str(out), "bytes": out.stat().st_size, "difference": exported.difference, **exported.facts})
        return
    echo(f"Model    {escape(str(out))}, {out.stat().st_size:,} bytes")
    echo(f"In       {exported.facts['input']}")
    echo(f"Out      {exported.facts['output']}: {escape(', '.join(exported.facts['classes']))}")
    echo(f"[dim]Asked about the same images, file and model differ by {exported.difference:.1g} in a probability.[/]")
