"""Committed rows of methods that send generators were made with the safeguards of the preset."""

from __future__ import annotations

import json

import pytest

from benchmarks.grid import CELLS, RECORDS
from osfl.core.settings import resolve_settings
from osfl.methods.federated_factory import FederatedFactory

SAFE = resolve_settings(FederatedFactory, "cpu")


@pytest.mark.parametrize("cell", CELLS)
def test_no_row_of_federated_factory_has_fewer_safeguards_than_the_preset(cell: str) -> None:
    path = RECORDS / f"{cell}.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["methods"] if path.exists() else {}
    for label, row in rows.items():
        if label.partition("@")[0] == "federated_factory":
            kept = {name: row["settings"][name] for name in ("least", "mixture_prior")}
            assert kept["least"] >= SAFE.least and kept["mixture_prior"] >= SAFE.mixture_prior, (label, kept)
