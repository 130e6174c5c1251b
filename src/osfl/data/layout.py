"""Class, split, domain and patient of an image file, from its path. Pure functions of names.

class/*          train|val|test/class/*          domain/class/*          train|test/domain/class/*
class/patient/*  (when the inner folders are different ones in each outer folder)
"""

from __future__ import annotations

import csv
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import PurePath, PurePosixPath

from osfl.core.errors import DataError, nearest
from osfl.data.decode import SUFFIXES
from osfl.data.multilabel import class_columns, joined, label_of, labels_in
from osfl.data.source import Problem

PARTS = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}
SKIPPED = "left out"
MEDICAL = (".dcm", ".dicom", ".ima", ".nii")
COLUMNS = ("path", "label", "split", "domain")  # of a table; besides, one for the patient of an image
WHOM = ("patient", "subject", "case", "group", "person")
_WHOM = re.compile(rf"(id)?({'|'.join(WHOM)})s?(id|ids|uid|no|nr|number|code|key|name|index)?")
FEW_PEOPLE = 4  # a column with so few values is perhaps a diagnosis, an arm of a study or a yes and no


@dataclass(frozen=True)
class Item:
    """One image file and what is known of it."""

    name: str
    label: str
    part: str = ""  # train, val or test; empty when the dataset has no parts
    domain: str = ""
    group: str = ""


def arrange(names: Iterable[str], group_pattern: str = "") -> tuple[list[Item], list[Problem]]:
    """Items from names in a folder or zip, sorted; whatever does not fit is a problem."""
    images, problems = _images(names)
    rows = _without_wrapper([(name, list(PurePosixPath(name).parts[:-1])) for name in images])
    splits = bool(rows) and all(folders and folders[0].lower() in PARTS for _, folders in rows)
    inner = [(name, folders[1:] if splits else folders) for name, folders in rows]
    depth = _usual_depth(inner)
    items = []
    for (name, folders), (_, outer) in zip(inner, rows, strict=True):
        if len(folders) != depth:
            what = "not inside a class folder" if not folders else f"{len(folders)} folders deep, others {depth}"
            problems.append(Problem(name, what, SKIPPED))
            continue
        part = PARTS[outer[0].lower()] if splits else ""
        items.append(Item(name, folders[-1], part, folders[0] if depth == 2 else ""))
    if depth == 2 and not _shared(items):
        items = [replace(item, label=item.domain, domain="", group=item.label) for item in items]
        problems.append(Problem("(all)", "inner folders differ from class to class", "taken as groups, e.g. patients"))
        name_of, several = one_name_each([item.group for item in items], "(all)")
        items, problems = [replace(item, group=name_of[item.group]) for item in items], problems + several
    return [with_group(item, group_pattern) for item in items], problems


def _images(names: Iterable[str]) -> tuple[list[str], list[Problem]]:
    images: list[str] = []
    problems = []
    for name in sorted(names):
        path = PurePosixPath(name)
        if not _writable(name):
            problems.append(Problem(ascii(name), "a name that is not UTF-8", SKIPPED))
        elif path.is_absolute() or ".." in path.parts:
            problems.append(Problem(name, "a name that points outside", SKIPPED))
        elif not may_be_image(path):
            problems.append(Problem(name, "not an image file", SKIPPED))
        else:
            images.append(name)
    return images, problems


def may_be_image(path: PurePath) -> bool:
    """By its name. Scanners write DICOM without an ending, or with a number; such files are judged by their content."""
    ending = path.suffix.lower()
    if path.name.upper() == "DICOMDIR":
        return False
    return (
        ending in SUFFIXES or ending in MEDICAL or path.name.lower().endswith(".nii.gz") or ending[1:].isdecimal() or not ending
    )


def _writable(name: str) -> bool:
    """Whether the name can be printed and stored; on disk a name may be any bytes."""
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


