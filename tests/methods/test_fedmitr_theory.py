"""FedMITR's theory on cases small enough to be computed: the errors of Eq. 15 and 19, the stability of Lemmas 1 and 2."""

from __future__ import annotations

import math

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.distillation.token_relabel import as_vit
from osfl.models.build import build_model
from osfl.models.vit import Vit


def vits(classes: int, count: int) -> list[Vit]:
    task = Task("t", tuple(str(c) for c in range(classes)), (1, 8, 8))
    return [as_vit(build_model("vit-p2-w16-d2-h2", task, torch_generator(i, "vit")).eval()) for i in range(count)]


@pytest.mark.parametrize("classes", [2, 10])
def test_a_hard_label_on_patches_of_noise_is_wrong_by_what_eq_15_says(classes: int) -> None:
    """δ = softmax - label: 1 - 1/K for an even answer, about that for a network that has learned nothing about noise."""
    (student,), rng = vits(classes, 1), torch_generator(0, "noise")
    dropped = torch.stack([torch.randperm(16, generator=rng)[:5] for _ in range(200)])
    with torch.no_grad():
        answers = student(torch.randn(200, 1, 8, 8, generator=rng), dropped).softmax(-1)
    labels = torch.nn.functional.one_hot(torch.arange(200) % classes, classes)
    even = torch.full((classes,), 1 / classes) - labels[0]
    assert float(even.square().sum()) == pytest.approx(1 - 1 / classes)
    assert float((answers - labels).square().sum(1).mean()) == pytest.approx(1 - 1 / classes, rel=0.05)


def test_a_soft_label_on_patches_of_noise_is_wrong_by_far_less() -> None:
    """Eq. 19: E‖softmax(S(x_l)) - softmax(E(x_l))‖² is far below E‖softmax(S(x_l)) - y‖²."""
    (student, *clients), rng = vits(10, 4), torch_generator(1, "noise")
    x, dropped = torch.randn(200, 1, 8, 8, generator=rng), torch.randint(0, 16, (200, 5), generator=rng)
    with torch.no_grad():
        answers = student(x, dropped).softmax(-1)
        together = torch.stack([client(x, dropped) for client in clients]).mean(0).softmax(-1)
    labels = torch.nn.functional.one_hot(torch.arange(200) % 10, 10)
    soft, hard = ((answers - target).square().sum(1).mean() for target in (together, labels))
    assert float(soft) < 0.05 * float(hard)


def stability(steps: int, n: int = 20, c: float = 1.0, runs: int = 2000) -> float:
    """sup_z E|f(w_T; z) - f(w'_T; z)| of SGD on two datasets of n numbers that differ in one.

    f(w; z) = (1 + sin(w + z)) / 2 is not convex, lies in [0, 1], and has L = μ = 1/2; steps are c / t, samples drawn anew.
    """
    rng = torch_generator(0, "stability")
    data = 6.3 * torch.rand(n, generator=rng, dtype=torch.float64)
    other = data.clone()
    other[0] += math.pi
    w = [torch.zeros(runs, dtype=torch.float64) for _ in range(2)]
    for t in range(1, steps + 1):
        drawn = torch.randint(0, n, (runs,), generator=rng)
        w = [one - c / t * torch.cos(one + z[drawn]) / 2 for one, z in zip(w, (data, other), strict=True)]
    z = torch.linspace(0, 6.3, 64, dtype=torch.float64)[:, None]
    return float((torch.sin(w[0] + z) - torch.sin(w[1] + z)).abs().div(2).mean(1).max())


def bound(steps: int, n: int = 20, c: float = 1.0, sign: int = 1) -> float:
    """Lemma 2: (1 + 1/(μc)) / (n - 1) (2cL²)^(1/(μc + 1)) T^(±μc/(μc + 1))."""
    smooth, lipschitz = 0.5, 0.5
    power = smooth * c / (smooth * c + 1)
    constant = (1 + 1 / (smooth * c)) / (n - 1) * (2 * c * lipschitz**2) ** (1 / (smooth * c + 1))
    return float(constant * steps ** (sign * power))


@pytest.mark.parametrize("steps", [10, 100, 500])
def test_sgd_is_as_stable_as_lemma_2_says(steps: int) -> None:
    assert 0 < stability(steps) <= bound(steps)


def test_lemma_2_has_a_positive_exponent() -> None:
    """The main text prints T to a negative power; then the bound would fall with every step, below what is measured."""
    assert bound(500, sign=-1) < stability(500) < bound(500)


def gaps(steps: int, n: int = 20, c: float = 1.0, runs: int = 20_000) -> tuple[float, float, float]:
    """Over datasets S of n numbers: E[R(w) - R_S(w)]; the same by exchanging one number; and E|f(w; z) - f(w'; z)| of the two.

    The loss is that of `stability`, numbers are uniform in [0, 3], and w' has seen another number in place of the first.
    """
    rng = torch_generator(0, "generalization")
    data, fresh = 3 * torch.rand((runs, n), generator=rng, dtype=torch.float64), 3 * torch.rand(runs, generator=rng)
    other = data.clone()
    other[:, 0] = fresh
    w = [torch.zeros(runs, dtype=torch.float64) for _ in range(2)]
    for t in range(1, steps + 1):
        drawn = torch.randint(0, n, (runs, 1), generator=rng)
        w = [one - c / t * torch.cos(one + z.gather(1, drawn)[:, 0]) / 2 for one, z in zip(w, (data, other), strict=True)]
    everywhere = torch.linspace(0, 3, 301, dtype=torch.float64)
    risk = (1 + torch.sin(w[0][:, None] + everywhere)).div(2).mean(1)
    seen = (1 + torch.sin(w[0][:, None] + data)).div(2).mean(1)
    exchanged = (torch.sin(w[0] + fresh) - torch.sin(w[1] + fresh)).div(2)
    return float((risk - seen).mean()), float(exchanged.mean()), float(exchanged.abs().mean())


@pytest.mark.parametrize("steps", [10, 100])
def test_what_is_stable_generalizes(steps: int) -> None:
    """Lemma 1, as Hardt, Recht and Singer state it: the gap between risk and training risk is at most the stability, because
    it is the mean effect of exchanging one image, on that image."""
    gap, exchanged, stable = gaps(steps)
    assert gap == pytest.approx(exchanged, rel=0.05) and 0 < gap <= stable <= bound(steps)
