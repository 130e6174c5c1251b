"""FOL's Theorems 1 and 2 as they are printed, beside what is measured.

    python -m benchmarks.bench fol_bounds

Digits, five clients, Dirichlet(0.3), FOL's `cpu` preset, one encounter of all with all, three seeds.

Theorem 1, on each client's held-out images: |R(student) - R(ensemble)|, our bound E √(KL/2), and the printed
L C T / (α(1 - α)) (L_KD/2 + 1/8) with L = 1; and what that is for α = 1/2 and L_KD = 0: it can be no less.

Theorem 2, for the head of the first client's model, which learns from its ensemble by SGD on batches of 32 images, with several
strengths λ of the pull to where it began (0.001 is the preset's): E‖W_t - W*‖² over many runs, as a share of the first, beside
γ^t + Σ γ^τ η²σ² / ‖W_0 - W*‖², once with the step that the printed rate likes best, μ²/L³, and once with half of the largest
that the theorem allows, 1/(2L). σ² is the largest variance of a batch's gradient that was met. Nothing is chosen here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from osfl.core.method import Context
from osfl.core.seeds import torch_generator
from osfl.core.types import Payload, Shard, Upload
from osfl.ingredients.ensembles.ensemble import fast_logits
from osfl.ingredients.training.local import classifier
from osfl.methods.fol import Fol
from osfl.methods.fol.bounds import HeadLoss, head_loss, printed_rate
from osfl.methods.fol.pruning import layers_of
from osfl.models.inputs import to_input
from osfl.runtime.workers import compute_threads
from osfl.simulate.simulation import Simulation, prepare

SIMULATION = Simulation("fol", "digits", 5, "dirichlet:0.3", "cpu", changes={"answer": "ensemble"})  # its members are kept
SEEDS = (0, 1, 2)
STRENGTHS = (0.001, 0.1, 1.0, 10.0, 100.0)  # λ
STEPS, BATCH, RUNS = 50, 32, 100


def run() -> dict[str, Any]:
    with compute_threads(1):
        found = [_encounter(seed) for seed in SEEDS]
    return {
        "command": SIMULATION.command("fol-bounds"),
        "theorem_1": {
            f"seed{seed}": _risks(gaps, temperature) for seed, (gaps, _, temperature) in zip(SEEDS, found, strict=True)
        },
        "theorem_2": {
            f"seed{seed}": [_descent(loss, strength, seed) for strength in STRENGTHS]
            for seed, (_, loss, _) in zip(SEEDS, found, strict=True)
        },
    }


def _encounter(seed: int) -> tuple[list[dict[str, float]], HeadLoss, float]:
    """Every client's measurement of Theorem 1; what the head of the first one would learn; and T."""
    federation = prepare(replace(SIMULATION, seed=seed))
    method, ctx = Fol(federation.plan.task, federation.plan.settings), Context(federation.plan, torch.device("cpu"))
    uploads = [Upload(s.client, federation.plan.digest, method.client_phase(s, ctx)) for s in federation.shards]
    release = method.server_phase(uploads, ctx)
    learned = [method.personalize(release, shard, ctx) for shard in federation.shards]
    gaps = [{**one.facts["notes"]["gap"], "classes": len(federation.plan.task.classes)} for one in learned]
    return gaps, _head(method, federation.shards[0], uploads[0].payload, learned[0], ctx), method.settings.temperature


def _head(method: Fol, shard: Shard, own: Payload, learned: Payload, ctx: Context) -> HeadLoss:
    """The last layer of the own model, which learns the answers of the client's ensemble to its training images."""
    before = classifier(own, method.task)
    teacher = fast_logits([method.build(learned)], shard.train.images)[0]
    last = layers_of(before)[-1].module
    assert last.bias is not None
    with torch.no_grad():
        features = before.features(to_input(shard.train.images))  # type: ignore[operator]
        head = torch.cat([last.weight, last.bias[:, None]], 1)
    s = method.settings
    return head_loss(
        features, teacher, head, temperature=s.temperature, strength=s.anchor, scale=s.temperature**2 if s.scaled else 1.0
    )


def _risks(gaps: list[dict[str, float]], temperature: float) -> dict[str, Any]:
    least = gaps[0]["classes"] * temperature / 2  # α = 1/2 and no divergence
    return {
        "clients": len(gaps),
        "difference_of_risks": [gap["risk"] for gap in gaps],
        "ours": [gap["bound"] for gap in gaps],
        "printed": [gap["printed"] for gap in gaps],
        "least_that_the_printed_can_be": least,
        "held": sum(gap["risk"] <= gap["printed"] for gap in gaps),
        "ours_held": sum(gap["risk"] <= gap["bound"] for gap in gaps),
    }


def _descent(loss: HeadLoss, strength: float, seed: int) -> dict[str, Any]:
    loss = replace(loss, strength=strength)
    low, high = loss.curvature()
    steps = {"best_of_the_printed_rate": low**2 / high**3, "half_of_the_largest": 1 / (2 * high)}
    return {
        "lambda": strength,
        "mu": _short(low),
        "L": _short(high),
        **{name: _by_sgd(loss, step, printed_rate(low, high, step), seed) for name, step in steps.items()},
    }


def _by_sgd(loss: HeadLoss, step: float, rate: float, seed: int) -> dict[str, Any]:
    """All runs side by side; distances are squared, and shares of the first."""
    rng, optimum = torch_generator(seed, "sgd", repr(step)), loss.optimum()
    first = float((loss.start - optimum).square().sum())
    w = loss.start.repeat(RUNS, 1, 1)
    measured, variance = [1.0], 0.0
    for _ in range(STEPS):
        slopes = loss.slope(w, torch.randint(len(loss.inputs), (RUNS, BATCH), generator=rng))
        exact = loss.slope(w)
        variance = max(variance, float((slopes - exact).square().sum((1, 2)).mean()))
        w = w - step * slopes
        measured.append(float((w - optimum).square().sum((1, 2)).mean()) / first)
    noise = step**2 * variance / first
    printed = [rate**t + noise * sum(rate**tau for tau in range(t)) for t in range(STEPS + 1)]
    return {
        "eta": _short(step),
        "gamma": _short(rate),
        "left_after_50_steps": _short(measured[-1]),
        "printed_after_50_steps": _short(printed[-1]),
        "steps_within": sum(one <= most for one, most in zip(measured[1:], printed[1:], strict=True)),
    }


def _short(value: float) -> float:
    return float(f"{value:.4g}")
