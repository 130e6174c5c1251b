"""Pixels, labels, splits, licenses. Nothing about a method.

The public names are loaded when they are used, so that listing the data sheets does not import torch.

Begin with opening.py (a name or a path becomes images), partition.py (who holds which) and views.py (shards).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from osfl.data.catalog import Sheet, sheets
    from osfl.data.findings import class_problems, grouped
    from osfl.data.opening import open_dataset
    from osfl.data.partition import Partition, assign, domain_clients, parse_partition
    from osfl.data.source import Part, Problem, Source
    from osfl.data.views import class_counts, evaluation_part, hold_out, make_shard, make_shards, take_stratified, with_train

_HOMES = {
    "catalog": ("Sheet", "sheets"),
    "findings": ("class_problems", "grouped"),
    "opening": ("open_dataset",),
    "partition": ("Partition", "assign", "domain_clients", "parse_partition"),
    "source": ("Part", "Problem", "Source"),
    "views": (
        "class_counts",
        "evaluation_part",
        "hold_out",
        "make_shard",
        "make_shards",
        "take_stratified",
        "with_train",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Part",
    "Partition",
    "Problem",
    "Sheet",
    "Source",
    "assign",
    "class_counts",
    "class_problems",
    "domain_clients",
    "evaluation_part",
    "grouped",
    "hold_out",
    "make_shard",
    "make_shards",
    "open_dataset",
    "parse_partition",
    "sheets",
    "take_stratified",
    "with_train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'osfl.data' has no attribute '{name}'")
    return getattr(import_module(f"osfl.data.{_HOME_OF[name]}"), name)
