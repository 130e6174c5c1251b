"""Figures that cards repeat are those of the records: a record that is made again changes its card."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GLOBAL, OWN = "scores.global.accuracy", "scores.clients.own.mean"
TABLES = {  # card -> metric, rows of the record by column; "resolution" is whichever row is without regions
    "fedmitr": (
        GLOBAL,
        "centralized local_only fedavg deepinversion_vit fedmitr fedmitr@lambda2=0 fedmitr@lambda1=0 "
        "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0 ensemble ensemble@ensemble=class_count ensemble@ensemble=odds",
    ),
    "fol": (
        OWN,
        "local_only fedavg fedavg_rounds@rounds=3 dense@generators=1@server_epochs=4 coboosting@generators=1@server_epochs=4 "
        "fol@align=false fol@align=false@answer=ensemble fol fol@answer=ensemble",
    ),
    "falcon": (GLOBAL, "falcon falcon@alpha=0 resolution falcon@order=ar falcon@order=nar fedpft fedcgs centralized_tokens"),
}
_CELLS = {"brain MRI": "brain", "chest X-ray": "xray", "blood cells": "blood360"}  # FALCON's rows, which have no link


def rows(card: str, columns: int) -> list[tuple[str, list[float]]]:
    """Cells and figures of the card's table."""
    found = []
    for line in (ROOT / "docs" / "methods" / f"{card}.md").read_text(encoding="utf-8").splitlines():
        first, _, rest = line.removeprefix("| ").partition(" |")
        figures = [float(number) for number in re.findall(r"(?<![\w.])\d+\.\d(?!\d)", rest)]
        if cell := _cell(card, first):
            found += [(cell, figures)] if len(figures) == columns else []
    return found


def _cell(card: str, first: str) -> str:
    if link := re.search(r"records/([\w.-]+)\.json", first):
        return link[1]
    if card != "falcon" or first.startswith("mean"):
        return ""
    if first.startswith("PACS"):
        return "pacs-domains"
    if not (part := re.fullmatch(r"(brain MRI|chest X-ray|blood cells) (0\.\d)(.*)", first)):
        return ""
    more = {"": "", ", 448 px": "448", ", 360 px": "", ", ViT-S": "-vit", ", ViT-S as encoder": "-vit"}[part[3]]
    return f"{_CELLS[part[1]]}{more}-a{part[2]}"


def recorded(cell: str, labels: Sequence[str], metric: str) -> list[float]:
    methods = json.loads((ROOT / "benchmarks" / "records" / f"{cell}.json").read_text(encoding="utf-8"))["methods"]
    names = [next(name for name in methods if "resolution=" in name) if label == "resolution" else label for label in labels]
    there = [name if name in methods else name.partition("@")[0] for name in names]  # the whole budget instead of a quarter
    return [100 * methods[name][metric]["mean"] for name in there]


@pytest.mark.parametrize("card, least", [("fedmitr", 17), ("fol", 12), ("falcon", 16)])
def test_a_card_repeats_what_its_records_say(card: str, least: int) -> None:
    metric, labels = TABLES[card][0], TABLES[card][1].split()
    found = rows(card, len(labels))
    assert len(found) == least
    wrong = [
        f"{cell}, {label}: {shown}, in the record {true:.2f}"
        for cell, figures in found
        for label, shown, true in zip(labels, figures, recorded(cell, labels, metric), strict=True)
        if abs(shown - true) > 0.051  # halves are rounded either way
    ]
    assert not wrong, wrong
