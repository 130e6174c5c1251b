"""DENSE's equations, mixed architectures and bad settings."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.ingredients.generators.synthesis import Seen, Workshop, generator_loss
from osfl.methods.coboosting import CoBoosting
from osfl.methods.dense import SMOKE, Dense, Settings
from osfl.models.folding import freeze
from osfl.models.generators import build_generator
from osfl.models.inputs import to_input
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMALL = resolve_settings(Dense, "smoke")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run computes; small layers only wait for each other with more."""
    with compute_threads(1):
        yield


def uploads_of(method: Any, clients: str = "ab") -> list[Upload]:
    ctx = context(method.settings, list(clients))
    return [Upload(client, "", method.client_phase(shard(client, seed=i), ctx)) for i, client in enumerate(clients)]


def test_objective_is_the_sum_of_its_terms() -> None:
    rng = torch.Generator().manual_seed(0)
    teacher, student = torch.randn((2, 6, 3), generator=rng)
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    seen = Seen(teacher, student, torch.tensor(2.0), labels)
    method = Dense(TASK, replace(SMALL, bn=0.5, adversarial=0.0))
    assert torch.allclose(method.objective(seen), functional.cross_entropy(teacher, labels) + 1.0)
    more = Dense(TASK, replace(SMALL, bn=0.5, adversarial=2.0))
    assert float(more.objective(seen)) < float(method.objective(seen))  # disagreement is sought
    same = Seen(teacher, teacher, torch.tensor(2.0), labels)
    assert torch.equal(more.objective(same), method.objective(same))  # and counts nothing where there is none


def bn_gap(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """R_BN by hand: norms of how far the inputs of every BN layer are off its running statistics."""
    gaps: list[torch.Tensor] = []

    def look(layer: Any, given: tuple[torch.Tensor, ...]) -> None:
        var, mean = torch.var_mean(given[0], (0, 2, 3), correction=0)
        gaps.append((mean - layer.running_mean).norm() + (var - layer.running_var).norm())

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    model(x)
    for hook in hooks:
        hook.remove()
    return torch.stack(gaps).sum()


@pytest.mark.parametrize("kind", [Dense, CoBoosting])
def test_the_generators_loss_is_that_of_the_clients_themselves(kind: type[Dense] | type[CoBoosting]) -> None:
    method = kind(TASK, resolve_settings(kind, "smoke", {"bn": 0.5, "adversarial": 0.25, "student_lr": 0.1}))
    uploads = uploads_of(method)
    shop = Workshop(method, uploads, context(method.settings, "ab"))
    generator = build_generator(TASK.image, torch.Generator().manual_seed(1), latent_dim=16, width=8)
    z, labels = torch.randn((9, 16), generator=torch.Generator().manual_seed(2)), torch.arange(9) % 3
    loss = generator_loss(generator, z, labels, shop.teachers[0], freeze(shop.student), 0, torch.Generator(), method.objective)

    x, clients = generator(z).detach(), [method.build(upload.payload) for upload in uploads]
    teacher, student = torch.stack([client(x) for client in clients]).mean(0), shop.student.eval()(x)
    assert bool((teacher.argmax(-1) != student.argmax(-1)).any())
    losses, tau = functional.cross_entropy(teacher, labels, reduction="none"), 1.0
    if kind is Dense:
        weights, mask = torch.ones(9), teacher.argmax(-1) != student.argmax(-1)
    else:
        weights, mask, tau = 1 - teacher.softmax(-1)[torch.arange(9), labels], torch.ones(9), 3.0
    p, q = (teacher / tau).softmax(-1), (student / tau).softmax(-1)
    apart = tau**2 * (mask * (p * (p / q).log()).sum(-1)).mean()
    bn = torch.stack([bn_gap(client, x) for client in clients]).mean()
    assert float(bn.detach()) > 0.1 and float(apart.detach()) > 1e-3
    assert torch.allclose(loss, (weights * losses).mean() + 0.5 * bn - 0.25 * apart, rtol=1e-4)


@pytest.mark.parametrize("hard", [0.0, 0.5])
def test_a_step_of_the_student_follows_the_closed_form_at_its_temperature(hard: float) -> None:
    """The gradient of KD to the student's answers is tau (q - p) / B, and that of the labels' term softmax minus one-hot."""
    method = Dense(
        TASK,
        replace(
            SMALL,
            generators=1,
            synthesis_batch=12,
            student_batch=12,
            temperature=5.0,
            hard=hard,
            student_momentum=0.0,
            student_lr=0.1,
        ),
    )
    shop = Workshop(method, uploads_of(method), context(method.settings, "ab"))
    shop.grow(0, method.objective)
    twin = copy.deepcopy(shop.student).train()
    shop.study(0)

    answer, teacher = twin(to_input(shop.images)), shop.logits.mean(0)
    output = answer.detach()
    soft = 5 * ((output / 5).softmax(-1) - (teacher / 5).softmax(-1)) / 12
    answer.backward(soft + hard * (output.softmax(-1) - functional.one_hot(shop.labels, 3)) / 12)
    moved = 0.0
    for now, before in zip(shop.student.parameters(), twin.parameters(), strict=True):
        assert before.grad is not None and torch.allclose(now, before - 0.1 * before.grad, atol=1e-5)
        moved = max(moved, float((now - before).detach().abs().max()))
    assert moved > 1e-3


def test_the_students_rate_falls_along_a_cosine_over_the_epochs() -> None:
    method = Dense(TASK, replace(SMALL, generators=1, synthesis_batch=12, server_epochs=4, student_cosine=True, student_lr=0.1))
    shop, rates = Workshop(method, uploads_of(method), context(method.settings, "ab")), []
    shop.grow(0, method.objective)
    for epoch in range(4):
        shop.study(epoch)
        rates.append(shop.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.1 * (1 + 0.5**0.5) / 2, 0.05, 0.1 * (1 - 0.5**0.5) / 2])


