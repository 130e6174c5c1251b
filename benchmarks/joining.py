"""Records outlive the runs that they were made from: what a cell's committed record says stays when other rows are added.

Run folders are large and on one machine; a grid takes weeks on several. So a record is not only written from the runs at hand,
it is joined with what was committed: rows without a run here are kept as they are, and a row that has some of its seeds here
and others in the record gets both, if they were made with the same settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from osfl.evaluation.comparison import over

Row = dict[str, Any]


def joined(old: Mapping[str, Any], new: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """Both records of a cell as one, rows in the order of `labels`. Figures of other images, or of what the cell was before it
    was changed, are not mixed in."""
    changed = old.get("simulation", new["simulation"]) != new["simulation"]
    if changed or old.get("data", {}).get("digest") != new["data"]["digest"]:
        return dict(new)
    before, after = old["methods"], new["methods"]
    dated = {label: {"date": old["date"], **row} for label, row in before.items()}
    rows = {label: _row(dated.get(label), after.get(label)) for label in labels if label in before or label in after}
    fresh = {(pair["method"], pair["reference"]) for pair in new["equal_accuracy"]}
    kept = [pair for pair in old.get("equal_accuracy", ()) if (pair["method"], pair["reference"]) not in fresh]
    kept = [pair for pair in kept if {pair["method"], pair["reference"]} <= set(labels) - set(after)]
    return {**new, "methods": rows, "equal_accuracy": kept + list(new["equal_accuracy"])}


def lost(old: Mapping[str, Any], made: Mapping[str, Any]) -> list[str]:
    """Rows of a committed record of which fewer seeds would be left: what the cell was before it was changed, or from another
    start. Nothing should go without a word."""
    seeds = {label: len(row["release_digests"]) for label, row in made["methods"].items()}
    return [label for label, row in old.get("methods", {}).items() if len(row["release_digests"]) > seeds.get(label, 0)]


def _row(old: Row | None, new: Row | None) -> Row:
    if old is None or new is None:
        found = old or new
        assert found is not None
        return found
    lacking = [seed for seed in old["release_digests"] if seed not in new["release_digests"]]
    if not lacking or old["settings"] != new["settings"]:
        return new
    return {key: _field(key, old, new) for key in {**old, **new}}


def _field(key: str, old: Row, new: Row) -> Any:
    """By seed where a field has a value for each; else as the newer runs have it."""
    theirs, ours = old.get(key), new.get(key)
    if isinstance(theirs, dict) and isinstance(ours, dict) and all(name.startswith("seed") for name in {**theirs, **ours}):
        return dict(sorted({**theirs, **ours}.items()))
    if key == "own_by_encounter" and theirs and ours:
        return {number: _values(old, theirs.get(number, []), new, ours[number]) for number in ours}
    if not (isinstance(theirs, dict) and "values" in theirs):
        return ours if key in new else theirs
    return over(_values(old, theirs["values"], new, ours["values"] if ours else []))


def _values(old: Row, theirs: Sequence[float], new: Row, ours: Sequence[float]) -> list[float]:
    found = by_seed(old, theirs) | by_seed(new, ours)
    return [found[seed] for seed in sorted(found)]


def by_seed(row: Mapping[str, Any], values: Sequence[float]) -> dict[str, float]:
    """Values are in the order of seeds; a figure that only some seeds have cannot be told apart, and is left out."""
    seeds = sorted(row["release_digests"])
    return dict(zip(seeds, values, strict=True)) if len(values) == len(seeds) else {}
