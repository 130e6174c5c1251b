"""`osfl fuse`: fuse checkpoints that no OSFL client made, and print what was accepted and what was refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from osfl.cli import options
from osfl.cli.arguments import machine_for, with_smoke
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, errors, escape, output, put_json
from osfl.core.errors import UsageError
from osfl.core.types import Json

if TYPE_CHECKING:
    from osfl.roles.fusion import AcceptedCheckpoint, FusionRequest, RefusedCheckpoint
    from osfl.runtime.machine import Machine

EXAMPLES = (
    "osfl run --method local_only --set architecture=cnn-w8 --clients 2 --image-size 8 --samples 100 --smoke --out runs/sites",
    "python -c \"print(*range(10), sep='\\n', file=open('classes.txt', 'w'))\"",
    "osfl fuse runs/sites/models/client-01.safetensors runs/sites/models/client-02.safetensors --method ensemble"
    " --architecture cnn-w8 --image-size 8 --channels 1 --classes classes.txt --smoke --out runs/fused",
)

Models = Annotated[
    list[Path],
    typer.Argument(
        metavar="MODEL...",
        readable=False,
        show_default=False,
        help="Safetensors files that no client of ours made, in timm's or transformers' naming.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option("--key", "-k", metavar="server.key", show_default=False, help="A private key that signs the release."),
]
Architecture = Annotated[
    str,
    typer.Option("--architecture", metavar="NAME", show_default=False, help="What they all are; see `osfl ls architectures`."),
]
Classes = Annotated[
    Path,
    typer.Option(
        "--classes", metavar="classes.txt", show_default=False, help="One class a line, in the order of the heads' rows."
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        parser=options.new_folder,
        show_default=False,
        help="Where the model, its card and the report go.",
    ),
]
Pixels = Annotated[
    Literal["symmetric", "imagenet"] | None,
    typer.Option(
        "--pixels",
        show_default=False,
        help="What they were trained on: [-1, 1], or ImageNet's normalization; default: as given by files beside them, "
        "else [-1, 1].",
    ),
]
FusedBy = Annotated[str, typer.Option("--method", "-m", metavar="NAME", help="How they are fused.")]
Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="cpu|paper|smoke",
        help="Settings of the method by intent; some have more, such as fedmitr's `ours` and `smi`.",
    ),
]
Smoke = Annotated[bool, typer.Option("--smoke", help="The same as --preset smoke.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        show_default=False,
        help="Change one setting of the method, such as server_epochs=20; repeatable.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", "-s", metavar="S", help="All randomness is derived from it.")]


def _colors(text: str) -> int:
    if str(text) not in ("1", "3"):
        raise typer.BadParameter(f"{text!r} is not possible; expected 1, which is gray, or 3, which is RGB.")
    return int(text)


ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image-size",
        metavar="PX",
        min=8,
        max=1024,
        show_default=False,
        help="Side of the images; default: as the positional embeddings say.",
    ),
]
Channels = Annotated[
    int | None,
    typer.Option(
        "--channels", metavar="1|3", parser=_colors, show_default=False, help="1 is gray, 3 is RGB; default: as the models say."
    ),
]


def fuse(
    models: Models,
    architecture: Architecture,
    classes: Classes,
    out: Out,
    method: FusedBy = "fedmitr",
    preset: Preset = "cpu",
    smoke: Smoke = False,
    changes: Changes = None,
    seed: Seed = 0,
    image_size: ImageSize = None,
    channels: Channels = None,
    pixels: Pixels = None,
    key: Key = None,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    output_format: options.Format = "text",
) -> None:
    """Check plain checkpoints, name those that are refused (exit code 1), and fuse the others into one model.

    No plan, key or client is needed. Killed, the same command continues; a model that is finished stands.
    """
    from osfl.core.settings import parse_changes
    from osfl.roles.fusion import FusionRequest

    machine, preset = machine_for(device, precision, memory, workers=workers, threads=threads), with_smoke(preset, smoke)
    named, changed = read_classes(classes), parse_changes(changes or ())
    request = FusionRequest(models, architecture, named, method, preset, seed, changed, image_size, channels, pixels)
    fuse_models(request, classes, out, machine, key, output_format)


def fuse_models(
    request: FusionRequest, classes: Path, out: Path, machine: Machine, key: Path | None, output_format: str
) -> None:
    """Print which files are accepted, then fuse those. Exit code 1 if a file was refused, though the others were fused."""
    from osfl.roles.fusion import check_request, examine_checkpoints
    from osfl.roles.fusion import fuse as fuse_checkpoints
    from osfl.wire.signing import SigningKey

    signing = SigningKey.load(key) if key else None
    command = request.command(str(classes), str(out)) + machine.options()
    before = (out / "fusion.json").exists()
    check_request(request)  # before files are read, which may take a while
    examined = examine_checkpoints(request)
    _complain(examined.refused)  # before hours of work, not after
    for caution in examined.cautions:
        errors().print(f"[yellow]Caution:[/] {escape(caution)}.", soft_wrap=True)
    if output_format != "json":
        _show_accepted(examined.accepted)
    with progress_display(output_format == "json") as progress:
        record = fuse_checkpoints(
            request, out, command=command, machine=machine, progress=progress, key=signing, examined=examined
        )
    if output_format == "json":
        put_json({**record, "paths": [str(out / path) for path in _models(record).values()]})
    else:
        _show(record, out, finished_before=before)
    if record["refused"]:
        raise typer.Exit(1)


def read_classes(path: Path) -> list[str]:
    """One name a line, in the order of the heads' rows; every mistake with its line."""
    fix = "Give a text file with one class a line, in the order of the heads' rows."
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()  # some editors put a mark before the first name
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"the list of classes {path} cannot be read: {why}", field="classes", fix=fix) from None
    named = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    problems = [
        f"{path}, line {number}: {name!r} holds a character that cannot be shown"
        for number, name in named.items()
        if not name.isprintable()
    ]
    first: dict[str, int] = {}
    problems += [
        f"{path}, line {number}: class {name!r} is in line {first[name]} already"
        for number, name in named.items()
        if first.setdefault(name, number) != number
    ]
    if problems or not named:
        raise UsageError(problems or f"the list of classes {path} is empty", field="classes", fix=fix)
    return list(named.values())


