"""`osfl advise`: which method suits a consortium, from the committed records alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from osfl.cli import options
from osfl.cli.arguments import Mistakes
from osfl.cli.terminal import echo, escape, output, put_json
from osfl.core.errors import UsageError

if TYPE_CHECKING:
    from osfl.evaluation.advice.known import Case
    from osfl.evaluation.advice.needs import Wants
    from osfl.evaluation.advice.ranking import Advice, Ranked

EXAMPLES = (
    "osfl advise --sites 5 --images 4000 --classes 8 --classes-per-site 2 --image-size 28 --channels 3 --kind medical",
    "osfl advise --sites 30 --images 3000 --classes 10 --image-size 32 --kind natural --personal",
    "osfl advise --sites 5 --images 1500 --image-size 224 --kind medical --no-encoder --upload-limit 10MB",
    "osfl new --method onesum --dataset digits --clients north,south --smoke --sites consortium --out known.toml --force",
    "osfl advise --folders consortium --secure-sum --format json",
    "osfl advise --plan known.toml --images 1400",
)
SHOWN = 8  # methods in the table; JSON has all
SITES, ALLOWED = "What you know of the sites", "What is allowed, and what is wanted"


def _number(metavar: str, text: str) -> object:
    return typer.Option(metavar=metavar, min=1, rich_help_panel=SITES, show_default=False, help=text)


def _wish(text: str) -> object:
    return typer.Option(rich_help_panel=ALLOWED, help=text)


def advise(
    sites: Annotated[int | None, _number("N", "How many sites.")] = None,
    images: Annotated[int | None, _number("N", "Training images of all sites together.")] = None,
    classes: Annotated[int | None, _number("C", "How many classes.")] = None,
    classes_per_site: Annotated[
        float | None,
        typer.Option(
            metavar="K", min=0.1, rich_help_panel=SITES, show_default=False, help="Of how many classes a site has images."
        ),
    ] = None,
    image_size: Annotated[int | None, _number("PX", "Pixels of an image's side.")] = None,
    channels: Annotated[int | None, _number("1|3", "1 is gray, 3 is RGB.")] = None,
    kind: Annotated[
        Literal["medical", "natural", "writing"] | None,
        typer.Option(rich_help_panel=SITES, show_default=False, help="What the images show."),
    ] = None,
    folders: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", rich_help_panel=SITES, show_default=False, help="Count sites, images and classes: DIR/SITE/class/*."
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="plan.toml", rich_help_panel=SITES, show_default=False, help="Take sites and images from a plan."),
    ] = None,
    encoder: Annotated[bool, _wish("Sites may use published weights: an encoder, or a network to start from.")] = True,
    upload_limit: Annotated[
        str | None,
        typer.Option(metavar="20MB", rich_help_panel=ALLOWED, show_default=False, help="What a site may send at most."),
    ] = None,
    server_time: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0,
            rich_help_panel=ALLOWED,
            show_default=False,
            help="What the server phase may take at most.",
        ),
    ] = None,
    server: Annotated[bool, _wish("There is a server; without it, neighbors exchange.")] = True,
    personal: Annotated[bool, _wish("Each site wants a model of its own, for its own distribution.")] = False,
    forget_class: Annotated[bool, _wish("One class of a site can be removed after the round.")] = False,
    secure_sum: Annotated[bool, _wish("The server may see the sum of all uploads only.")] = False,
    epsilon: Annotated[
        float | None,
        typer.Option(metavar="E", rich_help_panel=ALLOWED, show_default=False, help="Differential privacy at most this loose."),
    ] = None,
    output_format: options.Format = "text",
) -> None:
    """Rank the methods for what a consortium knows of itself, with the accuracy, bytes and seconds to expect.

    All figures are of committed records: of the cells that are nearest to your case, which are named with their distance. A
    doubling counts 1: of sites, images, classes, the share of classes a site has, or the image's side. Methods that need what
    is not allowed are left out, with the reason. Where no cell is near, there is no ranking.
    """
    from osfl.evaluation.advice.known import Case, known_cells
    from osfl.evaluation.advice.needs import Wants
    from osfl.evaluation.advice.ranking import advise as ranking

    mistakes, case, constant = Mistakes(), Case(sites, images, classes, None, image_size, channels, kind), None
    with mistakes.noted():
        _check(case, classes_per_site, server, secure_sum, epsilon)
    limit = None
    with mistakes.noted():
        limit = None if upload_limit is None else _bytes(upload_limit)
    with mistakes.noted():
        case, constant = _looked_up(case, folders, plan)
    if classes_per_site is not None and not mistakes.problems:
        with mistakes.noted():
            case = replace(case, share=_share(classes_per_site, case.classes, case.share))
    with mistakes.noted():
        if case == Case():
            raise UsageError("nothing is known of the sites", field="sites", fix=f"For example: {EXAMPLES[0]}")
    mistakes.check()
    wants = Wants(encoder, limit, server_time, server, personal, forget_class, secure_sum, epsilon)
    found = ranking(case, wants, known_cells())
    if output_format == "json":
        put_json(_as_json(case, wants, found, constant))
    else:
        _show(case, wants, found, constant)


# --- what the user gave -----------------------------------------------------------------------------------------------


def _check(case: Case, classes_per_site: float | None, server: bool, secure_sum: bool, epsilon: float | None) -> None:
    """Everything that contradicts itself, in one error."""
    wrong = []
    if case.images is not None and case.sites is not None and case.images < case.sites:
        wrong.append(f"--images {case.images}: expected at least one for each of {case.sites} sites")
    if case.classes is not None and case.classes < 2:
        wrong.append(f"--classes {case.classes}: expected at least 2; with one class there is nothing to tell apart")
    if case.channels not in (None, 1, 3):
        wrong.append(f"--channels {case.channels}: expected 1 (gray) or 3 (RGB)")
    if secure_sum and not server:
        wrong.append("--secure-sum and --no-server: the sum is taken at a server; leave one of them out")
    if epsilon is not None and not epsilon > 0:
        wrong.append(f"--epsilon {epsilon:g}: expected a number above 0; leave it out for no differential privacy")
    if classes_per_site is not None and case.classes is not None and classes_per_site > case.classes:
        wrong.append(f"--classes-per-site {classes_per_site:g}: expected at most the {case.classes} classes that there are")
    if wrong:
        raise UsageError(wrong)


def _bytes(text: str) -> float:
    """`20MB` or `500kB` in bytes, decimal."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(B|kB|MB|GB)?\s*", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"--upload-limit {text!r}: expected a size such as 500kB or 20MB", field="upload_limit")
    return float(match[1]) * {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9}[(match[2] or "").lower()]


