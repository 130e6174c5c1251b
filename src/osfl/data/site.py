"""What one site brings to a round: its own images, with the classes and the geometry that the plan agreed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from osfl.core.errors import DataError
from osfl.core.method import quiet
from osfl.core.types import ClientId, Progress, Task
from osfl.data.arrays import open_npz_parts, unknown_arrays
from osfl.data.catalog import nearest
from osfl.data.findings import site_class_problems
from osfl.data.folders import collect
from osfl.data.leakage import name_problems
from osfl.data.reading import Reading, check_reading
from osfl.data.source import Part, Problem, together
from osfl.data.views import class_counts


@dataclass(frozen=True)
class SiteData:
    """A site's images. Without a test part of its own everything is for training: nothing is cut off behind its back."""

    train: Part  # training and validation images; the run holds out its share
    test: Part | None
    problems: Sequence[Problem]
    native: int = 0  # median side of the images as they were given, in pixels; 0: not known


def open_site(path: Path, task: Task, progress: Progress = quiet, reading: Reading = Reading()) -> SiteData:
    """A folder or zip (`class/*`, `train|test/class/*`), a CSV table or an `.npz`. A class that the plan lacks is an error."""
    if not path.exists():
        raise DataError(f"there is no data at {path}", field="data", fix="Name the folder that holds one folder a class.")
    check_reading(reading)
    channels, height, _ = task.image
    if path.suffix.lower() == ".npz" and not path.is_dir():
        parts, native = open_npz_parts(path, len(task.classes), height, channels)
        check_kind(parts["train"].labels.ndim == 2, task)
        train = [parts[key] for key in ("train", "val") if key in parts]
        return SiteData(Part(together(part.dataset for part in train)), parts.get("test"), unknown_arrays(path), native)
    found = collect(path, task.classes, height, channels, progress, "", reading, task.several)
    check_kind(found.several, task)
    refuse_unknown(found.unknown, task)
    test = np.flatnonzero(found.parts == "test")
    rest = np.flatnonzero(found.parts != "test")
    if not len(rest):
        raise DataError(f"'{path.name}' holds test images only", field="data", fix="Put training images in train/class/*.")
    return SiteData(found.whole.subset(rest), found.whole.subset(test) if len(test) else None, found.problems, found.native)


def site_problems(found: SiteData, client: ClientId, task: Task) -> list[Problem]:
    """What is wrong with a site's files, and the classes of the task of which it has too few images."""
    counts = class_counts(found.train.labels, len(task.classes)).tolist()
    return [*found.problems, *name_problems(found.train, found.test), *site_class_problems(task.classes, client, counts)]


def check_kind(several: bool, task: Task) -> None:
    """An image with several labels in a round of one class an image, or the other way round."""
    if several != task.several:
        has = ("one label an image", "several labels an image (multi-label)")
        raise DataError(
            f"this data has {has[several]}, and the plan is about {has[not several]}",
            field="data",
            expected=task.kind,
            fix="Agree on a plan with the kind that all sites have (task.kind), or write the labels as the plan wants them.",
        )


def refuse_unknown(labels: Sequence[str], task: Task) -> None:
    """Images left out because a folder is misspelled would be missed by nobody."""
    if labels:
        close = {label: nearest(label, list(task.classes)) for label in labels}
        meant = "; ".join(f"'{label}': did you mean {' or '.join(names)}?" for label, names in close.items() if names)
        raise DataError(
            "there are classes that the plan does not know",
            field="data",
            expected=", ".join(task.classes),
            got=", ".join(labels),
            fix=f"{meant} Rename the folders, or move them away if they do not belong to this round.".strip(),
        )