@pytest.mark.parametrize("kind", [Dense, CoBoosting])
def test_all_images_first_and_then_as_many_lessons_as_asked_for(
    kind: type[Dense] | type[CoBoosting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every image is made against the student's start; then each lesson sees all of them, along one cosine of its own."""
    settings = resolve_settings(kind, "smoke", {"order": "images_first", "student_epochs": 3, "student_cosine": True})
    method: Any = kind(TASK, settings)
    done: list[tuple[str, int, int]] = []
    rates: list[float] = []
    grow, study = Workshop.grow, Workshop.study

    def grown(self: Workshop, epoch: int, *rest: Any) -> None:
        grow(self, epoch, *rest)
        done.append(("images", epoch, len(self.images)))

    def studied(self: Workshop, epoch: int, *rest: Any) -> None:
        study(self, epoch, *rest)
        rates.append(self.optimizer.param_groups[0]["lr"] / settings.student_lr)
        done.append(("lesson", epoch, len(self.images)))

    monkeypatch.setattr(Workshop, "grow", grown)
    monkeypatch.setattr(Workshop, "study", studied)
    method.server_phase(uploads_of(method), context(settings, ["a", "b"]))
    one = settings.generators * settings.synthesis_batch
    assert done == [("images", 0, one), ("images", 1, 2 * one), *(("lesson", epoch, 2 * one) for epoch in range(3))]
    assert rates == pytest.approx([1.0, 0.75, 0.25])
    (problem,) = kind(TASK, replace(settings, order="interleaved")).problems(2)
    assert "order=images_first" in problem


def test_every_epoch_starts_with_a_new_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    import osfl.ingredients.generators.synthesis as synthesis

    starts: list[torch.Tensor] = []

    def watched(*args: Any, **options: Any) -> Any:
        generator = build_generator(*args, **options)
        starts.append(generator.conv1.weight.detach().clone())
        return generator

    monkeypatch.setattr(synthesis, "build_generator", watched)
    method = Dense(TASK, replace(SMALL, server_epochs=3, generators=1))
    method.server_phase(uploads_of(method), context(method.settings, "ab"))
    assert len(starts) == 3 and len({start.sum().item() for start in starts}) == 3
    assert all(0.015 < float(start.std()) < 0.025 for start in starts)  # N(0, 0.02) each time


def test_the_pool_grows_to_its_cap_and_keeps_the_newest() -> None:
    method = Dense(TASK, replace(SMALL, generators=1, pool_batches=2, synthesis_batch=4))
    shop = Workshop(method, uploads_of(method), context(method.settings, "ab"))
    sizes, last = [], torch.empty(0)
    for epoch in range(3):
        shop.grow(epoch, method.objective)
        sizes.append(len(shop.images))
        if epoch == 2:
            assert torch.equal(shop.images[:4], last)
        last = shop.images[-4:]
    assert sizes == [4, 8, 8] and shop.logits.shape == (2, 8, 3)


def test_kept_answers_are_those_of_the_clients() -> None:
    method = Dense(TASK, SMALL)
    uploads = uploads_of(method)
    shop = Workshop(method, uploads, context(SMALL, "ab"))
    shop.grow(0, method.objective)
    for row, upload in zip(shop.logits, uploads, strict=True):
        assert torch.allclose(row, method.build(upload.payload)(to_input(shop.images)), atol=1e-4)


@pytest.mark.parametrize("name", ["dense", "coboosting", "dafl"])
def test_cnn_and_resnet_clients_teach_one_student(name: str) -> None:
    from osfl.core.registry import load

    kind = load(name)
    settings = resolve_settings(kind, "smoke", {"architecture": "a:cnn-w4,*:resnet18-w8", "student": "cnn-w4"})
    method = kind(TASK, settings)
    assert not method.problems(2)
    release = method.server_phase(uploads_of(method), context(settings, "ab"))
    assert release.shared.facts["architecture"] == "cnn-w4"
    assert method.build(release.shared)(torch.zeros(2, *TASK.image)).shape == (2, 3)


@pytest.mark.parametrize("name", ["dense", "coboosting", "dafl", "fedftg"])
def test_averaged_start_needs_one_architecture(name: str) -> None:
    from osfl.core.registry import load

    kind = load(name)
    changes = {"architecture": "a:cnn-w4,*:resnet18-w8", "init": "average"}
    problems = kind(TASK, resolve_settings(kind, "smoke", changes)).problems(2)
    assert len(problems) == 1 and "'init'" in problems[0]


def test_class_counts_travel_only_when_the_teacher_needs_them() -> None:
    plain, weighted = Dense(TASK, SMALL), Dense(TASK, replace(SMALL, ensemble="class_count"))
    assert "class_counts" not in uploads_of(plain)[0].payload.facts
    assert uploads_of(weighted)[0].payload.facts["class_counts"] == [8, 8, 8]


@pytest.mark.parametrize(
    "setting",
    [
        "server_epochs",
        "generator_steps",
        "synthesis_batch",
        "student_batch",
        "passes",
        "generators",
        "latent_dim",
        "generator_lr",
        "student_lr",
        "temperature",
        "generator_width",
    ],
)
def test_nothing_starts_with_zero(setting: str) -> None:
    problems = Dense(TASK, replace(SMALL, **{setting: 0})).problems(2)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]


def test_presets_are_known_settings_and_the_paper_changes_nothing() -> None:
    assert resolve_settings(Dense, "paper") == Settings() and set(SMOKE) <= set(Settings.__dataclass_fields__)
    resolve_settings(Dense, "cpu")
