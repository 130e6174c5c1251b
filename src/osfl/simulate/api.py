"""`osfl.run` and `osfl.compare`: plain functions for Python and notebooks, whose results show themselves."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from torch import nn

from osfl.core.errors import UsageError
from osfl.core.headline import NAMES, headline_of
from osfl.core.method import Method, quiet
from osfl.core.registry import register, register_file
from osfl.core.result import read_result
from osfl.core.types import Json, Progress
from osfl.data.source import Source
from osfl.data.torch_dataset import Items, from_torch
from osfl.evaluation.gains import with_gains
from osfl.models.architectures import register_model
from osfl.reports.columns import shown_columns, table_rows
from osfl.reports.comparison import comparison_page
from osfl.reports.page import run_page
from osfl.reports.saved import save_figures
from osfl.reports.text import percent, size
from osfl.rounds.finished import load_model
from osfl.runtime.machine import Machine
from osfl.simulate.compare import compare as compare_in
from osfl.simulate.run import run as run_in
from osfl.simulate.simulation import Simulation, default_folder
from osfl.simulate.tracking.tracker import Tracker, open_logs

if TYPE_CHECKING:
    from osfl.core.result import Result as ResultDict

__all__ = ["Comparison", "Result", "compare", "from_torch", "register_model", "run"]

Chosen: TypeAlias = str | Path | type[Method] | Simulation
Images: TypeAlias = str | Path | Source | Items | tuple[Items, Items]


class Result(dict[str, Json]):
    """What `results.json` holds (every key: `osfl.core.result`), with what one asks first as attributes."""

    def __init__(self, found: Mapping[str, Json], folder: Path) -> None:
        super().__init__(found)
        self.folder = folder

    @property
    def scores(self) -> dict[str, Any]:
        return cast(dict[str, object], self["scores"])

    @property
    def accuracy(self) -> float:
        """On the global test set."""
        return float(self.scores["global"]["accuracy"])

    @property
    def balanced_accuracy(self) -> float:
        return float(self.scores["global"]["balanced_accuracy"])

    @property
    def auroc(self) -> float | None:
        return cast(float | None, self.scores["global"]["auroc"])

    @property
    def upload_bytes(self) -> int:
        """Of all clients together."""
        return int(self["costs"]["upload_bytes"])

    @property
    def headline(self) -> tuple[str, float]:
        """The metric to read first, and its value."""
        metric, _ = headline_of(cast("ResultDict", self))
        return NAMES[metric], float(self.scores["global"][metric])

    @property
    def report(self) -> Path:
        return self.folder / "report" / "index.html"

    def save_figures(self, folder: Path | str, formats: Sequence[str] = ("svg",)) -> list[Path]:
        """Each figure of the report as a file: svg, png, csv (the numbers behind it). What `osfl report --figures` does."""
        return save_figures(lambda: run_page(cast("ResultDict", self)), Path(folder), formats)

    def model(self, client: str | None = None) -> nn.Module:
        """The finished model, ready to be asked; `client` where each has its own."""
        return load_model(self.folder, client)[0]

    def to_frame(self) -> Any:  # pandas.DataFrame
        """One row a client: its images, its accuracy on its own distribution and on all, its bytes."""
        own, everyone = (self.scores["clients"][key]["values"] for key in ("own", "everyone"))
        costs = self["costs"]
        rows = [
            {
                "client": row["client"],
                "train": row["train"],
                "val": row["val"],
                "own_accuracy": own[row["client"]],
                "accuracy": everyone[row["client"]],
                "upload_bytes": costs["upload_bytes_by_client"].get(row["client"], 0),
                "download_bytes": costs["download_bytes_by_client"].get(row["client"], 0),
            }
            for row in self["clients"]
        ]
        return _pandas().DataFrame(rows).set_index("client")

    def __repr__(self) -> str:
        name, value = self.headline
        clients = len(self["clients"])
        sent = size(self.upload_bytes).replace("\N{NO-BREAK SPACE}", " ")
        return f"<osfl.Result {self['method']}: {name} {value:.1%}, {clients} clients, {sent} sent, in {self.folder}>"

    def _repr_html_(self) -> str:
        name, value = self.headline
        rows = [
            (name, f"{value:.1%}"),
            ("worst client", f"{self.scores['clients']['own']['worst']:.1%}"),
            ("sent by all clients", size(self.upload_bytes)),
            ("report", str(self.report)),
        ]
        smoke = "<p><b>Smoke run: its figures say nothing about a method.</b></p>" if self["preset"] == "smoke" else ""
        return smoke + _html([str(self["method"]), f"{len(self['clients'])} clients"], rows)


class Comparison(dict[str, Json]):
    """What `comparison.json` holds."""

    def __init__(self, found: Mapping[str, Json], folder: Path) -> None:
        super().__init__(found)
        self.folder = folder

    @property
    def report(self) -> Path:
        return self.folder / "report" / "index.html"

    def to_frame(self) -> Any:  # pandas.DataFrame
        """One row a method, a column a metric: means over seeds."""
        means = {name: {key: one["mean"] for key, one in metrics.items()} for name, metrics in self["methods"].items()}
        return _pandas().DataFrame.from_dict(means, orient="index").dropna(axis="columns", how="all")

    def save_figures(self, folder: Path | str, formats: Sequence[str] = ("svg",)) -> list[Path]:
        """Each figure of the comparison's page as a file: svg, png, csv (the numbers behind it)."""
        results = [read_result(self.folder / run["path"]) for run in self["runs"]]
        return save_figures(lambda: comparison_page(self, with_gains(results)), Path(folder), formats)

    def __repr__(self) -> str:
        first = self["headline"]["metric"]
        found = [(name, one[f"scores.global.{first}"]["mean"]) for name, one in self["methods"].items()]
        scores = ", ".join(f"{name} {percent(value)}".replace("\N{NO-BREAK SPACE}", " ") for name, value in found)
        return f"<osfl.Comparison by {NAMES[first]}: {scores}, in {self.folder}>"

    def _repr_html_(self) -> str:
        rows = [(row.method, *(f"{cell.text} {cell.spread}".strip() for cell in row.cells)) for row in table_rows(self)]
        return _html(["method", *(column.title for column in shown_columns(self))], rows)


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _pandas() -> Any:
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise UsageError(
            "a frame needs pandas, which is not installed", field="pandas", fix="pip install 'osfl[pandas]'"
        ) from None
    return pandas