def _without_wrapper(rows: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Drop a single folder around everything (archives often have one), unless it is a part or the only class."""
    tops = {folders[0] if folders else "" for _, folders in rows}
    if len(tops) != 1 or tops <= {""} or {top.lower() for top in tops} <= set(PARTS):
        return rows
    if Counter(len(folders) for _, folders in rows).most_common(1)[0][0] < 2:
        return rows
    return _without_wrapper([(name, folders[1:]) for name, folders in rows])


def _usual_depth(rows: Sequence[tuple[str, list[str]]]) -> int:
    depths = Counter(len(folders) for _, folders in rows if 1 <= len(folders) <= 2)
    return depths.most_common(1)[0][0] if depths else 1


def _shared(items: Sequence[Item]) -> bool:
    """Whether classes repeat from domain to domain; else the inner folders are something else."""
    pairs = {(item.domain, item.label) for item in items}
    seen = Counter(label for _, label in pairs)
    return len({domain for domain, _ in pairs}) < 2 or sum(n > 1 for n in seen.values()) * 2 >= len(seen)


def with_group(item: Item, pattern: str) -> Item:
    """The group a sheet's pattern finds in the file name; a file without one is a group of its own."""
    if not pattern:
        return item
    found = re.search(pattern, PurePosixPath(item.name).name)
    return replace(item, group=f"{item.label}/{found.group(1)}" if found else item.name)


@dataclass(frozen=True)
class Table:
    """A table as read."""

    items: list[Item]
    problems: list[Problem]
    several: bool = False  # an image may have several labels, or none (osfl.data.multilabel)
    classes: tuple[str, ...] = ()  # those that have a column of their own, whether an image is of them or not


def read_table(text: str, where: str, group: str = "", by: str = "", classes: Collection[str] = ()) -> Table:
    """Rows of `path,label[,split][,domain][,patient]`; a bad row is a problem, a bad header an error.

    Several labels of an image are in a column `labels` (or `label`), as `glioma|edema`, or have a column of 0 and 1 each.
    `group`: the column with the patient, whatever its name. `by`: a column that is used as the domain. `classes`: those of the
    plan, which decide what columns of 0 and 1 are classes.
    """
    text, separator, first = _separated(text)
    reader = csv.DictReader(StringIO(text, newline=""), delimiter=separator)
    header = [column.strip().lower() for column in reader.fieldnames or []]
    if twice := sorted({column for column in header if column and header.count(column) > 1}):
        raise DataError(
            f"'{where}' has the column '{twice[0]}' more than once",
            field="header",
            expected="each column once",
            got=",".join(header),
            fix="Rename or remove one of them.",
        )
    named = {column.strip().lower(): column.strip() for column in reader.fieldnames or []}
    listed = "labels" in header and "label" not in header
    header = ["label" if listed and column == "labels" else column for column in header]
    reader.fieldnames = header
    numbers, rows = _rows(reader, where)
    group, by = (_column(name, header, where) for name in (group, by))
    whom = group or _whom(header, rows, where)
    name_of, several_ways = one_name_each([row.get(whom, "") for row in rows], where)
    rows = [{**row, whom: name_of[row[whom]]} if whom in row else row for row in rows]
    taken = {*COLUMNS, whom, by, *filter(names_patient, header)}
    columns = {} if "label" in header else _class_columns(header, rows, taken, named, classes, where)
    if "path" not in header or not ("label" in header or columns):
        raise DataError(
            f"'{where}' lacks the columns 'path' and 'label'",
            field="header",
            expected="path,label[,split][,domain][,patient], or for several labels of an image a column of 0 and 1 for each",
            got=",".join(filter(None, header)) or "an empty file",
            fix="Rename columns in the table's first line: path is the file of an image, label its class.",
        )
    problems = _columns([column for column in header if column not in columns], rows, whom, by, where) + several_ways
    if separator != ",":
        problems.append(Problem(where, f"columns are separated by {separator!r}, not by a comma", "read as they are"))
    if columns:
        problems.append(
            Problem(where, f"columns of 0 and 1: {', '.join(columns.values())}", "each is a class; an image may have several")
        )
    items: list[Item] = []
    for number, row in zip(numbers, rows, strict=True):
        item, problem = _row(row, columns, whom, by or "domain", f"{where}:{number + first - 2}")
        items += [item] if item else []
        problems += [problem] if problem else []
    several = listed or bool(columns) or any(len(labels_in(item.label)) > 1 for item in items)
    if several:
        items = [replace(item, label=joined(labels_in(item.label))) for item in items]
    if several and not listed and not columns:
        many = sum(len(labels_in(item.label)) > 1 for item in items)
        what = f"{many} of {len(items)} rows with several labels, joined by '|'"
        problems.append(Problem(where, what, "read as multi-label: an image may have several of the classes, or none"))
    return Table(_once(items, problems), [*problems, *_several_labels(items)], several, tuple(columns.values()))


def _class_columns(
    header: Sequence[str],
    rows: Sequence[Mapping[str, str]],
    taken: Collection[str],
    named: Mapping[str, str],
    classes: Collection[str],
    where: str,
) -> dict[str, str]:
    """Columns that are a class each, with its name; those of the plan, where there is one."""
    found = {column: named[column] for column in class_columns(header, rows, taken)}
    if not classes or not found:
        return found
    wanted = {name.lower(): name for name in classes}
    if missing := sorted(set(wanted) - set(header)):
        raise DataError(
            f"'{where}' has no column '{wanted[missing[0]]}', which is a class of the plan",
            field="header",
            expected=",".join(["path", *classes]),
            got=",".join(header),
            fix="Add it, with 1 where an image shows it and 0 where it does not.",
        )
    return {column: wanted[column] for column in header if column in wanted}


def _separated(text: str) -> tuple[str, str, int]:
    """(table, what separates its columns, number of the first row below the header), as Excel writes it in any country."""
    text = text.lstrip("\ufeff")
    if hint := re.match(r"sep=([,;\t|])\r?\n", text):  # understood by Excel; not a part of the table
        return text[hint.end() :], hint.group(1), 3
    header = text.partition("\n")[0].lower()
    for separator in (",", ";", "\t"):
        columns = {column.strip(' "\r') for column in header.split(separator)}
        if "path" in columns and len(columns) > 1:
            return text, separator, 2
    return text, max(",;\t", key=header.count), 2


def _several_labels(items: Sequence[Item]) -> list[Problem]:
    """Cells such as `glioma+edema`: probably two labels of one image, but '+' may as well be a part of a name."""
    labels = {name for item in items for name in labels_in(item.label)}
    done = "kept as a class of its own; if they are several labels, write '|' between them"
    found = [item for item in items if names_several(item.label, labels)]
    return [Problem(item.name, "probably several labels in one cell (multi-label data)", done, item.label) for item in found]


def names_several(label: str, labels: Collection[str]) -> bool:
    """Whether a label is made of labels that also stand alone, joined by another separator than '|'."""
    parts = {part.strip() for part in re.split(r"[;,+&/]", label)}
    return len(parts) > 1 and parts <= set(labels)


def _column(name: str, header: Sequence[str], where: str) -> str:
    """The column that was asked for by name, as the header has it."""
    wanted = name.strip().lower()
    if wanted and wanted not in header:
        close = nearest(wanted, list(header))
        raise DataError(
            f"'{where}' has no column '{name}'.{close}",
            field="header",
            expected=name,
            got=",".join(filter(None, header)),
            fix="Check its name.",
        )
    return wanted


def names_patient(column: str) -> bool:
    """Whether a column holds the patient of an image: patient, Patient ID, subject-no, case, group, ..."""
    return _WHOM.fullmatch(re.sub(r"[^a-z0-9]", "", column.lower())) is not None


def _whom(header: Sequence[str], rows: Sequence[Mapping[str, str]], where: str) -> str:
    """The column with the patient of an image; empty if there is none. Two that disagree are for the user to decide."""
    found = [column for column in header if names_patient(column)]
    for other in found[1:]:
        values = [(row.get(found[0], ""), row.get(other, "")) for row in rows]
        sides = {len({value[side] for value in values}) for side in (0, 1)}
        if sides != {len(set(values))}:
            raise DataError(
                f"'{where}' has two columns that name the patient of an image, and they group the images differently",
                field="header",
                expected="one such column",
                got=f"'{found[0]}' and '{other}'",
                fix="Rename the one that must not decide, for example to 'note': images of one person must not be in "
                "training and test, nor at two sites.",
            )
    return found[0] if found else ""


def one_name_each(names: Iterable[str], where: str) -> tuple[dict[str, str], list[Problem]]:
    """Each writing of a person's name -> one of them, and what was put together: images of one person must not be split up.

    Names that differ only in case, blanks, leading zeros or a final `.0` (as spreadsheets add it) are one person's.
    """
    ways: dict[str, list[str]] = {}
    for name in sorted(set(names)):
        ways.setdefault(person_key(name), []).append(name)
    several = [found for found in ways.values() if len(found) > 1]
    name_of = {name: found[0] for found in ways.values() for name in found}
    if not several:
        return name_of, []
    examples = "; ".join(" = ".join(map(repr, found)) for found in several[:3]) + ("; …" if len(several) > 3 else "")
    what = f"{len(several)} people have names that differ only in case, blanks, leading zeros or a final .0: {examples}"
    done = "each taken as one person; if they are different people, give them names that differ in more than that"
    return name_of, [Problem(where, what, done)]


def person_key(name: str) -> str:
    """Equal for all writings of one name; `1.2.0` and `1.05` are no whole numbers and stay what they are."""
    text = "".join(unicodedata.normalize("NFKC", name).casefold().split())
    text = re.sub(r"([^.]*\d)\.0+", r"\1", text) if re.fullmatch(r"[^.]*\d\.0+", text) else text
    return re.sub(r"(?<![\d.])0+(?=\d)", "", text)


def _columns(header: Sequence[str], rows: Sequence[Mapping[str, str]], whom: str, by: str, where: str) -> list[Problem]:
    """What is used of the columns, and what is not."""
    done = (
        f"not used; a column that names the patient of an image is called {', '.join(WHOM[:-1])} or {WHOM[-1]}, "
        "or is named with --group"
    )
    used = {*COLUMNS, whom, by}
    unknown = [column for column in header if column and column not in used and not names_patient(column)]
    problems = [Problem(where, f"unknown column '{column}'", done) for column in unknown]
    if by and (nowhere := sum(not row.get(by) for row in rows)):
        problems.append(Problem(where, f"{nowhere} rows with nothing in '{by}'", "a site of their own, 'unknown'"))
    if not whom:
        return problems
    values = [row.get(whom, "") for row in rows]
    people = len(set(values) - {""})
    what = f"the column '{whom}' names the patient of an image: {people} in {len(rows)} rows"
    what += ", which is few: is it a person?" if people <= FEW_PEOPLE else ""
    problems.append(Problem(where, what, "never split between training, validation and test, nor between sites"))
    if "" in values:
        problems.append(Problem(where, f"{values.count('')} rows with nothing in '{whom}'", "each taken as somebody else"))
    return problems


def _rows(reader: csv.DictReader[str], where: str) -> tuple[list[int], list[dict[str, str]]]:
    """Rows and their lines, without empty ones, which spreadsheets add at the end."""
    found = []
    try:
        for row in reader:
            values = {key: value.strip() for key, value in row.items() if key and isinstance(value, str)}
            found += [(reader.line_num, values)] if any(values.values()) else []
    except csv.Error as error:
        raise DataError(f"'{where}' cannot be read as CSV: {error}", field="file", fix="Export it again.") from None
    return [number for number, _ in found], [values for _, values in found]


def _row(
    values: Mapping[str, str], columns: Mapping[str, str], whom: str, domain: str, where: str
) -> tuple[Item | None, Problem | None]:
    path = values.get("path", "").replace("\\", "/")  # as Windows writes folders
    label, split = values.get("label", ""), values.get("split", "").lower()
    if columns and path:
        label = label_of(values, columns) or ""
        if not label:
            return None, Problem(where, "a cell of a class that is neither 0 nor 1", SKIPPED)
    if not path or not label:
        return None, Problem(where, "no path" if not path else "no label", SKIPPED)
    if split and split not in PARTS:
        return None, Problem(where, f"unknown split '{split}'", SKIPPED)
    place = values.get(domain, "") or ("" if domain == "domain" else "unknown")
    return Item(path, label, PARTS.get(split, ""), place, values.get(whom, "")), None


def _once(items: Sequence[Item], problems: list[Problem]) -> list[Item]:
    """A path that is listed again is used once; with another label it is a contradiction and is not used at all."""
    labels: dict[str, set[str]] = {}
    for item in items:
        labels.setdefault(item.name, set()).add(item.label)
    kept: dict[str, Item] = {}
    for item in items:
        if len(labels[item.name]) > 1:
            problems.append(
                Problem(item.name, "listed with more than one label", SKIPPED, " and ".join(sorted(labels[item.name])))
            )
        elif item.name in kept:
            problems.append(Problem(item.name, "listed twice", "used once"))
        else:
            kept[item.name] = item
    return [kept[name] for name in sorted(kept)]


def class_names(items: Iterable[Item], several: bool = False) -> tuple[str, ...]:
    """Sorted; as numbers where all are."""
    labels = {name for item in items for name in (labels_in(item.label) if several else (item.label,))}
    numeric = all(label.isdecimal() for label in labels)
    return tuple(sorted(labels, key=lambda label: (int(label) if numeric else 0, label)))
