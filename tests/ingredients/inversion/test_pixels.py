"""Every term of the inversion by hand, and what the descent must keep."""

import copy
import math
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.types import Task
from osfl.ingredients.inversion.pixels import (
    Inversion,
    Pixels,
    Watched,
    balanced_labels,
    disagreement,
    invert,
    jensen_shannon,
    labels_for,
    pixel_problems,
    total_variation,
)
from osfl.models.build import build_model
from osfl.runtime.workers import compute_threads

TASK = Task("toy", ("a", "b", "c"), (3, 8, 8))
SMALL = Inversion(steps=4, lr=0.1, tv=1e-3, bn=1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a run: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(architecture: str = "cnn-w4", seed: int = 0) -> nn.Module:
    """A network with BN statistics of its own."""
    network = build_model(architecture, TASK, rng(seed))
    with torch.no_grad():
        network.train()(torch.randn((32, *TASK.image), generator=rng(seed + 1)))
    return network.eval()


def test_total_variation_by_hand() -> None:
    x = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).view(1, 1, 2, 2)
    right, down = (1.0 + 16.0) ** 0.5, (9.0 + 36.0) ** 0.5  # differences (1, 4) and (3, 6)
    assert float(total_variation(x)) == pytest.approx(right + down + 7.0 + 2.0)  # diagonals: |1 - 8| and |4 - 2|
    assert float(total_variation(x, normalize=True)) == pytest.approx(float(total_variation(x)) / 2)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
