"""`osfl report`: write the reports of finished runs again, and a page that compares them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import names
from osfl.cli.summary import show_comparison, show_run
from osfl.cli.terminal import put_json
from osfl.core.errors import RoundError
from osfl.core.types import Json

if TYPE_CHECKING:
    from osfl.core.result import Result

EXAMPLES = (
    "osfl compare --methods fedavg,ensemble --smoke --out runs/pair",
    "osfl report runs/pair",
    "osfl report 'runs/pair/*/seed0' --markdown",
    "osfl report runs/pair --figures runs/figures --as svg,csv",
)

Folders = Annotated[list[str], typer.Argument(metavar="DIR...", help="Folders of runs or of a comparison; * is allowed.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        parser=options.new_folder,
        show_default=False,
        help="Where the comparison page goes; default report/ beside the runs.",
    ),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as markdown.")]
Figures = Annotated[
    Path | None,
    typer.Option(
        "--figures",
        metavar="DIR",
        parser=options.new_folder,
        show_default=False,
        help="Save each figure of the pages there: those of several runs in a folder each, those of their comparison in DIR.",
    ),
]
As = Annotated[
    str, typer.Option("--as", metavar="svg,png,csv", help="Formats of --figures; CSV has the numbers behind a figure.")
]


@dataclass(frozen=True)
class Finished:
    """A run that has results."""

    folder: Path
    result: Result
    label: str = ""  # its name in a comparison; empty: by its method and settings


def report(
    folders: Folders,
    out: Out = None,
    markdown: Markdown = False,
    metric: options.Metric = "",
    figures: Figures = None,
    as_: As = "svg",
    output_format: options.Format = "text",
) -> None:
    """Write report/index.html again for each run, and one page that compares them."""
    from osfl.reports.markdown import comparison_markdown
    from osfl.reports.saved import checked

    formats = checked(names(as_, "--as", "format"))
    runs = _with_gains(_labeled(_runs(folders)))
    where = _redraw(runs)
    saved = [] if figures is None else _saved(runs, figures, formats)
    if len(runs) == 1 and not markdown and out is None:
        shown: dict[str, Json] = {**runs[0].result, "saved": [str(path) for path in saved]} if saved else {**runs[0].result}
        put_json(shown) if output_format == "json" else show_run(runs[0].result, runs[0].folder)
        _say_saved(saved, figures, output_format)
        return
    target = out or _beside(runs) / "report"
    comparison = _compare(runs, target, f"osfl report {' '.join(folders)}", metric)
    if figures is not None:
        from osfl.reports.comparison import comparison_page
        from osfl.reports.saved import save_figures

        saved += save_figures(lambda: comparison_page(comparison, [run.result for run in runs]), figures, formats)
    if output_format == "json":
        paths = {"saved": [str(path) for path in saved]} if saved else {}
        put_json({**comparison, "reports": [str(path) for path in where], "report": str(target / "index.html"), **paths})
    elif markdown:
        print(comparison_markdown(comparison), end="")
    else:
        show_comparison(comparison, target / "index.html")
    _say_saved(saved, figures, "json" if markdown else output_format)


def _saved(runs: Sequence[Finished], folder: Path, formats: Sequence[str]) -> list[Path]:
    """The figures of each run's page, beside the same other runs; several runs have a folder each."""
    from osfl.reports.page import run_page
    from osfl.reports.saved import save_figures

    written = []
    for run in runs:
        place = folder / f"{run.label}-seed{run.result['seed']}" if len(runs) > 1 else folder
        written += save_figures(lambda run=run: run_page(run.result, _beside_it(run, runs)), place, formats)  # type: ignore[misc]
    return written


def _say_saved(saved: Sequence[Path], folder: Path | None, output_format: str) -> None:
    if saved and output_format == "text":
        print(f"Figures: {len(saved)} files in {folder}")


