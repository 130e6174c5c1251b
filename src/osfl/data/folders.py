"""Image folders, zips and CSV tables to a source: arrange, decode, cut a test part if there is none, report."""

from __future__ import annotations

import codecs
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from osfl.core.errors import DataError
from osfl.core.result import finding_line
from osfl.core.types import Progress
from osfl.data.arrays import TEST_SHARE
from osfl.data.catalog import Sheet
from osfl.data.decoded_files import Gallery, gallery
from osfl.data.findings import grouped
from osfl.data.layout import SKIPPED, Item, Table, arrange, class_names, read_table
from osfl.data.mapped import by_place, is_large
from osfl.data.multilabel import label_matrix, labels_in
from osfl.data.reading import Reading
from osfl.data.source import Indices, Names, Part, Problem, Source, finish, part_of
from osfl.data.split import hold_out_mask, strata_of
from osfl.data.tree import open_tree, read_file, stamp

DEFAULT_SIZE = 64


@dataclass(frozen=True)
class Collection:
    """All usable images of a folder, zip or table as one part, and the name of the part each belongs to."""

    classes: tuple[str, ...]
    whole: Part
    parts: Names  # "", train, val or test
    problems: list[Problem]
    unknown: tuple[str, ...] = ()  # labels that are no class of ours; their images are left out
    several: bool = False  # a table in which an image may have several labels
    native: int = 0  # median side of the files, in pixels


def open_images(
    path: Path,
    sheet: Sheet | None,
    size: int | None,
    channels: int | None,
    progress: Progress,
    doubts: Sequence[Problem],
    reading: Reading = Reading(),
) -> Source:
    """A folder or zip of images; classes, parts and domains are folders."""
    found = collect(
        path,
        (sheet.classes or None) if sheet else None,
        *_geometry(sheet, size, channels),
        progress,
        sheet.group_pattern if sheet else "",
        reading,
    )
    return _source(path.stem, found, sheet, doubts)


def open_table(path: Path, size: int | None, channels: int | None, progress: Progress, reading: Reading = Reading()) -> Source:
    """A CSV of `path,label[,split][,domain][,patient]`, or with several labels; paths are relative to the CSV's folder."""
    return _source(path.stem, collect(path, None, *_geometry(None, size, channels), progress, "", reading), None, [])


def collect(
    path: Path,
    classes: tuple[str, ...] | None,
    size: int,
    channels: int | None,
    progress: Progress,
    group_pattern: str = "",
    reading: Reading = Reading(),
    several: bool = False,
) -> Collection:
    """Every image of a folder, zip or CSV table that can be used; without `classes` the names of the labels are. `several`: an
    image may have several of the classes, also where none of these has."""
    if path.suffix.lower() == ".csv" and not path.is_dir():
        table = _listed(path, reading, classes or ())
        items, problems, several = table.items, table.problems, several or table.several
        classes = classes or (tuple(sorted(table.classes)) or None)
        stamps = [stamp(path.parent / item.name) for item in items]
        pictures = gallery(
            [item.name for item in items], stamps, lambda name: read_file(path.parent / name), size, channels, progress, reading
        )
    else:
        with open_tree(path) as tree:
            items, problems = arrange(tree.stamps, group_pattern)
            stamps = [tree.stamps[item.name] for item in items]
            pictures = gallery([item.name for item in items], stamps, tree.read, size, channels, progress, reading)
    return _collected(path.stem, items, pictures, classes, problems, channels, several)


def _listed(path: Path, reading: Reading, classes: Sequence[str]) -> Table:
    blob = path.read_bytes()
    wide = blob.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # "Unicode text" of Excel
    try:
        text = blob.decode("utf-16" if wide else "utf-8")
    except UnicodeDecodeError:
        raise DataError(f"'{path.name}' is not UTF-8 text", field="file", fix="Save it as UTF-8 CSV.") from None
    return read_table(text, path.name, reading.group, reading.by, classes)


def _geometry(sheet: Sheet | None, size: int | None, channels: int | None) -> tuple[int, int | None]:
    return size or (sheet.size if sheet else DEFAULT_SIZE), channels or (sheet.channels if sheet else None)


def _collected(
    name: str,
    items: list[Item],
    pictures: Gallery,
    classes: tuple[str, ...] | None,
    problems: list[Problem],
    channels: int | None,
    several: bool,
) -> Collection:
    items = _pictured(items, pictures)
    problems = [*problems, *pictures.problems]
    classes = classes or class_names(items, several)
    unknown = [sorted(set(labels_in(item.label) if several else (item.label,)) - set(classes)) for item in items]
    pairs = zip(items, unknown, strict=True)
    problems += [Problem(item.name, f"unknown class '{extra[0]}'", SKIPPED) for item, extra in pairs if extra]
    use = np.array([n for n, extra in enumerate(unknown) if not extra], dtype=np.int64)
    if not len(use):
        raise _nothing(name, problems)
    problems += _doubles(items, pictures) + _shapes(items, pictures, channels)
    whole, parts = _whole([items[i] for i in use], pictures, use, classes, several)
    problems += _shared_people(whole, parts)
    extra = tuple(sorted({label for labels in unknown for label in labels}))
    return Collection(classes, whole, parts, problems, extra, several, int(np.median(pictures.sides[use])))


def _pictured(items: list[Item], pictures: Gallery) -> list[Item]:
    """One item for each picture: of a volume each slice. What shows one person, or is of one file, stays together."""
    found = [items[i] for i in pictures.kept]
    for n, (item, place, person) in enumerate(zip(found, pictures.places.tolist(), pictures.people.tolist(), strict=True)):
        group = item.group or (f"person {person + 1}" if person >= 0 else item.name if place else "")
        found[n] = replace(item, name=f"{item.name} {place}".strip(), group=group)
    return found


