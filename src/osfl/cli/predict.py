"""`osfl predict`: classify images with the model of a finished run."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from osfl.cli import options
from osfl.cli.finished import OwnMethod
from osfl.cli.terminal import errors, escape, output, put_json
from osfl.core.errors import DataError, UsageError
from osfl.core.types import Json
from osfl.data.reading import Reading, reading_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from osfl.core.types import Task

EXAMPLES = (
    "osfl run --method fedavg --smoke --out runs/asked",
    "python -c \"from PIL import Image; Image.new('L', (16, 16)).save('dot.png')\"",
    "osfl predict --run runs/asked dot.png",
)

Run = Annotated[Path, typer.Option("--run", "-r", metavar="DIR", help="The folder of a finished run, or of a site's model.")]
Client = Annotated[
    str | None,
    typer.Option("--client", "-c", metavar="NAME", show_default=False, help="Whose model, where each has its own."),
]
Images = Annotated[list[Path], typer.Argument(metavar="IMAGE|FOLDER...", help="Image files, or folders of them.")]
Csv = Annotated[bool, typer.Option("--csv", help="Comma-separated: path, class, and a column a class.")]


Batch = Annotated[int, typer.Option("--batch", metavar="N", min=1, help="Images that are decoded and answered at once.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=lambda text: options.new_file(text, "table.csv"),
        show_default=False,
        help="Write the table there, as CSV: path, class, and a column a class.",
    ),
]
Mirrored = Annotated[
    bool,
    typer.Option("--tta", help="Test-time augmentation: the mean with the mirrored image; not where left and right matter."),
]


def predict(
    images: Images,
    run: Run,
    client: Client = None,
    as_csv: Csv = False,
    out: Out = None,
    batch: Batch = 64,
    tta: Mirrored = False,
    method: OwnMethod = None,
    output_format: options.Format = "text",
) -> None:
    """Name the class of each image, with probabilities. Exit code 1 if a file could not be read."""
    from osfl.rounds.finished import load_model
    from osfl.rounds.state import read_json
    from osfl.runtime.atomic import replace_atomically

    if out is not None and out.exists() and any(path.exists() and path.samefile(out) for path in images):
        raise UsageError(f"--out {out} is one of the images", field="out", fix="Name another file, such as table.csv.")
    model, task = load_model(run, client)
    reading = reading_of(read_json(run / "plan.json").get("data", {}))  # slices and gray values as in training
    files = list(_files(images))
    failed: dict[str, str] = {}
    rows = [
        row
        for start in range(0, len(files), batch)
        for row in _answers(model, task, files[start : start + batch], reading, failed, tta)
    ]
    if out is not None:
        text = StringIO(newline="")
        _write_csv(rows, task.classes, text)
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(out, text.getvalue().encode("utf-8", "surrogateescape"))  # names of files may be no text
    if output_format == "json":
        put_json({"classes": list(task.classes), "predictions": rows, "failed": failed})
    elif as_csv:
        _write_csv(rows, task.classes, sys.stdout)
    elif out is not None:
        output().print(f"{len(rows):,} images in {escape(str(out))}", soft_wrap=True)
    else:
        _show(rows, task.classes)
    for path, why in failed.items():
        errors().print(f"[red]Not read:[/] {escape(path)}: {escape(why)}", soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _files(given: Sequence[Path]) -> Iterator[Path]:
    """Files as given, and the image files of folders in the order of their names."""
    from osfl.data.layout import may_be_image
    from osfl.data.tree import hidden

    for path in given:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and may_be_image(file))
            inside = [file for file in inside if not hidden(str(file.relative_to(path)))]
            if not inside:
                raise DataError(
                    f"folder {path} holds no image file",
                    field="image",
                    expected="PNG, JPEG, TIFF, DICOM or NIfTI files, and such",
                    fix="Name the files one by one if they have other endings.",
                )
            yield from inside
        else:
            yield path


def _answers(
    model: nn.Module, task: Task, files: Sequence[Path], reading: Reading, failed: dict[str, str], mirrored: bool
) -> list[dict[str, object]]:
    import torch

    from osfl.models.inputs import to_input
    from osfl.models.outputs import to_probabilities

    read = {str(path): pixels for path in files if (pixels := _pixels(path, task, reading, failed)) is not None}
    if not read:
        return []
    with torch.no_grad():
        given = to_input(torch.stack(list(read.values())))
        shares = to_probabilities(model(given), task.kind)  # (images, classes)
        if mirrored:
            shares = (shares + to_probabilities(model(given.flip(-1)), task.kind)) / 2
    return [
        {
            "path": path,
            **_first(row, task),
            "probabilities": {name: round(float(p), 6) for name, p in zip(task.classes, row, strict=True)},
        }
        for path, row in zip(read, shares, strict=True)
    ]


def _first(row: torch.Tensor, task: Task) -> dict[str, Json]:
    """The class with the highest probability; multi-label none, since each class is a question of its own."""
    return {} if task.several else {"class": task.classes[int(row.argmax())], "probability": round(float(row.max()), 6)}


def _pixels(path: Path, task: Task, reading: Reading, failed: dict[str, str]) -> torch.Tensor | None:
    """The image as the task wants it, uint8 (channels, height, width); a file that cannot be read is noted."""
    import torch

    from osfl.data.decode import decode, full_scale
    from osfl.data.unusable import Unusable

    channels, side, _ = task.image
    try:
        decoded = decode(path.read_bytes(), path.name, side, channels, reading)[0]  # of a volume the first of the slices used
    except (OSError, Unusable) as error:
        failed[str(path)] = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        return None
    pixels = torch.tensor(decoded.pixels)
    if not decoded.deep:
        return pixels
    return (pixels * (255 / full_scale(float(pixels.max())))).round().to(torch.uint8)


def _show(rows: Sequence[dict[str, Json]], classes: Sequence[str]) -> None:
    """The answer, and the runners-up that are worth a look."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    for row in rows:
        ranked = sorted(row["probabilities"].items(), key=lambda item: -item[1])
        if "class" not in row:  # multi-label: each class is a question of its own
            table.add_row(escape(row["path"]), escape(", ".join(f"{name} {share:.1%}" for name, share in ranked)))
            continue
        others = ", ".join(f"{name} {share:.1%}" for name, share in ranked[1:4] if share >= 0.001)
        table.add_row(
            escape(row["path"]), f"[bold]{escape(row['class'])}[/]", f"{row['probability']:.1%}", f"[dim]{escape(others)}[/]"
        )
    output().print(table)


def _write_csv(rows: Sequence[dict[str, Json]], classes: Sequence[str], file: TextIO) -> None:
    out = csv.writer(file, lineterminator="\n")
    answer = [key for key in ("path", "class", "probability") if not rows or key in rows[0]]
    out.writerow([*answer, *(f"p({name})" for name in classes)])
    for row in rows:
        out.writerow([*(row[key] for key in answer), *row["probabilities"].values()])
