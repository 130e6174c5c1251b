"""Options that name a finished model; shared by the verbs that use one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from osfl.cli import options

if TYPE_CHECKING:
    from osfl.roles.finished_model import FinishedModel

_PLAIN = "A plain checkpoint"

OwnMethod = Annotated[
    str | None,
    typer.Option(
        "--method",
        metavar="FILE",
        parser=lambda text: options.own_method(text),
        show_default=False,
        help="The file of a method of your own that made the model, ./mine.py; a run's folder never names a file to load.",
    ),
]

ModelArchitecture = Annotated[
    str,
    typer.Option(
        "--architecture",
        metavar="NAME",
        rich_help_panel=_PLAIN,
        show_default=False,
        help="Its name of `osfl ls architectures`.",
    ),
]
ModelClasses = Annotated[
    Path | None,
    typer.Option(
        "--classes",
        metavar="classes.txt",
        rich_help_panel=_PLAIN,
        show_default=False,
        help="One class a line, in the order of the head's rows.",
    ),
]
ModelSize = Annotated[
    int | None,
    typer.Option(
        "--image-size", metavar="PX", min=8, max=1024, rich_help_panel=_PLAIN, show_default=False, help="Side of its images."
    ),
]
ModelChannels = Annotated[
    int | None,
    typer.Option(
        "--channels", metavar="1|3", min=1, max=3, rich_help_panel=_PLAIN, show_default=False, help="1 is gray, 3 is RGB."
    ),
]
ModelPixels = Annotated[
    Literal["symmetric", "imagenet"] | None,
    typer.Option(
        "--pixels",
        rich_help_panel=_PLAIN,
        show_default=False,
        help="What it was trained on: [-1, 1], or ImageNet's normalization.",
    ),
]


def opened(
    model: Path,
    client: str | None,
    architecture: str = "",
    classes: Path | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    pixels: str | None = None,
) -> FinishedModel:
    """The finished model that these options name."""
    from osfl.cli.fuse import read_classes
    from osfl.roles.finished_model import PlainModel, open_model

    named = read_classes(classes) if classes else ()
    return open_model(model, client, PlainModel(architecture, named, image_size, channels, pixels))