def _source(name: str, found: Collection, sheet: Sheet | None, doubts: Sequence[Problem]) -> Source:
    train, val, test = _parts(name, found.whole, found.parts)
    return finish(
        sheet.name if sheet else name, found.classes, train, val, test, sheet, [*doubts, *found.problems], found.native
    )


def _nothing(name: str, problems: Sequence[Problem]) -> DataError:
    lost = [problem for problem in problems if problem.done == SKIPPED]  # of the others, none is why
    seen = "; ".join(finding_line(finding) for finding in grouped(lost)[:3])
    return DataError(
        f"'{name}' holds no usable image" + (f" ({seen})" if seen else ""),
        field="dataset",
        fix="Expected class/*, train|test/class/* or domain/class/* with PNG, JPEG, TIFF, BMP, GIF, WEBP or PPM files, "
        "or with DICOM or NIfTI files.",
    )


def _whole(items: list[Item], pictures: Gallery, use: Indices, classes: Sequence[str], several: bool) -> tuple[Part, Names]:
    """All images as one part, and the name of the part each belongs to."""
    number = {label: i for i, label in enumerate(classes)}
    named = [item.label for item in items]
    labels = label_matrix(named, classes) if several else np.array([number[label] for label in named], dtype=np.int64)
    large = is_large(len(pictures.images), pictures.images.shape[1:])
    images = pictures.images if large or len(use) == len(pictures.images) else pictures.images[use]
    grouped = any(item.group for item in items)  # then a file without a group is a group of its own
    groups = np.array([item.group or item.name for item in items], dtype=np.str_) if grouped else None
    domains = np.array([item.domain for item in items], dtype=np.str_) if any(i.domain for i in items) else None
    names = np.array([item.name for item in items], dtype=np.str_)
    parts = np.array([item.part for item in items], dtype=np.str_)
    if large:
        return Part(by_place(images, use, labels, pictures.name), domains, groups, names), parts
    return part_of(images, labels, domains, groups, names), parts


def _parts(name: str, whole: Part, parts: Names) -> tuple[Part, Part | None, Part]:
    """(train, val, test); without a test part a fifth of each class and domain, whole patients, always the same."""
    train, val, test = (np.flatnonzero(np.isin(parts, names)) for names in (("", "train"), ("val",), ("test",)))
    if not len(test):
        pool = whole.subset(train)
        held = hold_out_mask(strata_of(pool.strata, pool.domains), TEST_SHARE, 0, "test", groups=pool.groups)
        train, test = train[~held], train[held]
    if not len(train) or not len(test):
        raise DataError(
            f"'{name}' has {len(train)} training and {len(test)} test images",
            field="dataset",
            fix="Each class needs at least two images, or give train/ and test/ folders.",
        )
    return whole.subset(train), whole.subset(val) if len(val) else None, whole.subset(test)


def _doubles(items: list[Item], pictures: Gallery) -> list[Problem]:
    """The same file under two classes is a wrong label; in training and test it makes scores too good."""
    places: dict[bytes, list[Item]] = defaultdict(list)
    for item, content in zip(items, pictures.content, strict=True):
        places[content.tobytes()].append(item)
    problems = []
    for same in (found for found in places.values() if len(found) > 1):
        for item in same[1:]:
            elsewhere = [(other.name, "class") for other in same if other.label != item.label]
            elsewhere += [(other.name, "part") for other in same if other.part != item.part and item.part != "test"]
            for name, kind in elsewhere[:1]:
                problems.append(Problem(item.name, f"the same image is in another {kind}", "kept", name))
    return problems


def _shared_people(whole: Part, parts: Names) -> list[Problem]:
    """People whom the user's own parts have in training (or validation) and in test: scores will be too good."""
    if whole.groups is None:
        return []
    problems = []
    for one, other in (("train", "test"), ("val", "test"), ("train", "val")):
        both = sorted(set(whole.groups[np.isin(parts, ("", one))].tolist()) & set(whole.groups[parts == other].tolist()))
        if both:
            some = ", ".join(both[:5]) + (", …" if len(both) > 5 else "")
            what = f"{len(both)} people (patients, groups) have the same name in {one} and in {other}: {some}"
            problems.append(Problem("(all)", what, "kept as the parts say; if they are the same people, scores are too good"))
    return problems


def _shapes(items: list[Item], pictures: Gallery, channels: int | None) -> list[Problem]:
    """Geometry that was changed for many files at once: one line each."""
    size, n = pictures.images.shape[-1], len(items)
    problems = []
    if pictures.oblong.any():
        what = f"{int(pictures.oblong.sum())} of {n} images are not square"
        problems.append(Problem("(all)", what, f"resized to {size} × {size}, aspect ratio not kept"))
    if channels is None and pictures.color.any() and not pictures.color.all():
        what = f"{int((~pictures.color).sum())} of {n} images are gray, the others in color ({_by_class(items, pictures)})"
        problems.append(Problem("(all)", what, "all read as RGB; where it depends on the class, ask for 1 channel"))
    return problems


def _by_class(items: list[Item], pictures: Gallery) -> str:
    """Share of gray images in each class: a model can learn the file format instead of the picture."""
    labels = np.array([item.label for item in items])
    shares = {label: 1 - float(pictures.color[labels == label].mean()) for label in class_names(items)}
    return "gray: " + ", ".join(f"{label} {share:.0%}" for label, share in list(shares.items())[:6])