def _share(classes_per_site: float, classes: int | None, counted: float | None) -> float:
    if classes is None:
        raise UsageError(f"--classes-per-site {classes_per_site:g} has no effect without --classes", fix="Add --classes C.")
    if counted is not None:
        raise UsageError("--classes-per-site and --folders: the folders are counted", fix="Leave one of them out.")
    if classes_per_site > classes:
        raise UsageError(f"--classes-per-site {classes_per_site:g}: expected at most the {classes} classes that there are")
    return classes_per_site / classes


def _looked_up(case: Case, folders: Path | None, plan: Path | None) -> tuple[Case, float | None]:
    """The case with what folders or a plan say, and what a constant answer would have, if images were counted."""
    if folders is not None and plan is not None:
        raise UsageError("--folders and --plan both state what the sites have", fix="Leave one of them out.")
    if plan is not None:
        return _with(case, _of_plan(plan), "--plan"), None
    if folders is None:
        return case, None

    from osfl.data.image_counts import count_images
    from osfl.evaluation.advice.known import Case, counted_share

    counts = count_images(folders)
    total = sum(counts.values(), Counter[str]())
    names, images = sorted(total), total.total()
    share = counted_share([[row[name] for name in names] for row in counts.values()])
    found = Case(sites=len(counts), images=images, classes=len(names), share=share)
    return _with(case, found, "--folders"), max(total.values()) / images


def _of_plan(path: Path) -> Case:
    from osfl.core.plan import read_plan
    from osfl.evaluation.advice.known import Case

    round_plan = read_plan(path)
    channels, height, width = round_plan.task.image
    return Case(sites=len(round_plan.clients), classes=len(round_plan.task.classes), side=max(height, width), channels=channels)


def _with(case: Case, found: Case, source: str) -> Case:
    """Both together; what both say must agree."""
    given, known = ({key: value for key, value in asdict(one).items() if value is not None} for one in (case, found))
    other = [key for key in given if known.get(key, given[key]) != given[key]]
    wrong = [f"{key}: {given[key]} was given, {source} has {known[key]}" for key in other]
    if wrong:
        raise UsageError(wrong, fix=f"Leave out what {source} has.")
    return replace(case, **known)


# --- the answer -------------------------------------------------------------------------------------------------------


def _as_json(case: Case, wants: Wants, found: Advice, constant: float | None) -> dict[str, object]:
    return {
        "case": asdict(case),
        "wants": asdict(wants),
        "known": found.known,
        "constant_answer": constant,
        "ranked": [
            {**asdict(one), "evidence": [asdict(cell) for cell in one.evidence], "command": _command(one, case, wants)}
            for one in found.ranked
        ],
        "excluded": found.excluded,
        "nearest": [
            {"cell": cell.name, "title": cell.title, "distance": d, "constant_answer": cell.constant, **asdict(cell.case)}
            for d, cell in found.nearest[:SHOWN]
        ],
    }


