"""The two theorems where both sides are known exactly."""

import math
from typing import Any

import pytest
import torch

from osfl.methods.fol.bounds import HeadLoss, curvature, head_descent, head_loss, printed_rate, risk_gap


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def test_equal_answers_have_no_gap_and_no_bound() -> None:
    p = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    gap = risk_gap(p, p, torch.tensor([0, 1, 2, 0, 1]))
    assert gap.risk == gap.variation == gap.bound == 0


def test_a_hand_made_gap() -> None:
    """p = (.5, .5), q = (.25, .75), y = 0: risks .5 and .75, TV = .25, KL = .5 log 2 + .5 log(2/3)."""
    gap = risk_gap(logits([0.5, 0.5]), logits([0.25, 0.75]), torch.tensor([0]))
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert (gap.risk, gap.variation, gap.bound) == pytest.approx((0.25, 0.25, math.sqrt(kl / 2)))


def test_the_first_theorem_as_printed_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/4, 3/4) at T = 3: α = 1/4, so C T / (α (1 - α)) = 2 · 3 / (3/16) = 32."""
    p, q = 3 * logits([0.5, 0.5]), 3 * logits([0.25, 0.75])
    kl = 0.5 * math.log(2) + 0.5 * math.log(2 / 3)
    assert risk_gap(p, q, torch.tensor([0]), 3.0).printed == pytest.approx(32 * (kl / 2 + 1 / 8))


def test_the_first_theorem_as_printed_is_above_every_risk() -> None:
    """At least C T / 2, also for equal outputs that are all even: it holds, and says nothing."""
    rng = torch.Generator().manual_seed(2)
    for classes, t in ((2, 1.0), (3, 3.0), (10, 20.0)):
        p, q = (3 * torch.randn(20, classes, generator=rng) for _ in range(2))
        gap = risk_gap(p, q, torch.randint(classes, (20,), generator=rng), t)
        assert gap.risk <= gap.bound < 0.5 * classes * t <= gap.printed
    even = torch.zeros(1, 2)
    assert risk_gap(even, even, torch.tensor([0]), 2.0).printed == pytest.approx(2.0)
    sure = torch.tensor([[1e4, 0.0]])
    assert math.isfinite(risk_gap(sure, -sure, torch.tensor([0])).printed)


def test_the_second_theorem_as_printed_by_hand() -> None:
    """μ = 1, L = 2: γ = 1 - 2η + 8 η², least (7/8) at η = 1/8, 1 at 1/4, and above 1 up to 1/L = 1/2, where it is 2."""
    assert [printed_rate(1.0, 2.0, step) for step in (0.125, 0.25, 0.5)] == pytest.approx([7 / 8, 1.0, 2.0])


def test_noisy_descent_stays_within_the_second_theorem_as_printed() -> None:
    """SGD on f(w) = (w₁² + 2 w₂²) / 2 with gradient noise of variance σ², from (1, 1): the mean over 4,000 runs."""
    rng, step, deviation = torch.Generator().manual_seed(3), 0.125, 0.3
    curvatures = torch.tensor([1.0, 2.0], dtype=torch.float64)
    w, rate = torch.ones(4000, 2, dtype=torch.float64), printed_rate(1.0, 2.0, step)
    noise = step**2 * deviation**2
    for t in range(1, 41):
        drawn = deviation / 2**0.5 * torch.randn(w.shape, generator=rng, dtype=torch.float64)
        w = w - step * (curvatures * w + drawn)
        promised = rate**t * 2 + noise * sum(rate**tau for tau in range(t))
        assert float(w.square().sum(1).mean()) <= promised
    assert promised > 3 * noise  # noise is what is left, and the promise is not for an exact gradient


def test_the_head_stays_within_the_second_theorem_as_printed() -> None:
    """Its promise for the best of its steps is weaker than ours for a longer one."""
    found = head_descent(head_loss(**problem(), temperature=3.0, strength=0.1), 30)
    assert all(ours <= theirs for ours, theirs in zip(found.promised, found.printed, strict=True))
    assert found.printed[0] == 1.0 and found.promised[30] < found.printed[30] < 1.0


def test_the_gap_is_below_the_variation_below_the_bound_whatever_is_predicted() -> None:
    rng = torch.Generator().manual_seed(1)
    for scale in (0.1, 1.0, 30.0):
        p, q = scale * torch.randn(50, 6, generator=rng), scale * torch.randn(50, 6, generator=rng)
        gap = risk_gap(p, q, torch.randint(6, (50,), generator=rng))
        assert 0 < gap.risk <= gap.variation <= gap.bound
    p, q = logits([0.9, 0.1], [0.9, 0.1]), logits([0.1, 0.9], [0.1, 0.9])
    assert risk_gap(p, q, torch.tensor([0, 1])).risk == pytest.approx(0, abs=1e-12)  # one gains what the other loses


def problem(seed: int = 0) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(30, 5, generator=rng),
        "teacher": 3 * torch.randn(30, 4, generator=rng),
        "head": torch.randn(4, 6, generator=rng),
    }


@pytest.mark.parametrize("temperature, strength", [(1.0, 0.1), (3.0, 0.01), (3.0, 1.0)])
def test_the_head_approaches_its_optimum_at_least_as_fast_as_promised(temperature: float, strength: float) -> None:
    found = head_descent(head_loss(**problem(), temperature=temperature, strength=strength), 60)
    assert found.measured[0] == found.promised[0] == 1.0
    assert all(m <= p + 1e-9 for m, p in zip(found.measured, found.promised, strict=True))
    assert found.measured[-1] < 0.9


def test_a_teacher_that_the_head_already_follows_leaves_nothing_to_learn() -> None:
    p = {name: tensor.double() for name, tensor in problem().items()}
    inputs = torch.cat([p["features"], torch.ones(30, 1)], 1)
    loss = head_loss(p["features"], inputs @ p["head"].T, p["head"], temperature=2.0, strength=0.1)
    found = head_descent(loss, 5)
    assert found.measured == [0.0] * 6


def test_a_scaled_divergence_is_another_optimum_and_another_promise() -> None:
    """T² KL, as in the preset: c = T² is the plain loss with an anchor of λ / T²."""
    t, strength = 3.0, 0.09
    scaled = head_descent(head_loss(**problem(), temperature=t, strength=strength, scale=t**2), 20)
    plain = head_descent(head_loss(**problem(), temperature=t, strength=strength / t**2), 20)
    assert scaled.measured == pytest.approx(plain.measured, abs=1e-6) and scaled.promised == pytest.approx(plain.promised)


def test_curvature_bounds_the_true_hessian() -> None:
    rng = torch.Generator().manual_seed(4)
    h, t, strength = torch.randn(12, 3, generator=rng, dtype=torch.float64), 2.0, 0.05
    p = torch.rand(12, 3, generator=rng, dtype=torch.float64).softmax(-1)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        w = flat.view(3, 3)
        return -(p * (h @ w.T / t).log_softmax(-1)).sum(-1).mean() + strength * (w**2).sum()

    low, high = curvature(h, t, strength)
    for seed in range(5):
        at = torch.randn(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, at))
        assert low - 1e-9 <= float(values.min()) and float(values.max()) <= high + 1e-9


def test_curvature_by_hand() -> None:
    """All inputs along one axis with E h hᵀ = 4, T = 2: L - μ = 4 / (2 · 4)."""
    h = torch.tensor([[2.0, 0.0], [-2.0, 0.0]], dtype=torch.float64)
    assert curvature(h, 2.0, 0.05) == pytest.approx((0.1, 0.1 + 0.5))


def test_the_head_s_gradient_by_hand() -> None:
    """One image h = (1, 1), its bias included, and W = 0, so that both answers are 1/2; the target is (1, 0), W_0 = -1, T = 2,
    c = 4, λ = 0.5: c (q - p) h / T = 4 (-1/2) / 2 = -1, and 2 λ (W - W_0) = 1, for the first row; 1 and 1 for the second."""
    one = torch.ones(2, 2, dtype=torch.float64)
    loss = HeadLoss(one[:1], torch.tensor([[1.0, 0.0]], dtype=torch.float64), -one, 2.0, 0.5, 4.0)
    assert loss.slope(0 * one).tolist() == [[0.0, 0.0], [2.0, 2.0]]


def test_the_head_s_gradient_is_that_of_its_loss_also_on_some_images() -> None:
    loss = head_loss(**problem(), temperature=3.0, strength=0.1, scale=9.0)
    rows = torch.tensor([3, 7, 7])
    for chosen in (slice(None), rows):
        w = loss.start.clone().add_(0.5).requires_grad_()
        h, p = loss.inputs[chosen], loss.target[chosen]
        divergence = (p * (p.log() - (h @ w.T / 3).log_softmax(-1))).sum(-1).mean()
        (9 * divergence + 0.1 * (w - loss.start).square().sum()).backward()
        assert w.grad is not None
        torch.testing.assert_close(loss.slope(w.detach(), chosen), w.grad)


def test_several_heads_descend_at_once() -> None:
    """As a measurement of stochastic descent needs: a head and a batch for each run."""
    loss, rng = head_loss(**problem(), temperature=3.0, strength=0.1), torch.Generator().manual_seed(0)
    w, rows = torch.randn(2, 4, 6, generator=rng, dtype=torch.float64), torch.randint(30, (2, 8), generator=rng)
    apart = torch.stack([loss.slope(one, row) for one, row in zip(w, rows, strict=True)])
    torch.testing.assert_close(loss.slope(w, rows), apart)


def test_the_optimum_has_no_gradient() -> None:
    loss = head_loss(**problem(), temperature=3.0, strength=0.1)
    assert float(loss.slope(loss.optimum()).norm()) < 1e-9 < float(loss.slope(loss.start).norm())