def _show_accepted(accepted: Sequence[AcceptedCheckpoint]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.models.plain_checkpoints import ASSUMED, DECLARED, scale_name
    from osfl.reports.text import compact

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Accepted", overflow="fold")
    for title in ("Naming", "Parameters", "Head", "Name in the round"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in accepted:
        head = " × ".join(map(str, one.checkpoint.head))
        table.add_row(escape(one.checkpoint.file), one.checkpoint.naming, compact(one.checkpoint.parameters), head, one.client)
    output().print(table)
    for one in accepted:
        if one.checkpoint.unused:
            echo(f"[dim]Of {escape(one.checkpoint.file)} nothing here uses {escape(', '.join(one.checkpoint.unused))}.[/]")
        if one.pixels_by == DECLARED:
            echo(
                f"[dim]{escape(one.checkpoint.file)} takes pixels as given by the files beside it: {scale_name(one.pixels)}.[/]"
            )
    if any(one.pixels_by == ASSUMED for one in accepted):
        echo("[dim]Where no file gives them, pixels in [-1, 1] are assumed (--pixels).[/]")


def _show(record: Mapping[str, Json], out: Path, *, finished_before: bool) -> None:
    from osfl.reports.text import many

    echo(
        f"Fused    {many(len(record['accepted']), 'model')} by [bold]{record['method']}[/]; "
        f"release {record['release_digest'][:16]}…"
    )
    for client, path in _models(record).items():
        whose = f" --client {client}" if client else ""
        echo(f"Model    {escape(str(out / path))}   (osfl predict --run {escape(str(out))}{whose} IMAGE)")
    echo(f"Report   {escape(str(out / 'report' / 'index.html'))}")
    if finished_before:
        echo("[dim]This was finished before; nothing was computed again.[/]")


def _models(record: Mapping[str, Json]) -> Mapping[str, str]:
    """By client, "" for everybody's; fusions of earlier versions did not say."""
    models: Mapping[str, str] = record.get("models", {"": "model.safetensors"})
    return models


def _complain(refused: Sequence[RefusedCheckpoint]) -> None:
    for one in refused:
        errors().print(f"[red]Refused:[/] {escape(one.file)}: {escape(one.reason)}. [dim]{escape(one.fix)}[/]", soft_wrap=True)
