"""The analytic Gaussian mechanism beside a maintained accountant, and beside an integral."""

from __future__ import annotations

import math

import pytest

from osfl.ingredients.statistics.gaussian_mechanism import delta_of, epsilon_for, multiplier_for, shown_epsilon

# epsilon, delta, least noise by dp-accounting 0.6.0: pld.accountant.get_smallest_gaussian_noise(parameters, 1, 1.0)
REFERENCE = (
    (0.1, 1e-05, 30.7495661),
    (0.1, 1e-08, 45.9373602),
    (0.5, 1e-05, 7.03182674),
    (0.5, 1e-08, 9.86353383),
    (1, 1e-05, 3.73063166),
    (1, 1e-08, 5.1003088),
    (2, 1e-05, 1.99381248),
    (2, 1e-08, 2.65292681),
    (3, 1e-05, 1.3905935),
    (3, 1e-08, 1.81864295),
    (4, 1e-05, 1.08116188),
    (4, 1e-08, 1.39558272),
    (8, 1e-05, 0.600229073),
    (8, 1e-08, 0.7483943),
    (16, 1e-05, 0.344177482),
    (16, 1e-08, 0.41308631),
    (30, 1e-05, 0.214720176),
    (30, 1e-08, 0.248861364),
    (100, 1e-05, 0.0946699416),
    (100, 1e-08, 0.103577606),
)


@pytest.mark.parametrize(("epsilon", "delta", "multiplier"), REFERENCE)
def test_noise_and_epsilon_are_those_of_the_reference(epsilon: float, delta: float, multiplier: float) -> None:
    assert multiplier_for(epsilon, delta) == pytest.approx(multiplier, rel=1e-5)
    assert epsilon_for(multiplier, delta) == pytest.approx(epsilon, rel=1e-5)


@pytest.mark.parametrize(("epsilon", "multiplier"), [(0.0, 2.0), (1.0, 1.0), (3.0, 0.5)])
def test_delta_is_the_integral_of_what_one_density_has_beyond_the_other(epsilon: float, multiplier: float) -> None:
    step, total = 1e-4, 0.0
    for i in range(-120_000, 120_000):
        x = i * step
        p = math.exp(-(((x - 1) / multiplier) ** 2) / 2)
        q = math.exp(-((x / multiplier) ** 2) / 2)
        total += max(0.0, p - math.exp(epsilon) * q) * step
    assert delta_of(epsilon, multiplier) == pytest.approx(total / (multiplier * math.sqrt(2 * math.pi)), rel=1e-5)


def test_what_is_promised_is_kept_to_the_last_bit() -> None:
    for epsilon, delta, _ in REFERENCE:
        assert delta_of(epsilon, multiplier_for(epsilon, delta)) <= delta
        assert delta_of(epsilon_for(2.0, delta), 2.0) <= delta


def test_noise_that_hides_everything_or_nothing() -> None:
    assert epsilon_for(1e9, 1e-5) == 0.0
    assert epsilon_for(1e-5, 1e-5) == math.inf


@pytest.mark.parametrize(
    ("epsilon", "shown"),
    [(0.0123412, 0.01235), (7.9996, 8.0), (8.0, 8.0), (123456.0, 123500.0), (0.0, 0.0), (math.inf, None)],
)
def test_a_statement_shows_four_digits_of_epsilon_rounded_up(epsilon: float, shown: float | None) -> None:
    assert shown_epsilon(epsilon) == shown
