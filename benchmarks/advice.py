"""What `osfl advise` knows: the records as one table in the package, and how often its advice would have been right.

    python -m benchmarks.advice              src/osfl/evaluation/advice/known.json, of the records
    python -m benchmarks.advice --majority   benchmarks/records/majority.json, of the test images; needs the datasets
    python -m benchmarks.advice --judge      the table, then benchmarks/records/advice.json: every cell left out once

How the ranking was chosen: the distance was written down first and never changed. Of five rankings over it (the weighted
difference to the best, over all cells or the nearest five; an additive model of method and cell; the mean over a method's one
or three nearest cells) the first is used: it and the additive model were right most often, and it is simpler. A stronger
pull towards `UNKNOWN` (as of a cell at distance `NEAR`) was tried and was right less often. So the figures of `--judge` are
a little flattering; those without all cells of the same images were looked at only afterwards.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.grid import AGAIN, CELLS, RECORDS
from benchmarks.private_sums import CELLS as CURVES
from benchmarks.private_sums import RECORD as PRIVATE
from osfl.core.registry import load
from osfl.core.result import write_json
from osfl.core.settings import resolve_settings
from osfl.core.types import Task
from osfl.data import open_dataset
from osfl.data.catalog import sheets
from osfl.evaluation.advice.known import FILE, Cell, cell_of, class_share
from osfl.evaluation.advice.needs import Wants, abilities
from osfl.evaluation.advice.ranking import advise, method_of
from osfl.simulate.simulation import Simulation

GLOBAL, OWN = "scores.global.accuracy", "scores.clients.own.mean"
KIND = {"digits": "writing", "cifar10-subset": "natural", "pacs-subset": "natural"}  # all others are medical
TOLERANCE = 0.02
MAJORITY = RECORDS / "majority.json"
PAGE = Path(__file__).parent.parent / "docs" / "advise.md"
BEGIN, END = "<!-- judged: written by `python -m benchmarks.advice --judge` -->", "<!-- end of judged -->"
JUDGED = {
    "global": "global",
    "own": "own",
    "global_of_other_images": "global, without all cells of the same images",
    "own_of_other_images": "own, without all cells of the same images",
}


def table() -> dict[str, Any]:
    """All cells of the grid that have a record but those of a start made again, without what only simulations can do."""
    constant = json.loads(MAJORITY.read_text(encoding="utf-8"))["share"]
    there = [cell for cell in CELLS if (RECORDS / f"{cell}.json").exists() and not cell.startswith(AGAIN)]
    cells = {cell: _cell(cell, constant) for cell in there}
    for cell, rows in private_rows(json.loads(PRIVATE.read_text(encoding="utf-8"))).items():
        cells[cell]["rows"] = dict(sorted({**cells[cell]["rows"], **rows}.items()))
    return {"made_by": "python -m benchmarks.advice", "from": "benchmarks/records", "cells": cells}


def _cell(name: str, constant: Mapping[str, float]) -> dict[str, Any]:
    record, simulation = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8")), CELLS[name]
    data, sheet = record["data"], sheets()[simulation.dataset]
    sites, classes = data["clients"], len(sheet.classes)
    return {
        "title": f"{sheet.title.partition(',')[0]}, {simulation.partition}",
        "sites": sites,
        "images": data["train_images"],
        "classes": classes,
        "share": round(class_share(simulation.partition, sites, classes), 4),
        "side": simulation.image_size or sheet.size,
        "channels": simulation.channels or sheet.channels,
        "kind": KIND.get(simulation.dataset, "medical"),
        "constant": constant.get(simulation.dataset),
        "rows": {label: _row(label, row, sites) for label, row in sorted(record["methods"].items()) if _one_shot(label)},
    }


def private_rows(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Cell -> rows with differential privacy, of the record of OneSum's curves over epsilon. It has global accuracy alone, and
    no seconds: the sums were made once for all draws of noise."""
    found: dict[str, dict[str, Any]] = {}
    for name, curves in record["cells"].items():
        simulation = CURVES[name]
        cell = next(cell for cell in CELLS if _same_split(CELLS[cell], simulation) and (RECORDS / f"{cell}.json").exists())
        of, changes = load(simulation.method), "".join(f"@{key}={value}" for key, value in simulation.changes.items())
        sheet, s = sheets()[simulation.dataset], curves["settings"]
        side = simulation.image_size or sheet.size
        task = Task(simulation.dataset, sheet.classes, (simulation.channels or sheet.channels, side, side))
        method = of(task, resolve_settings(of, "cpu", s))
        upload = 8 * sum(math.prod(map(int, one.shape)) for one in method.contract("").values() if one.required)
        for noise, epsilon in [(kind, epsilon) for kind in ("share", "site") for epsilon in curves.get(kind, {})]:
            label = f"{simulation.method}{changes}@epsilon={epsilon}@delta={record['delta']:g}@noise={noise}"
            found.setdefault(cell, {})[label] = {
                "everyone": [round(value / 100, 4) for value in curves[noise][epsilon]],
                "own": [],
                "upload": upload,
                "server": None,
                "site": None,
                "weights": _weights(label, s),
                "epsilon": float(epsilon),
            }
    return found


def _same_split(one: Simulation, other: Simulation) -> bool:
    names = ("dataset", "clients", "partition", "samples", "image_size", "channels")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _one_shot(label: str) -> bool:
    return not load(label.partition("@")[0]).provides("simulate")