def _show(case: Case, wants: Wants, found: Advice, constant: float | None) -> None:
    from osfl.evaluation.advice.ranking import NEAR, REACH
    from osfl.reports.text import percent

    names = {
        "sites": "sites",
        "images": "images",
        "classes": "classes",
        "share": "of the classes at a site",
        "side": "px",
        "channels": "channel(s)",
        "kind": "images",
    }
    given = {key: value for key, value in asdict(case).items() if value is not None}
    shown = [f"{percent(value, 0) if key == 'share' else value} {names[key]}" for key, value in given.items()]
    echo(f"Your case: {', '.join(shown)}.")
    if missing := [key for key in names if key not in given]:
        option_names = {"share": "classes-per-site", "side": "image-size"}
        echo(f"[dim]Not given, and so without effect: {', '.join('--' + option_names.get(key, key) for key in missing)}.[/]")
    near = ", ".join(f"{cell.name} ({d:.1f})" for d, cell in found.nearest[:4])
    echo(f"Nearest cells of the records, with their distance: {near}.")
    if not found.known:
        echo(f"[yellow]Nothing near is known: no cell is within {REACH:g} doublings. Compare methods on your own images.[/]")
        return
    if found.nearest[0][0] > NEAR:
        echo("[yellow]The nearest cell is far: take the figures as hints, and compare methods on your own images.[/]")
    _table(found.ranked[:SHOWN], wants.personal)
    if len(found.ranked) > SHOWN:
        echo(f"[dim]and {', '.join(one.label for one in found.ranked[SHOWN:])}[/]")
    _constant(found, constant)
    for reason in dict.fromkeys(found.excluded.values()):
        methods = ", ".join(method for method, why in found.excluded.items() if why == reason)
        echo(f"[dim]Not {methods}: {escape(reason)}.[/]")
    _against_the_server(found.variants)
    if found.ranked:
        echo(f"\nTry the first: [cyan]{escape(_command(found.ranked[0], case, wants))}[/]")
    else:
        echo("[yellow]No method of the records keeps to what you allow.[/]")


def _table(ranked: Sequence[Ranked], personal: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from osfl.reports.text import percent, seconds, size

    if not ranked:
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Method", overflow="fold", min_width=17)
    accuracy = "Own\naccuracy" if personal else "Accuracy"
    for title in ("Behind", accuracy, "80 % of\nruns", "A site\nsends", "Server", "A site"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in ranked:
        table.add_row(
            escape(one.label.replace("@", "\n  ")),
            f"{-100 * one.score:.1f}",
            percent(one.accuracy),
            f"{100 * one.low:.0f}–{100 * one.high:.0f}",
            size(one.upload),
            *("–" if value is None else seconds(value) for value in (one.server, one.site)),
        )
    output().print(table)
    echo("The order is by points behind the best method of each cell, near cells first: other images have other accuracies.")
    used = ", ".join(f"{cell.cell} ({cell.distance:.1f}) {percent(cell.accuracy)}" for cell in ranked[0].evidence)
    echo(f"The cells of the first, with its accuracy there: {used}. --format json has those of all.")


def _constant(found: Advice, constant: float | None) -> None:
    from osfl.reports.text import percent

    _, cell = found.nearest[0]
    if constant is not None:
        echo(f"Always the most frequent class would have {percent(constant)} of your images; judge accuracy beside that.")
    elif cell.constant is not None:
        echo(f"Always the most frequent class would have {percent(cell.constant)} in {cell.name}; judge accuracy beside that.")


def _against_the_server(variants: Sequence[Ranked]) -> None:
    """What the other kind of noise costs, where the first trusts the server with each site's share of it."""
    from osfl.reports.text import percent

    if not variants or not variants[0].label.endswith("@noise=share"):
        return
    other = next((one for one in variants if one.label.endswith("@noise=site")), None)
    reached = f" has {percent(other.accuracy)} ({escape(other.label)})" if other else " is in no record near"
    echo(f"noise=share trusts the server not to look at single uploads; noise=site, against the server, too,{reached}.")


def _command(one: Ranked, case: Case, wants: Wants) -> str:
    """How to try it on images of one's own."""
    from osfl.evaluation.advice.needs import OF_THE_ROUND, settings_in

    changes = settings_in(one.label)
    of_the_round = [f"--{key} {changes.pop(key)}" for key in OF_THE_ROUND if key in changes]
    parts = ["osfl run --method", one.label.partition("@")[0], "--dataset path/to/images"]
    parts += [f"--clients {case.sites}"] if case.sites else []
    parts += ["--secure-sum"] if wants.secure_sum else []
    return " ".join([*parts, *of_the_round, *(f"--set {key}={value}" for key, value in changes.items())])
