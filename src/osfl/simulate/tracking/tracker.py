"""`--log tensorboard|mlflow|wandb[:DIR]`: what a run found out goes to a tracker, after its results are on disk.

A tracker only ever gets a finished result, so it cannot change one. If it fails, that is said once, and runs go on without it.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from osfl.core.errors import UsageError, nearest
from osfl.core.result import Result
from osfl.core.types import Json, digest_of
from osfl.reports.comparison import comparison_page
from osfl.reports.page import run_page
from osfl.reports.saved import as_png, figure_names
from osfl.simulate.tracking.logged import Scalar, comparison_scalars, curves, facts, scalars

Say: TypeAlias = Callable[[str], object]
_UNFIT = re.compile(r"[^\w.@=,+-]+")  # for the name of a folder


@runtime_checkable
class Tracker(Protocol):
    """Where runs are logged: `start`, then any of the others, then `finish`; and again for the next run."""

    def start(self, run: str, facts: Mapping[str, str]) -> None: ...
    def scalar(self, name: str, value: float, step: int) -> None: ...
    def figure(self, name: str, png: bytes) -> None: ...
    def finish(self) -> None: ...


def _tensorboard(folder: Path) -> Tracker:
    from osfl.simulate.tracking.to_tensorboard import TensorBoard

    return TensorBoard(folder)


def _mlflow(folder: Path) -> Tracker:
    from osfl.simulate.tracking.to_mlflow import MLflow

    return MLflow(folder)


def _wandb(folder: Path) -> Tracker:
    from osfl.simulate.tracking.to_wandb import WeightsAndBiases

    return WeightsAndBiases(folder)


# name, which is the extra's too -> what it needs, and what opens it in a folder
TRACKERS: dict[str, tuple[tuple[str, ...], Callable[[Path], Tracker]]] = {
    "tensorboard": (("tensorboard",), _tensorboard),
    "mlflow": (("mlflow", "sqlalchemy", "alembic"), _mlflow),
    "wandb": (("wandb",), _wandb),
}


def open_logs(wanted: str | Tracker | Sequence[str | Tracker] | None, say: Say | None = None) -> list[Log]:
    """`tensorboard`, `mlflow:DIR`, a tracker of one's own, or several. A missing extra is refused here, before a run."""
    each = [] if wanted is None else [wanted] if isinstance(wanted, (str, Tracker)) else list(wanted)
    say = say or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))
    return [_opened(one, say) if isinstance(one, str) else _own(one, say) for one in each]


def _own(tracker: Tracker, say: Say) -> Log:
    return Log(type(tracker).__name__, lambda: tracker, None, say)


def _opened(text: str, say: Say) -> Log:
    name, colon, place = text.partition(":")
    if name not in TRACKERS or (colon and not place):
        raise UsageError(
            f"--log: expected {' or '.join(TRACKERS)}, each with :DIR if wanted; got {text!r}.{nearest(name, tuple(TRACKERS))}",
            field="log",
            fix="For example --log tensorboard:runs/tensorboard.",
        )
    needs, open_in = TRACKERS[name]
    missing = [module for module in needs if find_spec(module) is None]
    if missing:
        what = " and ".join(missing)
        raise UsageError(f"--log {name} needs {what}, not installed here", field="log", fix=f"pip install 'osfl[{name}]'")
    folder = Path(place) if place else Path("runs") / name
    return Log(name, lambda: open_in(folder), folder, say)


@dataclass
class Log:
    """One tracker, opened with the first run that is logged. `folder`: where it writes; None for one of somebody's own."""

    name: str
    open: Callable[[], Tracker]
    folder: Path | None
    say: Say
    failed: bool = False
    _tracker: Tracker | None = field(default=None, repr=False)

    def run(self, result: Result, folder: Path) -> None:
        """A finished run; one that was logged here before is not logged again."""
        name = f"{folder.parent.name}-{folder.name}" if re.fullmatch(r"seed\d+", folder.name) else folder.name
        figures: Callable[[], str] = lambda: run_page(result)  # noqa: E731
        values: Callable[[], list[Scalar]] = lambda: [*scalars(result), *curves(result)]  # noqa: E731
        self._log(name, lambda: facts(result), values, figures, result, f"Its results are in {folder}")

    def comparison(self, comparison: dict[str, Json], results: Sequence[Result], folder: Path) -> None:
        """Means over seeds of all methods, and the figures of the comparison's page."""
        about = {"methods": ", ".join(comparison["methods"]), "runs": str(len(comparison["runs"]))}
        figures: Callable[[], str] = lambda: comparison_page(comparison, results)  # noqa: E731
        where = f"The comparison is in {folder}"
        values: Callable[[], list[Scalar]] = lambda: comparison_scalars(comparison)  # noqa: E731
        self._log(f"{folder.name}-comparison", lambda: about, values, figures, comparison, where)

    def _log(
        self,
        name: str,
        about: Callable[[], Mapping[str, str]],
        values: Callable[[], Sequence[Scalar]],
        page: Callable[[], str],
        found: Mapping[str, Json],
        where: str,
    ) -> None:
        if self.failed:
            return
        try:
            digest = digest_of({key: value for key, value in found.items() if key != "figures"})
            marker = None if self.folder is None else self.folder / ".logged" / digest
            if marker is not None and marker.exists():
                return
            self._tracker = self._tracker or self.open()
            self._tracker.start(f"{_UNFIT.sub('-', name)}-{digest[:8]}", about())
            for one in values():
                self._tracker.scalar(*one)
            for title, drawing in figure_names(page).items():
                if drawing.table:  # pictures stay out: among them may be images of owners
                    self._tracker.figure(title, as_png(drawing))
            self._tracker.finish()
            if marker is not None:
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()
        except (Exception, SystemExit) as error:  # whatever a tracker fails with, a run is worth more
            self.failed = True
            with contextlib.suppress(Exception, SystemExit):
                if self._tracker is not None:
                    self._tracker.finish()
            reason = (str(error).strip().splitlines() or [""])[0]
            with contextlib.suppress(Warning):  # where warnings are errors
                self.say(
                    f"Logging to {self.name} failed and is left out from here on: {type(error).__name__}: {reason}. {where}."
                )