# --- run and compare --------------------------------------------------------------------------------------------------


def run(
    method: Chosen = "onesum",
    out: Path | str | None = None,
    *,
    dataset: Images = "digits",
    clients: int | None = None,
    partition: str = "dirichlet:0.1",
    preset: str = "cpu",
    seed: int = 0,
    settings: Mapping[str, Json] | None = None,
    samples: int | None = None,
    test_samples: int | None = None,
    image_size: int | None = None,
    channels: int | None = None,
    evaluate_on: Literal["test", "val"] = "test",
    workers: int | None = None,
    device: str = "cpu",
    machine: Machine | None = None,
    progress: Progress | bool = True,
    log: str | Tracker | Sequence[str | Tracker] | None = None,
) -> Result:
    """Simulate one round and return its result; the folder `out` keeps everything, and an interrupted run continues there.

    `method` is a name, a file (`./mine.py`), a class of your own, or a whole `Simulation`. `dataset` is a name, a path, or two
    torch datasets (train, test). `settings` change the method's own, such as `{"epochs": 2}`. `log`: `tensorboard`, `mlflow` or
    `wandb`, each with `:DIR` if wanted, or a tracker of one's own (`osfl.simulate.tracking.tracker.Tracker`).
    """
    logs = open_logs(log)
    options: dict[str, object] = {
        "clients": clients,
        "partition": partition,
        "preset": preset,
        "seed": seed,
        "changes": _changes(settings),
        "samples": samples,
        "test_samples": test_samples,
        "image_size": image_size,
        "channels": channels,
        "evaluate_on": evaluate_on,
    }
    simulation = _simulation(method, dataset, options)
    folder = Path(out) if out is not None else default_folder(simulation)
    shown = progress if callable(progress) else ProgressLine() if progress else quiet
    found = run_in(simulation, folder, machine=machine or Machine(workers=workers, device=device), progress=shown, logs=logs)
    return Result(found, folder)


