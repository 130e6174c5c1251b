"""Co-Boosting's equations."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.ingredients.generators.synthesis import Batch, Seen, Teacher, Workshop
from osfl.methods import coboosting
from osfl.methods.coboosting import CoBoosting, Voices, hard_samples, perturbed, vote, weight_step
from osfl.models.build import build_model
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMALL = resolve_settings(CoBoosting, "smoke")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run computes; small layers only wait for each other with more."""
    with compute_threads(1):
        yield


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uploads_of(method: Any, clients: str = "abc") -> list[Upload]:
    ctx = context(method.settings, list(clients))
    return [Upload(client, "", method.client_phase(shard(client, seed=i), ctx)) for i, client in enumerate(clients)]


def test_a_weight_moves_by_its_step_or_to_its_bound() -> None:
    weights, gradient = torch.tensor([0.5, 0.001, 0.999, 0.5]), torch.tensor([3.0, 2.0, -1e-6, 0.0])
    assert torch.allclose(weight_step(weights, gradient, 0.01), torch.tensor([0.49, 0.0, 1.0, 0.5]))


@pytest.mark.parametrize("mode", ["logits", "probabilities", "class_count"])
def test_the_ensemble_does_not_care_for_the_scale_of_its_weights(mode: str) -> None:
    logits = torch.randn((4, 6, 3), generator=rng()).double()
    base = torch.rand((4, 3), generator=rng(1)).double() if mode == "class_count" else torch.ones(4).double()
    weights = torch.rand(4, generator=rng(2)).double().requires_grad_()
    assert torch.allclose(vote(logits, weights, mode, base), vote(logits, 7 * weights, mode, base))
    loss = functional.cross_entropy(vote(logits, weights, mode, base), torch.tensor([0, 1, 2, 0, 1, 2]))
    (gradient,) = torch.autograd.grad(loss, weights)
    assert abs(float((weights.detach() * gradient).sum())) < 1e-12 and float(gradient.abs().max()) > 1e-3


@pytest.mark.parametrize("mode", ["logits", "probabilities", "class_count", "odds"])
def test_votes_with_gradients_are_what_the_teachers_are_reported(mode: str) -> None:
    """Also when a client has no weight left."""
    settings = replace(SMALL, ensemble=mode)
    method = CoBoosting(TASK, settings)
    uploads = uploads_of(method)
    shop = Workshop(method, uploads, context(settings, "abc"))
    voices, logits = Voices(shop, uploads), torch.randn((3, 6, 3), generator=rng())
    for weights in ([0.9, 0.3, 0.1], [0.9, 0.3, 0.0]):
        voices.weights = torch.tensor(weights)
        voices._report()
        expected = vote(logits, voices.weights, mode, voices.base)
        assert bool(torch.isfinite(expected).all()) and float(expected.std()) > 0.01
        for teacher in [*shop.teachers, shop.folded]:
            assert torch.allclose(teacher.combined(logits), expected, atol=1e-4)


