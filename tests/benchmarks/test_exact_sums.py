"""The attack on exact sums finds whole-number rows of their second moments alone."""

import numpy as np

from benchmarks.exact_sums import alone, rows_of


def test_rows_are_computed_from_their_exact_second_moments() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (6, 60)).astype(float)
    found = rows_of(rows.T @ rows, len(rows))
    assert found is not None
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, rows.tolist()))


def test_more_images_than_features_leave_it_without_a_basis() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (8, 4)).astype(float)
    assert rows_of(rows.T @ rows, len(rows)) is None


def test_images_that_have_a_feature_alone_are_read_one_after_the_other() -> None:
    """Each row after the first has a feature that only it and the ones before have; the last two share all of theirs."""
    rows = np.random.default_rng(0).integers(1, 9, (7, 40))
    for i in range(6):
        rows[i + 1 :, i] = 0
    rows[5:, 5] = (2, 3)
    assert sorted(map(tuple, alone(rows.T @ rows))) == sorted(map(tuple, rows[:5]))
    assert alone(rows[5:].T @ rows[5:]) == []
