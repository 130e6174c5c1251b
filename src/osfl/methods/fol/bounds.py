"""What theory promises about a distilled student, beside what is measured.

Theorem 1 (how far the student's risk can be from the teacher's), as printed: for C classes, a loss with Lipschitz constant L,
temperature T and tempered outputs within (α, 1 - α),

    |R(student) - R(teacher)| ≤ L C T / (α (1 - α)) (L_KD / 2 + 1/8)

Because α (1 - α) ≤ 1/4, the right side is at least L C T / 2, which no risk between 0 and 1 with L = 1 can exceed. So that
something can be learned from a measurement, a tighter one stands beside it, with a proof in two lines. Let
R(f) = E[1 - p_f(y|x)], the risk of a classifier that draws its answer from p_f. Then

    |R(student) - R(teacher)| = |E[p_t(y|x) - p_s(y|x)]| ≤ E TV(p_t, p_s) ≤ E √(KL(p_t‖p_s) / 2) ≤ √(E KL(p_t‖p_s) / 2)

by the definition of total variation, Pinsker's and Jensen's inequality. It holds for every set of images, so also for the
measured one: a violation would be a mistake in the code. Driving the distillation loss to zero drives the gap to zero.

Theorem 2 (how fast), as printed: for SGD on a μ-strongly convex loss with L-Lipschitz gradients of variance ≤ σ²,

    E‖W_t - W*‖² ≤ γ^t ‖W_0 - W*‖² + Σ_{τ<t} γ^τ η²σ²,   γ = 1 - 2ημ + (L³/μ) η²,   0 < η < 1/L

γ is below 1 for η < 2μ²/L³ only, and least, 1 - (μ/L)³, at half of that. Ours: on a convex head, the last layer W on frozen
features h with its bias, the loss
f(W) = c E KL(softmax(A/T) ‖ softmax(W h/T)) + λ ‖W - W_0‖² has a Hessian between μ = 2λ and L = 2λ + c λ_max(E h hᵀ) / (2 T²),
because that of the logarithm of a softmax's normalizer is at most 1/2; c is T² or 1. Gradient descent with step 2/(μ + L) then
contracts:

    ‖W_t - W*‖ ≤ ((L - μ) / (L + μ))^t ‖W_0 - W*‖
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LEAST = 1e-12  # α where an output is 0 or 1 in floating point
_EXACT = 1e-10  # how far from W* its computed value may be; distances of that size are no measurement


@dataclass(frozen=True)
class Gap:
    """Theorem 1 on a set of images, smallest first if it holds; the last is the bound as printed."""

    risk: float  # |R(student) - R(teacher)|
    variation: float  # E TV
    bound: float  # E √(KL / 2)
    printed: float  # C T / (α (1 - α)) (L_KD / 2 + 1/8)


def risk_gap(teacher: torch.Tensor, student: torch.Tensor, labels: torch.Tensor, temperature: float = 1.0) -> Gap:
    """From logits (n, classes) of both for the same images; the temperature is that of the distillation."""
    p, q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    there = (p.exp() - q.exp()).gather(1, labels[:, None])
    variation = (p.exp() - q.exp()).abs().sum(-1) / 2
    divergence = (p.exp() * (p - q)).sum(-1).clamp_min(0)  # rounding may go below zero
    printed = printed_risk_bound(teacher.double() / temperature, student.double() / temperature, temperature)
    return Gap(abs(float(there.mean())), float(variation.mean()), float((divergence / 2).sqrt().mean()), printed)


def printed_risk_bound(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> float:
    """Theorem 1's right side with L = 1, from tempered logits; α is the least distance of an output from 0 and 1."""
    p, q = teacher.log_softmax(-1), student.log_softmax(-1)
    outputs = torch.cat([p, q]).exp()
    alpha = float(torch.minimum(outputs, 1 - outputs).min().clamp_min(_LEAST))
    divergence = float((p.exp() * (p - q)).sum(-1).mean())
    return p.shape[-1] * temperature / (alpha * (1 - alpha)) * (divergence / 2 + 1 / 8)


@dataclass(frozen=True)
class Descent:
    """Theorem 2: distances to the optimum after 0, 1, 2, … steps, as shares of the first, and what was promised."""

    measured: list[float]
    promised: list[float]
    printed: list[float]  # by the theorem as printed, with the step that suits it best and without noise


@dataclass(frozen=True)
class HeadLoss:
    """c E KL(softmax(A/T) ‖ softmax(W h/T)) + λ ‖W - W_0‖² of a last layer W (classes, inputs + 1; the bias last), as above."""

    inputs: torch.Tensor  # h and 1, (n, inputs + 1), float64
    target: torch.Tensor  # softmax(A/T), (n, classes)
    start: torch.Tensor  # W_0
    temperature: float  # T
    strength: float  # λ
    scale: float  # c

    def slope(self, w: torch.Tensor, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
        """The gradient at W, on these images alone."""
        h = self.inputs[rows]
        wrong = (h @ w.mT / self.temperature).softmax(-1) - self.target[rows]
        return self.scale * wrong.mT @ h / (self.temperature * h.shape[-2]) + 2 * self.strength * (w - self.start)

    def curvature(self) -> tuple[float, float]:
        """μ and L."""
        return curvature(self.inputs, self.temperature, self.strength, self.scale)

    def optimum(self) -> torch.Tensor:
        """W*, by Nesterov's accelerated descent until ‖∇f‖/μ, which bounds the distance left, is negligible."""
        low, high = self.curvature()
        root = (high / low) ** 0.5
        momentum = (root - 1) / (root + 1)
        w = ahead = self.start
        for _ in range(200_000):
            gradient = self.slope(ahead)
            if float(gradient.norm()) <= _EXACT * low:
                break
            new = ahead - gradient / high
            ahead, w = new + momentum * (new - w), new
        return ahead


def head_loss(
    features: torch.Tensor,
    teacher: torch.Tensor,
    head: torch.Tensor,
    *,
    temperature: float,
    strength: float,
    scale: float = 1.0,
) -> HeadLoss:
    """Of features (n, inputs), the teacher's logits (n, classes) and the head as it is."""
    inputs = torch.cat([features, features.new_ones(len(features), 1)], 1).double()
    return HeadLoss(inputs, (teacher.double() / temperature).softmax(-1), head.double(), temperature, strength, scale)


def head_descent(loss: HeadLoss, steps: int) -> Descent:
    """Gradient descent of the head with step 2/(μ + L)."""
    low, high = loss.curvature()
    optimum, w, measured = loss.optimum(), loss.start.clone(), []
    for _ in range(steps + 1):
        distance = float((w - optimum).norm())
        measured.append(distance if distance > 10 * _EXACT else 0.0)
        w = w - 2 / (low + high) * loss.slope(w)
    first = measured[0] or 1.0  # the teacher may be the student already: then all distances are 0
    rate = (high - low) / (high + low)
    printed = printed_rate(low, high, low**2 / high**3) ** 0.5  # γ is of squared distances
    return Descent([d / first for d in measured], [rate**t for t in range(steps + 1)], [printed**t for t in range(steps + 1)])


def printed_rate(low: float, high: float, step: float) -> float:
    """Theorem 2's γ for a loss of curvature between μ and L."""
    return 1 - 2 * step * low + high**3 / low * step**2


def curvature(h: torch.Tensor, temperature: float, strength: float, scale: float = 1.0) -> tuple[float, float]:
    """μ and L of the head's loss on inputs h (n, d)."""
    largest = float(torch.linalg.matrix_norm(h, 2)) ** 2 / len(h)
    return 2 * strength, 2 * strength + scale * largest / (2 * temperature**2)