def test_total_variation_s_gradient_is_that_of_its_definition(order: torch.memory_format) -> None:
    x = torch.randn(3, 2, 5, 4, dtype=torch.float64, generator=rng()).contiguous(memory_format=order)
    assert torch.autograd.gradcheck(total_variation, (x.requires_grad_(),))
    flat = torch.ones(2, 3, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(total_variation(flat), flat)
    assert float(gradient.abs().max()) == 0  # and finite, where the norm has a corner


def test_total_variation_properties() -> None:
    x = torch.randn((2, 3, 5, 5), generator=rng())
    assert float(total_variation(torch.full((2, 3, 4, 4), 7.0))) == 0
    assert float(total_variation(x + 3)) == pytest.approx(float(total_variation(x)), rel=1e-5)
    assert float(total_variation(-4 * x)) == pytest.approx(4 * float(total_variation(x)), rel=1e-5)


@pytest.mark.parametrize("architecture", ["cnn-w4", "resnet18-w8"])
def test_statistics_term_equals_hooks(architecture: str) -> None:
    """R_BN, the logits and both gradients equal a straightforward version with forward hooks, in float64."""
    network = model(architecture).double()
    x = torch.randn((6, *TASK.image), generator=rng(3), dtype=torch.float64)
    terms: list[torch.Tensor] = []

    def hook(layer: nn.Module, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        var, mean = torch.var_mean(inputs[0], (0, 2, 3), correction=0)
        assert isinstance(layer.running_mean, torch.Tensor) and isinstance(layer.running_var, torch.Tensor)
        terms.append((mean - layer.running_mean).norm() + (var - layer.running_var).norm())

    plain = copy.deepcopy(network)
    layers = [layer for layer in plain.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.register_forward_hook(hook)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = functional.cross_entropy(plain(first), torch.arange(6) % 3) + 2.0 * sum(terms)
    expected.backward()
    watched = Watched(network)
    logits, term = watched(second)
    loss = functional.cross_entropy(logits, torch.arange(6) % 3) + 2.0 * term
    loss.backward()
    assert watched.layers == len(layers) == len(terms)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-9)
    assert first.grad is not None and second.grad is not None
    assert torch.allclose(first.grad, second.grad, rtol=1e-7, atol=1e-10)


def test_statistics_term_is_zero_at_the_batch_s_own_statistics() -> None:
    network, x = model(), torch.randn((6, *TASK.image), generator=rng(3))
    for layer in [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]:  # one after the other: each changes the next
        seen: list[torch.Tensor] = []
        handle = layer.register_forward_hook(lambda _, inputs, out, seen=seen: seen.append(inputs[0]))
        with torch.no_grad():
            network(x)
        handle.remove()
        layer.running_var, layer.running_mean = torch.var_mean(seen[0], (0, 2, 3), correction=0)
    assert float(Watched(network)(x)[1]) < 1e-3


def test_watching_leaves_the_network_alone() -> None:
    network = model()
    before = copy.deepcopy(network.state_dict())
    invert([Watched(network)], torch.tensor([0, 1, 2]), TASK.image, SMALL, rng())
    assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
    assert not any(layer._forward_hooks for layer in network.modules())
    assert all(p.requires_grad and p.grad is None for p in network.parameters())


def test_descent_lowers_the_loss_and_repeats() -> None:
    watched, labels = Watched(model()), torch.arange(12) % 3

    def loss(x: torch.Tensor) -> float:
        logits, term = watched(x)
        return float(functional.cross_entropy(logits, labels) + term)

    start = torch.randn((12, *TASK.image), generator=rng())
    settings = Inversion(steps=30, lr=0.05, tv=1e-5, bn=1.0, roll=0)
    images = invert([watched], labels, TASK.image, settings, rng())
    assert loss(images) < 0.7 * loss(start)
    assert torch.equal(images, invert([watched], labels, TASK.image, settings, rng()))


def test_first_adam_step_is_the_learning_rate() -> None:
    """Adam's first step moves each pixel by lr against the sign of its gradient."""
    start = torch.randn((6, *TASK.image), generator=rng())
    moved = invert([Watched(model())], torch.arange(6) % 3, TASK.image, Inversion(steps=1, lr=0.05, roll=0), rng())
    assert torch.allclose((moved - start).abs(), torch.tensor(0.05), atol=1e-3)


def teachers_and_student() -> tuple[list[nn.Module], nn.Module]:
    """Two teachers, and a student that answers otherwise."""
    student = model(seed=7)
    with torch.no_grad():
        student.head.weight.mul_(4)  # type: ignore[union-attr, operator]
    return [model(seed=0), model(seed=3)], student


def loss_by_hand(x: torch.Tensor, labels: torch.Tensor, settings: Inversion) -> torch.Tensor:
    """CE of the mean logits + tv √(256·3·32·32 / pixels) R_TV + bn Σ_clients R_BN + l2 |x| + adi (1 - JS)."""
    models, student = teachers_and_student()
    terms: list[torch.Tensor] = []
    for layer in [m for network in models for m in network.modules() if isinstance(m, nn.BatchNorm2d)]:
        layer.register_forward_pre_hook(
            lambda layer, inputs: terms.extend(
                [
                    (inputs[0].mean((0, 2, 3)) - layer.running_mean).norm(),
                    (inputs[0].var((0, 2, 3), correction=0) - layer.running_var).norm(),
                ]
            )
        )
    logits = (models[0](x) + models[1](x)) / 2
    gaps = [
        x[..., 1:] - x[..., :-1],
        x[..., 1:, :] - x[..., :-1, :],
        x[..., 1:, 1:] - x[..., :-1, :-1],
        x[..., 1:, :-1] - x[..., :-1, 1:],
    ]
    p, q = (output.div(3).softmax(-1).clamp(0.01, 0.99) for output in (student(x), logits))
    m = (p + q) / 2
    js = 0.5 * (m * (m / p).log() + m * (m / q).log()).sum(-1).mean()
    loss = functional.cross_entropy(logits, labels) + settings.bn * sum(terms) + settings.adi * (1 - js)
    scaled = settings.tv * (256 * 3 * 32 * 32 / x.numel()) ** 0.5
    total: torch.Tensor = loss + settings.l2 * x.norm() + scaled * torch.stack([gap.norm() for gap in gaps]).sum()
    return total


@pytest.mark.parametrize("images", [6, 12])
@pytest.mark.parametrize(
    "weights",
    [{}, {"tv": 1e-3}, {"bn": 1.0}, {"l2": 0.1}, {"adi": 10.0}, {"tv": 1e-3, "bn": 1.0, "l2": 0.1, "adi": 10.0}],
    ids=lambda weights: "+".join(weights),
)
def test_a_step_goes_down_the_loss_as_written_by_hand(
    weights: dict[str, float], images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With plain descent in place of Adam, the first step shows the whole gradient, not only its sign."""
    monkeypatch.setattr(torch.optim, "Adam", lambda pixels, lr, **_: torch.optim.SGD(pixels, lr))
    settings = Inversion(**{"steps": 1, "lr": 1.0, "roll": 0, "tv": 0.0, "bn": 0.0, **weights})  # type: ignore[arg-type]
    labels, (models, student) = torch.arange(images) % 3, teachers_and_student()
    start = torch.randn((images, *TASK.image), generator=rng()).requires_grad_()
    (expected,) = torch.autograd.grad(loss_by_hand(start, labels, settings), start)
    moved = invert([Watched(network) for network in models], labels, TASK.image, settings, rng(), student=student)
    assert float((start.detach() - moved - expected).norm()) < 1e-3 * float(expected.norm())


def test_clamp_keeps_the_valid_range() -> None:
    images = invert([Watched(model())], torch.arange(6) % 3, TASK.image, Inversion(steps=2, clamp=True), rng())
    assert float(images.abs().max()) <= 1


def test_disagreement_is_zero_at_equality_and_draws_images_apart() -> None:
    a, b = torch.randn((2, 5, 3), generator=rng(), dtype=torch.float64)
    assert float(disagreement(a, a)) == pytest.approx(0, abs=1e-12)
    assert float(disagreement(a, b)) == pytest.approx(float(disagreement(b, a))) and float(disagreement(a, b)) > 0
    p, q = (a / 3).softmax(-1), (b / 3).softmax(-1)  # nothing is clamped here, so the formula can be written out
    m = (p + q) / 2
    by_hand = 0.5 * (m * (m / p).log() + m * (m / q).log()).sum(-1).mean()
    assert float(disagreement(a, b)) == pytest.approx(float(by_hand))


def test_the_jensen_shannon_divergence_by_hand() -> None:
    """p = (1, 0), q = (1/2, 1/2): m = (3/4, 1/4), ½ log(4/3) + ½ (½ log(2/3) + ½ log 2); log 2 where nothing is shared."""
    p, q = torch.tensor([[90.0, 0.0]]), torch.zeros(1, 2)
    by_hand = 0.5 * math.log(4 / 3) + 0.5 * (0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert float(jensen_shannon(p, q)) == float(jensen_shannon(q, p)) == pytest.approx(by_hand)
    assert float(jensen_shannon(p, -p)) == pytest.approx(math.log(2)) and float(jensen_shannon(p, p)) == 0
    rows = torch.randn((2, 5, 3), generator=rng())
    each = [jensen_shannon(rows[0, i : i + 1], rows[1, i : i + 1]) for i in range(5)]
    assert float(jensen_shannon(*rows)) == pytest.approx(float(torch.stack(each).mean()), rel=1e-5)


def test_adaptive_term_changes_images() -> None:
    labels, student = torch.arange(6) % 3, model(seed=7)
    plain = invert([Watched(model())], labels, TASK.image, SMALL, rng())
    settings = Inversion(steps=4, lr=0.1, tv=1e-3, bn=1.0, adi=10.0)
    assert not torch.equal(plain, invert([Watched(model())], labels, TASK.image, settings, rng(), student=student))


def test_adaptive_images_are_those_that_the_student_gets_wrong() -> None:
    (teacher, _), student = teachers_and_student()

    def gap(adi: float) -> float:
        settings = Inversion(steps=20, lr=0.1, tv=0.0, bn=0.0, roll=0, adi=adi)
        x = invert([Watched(teacher)], torch.arange(6) % 3, TASK.image, settings, rng(), student=student)
        with torch.no_grad():
            return float(disagreement(student(x), teacher(x)))

    assert gap(10.0) > 1.5 * gap(0.0)


def test_labels() -> None:
    seen = torch.tensor([5.0, 0.0, 15.0])
    assert balanced_labels(7, [0, 2]).bincount(minlength=3).tolist() == [4, 0, 3]
    assert labels_for("balanced", 9, seen, rng()).bincount().tolist() == [3, 3, 3]
    assert labels_for("seen", 8, seen, rng()).bincount(minlength=3).tolist() == [4, 0, 4]
    drawn = labels_for("counts", 4000, seen, rng()).bincount(minlength=3)
    assert int(drawn[1]) == 0 and abs(int(drawn[2]) / 4000 - 0.75) < 0.03


def test_pixels_that_are_not_finite_name_the_setting() -> None:
    with pytest.raises(TrainingError, match="not finite") as caught:
        invert([Watched(model())], torch.tensor([0, 1]), TASK.image, Inversion(steps=3, lr=float("inf")), rng())
    assert caught.value.field == "pixel_lr"


def test_settings_that_make_no_image_are_named() -> None:
    problems = pixel_problems(Pixels(images=1, steps=0, pixel_lr=0.0, tv=-1.0))
    assert [word.split("'")[1] for word in problems] == ["images", "steps", "tv", "pixel_lr"]
