"""`osfl server --models`: fuse checkpoints that no OSFL client made, and say what was taken and what was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from osfl.cli import options
from osfl.cli.progress import telling
from osfl.cli.terminal import answers, errors, escape, put_json, say
from osfl.errors import UsageError

if TYPE_CHECKING:
    from osfl.market import Accepted, Market, Refused
    from osfl.phases import Machine

MARKET = "A market of models"
Models = Annotated[
    list[Path] | None,
    typer.Option("--models", metavar="FILE...", readable=False, rich_help_panel=MARKET, show_default=False,
                 help="Fuse safetensors files that no client of ours made, in timm's or transformers' naming."),
]  # fmt: skip
Architecture = Annotated[
    str | None,
    typer.Option("--architecture", metavar="NAME", rich_help_panel=MARKET, show_default=False,
                 help="What they all are; see `osfl ls architectures`."),
]  # fmt: skip
Classes = Annotated[
    Path | None,
    typer.Option("--classes", metavar="classes.txt", rich_help_panel=MARKET, show_default=False,
                 help="One class a line, in the order of the heads' rows."),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, rich_help_panel=MARKET, show_default=False,
                 help="Where the model, its card and the report go."),
]  # fmt: skip
Pixels = Annotated[
    Literal["symmetric", "imagenet"] | None,
    typer.Option("--pixels", rich_help_panel=MARKET, show_default=False,
                 help="What they were trained on: [-1, 1], or ImageNet's normalization; default: as files beside them tell, "
                      "else [-1, 1]."),
]  # fmt: skip
FusedBy = Annotated[str, typer.Option("--method", "-m", metavar="NAME", rich_help_panel=MARKET, help="How they are fused.")]
Preset = Annotated[
    str,
    typer.Option("--preset", metavar="cpu|paper|smoke", rich_help_panel=MARKET,
                 help="Settings of the method by intent; some have more, such as fedmitr's `ours` and `smi`."),
]  # fmt: skip
Smoke = Annotated[bool, typer.Option("--smoke", rich_help_panel=MARKET, help="The same as --preset smoke.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", rich_help_panel=MARKET, show_default=False,
                 help="Change one setting of the method, such as server_epochs=20; repeatable."),
]  # fmt: skip
Seed = Annotated[
    int, typer.Option("--seed", "-s", metavar="S", rich_help_panel=MARKET, help="All randomness is derived from it.")
]


def _colors(text: str) -> int:
    if str(text) not in ("1", "3"):
        raise typer.BadParameter(f"{text!r} is not possible; expected 1, which is grey, or 3, which is RGB.")
    return int(text)


ImageSize = Annotated[
    int | None,
    typer.Option("--image-size", metavar="PX", min=8, max=1024, rich_help_panel=MARKET, show_default=False,
                 help="Side of the images; default: as the positional embeddings say."),
]  # fmt: skip
Channels = Annotated[
    int | None,
    typer.Option("--channels", metavar="1|3", parser=_colors, rich_help_panel=MARKET, show_default=False,
                 help="1 is grey, 3 is RGB; default: as the models say."),
]  # fmt: skip


def fuse_models(market: Market, classes: Path, out: Path, machine: Machine, key: Path | None, format: str) -> None:
    """Tell what is accepted and what is not, then fuse. Exit code 1 if a file was refused, though the others were fused."""
    from osfl.market import check_words, examine, fuse
    from osfl.wire.signing import SigningKey

    signing = SigningKey.load(key) if key else None
    command = market.command(str(classes), str(out)) + machine.words()
    before = (out / "market.json").exists()
    check_words(market)  # before files are read, which may take a while
    examined = examine(market)
    _complain(examined.refused)  # before hours of work, not after
    for caution in examined.cautions:
        errors().print(f"[yellow]Caution:[/] {escape(caution)}.", soft_wrap=True)
    if format != "json":
        _show_accepted(examined.accepted)
    with telling(format == "json") as progress:
        said = fuse(market, out, command=command, machine=machine, progress=progress, key=signing,
                    examined=examined)  # fmt: skip
    if format == "json":
        put_json({**said, "paths": [str(out / path) for path in _models(said).values()]})
    else:
        _show(said, out, finished_before=before)
    if said["refused"]:
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
    problems = [f"{path}, line {number}: {name!r} holds a character that cannot be shown"
                for number, name in named.items() if not name.isprintable()]  # fmt: skip
    first: dict[str, int] = {}
    problems += [f"{path}, line {number}: class {name!r} is in line {first[name]} already"
                 for number, name in named.items() if first.setdefault(name, number) != number]  # fmt: skip
    if problems or not named:
        raise UsageError(problems or f"the list of classes {path} is empty", field="classes", fix=fix)
    return list(named.values())


def _show_accepted(accepted: Sequence[Accepted]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.models.offers import ASSUMED, TOLD, scale_name
    from osfl.reports.words import compact

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Accepted", overflow="fold")
    for title in ("Naming", "Parameters", "Head", "Name in the round"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in accepted:
        head = " × ".join(map(str, one.offer.head))
        table.add_row(escape(one.offer.file), one.offer.naming, compact(one.offer.parameters), head, one.client)
    answers().print(table)
    for one in accepted:
        if one.offer.unused:
            say(f"[dim]Of {escape(one.offer.file)} nothing here uses {escape(', '.join(one.offer.unused))}.[/]")
        if one.pixels_by == TOLD:
            say(f"[dim]{escape(one.offer.file)} takes pixels as the files beside it tell: {scale_name(one.pixels)}.[/]")
    if any(one.pixels_by == ASSUMED for one in accepted):
        say("[dim]What nothing tells is assumed: pixels in [-1, 1] go in (--pixels).[/]")


def _show(said: Mapping[str, Any], out: Path, *, finished_before: bool) -> None:
    from osfl.reports.words import many

    say(f"Fused    {many(len(said['accepted']), 'model')} by [bold]{said['method']}[/]; release {said['release_digest'][:16]}…")
    for client, path in _models(said).items():
        whose = f" --client {client}" if client else ""
        say(f"Model    {escape(str(out / path))}   (osfl predict --run {escape(str(out))}{whose} IMAGE)")
    say(f"Report   {escape(str(out / 'report' / 'index.html'))}")
    if finished_before:
        say("[dim]This was finished before; nothing was computed again.[/]")


def _models(said: Mapping[str, Any]) -> Mapping[str, str]:
    """By client, "" for everybody's; markets of earlier versions did not say."""
    models: Mapping[str, str] = said.get("models", {"": "model.safetensors"})
    return models


def _complain(refused: Sequence[Refused]) -> None:
    for one in refused:
        errors().print(f"[red]Refused:[/] {escape(one.file)}: {escape(one.reason)}. [dim]{escape(one.fix)}[/]", soft_wrap=True)
