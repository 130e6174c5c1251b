"""FALCON's equations by hand: what the student minimizes, who teaches, how generators are trained and drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Upload
from osfl.ingredients.tokens.encoding import tokens_digest
from osfl.methods.falcon import Falcon, Settings
from osfl.methods.falcon.distillation import noised, student_loss
from osfl.methods.falcon.generator import fit_generator
from osfl.models.initial import initialize
from osfl.models.naming import named
from osfl.models.token_models import LOG_VARIANCE, AttentionPool, TokenGenerator
from tests.methods.conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(Falcon, "smoke", {"dropout": 0.0, "hidden": 8})
WIDTH = SMOKE.width()
ENCODER = tokens_digest(SMOKE)
CPU = torch.device("cpu")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- the student (Eq. 10 to 13) ---


def test_the_students_loss_by_hand() -> None:
    """z = (2 ln 3, 0), T = 2: softmax(z / T) = (3/4, 1/4); p_T = (1/2, 1/2); y = 1, of which softmax(z) gives 1/10."""
    logits, labels, teacher = torch.tensor([[2 * math.log(3), 0.0]]), torch.tensor([1]), torch.tensor([[0.5, 0.5]])
    entropy = math.log(10)
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    for alpha in (0.0, 0.2, 0.5, 1.0):
        expected = (1 - alpha) * entropy + alpha * 4 * divergence
        assert float(student_loss(logits, labels, teacher, alpha, 2.0)) == pytest.approx(expected, rel=1e-5)


def test_the_students_loss_is_the_mean_over_its_batch() -> None:
    logits, labels = torch.randn(4, 3, generator=rng()), torch.tensor([0, 2, 1, 1])
    teacher = torch.rand(4, 3, generator=rng(1)).softmax(-1)
    each = [student_loss(logits[i : i + 1], labels[i : i + 1], teacher[i : i + 1], 0.3, 4.0) for i in range(4)]
    assert float(student_loss(logits, labels, teacher, 0.3, 4.0)) == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)


def test_noise_has_its_deviation_and_is_drawn_anew() -> None:
    x, random = torch.zeros(2, 3), rng(3)
    first, second = noised(x, 0.5, random), noised(x, 0.5, random)
    again = rng(3)
    assert torch.equal(first, 0.5 * torch.randn(2, 3, generator=again))
    assert torch.equal(second, 0.5 * torch.randn(2, 3, generator=again))
    assert torch.equal(noised(x + 7, 0.5, rng(3)), 7 + first)


def upload(client: str, counts: Sequence[int], model: AttentionPool, sequences: torch.Tensor, labels: torch.Tensor) -> Upload:
    tensors = {**named(model, "classifier"), "sequences": sequences, "labels": labels}
    return Upload(client, "", Payload(tensors, {"samples": sum(counts), "class_counts": list(counts), "encoder": ENCODER}))


def classifier(seed: int) -> AttentionPool:
    model = AttentionPool(WIDTH, 3, hidden=8, dropout=0.0)
    initialize(model, rng(seed))
    return model.eval()


def constant(*logits: float) -> AttentionPool:
    model = classifier(0)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.copy_(torch.tensor(logits))
    return model


def taught(counts: Sequence[Sequence[int]], models: Sequence[AttentionPool], x: torch.Tensor, **change: Any) -> torch.Tensor:
    settings = replace(SMOKE, **change)
    none = torch.zeros(0, 1, WIDTH), torch.zeros(0, dtype=torch.int64)
    output = [upload(name, count, model, *none) for name, count, model in zip("abc", counts, models, strict=False)]
    return Falcon(TASK, settings)._teacher(output, x, context(settings, "abc"))


TEMPERED = torch.tensor([[4.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 4.0]]).div(4).softmax(-1)  # T = 4


@pytest.mark.parametrize(
    ("ensemble", "counts", "weights"),
    [
        ("uniform", [[6, 0, 0], [0, 7, 0], [0, 0, 7]], [1 / 3, 1 / 3, 1 / 3]),
        ("size", [[6, 0, 0], [0, 7, 0], [0, 0, 7]], [0.3, 0.35, 0.35]),
        ("size", [[1, 0, 0], [0, 1, 0], [0, 0, 8]], [0.3, 0.3, 0.4]),  # no site has more than two fifths
    ],
)
def test_clients_teach_with_their_weights(ensemble: str, counts: Sequence[Sequence[int]], weights: Sequence[float]) -> None:
    """Eq. 10: the mean of softmax(z_k / T); each client here is sure of one class, whatever it sees."""
    models = [constant(*row) for row in (4 * torch.eye(3)).tolist()]
    found = taught(counts, models, torch.zeros(2, 1, WIDTH), ensemble=ensemble)
    assert torch.allclose(found, torch.tensor(weights) @ TEMPERED, atol=1e-6)


def test_clients_teach_each_class_by_their_images_of_it() -> None:
    """Class 0: two fifths at most for the first, though it has nearly all; class 1: alike; class 2: the second and third."""
    models = [constant(*row) for row in (4 * torch.eye(3)).tolist()]
    found = taught([[8, 2, 0], [1, 2, 5], [1, 2, 5]], models, torch.zeros(1, 1, WIDTH), ensemble="class_count")
    weights = torch.tensor([[0.4, 1 / 3, 0.0], [0.3, 1 / 3, 0.5], [0.3, 1 / 3, 0.5]])
    expected = (weights * TEMPERED).sum(0)
    assert torch.allclose(found[0], expected / expected.sum(), atol=1e-5)


def test_clients_teach_relative_to_their_mean_answer() -> None:
    x, models = torch.randn(5, 1, WIDTH, generator=rng(4)), [classifier(seed) for seed in (1, 2)]
    with torch.no_grad():
        answers = [(model(x) / 4).softmax(-1) for model in models]
    both = torch.stack([answer / answer.mean(0) for answer in answers]).sum(0)
    found = taught([[8, 8, 8], [8, 8, 8]], models, x, ensemble="relative")
    assert torch.allclose(found, both / both.sum(-1, keepdim=True), atol=1e-5)


def test_the_server_trains_its_student_by_adam_on_that_loss() -> None:
    """Two epochs of two batches, with noise on the sequences: a loop of our own ends at the same weights."""
    settings = replace(SMOKE, noise_std=0.5, epochs=2, batch_size=4, alpha=0.3, temperature=3.0, lr=0.01)
    ctx = context(settings, "ab")
    x, y = torch.randn(8, 1, WIDTH, generator=rng(5)), torch.tensor([0, 1, 2, 0] * 2)  # alike, so that nothing is capped
    models = [classifier(seed) for seed in (1, 2)]
    output = [upload(name, [2, 1, 1], models[i], x[4 * i : 4 * i + 4], y[4 * i : 4 * i + 4]) for i, name in enumerate("ab")]
    method = Falcon(TASK, settings)
    student, random = settings.classifier(WIDTH, 3, ctx.generator("student")), ctx.generator("distil")
    with torch.no_grad():
        teacher = torch.stack([(model(x) / 3).softmax(-1) for model in models]).mean(0)
    optimizer = torch.optim.Adam(student.parameters(), 0.01)
    for _ in range(2):
        for index in torch.randperm(8, generator=random).split(4):
            logits = student(x[index] + 0.5 * torch.randn(4, 1, WIDTH, generator=random))
            tempered = (logits / 3).log_softmax(-1)
            divergence = (teacher[index] * (teacher[index].log() - tempered)).sum(-1).mean()
            optimizer.zero_grad()
            (0.7 * functional.cross_entropy(logits, y[index]) + 0.3 * 9 * divergence).backward()
            optimizer.step()
    found = method.server_phase(output, ctx).shared.tensors
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in named(student, "classifier").items())


# --- the classifier's dropout ---


def test_hidden_units_that_stay_are_scaled_up() -> None:
    model, tokens = AttentionPool(6, 3, hidden=40, dropout=0.4), torch.randn(4, 5, 6, generator=rng(1))
    initialize(model, rng(2))
    hidden = model.fc1(model.pooled(tokens)).relu()
    kept = (torch.rand(hidden.shape, generator=rng(7)) >= 0.4).float()
    expected = model.head(model.fc2(hidden * kept / 0.6))
    assert torch.allclose(model(tokens, *model.draw_kept(4, rng(7))), expected, atol=1e-6) and 0.4 < float(kept.mean()) < 0.8


@pytest.mark.parametrize("residual", [True, False])
def test_the_plan_decides_whether_the_query_is_added(residual: bool) -> None:
    model = replace(SMOKE, query_residual=residual).classifier(WIDTH, 3, rng(1))
    tokens = torch.randn(4, 5, WIDTH, generator=rng(2))
    query = model.query[0, 0]
    weights = (model.keys(tokens) @ query / math.sqrt(WIDTH)).softmax(-1)
    found = (weights.unsqueeze(-1) * model.values(tokens)).sum(1)
    assert torch.allclose(model.pooled(tokens), found + query if residual else found, atol=1e-5)


# --- the generator ---


def small(components: int = 2, tokens: int = 2, dim: int = 3) -> TokenGenerator:
    model = TokenGenerator(tokens, dim, 3, width=8, depth=1, heads=2, components=components)
    initialize(model, rng(1))
    return model


def test_the_generator_is_trained_by_adamw_with_clipped_gradients() -> None:
    """Least -log p, the mean over sequences and positions; weight decay 1e-4, gradients of at most norm 2."""
    tokens, labels = (
        torch.randn(6, 2, 3, generator=rng(2)) * torch.tensor([1.0, 1, 9, 9, 30, 90])[:, None, None],
        torch.arange(6) % 3,
    )
    model, mine, random = small(), small(), rng(3)
    optimizer, norms = torch.optim.AdamW(mine.parameters(), 1e-2, weight_decay=1e-4), []
    for _ in range(3):
        for index in torch.randperm(6, generator=random).split(3):
            optimizer.zero_grad()
            (-mine.log_likelihood(tokens[index], labels[index]).mean()).backward()
            norms.append(torch.stack([p.grad.norm() for p in mine.parameters() if p.grad is not None]).norm())
            for parameter in mine.parameters():
                if parameter.grad is not None:
                    parameter.grad *= min(1.0, 2.0 / (float(norms[-1]) + 1e-6))
            optimizer.step()
    fit_generator(model, tokens, labels, rng(3), epochs=3, batch_size=3, lr=1e-2, device=CPU, progress=lambda done, total: None)
    assert max(norms) > 10 * min(norms)  # else Adam, which knows no scale, would not notice the clipping
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), mine.parameters(), strict=True))


def test_the_generator_learns_which_class_is_where() -> None:
    labels = torch.arange(30) % 3
    tokens = 4.0 * functional.one_hot(labels, 3).float()[:, None].expand(-1, 2, -1) + 0.3 * torch.randn(
        30, 2, 3, generator=rng(2)
    )
    model = small()
    fit_generator(
        model, tokens, labels, rng(3), epochs=30, batch_size=10, lr=2e-2, device=CPU, progress=lambda done, total: None
    )
    for c in range(3):
        drawn = model.sample(torch.full((50,), c), rng(c)).mean((0, 1))
        assert int(drawn.argmax()) == c


@pytest.mark.parametrize(("log_variance", "deviation"), [(math.log(4.0), 2.0), (50.0, math.exp(LOG_VARIANCE / 2))])
def test_a_draw_is_the_mean_plus_noise_of_that_deviation(log_variance: float, deviation: float) -> None:
    model = small(components=1, tokens=1)
    with torch.no_grad():
        for layer in (model.means, model.variances, model.weights):
            layer.weight.zero_()
        model.means.bias.fill_(5.0)
        model.variances.bias.fill_(log_variance)
    random = rng(4)
    torch.multinomial(torch.ones(6, 1), 1, generator=random)  # which component: there is one
    expected = 5.0 + deviation * torch.randn(6, 3, generator=random)
    assert torch.allclose(model.sample(torch.zeros(6, dtype=torch.int64), rng(4))[:, 0], expected, rtol=1e-5)


@pytest.mark.parametrize(("asked", "used"), [(60.0, 7.0), (-60.0, -7.0), (3.0, 3.0)])
def test_log_variances_stay_within_seven(asked: float, used: float) -> None:
    """One component at 0: log p(x) = -½ (x² / v + ln v + ln 2π) in each dimension, v = exp(used)."""
    model = small(components=1, tokens=1)
    with torch.no_grad():
        for layer in (model.means, model.variances, model.weights):
            layer.weight.zero_()
            layer.bias.zero_()
        model.variances.bias.fill_(asked)
    x = torch.tensor([[[0.02, -0.01, 0.03]]])
    expected = -0.5 * sum(v * v / math.exp(used) + used + math.log(2 * math.pi) for v in x.flatten().tolist())
    assert float(model.log_likelihood(x, torch.tensor([0])).detach()) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("images", "components"), [(9, 1), (24, 2), (63, 5)])
def test_few_images_have_few_components(images: int, components: int) -> None:
    settings = replace(SMOKE, components=5, generator_epochs=1)
    tokens = torch.randn(images, 1, WIDTH, generator=rng(6))
    made = Falcon(TASK, settings)._generated(tokens, shard("a", images), context(settings, "a"))
    assert len(made.tensors["generator/weights.bias"]) == components


def test_a_generator_works_on_standardized_tokens_unless_reported_otherwise() -> None:
    tokens, labels = 3.0 + 2.0 * torch.randn(40, 1, WIDTH, generator=rng(8)), torch.arange(40) % 3
    for standardize, center, scale in ((True, tokens.mean((0, 1)), tokens.std((0, 1))), (False, 0.0, 1.0)):
        space = Falcon(TASK, replace(SMOKE, standardize=standardize))._space(tokens, labels)
        assert torch.allclose(space, torch.stack([torch.zeros(WIDTH) + center, torch.zeros(WIDTH) + scale]), atol=1e-6)