def learned(generators: int, epoch: int) -> tuple[Workshop, Voices]:
    """Sixteen images, and one step of the weights on them."""
    settings = replace(SMALL, generators=generators, synthesis_batch=16 // generators, student_batch=16, weight_lr=0.01)
    method = CoBoosting(TASK, settings)
    uploads = uploads_of(method)
    shop = Workshop(method, uploads, context(settings, "abc"))
    shop.grow(0, method.objective)
    voices = Voices(shop, uploads)
    voices.learn(epoch)
    return shop, voices


def test_one_epoch_of_weights_is_so_many_steps_of_mu() -> None:
    shop, voices = learned(1, epoch=3)
    assert torch.allclose((voices.weights - 1 / 3).abs(), torch.full((3,), 0.01 * 0.99**3), atol=1e-7)
    assert torch.allclose(shop.folded.weights.float(), voices.weights) and voices.history.shape == (2, 3)


def test_weights_move_against_the_gradient_and_every_teacher_learns_of_it() -> None:
    """dCE/dw_i at equal weights that sum to one: mean_b (softmax(E) - onehot) (logits_i - E)."""
    shop, voices = learned(2, epoch=1)
    mean = shop.logits.mean(0)
    residual = mean.softmax(-1) - functional.one_hot(shop.labels, 3)
    slope = (residual * (shop.logits - mean)).sum((1, 2))
    assert torch.allclose(voices.weights, 1 / 3 - 0.0099 * slope.sign(), atol=1e-6)
    assert all(torch.allclose(teacher.weights.float(), voices.weights) for teacher in [*shop.teachers, shop.folded])


def test_the_ensemble_is_even_in_the_first_epoch_and_weighted_from_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    taught: list[torch.Tensor] = []
    shown: dict[str, Any] = {}

    class Watched(Workshop):
        def study(self, *args: Any) -> None:
            taught.append(self.folded.weights.float() / self.folded.weights.sum())
            super().study(*args)

    monkeypatch.setattr(coboosting, "Workshop", Watched)
    small = {"generators": 1, "synthesis_batch": 16, "student_batch": 48, "weight_lr": 0.01, "server_epochs": 3}
    method = CoBoosting(TASK, replace(SMALL, **small))
    ctx = replace(context(method.settings, "abc"), show=lambda title, figure: shown.__setitem__(title, figure))
    method.server_phase(uploads_of(method), ctx)
    history = torch.tensor(list(shown["Ensemble weights"]["series"].values())).T
    assert history.shape == (3, 3) and torch.allclose(history[0], torch.full((3,), 1 / 3))
    assert torch.allclose((history[1] - history[0]).abs(), torch.full((3,), 0.0099), atol=1e-6)
    assert torch.allclose((history[2] - history[1]).abs(), torch.full((3,), 0.009801), atol=1e-6)
    assert torch.allclose(torch.stack(taught), history / history.sum(1, keepdim=True), atol=1e-6)


def test_the_student_learns_from_diversified_images() -> None:
    released = []
    for epsilon in (0.0, 0.5):
        method = CoBoosting(TASK, replace(SMALL, epsilon=epsilon, server_epochs=1))
        shared = method.server_phase(uploads_of(method), context(method.settings, "abc")).shared
        released.append(torch.cat([value.flatten().float() for value in shared.tensors.values()]))
    assert not torch.allclose(released[0], released[1], atol=1e-3)


def test_mu_follows_the_number_of_clients_unless_it_is_set() -> None:
    method = CoBoosting(TASK, SMALL)
    uploads = uploads_of(method, "abcde")
    shop = Workshop(method, uploads, context(SMALL, "abcde"))
    assert Voices(shop, uploads).size == pytest.approx(0.02)


def test_a_step_that_silences_everybody_is_not_taken() -> None:
    method = CoBoosting(TASK, replace(SMALL, weight_lr=2.0, generators=1))
    uploads = uploads_of(method, "a")
    shop = Workshop(method, uploads, context(method.settings, "a"))
    shop.grow(0, method.objective)
    voices = Voices(shop, uploads)
    for epoch in range(1, 4):
        voices.learn(epoch)
    assert float(voices.weights.sum()) > 0


def teacher_of(count: int = 2) -> Teacher:
    members = [build_model("cnn-w4", TASK, rng(i)).eval() for i in range(count)]
    return Teacher(members, "logits", torch.ones(count), watch=False)


def test_the_perturbation_has_sup_norm_epsilon() -> None:
    x = torch.rand((6, *TASK.image), generator=rng()) * 2 - 1
    batch = Batch(x, torch.zeros(2, 6, 3), [torch.rand((6, 3), generator=rng(1))])
    teacher = teacher_of()
    seen, answer = perturbed(batch, teacher, 8 / 255)
    sizes = (seen - x).abs().amax((1, 2, 3))
    assert torch.allclose(sizes, torch.full((6,), 8 / 255), atol=1e-6)
    assert torch.equal(answer, teacher.combined(teacher(seen)[0])) and not seen.requires_grad
    assert perturbed(batch, teacher, 0.0)[0] is x


def test_the_perturbation_follows_the_sign_of_a_random_mix_of_probabilities() -> None:
    x = torch.rand((4, *TASK.image), generator=rng()) * 2 - 1
    teacher = teacher_of()
    seen, _ = perturbed(Batch(x, torch.zeros(2, 4, 3), [torch.rand((4, 3), generator=rng(1))]), teacher, 0.25)
    leaf, u = x.clone().requires_grad_(), 2 * torch.rand((4, 3), generator=rng(1)) - 1
    answer = torch.stack([member(leaf) for member in teacher.members]).mean(0)
    (gradient,) = torch.autograd.grad((u * (answer / 4).softmax(-1)).sum(), leaf)
    clear = gradient.abs() > 1e-3 * gradient.abs().max()
    assert float(clear.float().mean()) > 0.5 and torch.allclose((seen - x)[clear], 0.25 * gradient.sign()[clear], atol=1e-6)


def test_the_objective_seeks_disagreement_at_temperature_three_and_adds_the_bn_term() -> None:
    teacher, student = torch.tensor([[3.0, 0, 0], [0, 3.0, 0]]), torch.tensor([[0.0, 3.0, 0], [0, 3.0, 0]])
    labels = torch.tensor([0, 2])
    method = CoBoosting(TASK, replace(SMALL, hardness=2.0, adversarial=0.5, bn=0.25))
    found = method.objective(Seen(teacher, student, torch.tensor(8.0), labels))
    sure, other = math.exp(3) / (math.exp(3) + 2), 1 / (math.exp(3) + 2)
    hard = ((1 - sure) ** 2 * -math.log(sure) + (1 - other) ** 2 * -math.log(other)) / 2
    apart = 9 * (math.e - 1) / (math.e + 2) / 2  # softened, the first sample is (e, 1, 1) against (1, e, 1)
    assert float(found) == pytest.approx(hard + 0.25 * 8 - 0.5 * apart, rel=1e-5)


def test_hard_samples_weigh_more() -> None:
    teacher = torch.tensor([[4.0, 0, 0], [0, 0, 4.0]])
    labels = torch.tensor([0, 0])
    losses = functional.cross_entropy(teacher, labels, reduction="none")
    p = teacher.softmax(-1)[:, 0]
    assert torch.allclose(hard_samples(teacher, labels, 1.0), ((1 - p) * losses).mean())
    assert torch.allclose(hard_samples(teacher, labels, 0.0), losses.mean())
    leaf = teacher.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(hard_samples(leaf, labels, 1.0), leaf)
    expected = (1 - p)[:, None] * (teacher.softmax(-1) - functional.one_hot(labels, 3)) / 2  # the weight is a constant
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize("setting", ["epsilon", "hardness", "generator_clip", "weight_lr"])
def test_negative_settings_are_named(setting: str) -> None:
    problems = CoBoosting(TASK, replace(SMALL, **{setting: -1.0})).problems(2)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]


def test_the_report_shows_images_and_weights() -> None:
    shown: dict[str, Any] = {}
    method = CoBoosting(TASK, SMALL)
    ctx = replace(context(SMALL, "abc"), show=lambda title, figure: shown.__setitem__(title, figure))
    method.server_phase(uploads_of(method), ctx)
    assert shown["Synthetic images"]["kind"] == "gallery" and len(shown["Synthetic images"]["images"]) > 3
    assert list(shown["Ensemble weights"]["series"]) == ["a", "b", "c"]
