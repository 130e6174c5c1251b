"""The data sheets: what each named dataset is, where it comes from, what its license allows.

No torch here, so that `osfl ls datasets` answers at once. Numbers and hashes are those of the publishers; a download
without a published hash is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class File:
    """One file of a dataset, and how to know it is the right one: by either hash (two packings may exist)."""

    name: str
    url: str = ""  # empty: not offered for download
    md5: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class Sheet:
    """What a user should know before using a dataset."""

    name: str
    title: str
    source: str  # whom to cite
    license: str
    classes: tuple[str, ...]  # none: the names of the folders
    counts: Mapping[str, int]  # images in train, val, test; "all" where there is no split of its own
    native: tuple[int, int, int]  # (channels, height, width) in the files
    size: int  # pixels used unless the plan sets others
    channels: int
    layout: str  # embedded, npz, zip, folder, idx, cifar10, cifar100 or svhn
    files: tuple[File, ...] = ()
    folders: tuple[str, ...] = ()  # where the usual archive or package puts the files; of a `folder` its usual names
    domains: tuple[str, ...] = ()
    group: str = ""  # what a group is, e.g. "patient"
    group_pattern: str = ""  # its name within the file name
    notes: str = ""
    ethics: str = ""


@cache
def sheets() -> Mapping[str, Sheet]:
    """Every named dataset, by name, in the order in which they are listed."""
    from osfl.data import catalog_classic, catalog_files, catalog_folders, catalog_medmnist

    found = {sheet.name: sheet for module in (catalog_files, catalog_classic, catalog_folders) for sheet in module.SHEETS}
    return found | {sheet.name: sheet for sheet in catalog_medmnist.SHEETS}


def nearest(name: str, candidates: list[str], n: int = 3) -> list[str]:
    """Names that the user may have meant."""
    close = difflib.get_close_matches(name.lower(), candidates, n=n, cutoff=0.5)
    return close or [c for c in candidates if name.lower() in c][:n]
