"""The accountant of private training beside a maintained one."""

from __future__ import annotations

import math

import pytest

from osfl.ingredients.training.accountant import epsilon_of, multiplier_for

# rate, multiplier, steps, epsilon at delta 1e-5 by dp-accounting 0.6.0: rdp.RdpAccountant with our orders, and with its own
REFERENCE = (
    (0.01, 0.6, 1000, 9.102632475357982, 8.680395753417068),
    (0.01, 1.0, 1000, 2.1077530754515745, 2.101366525420273),
    (0.01, 2.0, 1000, 0.6861853363943164, 0.6861853363943164),
    (0.01, 4.0, 1000, 0.3011611585547749, 0.3011611585547749),
    (0.05, 0.6, 400, 24.93244428062353, 24.43463460855444),
    (0.05, 1.0, 400, 7.65436917789284, 7.425478508727143),
    (0.05, 2.0, 400, 2.4627198247659132, 2.460996506376129),
    (0.05, 4.0, 400, 1.0573842180051334, 1.0573842180051334),
    (0.2, 0.6, 100, 57.33487947697062, 47.70077052320549),
    (0.2, 1.0, 100, 16.773852994410063, 16.081655440721068),
    (0.2, 2.0, 100, 5.555175290595449, 5.498763681471653),
    (0.2, 4.0, 100, 2.2989473338423467, 2.298161740882599),
    (0.5, 0.6, 60, 103.87759932517864, 83.1289927512054),
    (0.5, 1.0, 60, 31.569072274377653, 31.412524344408354),
    (0.5, 2.0, 60, 11.403083081500291, 11.403083081500291),
    (0.5, 4.0, 60, 4.7713328726934625, 4.765219091042402),
    (1.0, 0.6, 10, 37.904408881628115, 37.72064290794515),
    (1.0, 1.0, 10, 19.801691480042894, 19.05359753163139),
    (1.0, 2.0, 10, 8.087861628831664, 8.079406222420491),
    (1.0, 4.0, 10, 3.6278518728252274, 3.617099772983339),
)


@pytest.mark.parametrize(("rate", "multiplier", "steps", "epsilon", "least"), REFERENCE)
def test_epsilon_is_that_of_the_reference(rate: float, multiplier: float, steps: int, epsilon: float, least: float) -> None:
    assert epsilon_of(rate, multiplier, steps, 1e-5) == pytest.approx(epsilon, rel=1e-9)
    assert epsilon >= least - 1e-9  # an upper bound; where epsilon is of any use, within 6 %
    assert epsilon > 10 or epsilon < 1.06 * least


@pytest.mark.parametrize(("epsilon", "rate", "steps"), [(1.0, 0.2, 100), (8.0, 0.5, 60), (3.0, 1.0, 20)])
def test_the_least_noise_keeps_epsilon_and_hardly_less_does_not(epsilon: float, rate: float, steps: int) -> None:
    multiplier = multiplier_for(epsilon, 1e-5, rate, steps)
    assert epsilon_of(rate, multiplier, steps, 1e-5) <= epsilon
    assert epsilon_of(rate, multiplier * 0.999, steps, 1e-5) > epsilon


def test_what_no_noise_keeps_is_infinite_and_nothing_costs_nothing() -> None:
    assert multiplier_for(1e-6, 1e-9, 1.0, 10_000) == math.inf
    assert epsilon_of(0.1, 1.0, 0, 1e-5) == 0.0