def compare(
    methods: Sequence[str | Path | type[Method]] | str | Path | type[Method],
    out: Path | str = "runs/compare",
    *,
    seeds: Sequence[int] | int = (0,),
    simulation: Simulation | None = None,
    metric: str = "",
    fresh: bool = False,
    dataset: Images = "digits",
    machine: Machine | None = None,
    progress: Progress | bool = True,
    log: str | Tracker | Sequence[str | Tracker] | None = None,
    **options: Any,
) -> Comparison:
    """Several methods on the same shards: `osfl.compare(["onesum", "fedavg"], clients=5, seeds=[0, 1])`.

    Further options are those of `osfl.run`; or give a whole `simulation`, whose method is not used.
    """
    several = [methods] if isinstance(methods, (str, Path, type)) else methods
    names, logs = [_named(one) for one in several], open_logs(log)
    if simulation is None:
        changes = _changes(options.pop("settings", None))
        simulation = _simulation(names[0].partition("@")[0] if names else "", dataset, {**options, "changes": changes})
    shown = progress if callable(progress) else ProgressLine() if progress else quiet
    how: dict[str, Any] = {"machine": machine or Machine(), "progress": shown, "metric": metric, "fresh": fresh, "logs": logs}
    return Comparison(compare_in(simulation, names, [seeds] if isinstance(seeds, int) else seeds, out, **how), Path(out))


def _changes(settings: Mapping[str, Json] | None) -> dict[str, Json]:
    if settings is not None and not isinstance(settings, Mapping):
        raise UsageError(f"settings: expected a dict, got {settings!r}", field="settings", fix='For example {"epochs": 2}.')
    return dict(settings or {})


def _simulation(method: Chosen, dataset: Images, options: Mapping[str, Json]) -> Simulation:
    if isinstance(method, Simulation):
        return method
    name = _named(method)
    if isinstance(dataset, (str, Path)):
        return Simulation(name, str(dataset), **options)
    source = dataset if isinstance(dataset, Source) else _torch(dataset)
    return replace(Simulation(name, source.name, **options), source=source)


def _torch(dataset: Items | tuple[Items, Items]) -> Source:
    """One dataset, or (train, test)."""
    parts = dataset if isinstance(dataset, tuple) else (dataset,)
    if not 1 <= len(parts) <= 2 or not all(hasattr(part, "__len__") and hasattr(part, "__getitem__") for part in parts):
        raise UsageError(
            f"dataset: expected a name, a path, a torch dataset, or two of them, (train, test), got {type(dataset).__name__}",
            field="dataset",
            fix="A torch dataset has a length, and its items are (image, label).",
        )
    return from_torch(*parts)


def _named(method: str | Path | type[Method]) -> str:
    if isinstance(method, type):
        return register(method)
    text = str(method)
    return register_file(Path(text)) if text.endswith(".py") else text


class ProgressLine:
    """One line that is written over, on a terminal or in a notebook; nothing elsewhere."""

    def __init__(self) -> None:
        self.shown = sys.stderr.isatty() or "ipykernel" in sys.modules
        self.begun, self.last, self.width = time.monotonic(), 0.0, 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not self.shown or (done < total and now - self.last < 0.2):
            return
        self.last = now
        text = f"[{now - self.begun:5.0f} s] {what}  {f'{done}/{total}' if total > 1 else 'done' if done else '…'}"
        sys.stderr.write(f"\r{text.ljust(self.width)}")
        sys.stderr.flush()
        self.width = len(text)