def _row(label: str, row: Mapping[str, Any], sites: int) -> dict[str, Any]:
    return {
        "everyone": [round(value, 4) for value in row[GLOBAL]["values"]],
        "own": [round(value, 4) for value in row[OWN]["values"]],
        "upload": round(row["costs.upload_bytes"]["mean"] / sites),
        "server": round(row["costs.server_seconds"]["mean"], 2),
        "site": round(row["costs.client_seconds"]["mean"] / sites, 2),
        "weights": _weights(label, row["settings"]),
    }


def _weights(label: str, settings: Mapping[str, Any]) -> str:
    """Published weights that sites use; FedCGS, FedPFT and FALCON always encode, OneSum where its features say so."""
    if settings.get("features") == "random" and settings.get("prior") == "global":  # OneSum without a network of the site
        return ""
    encodes = settings.get("features", "encoder") == "encoder" and settings.get("encoder", "random") != "random"
    return Path(str(settings["encoder"] if encodes else settings.get("pretrained", ""))).name


def judge(cells: Sequence[Cell], personal: bool, of_other_images: bool = False) -> dict[str, Any]:
    """Each cell as a case of its own, advised from the others: is the first of the list near the best that the cell has?

    A cell does not have every method, nor every variant. It is judged by the first method of the list that it has, with the
    variant that ranks highest of those that it has; the cells that have the very first method are counted apart.
    `of_other_images`: without all cells of the same images, too.
    """
    wants, judged, inside = Wants(personal=personal), {}, []
    for cell in cells:
        plain = {label: row for label, row in cell.rows.items() if row.epsilon is None}
        rows = {label: row for label, row in plain.items() if _admitted(label, personal)}
        others = [one for one in cells if one is not cell and not (of_other_images and _same_images(one, cell))]
        advice = advise(cell.case, wants, others)
        order = [method_of(one.label) for one in advice.ranked]
        there = [one for one in advice.variants if one.label in rows]
        if not there or len(rows) < 2:
            continue
        first = min(there, key=lambda one: order.index(method_of(one.label)))  # of equals the first: the highest variant
        reached = {label: _mean(row.values(personal)) for label, row in rows.items()}
        best = max(reached, key=lambda label: (reached[label], label))
        judged[cell.name] = {
            "first": order[0],
            "judged": first.label,
            "reached": round(reached[first.label], 4),
            "best": best,
            "best_reached": round(reached[best], 4),
            "within": reached[best] - reached[first.label] <= TOLERANCE,
        }
        inside += [one.low <= reached[one.label] <= one.high for one in there]
    direct = [one for one in judged.values() if one["first"] == method_of(str(one["judged"]))]
    return {
        "cells": len(judged),
        "within": sum(one["within"] for one in judged.values()),
        "cells_that_have_the_first": len(direct),
        "within_of_these": sum(one["within"] for one in direct),
        "accuracy_inside_the_interval": round(_mean(inside), 3),
        "by_cell": judged,
    }


def _admitted(label: str, personal: bool) -> bool:
    can = abilities(label)
    return can.personal if personal else can.sends


def _same_images(one: Cell, other: Cell) -> bool:
    return CELLS[one.name].dataset == CELLS[other.name].dataset


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_page(found: Mapping[str, Any]) -> None:
    """The figures of the record in docs/advise.md."""
    lines = [
        "| accuracy | cells | right | cells that have the first of the list | right there | inside the interval |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in JUDGED.items():
        one = found[name]
        shares = (one["within"] / one["cells"], one["within_of_these"] / one["cells_that_have_the_first"])
        right, direct = (f"{100 * share:.0f} %" for share in shares)
        lines.append(
            f"| {title} | {one['cells']} | {one['within']} ({right}) | {one['cells_that_have_the_first']} | "
            f"{one['within_of_these']} ({direct}) | {100 * one['accuracy_inside_the_interval']:.0f} % |"
        )
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text("\n".join([text[:begin], "", *lines, "", text[end:]]), encoding="utf-8")


def write_table() -> Path:
    FILE.write_text(json.dumps(table(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return FILE


def majority() -> Path:
    """How often the most frequent class occurs among the test images of each dataset."""
    share = {}
    for dataset in sorted({simulation.dataset for simulation in CELLS.values()}):
        labels = list(open_dataset(dataset).test.labels)
        share[dataset] = round(max(labels.count(label) for label in set(labels)) / len(labels), 4)
    write_json(MAJORITY, {"command": "python -m benchmarks.advice --majority", "share": share})
    return MAJORITY


def main(arguments: list[str]) -> None:
    if "--majority" in arguments:
        print(majority())
    print(write_table())
    if "--judge" not in arguments:
        return
    cells = [cell_of(name, found) for name, found in json.loads(FILE.read_text(encoding="utf-8"))["cells"].items()]
    found = {
        "command": "python -m benchmarks.advice --judge",
        "tolerance": TOLERANCE,
        "global": judge(cells, personal=False),
        "own": judge(cells, personal=True),
        "global_of_other_images": judge(cells, personal=False, of_other_images=True),
        "own_of_other_images": judge(cells, personal=True, of_other_images=True),
    }
    write_json(RECORDS / "advice.json", found)
    write_page(found)
    for name, one in found.items():
        if isinstance(one, dict):
            print(name, {key: value for key, value in one.items() if key != "by_cell"})


if __name__ == "__main__":
    main(sys.argv[1:])
