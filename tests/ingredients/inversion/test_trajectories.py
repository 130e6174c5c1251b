"""Trajectories in memory of their own, noise adaptation in closed form, and a student on flat vectors."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.types import Payload, Task
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.inversion.pixels import Inversion
from osfl.ingredients.inversion.trajectories import (
    Following,
    Learner,
    Lesson,
    Teacher,
    Trajectory,
    adapted,
    answers,
    finished_images,
    following_problems,
    in_batch_mode,
    in_parts,
    kept_images,
    lesson,
    noise_adapted,
    record,
)
from osfl.models.build import build_model
from osfl.runtime.workers import compute_threads

TASK = Task("toy", ("a", "b", "c"), (1, 8, 8))
SETTINGS = Inversion(steps=6, lr=0.1, bn=1.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a run: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(seed: int = 0, architecture: str = "cnn-w4") -> nn.Module:
    network = build_model(architecture, TASK, rng(seed))
    with torch.no_grad():
        network.train()(torch.randn((32, *TASK.image), generator=rng(seed + 1)))
    return network.eval()


def teacher(count: int = 2) -> Teacher:
    return Teacher(tuple("ab"[:count]), [model(seed) for seed in range(count)])


def wander(steps: int, n: int = 8) -> Trajectory:
    images = torch.randn((steps, n, *TASK.image), generator=rng(5)) + torch.arange(steps).view(-1, 1, 1, 1, 1) / 3
    return Trajectory(images, tuple((t + 1) / steps for t in range(steps)), torch.arange(n) % 3)


def test_entries_are_distinct_memory_with_distinct_content() -> None:
    trajectory = record(teacher(), torch.arange(6) % 3, TASK.image, SETTINGS, rng())
    assert len(trajectory) == 6 and trajectory.times[-1] == 1.0 and trajectory.images.dtype == torch.float16
    assert len({trajectory.images[t].data_ptr() for t in range(6)}) == 6
    assert all(not torch.equal(trajectory.images[t], trajectory.images[t + 1]) for t in range(5))


def test_images_are_made_for_the_labels_that_are_recorded() -> None:
    labels = torch.tensor([0, 0, 1, 2, 2, 2])
    linear = nn.Linear(64, 3)
    nn.init.normal_(linear.weight, 0.0, 0.3, generator=rng(1))
    maker = Teacher(("a",), [nn.Sequential(nn.Flatten(), linear)])
    trajectory = record(maker, labels, TASK.image, Inversion(steps=20, lr=0.2, bn=0.0, roll=0), rng(), every=10)
    assert trajectory.labels.tolist() == labels.tolist()
    with torch.no_grad():
        assert maker(trajectory.at(-1)).argmax(1).tolist() == labels.tolist()
    made = Lesson(trajectory, torch.zeros(2, 6, 3), torch.zeros(2, 6, 3))
    kept = kept_images([made])
    ((images, named),) = finished_images(Payload(kept))
    assert torch.equal(images, trajectory.images[-1].float()) and named.tolist() == labels.tolist()


def test_thinning_keeps_the_same_images_and_the_last() -> None:
    everything = record(teacher(), torch.arange(6) % 3, TASK.image, SETTINGS, rng(), half=False)
    some = record(teacher(), torch.arange(6) % 3, TASK.image, SETTINGS, rng(), every=4, half=False)
    assert some.times == (2 / 6, 1.0)
    assert torch.equal(some.images[0], everything.images[1]) and torch.equal(some.images[1], everything.images[5])


@pytest.mark.parametrize("steps", [1, 5])
def test_reverse_adaptation_in_closed_form(steps: int) -> None:
    """m = β^T m_0 + (1 - β) Σ_t β^(t-1) μ(x^(t)): the earliest images weigh most. The variance likewise, unbiased."""
    network, trajectory, beta = model(), wander(steps), 0.9
    convolution, norm = network.stages[0].conv, network.stages[0].bn  # type: ignore[index, union-attr]
    mean, var = beta**steps * norm.running_mean, beta**steps * norm.running_var
    for t in range(1, steps + 1):
        got_var, got_mean = torch.var_mean(convolution(trajectory.at(t - 1)).detach(), (0, 2, 3), correction=1)
        mean, var = mean + (1 - beta) * beta ** (t - 1) * got_mean, var + (1 - beta) * beta ** (t - 1) * got_var
    replayed = adapted(network, trajectory).stages[0].bn  # type: ignore[index, union-attr]
    assert torch.allclose(replayed.running_mean, mean, atol=1e-6) and torch.allclose(replayed.running_var, var, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
def test_the_noise_teacher_s_answer_in_closed_form(steps: int) -> None:
    """A lone BN layer answers (x - m) / √(v + ε); it started at m = 0, v = 1 and went back with β = 0.9."""
    trajectory = wander(steps)
    mean, var = torch.zeros(()), torch.tensor(0.9**steps)
    for place in range(steps):
        mean = mean + 0.1 * 0.9**place * trajectory.at(place).mean()
        var = var + 0.1 * 0.9**place * trajectory.at(place).var(correction=1)
    alone = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten()).eval()
    output = answers(noise_adapted(Teacher(("a",), [alone]), trajectory, "running"), trajectory)
    assert torch.allclose(output, (trajectory.images.flatten(2) - mean) / (var + 1e-5).sqrt(), atol=1e-5)


def test_images_that_weigh_nothing_are_not_visited() -> None:
    """Walking all of a long trajectory gives the same statistics to float precision."""
    trajectory, network = wander(220, n=4), model()
    slow = copy.deepcopy(network)
    with torch.no_grad():
        for layer in [m for m in slow.modules() if isinstance(m, nn.BatchNorm2d)]:
            layer.train()
        for place in reversed(range(220)):
            slow(trajectory.at(place))
    for ours, theirs in zip(adapted(network, trajectory).buffers(), slow.buffers(), strict=True):
        if ours.is_floating_point():
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_batch_reading_uses_the_batch_and_moves_nothing() -> None:
    network, x = model(), 3 * torch.randn((8, *TASK.image), generator=rng(9))
    batchwise = in_batch_mode(network)
    kept = {name: value.clone() for name, value in batchwise.state_dict().items() if value.is_floating_point()}
    trained = copy.deepcopy(network).train()
    assert torch.allclose(batchwise(x), trained(x), atol=1e-6)
    assert all(torch.equal(batchwise.state_dict()[name], value) for name, value in kept.items())


def test_teachers_combine_and_a_single_member_is_itself() -> None:
    x, pair = torch.randn((4, *TASK.image), generator=rng(3)), teacher()
    assert torch.allclose(pair(x), (pair.members[0](x) + pair.members[1](x)) / 2, atol=1e-6)
    assert torch.allclose(teacher(1)(x), pair.members[0](x))
    heavy = Teacher(("a", "b"), pair.members, "size", torch.tensor([30.0, 10.0]))
    doubled = Teacher(("a", "b"), pair.members, "size", torch.tensor([60.0, 20.0]))
    assert torch.allclose(heavy(x), doubled(x), atol=1e-6)  # only proportions matter
    output = answers(pair, wander(3))
    assert output.shape == (3, 8, 3) and torch.allclose(output[1], pair(wander(3).at(1)), atol=1e-6)


def lesson_of(trajectory: Trajectory, seed: int = 0) -> Lesson:
    shape = (len(trajectory), trajectory.images.shape[1], 3)
    return Lesson(trajectory, torch.randn(shape, generator=rng(seed)), torch.randn(shape, generator=rng(seed + 1)))


def test_noise_teacher_is_unused_at_the_last_step_and_alone_at_none() -> None:
    """λ^(T) = 0; in between the loss is the blend."""
    one = lesson_of(wander(4))
    learner = Learner(model(), 4.0)
    other = Lesson(one.trajectory, one.clean, one.noisy + torch.randn(one.noisy.shape, generator=rng(8)))
    assert torch.equal(learner.gradient([one], 3, track=False), learner.gradient([other], 3, track=False))
    assert not torch.equal(learner.gradient([one], 0, track=False), learner.gradient([other], 0, track=False))
    output = learner.model(one.trajectory.at(1))
    loss = 0.5 * kd_loss(one.noisy[1], output, 4.0) + 0.5 * kd_loss(one.clean[1], output, 4.0)
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, learner.parameters)])
    assert torch.allclose(learner.gradient([one], 1, track=False), expected, atol=1e-6)


def test_untracked_passes_leave_running_statistics_alone() -> None:
    learner, one = Learner(model(), 4.0), lesson_of(wander(2))
    norm = learner.model.stages[0].bn  # type: ignore[index, union-attr]
    before = norm.running_mean.clone()
    learner.gradient([one], 0, track=False)
    assert torch.equal(norm.running_mean, before) and norm.momentum == 0.1
    learner.gradient([one], 0)
    assert not torch.equal(norm.running_mean, before)


def test_steps_equal_torch_s_sgd() -> None:
    learner, twin = Learner(model(), 4.0), model().train()
    optimizer = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
    one = lesson_of(wander(3))
    for place in range(3):
        learner.step(learner.gradient([one], place), 0.1, 0.9, 1e-2)
        output, share = twin(one.trajectory.at(place)), 1 - one.trajectory.times[place]
        loss = share * kd_loss(one.noisy[place], output, 4.0) + (1 - share) * kd_loss(one.clean[place], output, 4.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(learner.parameters, twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_clipping_and_gradients_that_are_not_finite() -> None:
    learner = Learner(model(), 4.0)
    before = torch.cat([p.detach().flatten() for p in learner.parameters])
    learner.step(torch.full_like(before, 3.0), 1.0, clip=0.5)
    moved = torch.cat([p.detach().flatten() for p in learner.parameters]) - before
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-3)
    learner.step(torch.full_like(before, float("nan")), 1.0)
    with pytest.raises(TrainingError, match="not finite"):
        learner.check_finite(1.0)


@pytest.mark.parametrize("reading", ["running", "batch_stats"])
def test_a_lesson_holds_answers_of_both_teachers(reading: str) -> None:
    labels, both = torch.arange(6) % 3, teacher()
    one = lesson(both, both, labels, TASK.image, SETTINGS, rng(), every=2, reading=reading)  # type: ignore[arg-type]
    assert one.clean.shape == one.noisy.shape == (3, 6, 3)
    assert torch.allclose(one.clean, answers(both, one.trajectory), atol=1e-4)  # folded teachers agree
    assert not torch.allclose(one.clean, one.noisy, atol=1e-2)


def test_mixed_architectures_teach_together() -> None:
    mixed = Teacher(("a", "b"), [model(0), model(1, "resnet18-w8")])
    one = lesson(mixed, mixed, torch.arange(6) % 3, TASK.image, SETTINGS, rng(), every=3, reading="running")
    assert bool(one.clean.isfinite().all() and one.noisy.isfinite().all())


def test_parts_cover_all_repetitions_once() -> None:
    assert [list(part) for part in in_parts(5, 1)] == [[0, 1], [2, 3], [4]]
    assert [list(part) for part in in_parts(2, 3)] == [[0], [1]]


def test_settings_that_teach_nothing_are_named() -> None:
    problems = following_problems(Following(repetitions=0, every=0, temperature=0.0, student_lr=-1.0))
    assert [word.split("'")[1] for word in problems] == ["repetitions", "every", "temperature", "student_lr"]
