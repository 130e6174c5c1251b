"""Generators and what DENSE's heirs share: exact properties."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import osfl.ingredients.generators.synthesis as synthesis
from osfl.core.errors import TrainingError
from osfl.core.types import Task
from osfl.ingredients.ensembles.ensemble import Ensemble
from osfl.ingredients.generators.synthesis import (
    Seen,
    Synthesis,
    Teacher,
    check_finite,
    draw_labels,
    keep,
    masked_divergence,
    moved,
    out_of_range,
    spans,
    synthesize,
    take_up,
)
from osfl.models.build import build_model
from osfl.models.generators import UpConv, build_generator
from osfl.runtime.workers import Workers, compute_threads

TASK = Task("toy", ("a", "b", "c"), (3, 12, 12))
SMALL = Synthesis(generator_steps=3, generator_width=8, latent_dim=6, synthesis_batch=8, shift=1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run computes; small layers only wait for each other with more."""
    with compute_threads(1):
        yield


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def members(*architectures: str) -> list[nn.Module]:
    built = [build_model(name, TASK, rng(i)) for i, name in enumerate(architectures)]
    with torch.no_grad():
        for model in built:
            model.train()(torch.randn((16, *TASK.image), generator=rng(9)))
    return [model.eval() for model in built]


# --- generators ---


def test_doubling_convolution_equals_repetition_then_convolution() -> None:
    layer = UpConv(5, 4).double()
    x = torch.randn((2, 5, 6, 7), generator=rng()).double().requires_grad_()
    plain = functional.conv2d(functional.interpolate(x, scale_factor=2.0), layer.weight, layer.bias, padding=1)
    assert torch.allclose(layer(x), plain, rtol=0, atol=1e-12)
    ours = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    theirs = torch.autograd.grad(plain.square().sum(), [x, layer.weight])
    assert all(torch.allclose(a, b, rtol=0, atol=1e-10) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("ending", ["sigmoid", "tanh+norm"])
@pytest.mark.parametrize("image", [(1, 8, 8), (3, 28, 28), (3, 30, 30), (1, 9, 14), (3, 3, 5)])
def test_generators_make_any_size(image: tuple[int, int, int], ending: str) -> None:
    made = build_generator(image, rng(), latent_dim=6, width=8, ending=ending)(torch.randn((4, 6), generator=rng(1)))  # type: ignore[arg-type]
    assert made.shape == (4, *image) and bool(made.isfinite().all())
    if ending == "sigmoid":
        assert float(made.detach().abs().max()) <= 1
    else:  # each channel has mean 0 and deviation 1 over the batch
        assert torch.allclose(made.mean((0, 2, 3)), torch.zeros(image[0]), atol=1e-4)


def test_a_conditional_generator_listens_to_its_label() -> None:
    generator = build_generator((1, 8, 8), rng(), latent_dim=6, width=8, classes=3, start="uniform")
    z = torch.randn((4, 6), generator=rng(1))
    first, other = generator(z, torch.tensor([0, 1, 2, 0])), generator(z, torch.tensor([1, 1, 2, 0]))
    assert not torch.equal(first, other)


def test_generators_start_from_their_own_generator_in_any_thread() -> None:
    """No draw touches the global generator, so threads cannot disturb each other."""
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda i: build_generator(TASK.image, rng(i % 2), latent_dim=6, width=8).state_dict(), range(16)))
    assert torch.equal(torch.get_rng_state(), before)
    for i, state in enumerate(made):
        assert all(torch.equal(value, made[i % 2][name]) for name, value in state.items())
    assert not torch.equal(made[0]["conv1.weight"], made[1]["conv1.weight"])


def test_the_start_is_as_published() -> None:
    state = build_generator((3, 32, 32), rng(), latent_dim=256).state_dict()
    assert 0.0195 < float(state["conv1.weight"].std()) < 0.0205 and float(state["conv1.bias"].abs().max()) == 0


# --- the teacher ---


@pytest.mark.parametrize("watch", [True, False])
def test_the_teacher_is_the_ensemble_whatever_its_architectures(watch: bool) -> None:
    mixed, weights = members("cnn-w4", "resnet18-w8"), torch.tensor([[3.0, 0, 1], [1, 2, 0]])
    x = torch.randn((5, *TASK.image), generator=rng(1))
    for mode, vote in (("logits", torch.ones(2)), ("class_count", weights)):
        teacher = Teacher(mixed, mode, vote, watch)
        answer = teacher.combined(teacher(x)[0])
        assert torch.allclose(answer, Ensemble(mixed, mode, vote)(x), atol=1e-4)


def test_the_bn_term_is_the_mean_over_clients_of_all_their_layers() -> None:
    pair = members("cnn-w4", "resnet18-w8")
    teacher = Teacher(pair, "logits", torch.ones(2), watch=True)
    layers = [sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) for model in pair]
    assert [member.layers for member in teacher.watched] == layers and min(layers) >= 3
    x = torch.randn((5, *TASK.image), generator=rng(1))
    each = [Teacher([model], "logits", torch.ones(1), True)(x)[1] for model in pair]
    assert torch.allclose(teacher(x)[1], torch.stack(each).mean())
    assert float(Teacher(pair, "logits", torch.ones(2), False)(x)[1]) == 0


# --- terms and draws ---


def test_the_mask_is_zero_where_student_and_teacher_agree() -> None:
    teacher = torch.randn((6, 3), generator=rng(), dtype=torch.float64)
    assert float(masked_divergence(teacher, teacher)) == 0
    assert float(masked_divergence(teacher, 5 * teacher)) == 0  # same argmax, other probabilities: still masked
    student = teacher.clone()
    student[0] = student[0].roll(1)
    p, q = teacher[0].softmax(-1), student[0].softmax(-1)
    assert torch.allclose(masked_divergence(teacher, student), -(p * (p / q).log()).sum() / 6)


