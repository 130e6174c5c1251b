"""Shards, held-out parts and subsamples."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from osfl.core.errors import UsageError
from osfl.data import (
    Part,
    Source,
    assign,
    class_counts,
    evaluation_part,
    hold_out,
    make_shards,
    open_dataset,
    take_stratified,
    with_train,
)
from osfl.data.source import part_of
from osfl.data.split import hold_out_mask


@pytest.fixture(scope="module")
def digits() -> Source:
    return open_dataset("digits", size=8)


def _part(n: int, classes: int = 3, groups: int = 0) -> Part:
    rng = np.random.default_rng(n)
    labels = rng.integers(0, classes, n)
    names = np.array([f"p{i}" for i in rng.integers(0, groups, n)]) if groups else None
    return part_of(rng.integers(0, 256, (n, 1, 4, 4), dtype=np.uint8), labels, None, names)


def test_shards_hold_all_images_once_and_repeat(digits: Source) -> None:
    drawn = assign("dirichlet:0.1", digits.train.labels, 5, 0)
    shards, again = make_shards(digits, drawn, seed=0), make_shards(digits, dict(reversed(drawn.items())), seed=0)
    assert [s.client for s in shards] == [f"client-0{i}" for i in range(1, 6)]
    assert sum(len(s.train) + len(s.val) for s in shards) == len(digits.train)
    assert [s.digest for s in shards] == [s.digest for s in again]
    assert [s.digest for s in shards] != [s.digest for s in make_shards(digits, drawn, seed=1)]
    for shard in shards:
        assert len(shard.val) == pytest.approx(0.1 * (len(shard.train) + len(shard.val)), abs=5)
        assert shard.train.images.dtype.is_floating_point is False and shard.train.images.shape[1:] == (1, 8, 8)


def test_another_client_does_not_change_a_shard(digits: Source) -> None:
    drawn = assign("iid", digits.train.labels, 3, 0)
    alone = make_shards(digits, {"client-02": drawn["client-02"]}, seed=0)[0]
    assert alone.digest == make_shards(digits, drawn, seed=0)[1].digest


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9]),
    st.integers(0, 10),
)
def test_holding_out_never_empties_a_side_nor_splits_a_group(labels: list[int], share: float, groups: int) -> None:
    strata = np.array(labels, dtype=np.int64)
    names = np.array([f"g{i % groups}" for i in range(len(labels))]) if groups else None
    held = hold_out_mask(strata, share, 0, "test", groups=names)
    assert not held.all()
    units = len(labels) if names is None else len(set(names.tolist()))
    assert held.any() == (share > 0 and units > 1)
    if names is not None:
        assert not set(names[held].tolist()) & set(names[~held].tolist())


def test_groups_come_close_to_the_share() -> None:
    part = _part(600, groups=150)
    kept, held = hold_out(part, 0.2)
    assert len(held) == pytest.approx(120, abs=15)
    assert class_counts(held.labels, 3) == pytest.approx(class_counts(part.labels, 3) * 0.2, abs=8)
    assert kept.groups is not None and held.groups is not None
    assert not set(kept.groups.tolist()) & set(held.groups.tolist())


def test_a_patient_keeps_to_one_side_inside_a_client() -> None:
    part = _part(100, groups=20)
    source = Source("x", ("a", "b", "c"), (1, 4, 4), part, _part(10))
    train = {img.numpy().tobytes() for img in make_shards(source, {"c": np.arange(100)}, seed=0)[0].train.images}
    sides: dict[str, set[bool]] = {}
    assert part.groups is not None
    for group, image in zip(part.groups.tolist(), part.dataset.images, strict=True):
        sides.setdefault(group, set()).add(image.numpy().tobytes() in train)
    assert all(len(side) == 1 for side in sides.values())


def test_subsamples_keep_the_proportions(digits: Source) -> None:
    some = take_stratified(digits.train, 100)
    assert len(some) == 100 and set(class_counts(some.labels, 10).tolist()) <= {9, 10, 11}
    assert np.array_equal(some.labels, take_stratified(digits.train, 100).labels)
    assert len(take_stratified(digits.train, 10**6)) == len(digits.train)
    with pytest.raises(UsageError, match="0 samples"):
        take_stratified(digits.train, 0)
    less = with_train(digits, some)
    assert less.digest != digits.digest and less.test is digits.test


def test_choosing_settings_leaves_the_test_part_alone(digits: Source) -> None:
    assert evaluation_part(digits, "test") == (digits.train, digits.test)
    kept, held = evaluation_part(digits, "val")
    assert len(kept) + len(held) == len(digits.train) and len(held) == pytest.approx(135, abs=6)
    own = Source("x", ("a", "b", "c"), (1, 4, 4), _part(20), _part(10), _part(5))
    assert evaluation_part(own, "val") == (own.train, own.val)


def test_empty_classes_are_counted() -> None:
    assert class_counts([0, 2, 2], 4).tolist() == [1, 0, 2, 0]