def _beside_it(run: Finished, runs: Sequence[Finished]) -> list[Result]:
    """The other runs on the same shards, by their names."""
    from osfl.evaluation.gains import same_shards

    others = [other for other in runs if other is not run and same_shards(other.result, run.result)]
    return [{**other.result, "method": other.label} for other in others]


def _runs(patterns: Sequence[str]) -> list[Finished]:
    """Every finished run that these folders hold, each once; a folder without any is named."""
    found: dict[Path, Finished] = {}
    missing = []
    for one_pattern in patterns:
        matched = sorted(_expanded(Path(one_pattern))) or [Path(one_pattern)]
        runs = [run for folder in matched for run in _finished(folder)]
        missing += [] if runs else [one_pattern]
        found |= {run.folder.resolve(): run for run in runs}
    if missing:
        fix = "Make one with `osfl run --out DIR`; an unfinished one continues when run again."
        for fused in (Path(one_pattern) for one_pattern in missing if (Path(one_pattern) / "fusion.json").is_file()):
            fix = f"{fused} is a fusion of plain checkpoints, whose page is {fused / 'report' / 'index.html'}."
        raise RoundError(
            f"no finished run in {', '.join(missing)}", field="folder", expected="a folder with results.json", fix=fix
        )
    return list(found.values())


def _expanded(pattern: Path) -> Iterator[Path]:
    """Expand patterns such as runs/* that were quoted, as a shell would."""
    return Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))


def _finished(folder: Path) -> list[Finished]:
    from osfl.core.result import read_result

    if (folder / "results.json").is_file():
        return [Finished(folder, read_result(folder))]
    if (folder / "comparison.json").is_file():
        return [Finished(folder / path, read_result(folder / path), label) for path, label in _listed(folder)]
    return []


def _listed(folder: Path) -> list[tuple[str, str]]:
    """Path and name of every run of a comparison."""
    try:
        comparison = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
        return [(str(run["path"]), str(run["method"])) for run in comparison["runs"]]
    except (ValueError, KeyError, TypeError) as error:  # half a file, or another one
        raise RoundError(
            f"{folder / 'comparison.json'} is not a comparison: {error!r}",
            field="comparison.json",
            fix=f"Repeat the `osfl compare` that made it, which continues, or name its runs: '{folder}/*/*'.",
        ) from None


def _labeled(runs: Sequence[Finished]) -> list[Finished]:
    """Each run with a name that no other run has."""
    from osfl.evaluation.comparison import group_names

    if all(run.label for run in runs):
        return list(runs)
    return [replace(run, label=name) for run, name in zip(runs, group_names([r.result for r in runs]), strict=True)]


def _with_gains(runs: Sequence[Finished]) -> list[Finished]:
    from osfl.evaluation.gains import with_gains

    return [replace(run, result=result) for run, result in zip(runs, with_gains([r.result for r in runs]), strict=True)]


def _redraw(runs: Sequence[Finished]) -> list[Path]:
    from osfl.reports.model_card import write_model_card
    from osfl.reports.page import write_report

    written = []
    for run in runs:
        written.append(write_report(run.result, run.folder / "report", _beside_it(run, runs)))
        write_model_card(run.result, run.folder)
    return written


def _compare(runs: Sequence[Finished], target: Path, command: str, metric: str) -> dict[str, object]:
    from osfl.evaluation.comparison import summarize
    from osfl.reports.comparison import write_comparison

    results = [run.result for run in runs]
    labels = [run.label for run in runs]
    paths = [os.path.relpath(run.folder, target.parent) for run in runs]
    comparison = summarize(results, labels=labels, paths=paths, command=command, metric=metric)
    write_comparison(comparison, results, target)
    return comparison


def _beside(runs: Sequence[Finished]) -> Path:
    """The folder that holds all of them; never a run's own, whose report/ is its own."""
    shared = Path(os.path.commonpath([run.folder.resolve() for run in runs]))
    base = shared.parent if shared in [run.folder.resolve() for run in runs] else shared
    return Path(os.path.relpath(base))