def test_labels_come_as_often_as_their_weights_say() -> None:
    weights = torch.tensor([1.0, 0.0, 3.0, 6.0])
    found = torch.bincount(draw_labels(20000, weights, rng()), minlength=4) / 20000
    assert found[1] == 0 and torch.allclose(found, weights.float() / 10, atol=0.015)


def test_moving_keeps_shape_and_pixels() -> None:
    x = torch.rand((2, 3, 8, 8), generator=rng()) + 1
    for seed in range(8):
        seen = moved(x, 2, rng(seed))
        assert seen.shape == x.shape
        assert set(seen[seen > 0].tolist()) <= set(x.flatten().tolist())
    assert torch.equal(moved(x, 0, rng()), x)


def test_spans_cover_everything_once() -> None:
    for total, parts in ((1, 8), (2, 8), (7, 3), (200, 8)):
        found = list(spans(total, parts))
        assert [i for span in found for i in span] == list(range(total)) and len(found) <= parts


def test_ranges_are_named() -> None:
    wrong = Synthesis(server_epochs=0, bn=-1.0, student_batch=1, generator_lr=float("nan"))
    found = out_of_range(wrong, ("server_epochs", "generator_lr"), ("bn",), ("student_batch",))
    assert [sentence.split("'")[1] for sentence in found] == ["server_epochs", "generator_lr", "bn", "student_batch"]


def test_a_loss_that_is_not_finite_stops_the_run() -> None:
    with pytest.raises(TrainingError, match="generator's loss is not finite"):
        check_finite(torch.tensor(float("nan")), "generator", "generator_lr", 0.1)


# --- steps ---


def images_of(seed: int) -> torch.Tensor:
    teacher = Teacher(members("cnn-w4", "cnn-w4"), "logits", torch.ones(2), True)
    student, labels = members("cnn-w4")[0], torch.arange(8) % 3

    def objective(seen: Seen) -> torch.Tensor:
        return functional.cross_entropy(seen.teacher, seen.labels) + seen.bn

    return synthesize(teacher, student, labels, TASK.image, SMALL, rng(seed), objective)


def test_synthesis_gives_the_same_images_in_any_thread() -> None:
    alone = Workers(1).map(images_of, range(4))
    together = Workers(4).map(images_of, range(4))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
    assert alone[0].dtype == torch.uint8 and not torch.equal(alone[0], alone[1])


def test_the_generator_learns_what_it_is_asked() -> None:
    """Not an accuracy benchmark: after some steps the teacher takes images for the labels more than at the start."""
    teacher = Teacher(members("cnn-w4"), "logits", torch.ones(1), False)
    labels, losses = torch.arange(24) % 3, []

    def objective(seen: Seen) -> torch.Tensor:
        loss = functional.cross_entropy(seen.teacher, seen.labels)
        losses.append(float(loss.detach()))
        return loss

    settings = replace(SMALL, generator_steps=60, generator_lr=0.01, shift=0)
    synthesize(teacher, members("cnn-w4")[0], labels, TASK.image, settings, rng(), objective)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_noise_takes_the_same_adam_steps_as_the_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps by hand, with betas 0.5 and 0.999, from the gradients that reach z."""
    noises: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []

    def look(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if not noises:
            given[0].register_hook(gradients.append)
        noises.append(given[0].detach().clone())

    def watched(*args: Any, **options: Any) -> nn.Module:
        generator = build_generator(*args, **options)
        generator.register_forward_pre_hook(look)
        return generator

    monkeypatch.setattr(synthesis, "build_generator", watched)
    monkeypatch.setattr(synthesis, "generator_flops", lambda *args: 0.0)
    teacher = Teacher(members("cnn-w4"), "logits", torch.ones(1), False)
    settings = replace(SMALL, generator_steps=2, generator_lr=0.25)
    synthesize(
        teacher,
        members("cnn-w4")[0],
        torch.arange(8) % 3,
        TASK.image,
        settings,
        rng(),
        lambda seen: 1000 * functional.cross_entropy(seen.teacher, seen.labels),
    )
    first, second = gradients
    assert torch.allclose(noises[1], noises[0] - 0.25 * first.sign(), atol=1e-3)
    mean, square = (0.25 * first + 0.5 * second) / 0.75, (0.999 * first**2 + second**2) / 1.999
    assert torch.allclose(noises[2], noises[1] - 0.25 * mean / square.sqrt(), atol=1e-3)


@pytest.mark.parametrize(
    "optimizer", [lambda p: torch.optim.Adam(p, 0.01), lambda p: torch.optim.SGD(p, 0.01, momentum=0.9)], ids=["Adam", "SGD"]
)
def test_a_stage_goes_on_exactly_where_the_last_ended(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build_model("cnn-w4", TASK, rng()).train()
        return model, optimizer(model.parameters())

    def advance(model: nn.Module, steps: torch.optim.Optimizer, first: int, last: int) -> None:
        for i in range(first, last):
            steps.zero_grad()
            model(torch.randn((8, *TASK.image), generator=rng(i))).square().sum().backward()
            steps.step()

    whole, parts, later = fresh(), fresh(), fresh()
    advance(*whole, 0, 4)
    advance(*parts, 0, 2)
    take_up(*later, "m", keep(*parts, "m"))
    advance(*later, 2, 4)
    assert all(torch.equal(a, b) for a, b in zip(whole[0].state_dict().values(), later[0].state_dict().values(), strict=True))
