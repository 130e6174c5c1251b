"""The distillation loss by its closed forms."""

from collections.abc import Iterator

import pytest
import torch

from osfl.core.errors import TrainingError
from osfl.ingredients.distillation.student import Pool, distill, kd_loss
from osfl.runtime.workers import compute_threads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


def logits(seed: int, rows: int = 5, classes: int = 4) -> torch.Tensor:
    return 3 * torch.randn((rows, classes), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("tau", [1.0, 4.0, 20.0])
def test_gradient_is_tau_times_the_difference(tau: float) -> None:
    teacher, student = logits(0), logits(1).requires_grad_()
    kd_loss(teacher, student, tau).backward()
    expected = tau * ((student / tau).softmax(-1) - (teacher / tau).softmax(-1)) / len(teacher)
    assert student.grad is not None and torch.allclose(student.grad, expected, atol=1e-12)


def test_zero_at_equality_and_never_negative() -> None:
    assert abs(float(kd_loss(logits(0), logits(0), 4.0))) < 1e-12
    assert all(float(kd_loss(logits(a), logits(a + 1), tau)) >= 0 for a in range(10) for tau in (1.0, 20.0))
    assert abs(float(kd_loss(logits(0), logits(0) + 7.0, 4.0))) < 1e-12  # logits are known up to a constant


def test_hot_limit_is_half_the_squared_distance_of_centered_logits() -> None:
    teacher, student = logits(0), logits(1)
    gap = (teacher - teacher.mean(-1, keepdim=True)) - (student - student.mean(-1, keepdim=True))
    expected = gap.square().sum(-1).mean() / (2 * teacher.shape[1])
    assert float(kd_loss(teacher, student, 1e4)) == pytest.approx(float(expected), rel=1e-3)


class Flat(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 3)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1))
        return out


def pool() -> Pool:
    x = torch.randn((48, 1, 4, 4), generator=torch.Generator().manual_seed(0))
    return Pool(x, 2 * x.flatten(1)[:, :3], x.flatten(1)[:, :3].argmax(1))


def test_a_student_learns_the_pool() -> None:
    student = Flat()
    distill(student, pool(), torch.Generator().manual_seed(0), epochs=60, batch_size=16, lr=0.05, hard=0.1, noise=0.01)
    assert float((student(pool().inputs).argmax(1) == pool().labels).float().mean()) > 0.9
    assert not student.training


def test_a_loss_that_is_not_finite_names_the_setting() -> None:
    broken = Pool(pool().inputs, torch.full((48, 3), float("nan")))
    with pytest.raises(TrainingError, match="not finite"):
        distill(Flat(), broken, torch.Generator().manual_seed(0), epochs=1)


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_half_the_loss_with_twice_the_rate_is_the_same_plain_step() -> None:
    one, other, plain = Flat(), Flat(), {"epochs": 2, "momentum": 0.0, "weight_decay": 0.0, "clip": 0.0}
    distill(one, pool(), rng(), lr=0.05, **plain)  # type: ignore[arg-type]
    distill(other, pool(), rng(), lr=0.1, soft=0.5, **plain)  # type: ignore[arg-type]
    assert torch.allclose(one.layer.weight, other.layer.weight, atol=1e-6) and bool(one.layer.weight.any())


def test_what_follows_each_step_knows_its_rate_and_may_undo_it() -> None:
    student, rates = Flat(), []

    def undo(model: torch.nn.Module, lr: float) -> None:
        rates.append(lr)
        with torch.no_grad():
            student.layer.weight.zero_()

    distill(student, pool(), rng(), epochs=2, batch_size=24, lr=0.1, after=undo)
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05]) and not bool(student.layer.weight.any())


@pytest.mark.parametrize("track", [True, False])
def test_statistics_of_batch_norm_move_only_where_they_are_tracked(track: bool) -> None:
    norm = torch.nn.BatchNorm2d(1)
    distill(torch.nn.Sequential(norm, Flat()), pool(), rng(), epochs=1, track=track)
    assert norm.running_mean is not None and bool(norm.running_mean.any()) == track
    assert not bool((norm.weight == 1).all())
