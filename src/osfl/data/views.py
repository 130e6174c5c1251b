"""Views of an opened dataset for each client and for evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from osfl.core.errors import UsageError
from osfl.core.types import ClientId, Shard, digest_of
from osfl.data.source import Indices, Part, Source, content_digest, source_digest
from osfl.data.split import hold_out_mask, strata_of, stratified_pick


def make_shards(source: Source, assignment: Mapping[ClientId, Indices], *, seed: int, val_fraction: float = 0.1) -> list[Shard]:
    """A shard for each client, in the order of their names; validation is cut from the client's own images."""
    return [
        make_shard(source.train.subset(assignment[client]), client, seed=seed, val_fraction=val_fraction)
        for client in sorted(assignment)
    ]


def make_shard(part: Part, client: ClientId, *, seed: int, val_fraction: float = 0.1) -> Shard:
    """One client's data, split by class and, where they are known, by patient; training is never empty."""
    train, val = train_and_validation(part, client, seed=seed, val_fraction=val_fraction)
    digest = digest_of([content_digest(train.dataset), content_digest(val.dataset)])
    return Shard(client, train.dataset, val.dataset, digest)


def train_and_validation(part: Part, client: ClientId, *, seed: int, val_fraction: float = 0.1) -> tuple[Part, Part]:
    """One client's images, cut by class and person."""
    held = hold_out_mask(part.strata, val_fraction, seed, "validation", client, groups=part.groups)
    return part.subset(np.flatnonzero(~held)), part.subset(np.flatnonzero(held))


def class_counts(labels: npt.ArrayLike, classes: int) -> Indices:
    """How many images of each class, (classes,)."""
    held = np.asarray(labels, dtype=np.int64)
    counts: Indices = held.sum(0) if held.ndim == 2 else np.bincount(held, minlength=classes).astype(np.int64)
    return counts


def take_stratified(part: Part, n: int) -> Part:
    """At most `n` images with the proportions of classes and domains kept; the same ones for every seed."""
    if n < 1:
        raise UsageError(f"{n} samples cannot be taken", field="samples", fix="For example --samples 4000.")
    return part.subset(stratified_pick(strata_of(part.strata, part.domains), n, 0, "samples"))


def hold_out(part: Part, fraction: float) -> tuple[Part, Part]:
    """(kept, held out): by class and domain, whole patients; the same cut for every seed and partition."""
    held = hold_out_mask(strata_of(part.strata, part.domains), fraction, 0, "tuning", groups=part.groups)
    return part.subset(np.flatnonzero(~held)), part.subset(np.flatnonzero(held))


def evaluation_part(source: Source, which: Literal["test", "val"], fraction: float = 0.1) -> tuple[Part, Part]:
    """(training part, part to evaluate on). With "val" the test part is not touched: for choosing settings."""
    if which == "test":
        return source.train, source.test
    if source.val is not None:
        return source.train, source.val
    return hold_out(source.train, fraction)


def with_train(source: Source, train: Part) -> Source:
    """The same dataset with other training images (`--samples`, a held-out part); the digest follows."""
    return replace(source, train=train, digest=source_digest(source.classes, (train, source.val, source.test)))
