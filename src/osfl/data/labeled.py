"""Labeled images that a finished model is measured on: a name, a folder, zip or table, an external test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from osfl.core.errors import DataError, UsageError
from osfl.core.method import quiet
from osfl.core.types import ClientId, Progress, Task
from osfl.data.arrays import open_npz_parts, unknown_arrays
from osfl.data.catalog import sheets
from osfl.data.folders import collect
from osfl.data.opening import open_dataset
from osfl.data.reading import Reading, check_reading
from osfl.data.site import check_kind, open_site, refuse_unknown
from osfl.data.source import Part, Problem, together
from osfl.data.views import train_and_validation


@dataclass(frozen=True)
class LabeledImages:
    part: Part
    name: str
    which: str  # test, validation or all
    problems: Sequence[Problem] = ()
    held_out: Part | None = None  # validation images of a site, for thresholds


def open_labeled(
    data: str, task: Task, *, whole: bool = False, reading: Reading = Reading(), progress: Progress = quiet
) -> LabeledImages:
    """Images with the task's classes, at its size: the part called test if there is one, else (or with `whole`) all."""
    path = Path(data)
    if not path.exists() and data in sheets():
        return _named(data, task, whole, reading, progress)
    if not path.exists():
        raise DataError(f"there is no data at {path}", field="data", fix="Name a folder that holds one folder a class.")
    check_reading(reading)
    if (reading.group or reading.by) and path.suffix.lower() != ".csv":
        named = " and ".join(f"{'--group' if c == reading.group else '--by'} {c}" for c in (reading.group, reading.by) if c)
        raise UsageError(f"{named}: {path} is no table, so it has no columns", field="by", fix="Give a CSV with such columns.")
    if path.suffix.lower() == ".npz" and not path.is_dir():
        parts, _ = open_npz_parts(path, len(task.classes), task.image[1], task.image[0])
        check_kind(parts["train"].labels.ndim == 2, task)
        return _chosen(path.name, parts.get("test"), list(parts.values()), whole, unknown_arrays(path))
    found = collect(path, task.classes, task.image[1], task.image[0], progress, "", reading, task.several)
    check_kind(found.several, task)
    refuse_unknown(found.unknown, task)
    tested = np.flatnonzero(found.parts == "test")
    test = found.whole.subset(tested) if len(tested) else None
    return _chosen(path.name, test, [found.whole], whole, found.problems)


def _named(name: str, task: Task, whole: bool, reading: Reading, progress: Progress) -> LabeledImages:
    source = open_dataset(name, size=task.image[1], channels=task.image[0], progress=progress, reading=reading)
    if source.classes != task.classes:
        raise DataError(
            f"{name} has other classes than the model",
            field="data",
            expected=", ".join(task.classes),
            got=", ".join(source.classes),
            fix="Give labeled images of the model's classes.",
        )
    check_kind(source.kind == "multilabel", task)
    parts = [part for part in (source.train, source.val, source.test) if part is not None]
    return _chosen(name, source.test, parts, whole, source.problems)


def _chosen(name: str, test: Part | None, parts: Sequence[Part], whole: bool, problems: Sequence[Problem]) -> LabeledImages:
    if test is not None and not whole:
        return LabeledImages(test, name, "test", problems)
    return LabeledImages(joined(parts), name, "all", problems)


def joined(parts: Sequence[Part]) -> Part:
    """Several parts as one; people and domains stay known where every part knows them."""

    def column(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        return None if any(one is None for one in found) else np.concatenate(found)

    if len(parts) == 1:
        return parts[0]
    return Part(together(part.dataset for part in parts), column("domains"), column("groups"), column("names"))


def held_out_of_site(data: Path, task: Task, client: ClientId, seed: int, reading: Reading) -> LabeledImages | None:
    """A site's images that it did not train on: its part called test, else what it held out; None where there are none."""
    found = open_site(data, task, reading=reading)
    _, held_out = train_and_validation(found.train, client, seed=seed) if task.several or found.test is None else (None, None)
    if found.test is not None:
        return LabeledImages(found.test, data.name, "test", found.problems, held_out)
    return LabeledImages(held_out, data.name, "validation", found.problems, held_out) if held_out else None
