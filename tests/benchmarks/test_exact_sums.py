"""The attack on exact sums finds whole-number rows of their second moments alone."""

import numpy as np

from benchmarks.exact_sums import rows_of


def test_rows_are_computed_from_their_exact_second_moments() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (6, 60)).astype(float)
    found = rows_of(rows.T @ rows, len(rows))
    assert found is not None
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, rows.tolist()))


def test_more_images_than_features_leave_it_without_a_basis() -> None:
    rows = np.random.default_rng(0).integers(0, 9, (8, 4)).astype(float)
    assert rows_of(rows.T @ rows, len(rows)) is None
