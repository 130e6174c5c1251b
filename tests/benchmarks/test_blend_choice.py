"""The rules that are compared: the first is what sites do, and a standard error decides for less of the network."""

from __future__ import annotations

import pytest
import torch

from benchmarks.blend_choice import ALONE, GRID, LEAST, RULES, one_standard_error
from osfl.core.seeds import torch_generator
from osfl.methods.onesum.personal import BLENDS, FACTORS, Choice, choose, default_choice, mixed


@pytest.mark.parametrize("seed", range(6))
def test_the_first_rule_is_what_sites_do(seed: int) -> None:
    rng = torch_generator(seed, "rules")
    scores = {factor: 3 * torch.randn(40, 3, generator=rng, dtype=torch.float64) for factor in FACTORS}
    network = (3 * torch.randn(40, 3, generator=rng, dtype=torch.float64)).log_softmax(1)
    prior, labels = torch.zeros(3, dtype=torch.float64), torch.randint(0, 3, (40,), generator=rng)
    answers = [mixed((c.softness * scores[c.factor] + prior).log_softmax(1), network, c.blend) for c in GRID]
    likelihood = torch.stack([one.gather(1, labels[:, None])[:, 0].clamp_min(LEAST) for one in answers])
    for shrinkage in (0.05, 0.5):
        assert RULES["auto, as it is"](likelihood, shrinkage) == choose({0: prior, **scores}, network, labels, shrinkage)


def table(better: float, images: int) -> torch.Tensor:
    """Log-likelihoods where more of the network is better by `better` an image and step, and images differ by one nat."""
    rows = torch.full((len(GRID), images), -9.0, dtype=torch.float64)
    noise = torch.arange(images, dtype=torch.float64) % 2 - 0.5
    for step, blend in enumerate(BLENDS):
        rows[GRID.index(Choice(3.0, 1.0, blend))] = step * (better + noise)
    return rows


def test_a_standard_error_decides_for_less_of_the_network() -> None:
    assert one_standard_error(table(0.1, 9), 0.05).blend == 0.0  # a mean of 0.1 with an error of 0.17
    assert one_standard_error(table(0.1, 200), 0.05).blend == 0.5
    assert one_standard_error(table(0.1, 1), 0.05).blend == 0.0


def test_without_evidence_rules_stay_where_they_start() -> None:
    none = torch.zeros(len(GRID), 5, dtype=torch.float64)
    for shrinkage in (0.05, 0.5):
        assert RULES["from the prior alone"](none, shrinkage) == RULES["prior alone"](none, shrinkage) == ALONE
        assert RULES["auto, as it is"](none, shrinkage) == default_choice(True, shrinkage)
    assert RULES["from the prior alone where lambda is large"](none, 0.5) == ALONE
    assert RULES["from the prior alone where lambda is large"](none, 0.05) == default_choice(True, 0.05)
