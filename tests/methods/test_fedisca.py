"""FedISCA's own parts: the inversion, its variants, and what is refused."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from osfl.core.method import Part
from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.inversion import trajectories
from osfl.ingredients.inversion.trajectories import Learner, Lesson, Lessons, Trajectory
from osfl.methods.fedisca import FedISCA, Settings
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.naming import named
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(FedISCA, "smoke")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a run: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def uploads(settings: Settings, clients: str = "ab") -> list[Upload]:
    method = FedISCA(TASK, settings)
    return [Upload(c, "", method.client_phase(shard(c, seed=i), context(settings, clients))) for i, c in enumerate(clients)]


def test_defaults_are_the_published_ones() -> None:
    s = Settings()
    assert (s.repetitions, s.steps, s.images, s.pixel_lr, s.tv, s.bn, s.roll) == (100, 500, 256, 0.05, 2.5e-5, 10.0, 2)
    assert (s.temperature, s.student_lr, s.student_momentum, s.student_decay) == (20.0, 1e-3, 0.9, 5e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"invert": "clients"},
        {"invert": "clients", "guides": "makers"},
        {"noise_teacher": "batch_stats"},
        {"ensemble": "class_count", "labels": "seen"},
        {"every": 2},
        {"init": "average"},
    ],
)
def test_variants_run(change: dict[str, str]) -> None:
    settings = replace(SMOKE, repetitions=1, **change)  # type: ignore[arg-type]
    release = FedISCA(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert all(bool(t.isfinite().all()) for t in release.shared.tensors.values() if t.is_floating_point())


@pytest.mark.parametrize(("invert", "images"), [("ensemble", [10]), ("clients", [4, 4, 4])])
def test_clients_share_the_images_of_a_repetition(invert: str, images: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Time then grows with the clients, as it does for the ensemble: not with their square."""
    settings = replace(SMOKE, repetitions=1, images=10, invert=invert)  # type: ignore[arg-type]
    made: list[trajectories.Trajectory] = []
    inner = trajectories.record

    def record(*args: Any, **options: Any) -> trajectories.Trajectory:
        made.append(inner(*args, **options))
        return made[-1]

    monkeypatch.setattr(trajectories, "record", record)
    FedISCA(TASK, settings).server_phase(uploads(settings, "abc"), context(settings, "abc"))
    assert [one.images.shape[1] for one in made] == [len(one.labels) for one in made] == images


def test_counts_travel_only_when_asked_for() -> None:
    assert "class_counts" not in uploads(SMOKE)[0].payload.facts
    assert "class_counts" in uploads(replace(SMOKE, ensemble="class_count"))[0].payload.facts


def test_cnn_and_resnet_clients_together() -> None:
    settings = replace(SMOKE, architecture="a:cnn-w4,*:resnet18-w8", student="cnn-w4", repetitions=1)
    release = FedISCA(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert release.shared.facts["architecture"] == "cnn-w4"


def test_the_student_learns_from_noise_alone() -> None:
    """Not a benchmark: on an easy task the student must answer as its teachers do, more often than chance."""
    settings = replace(
        SMOKE,
        epochs=15,
        batch_size=8,
        images=32,
        steps=30,
        repetitions=4,
        student_lr=0.02,
        temperature=4.0,
        pixel_lr=0.1,
        student_schedule="cosine",
        student_clip=5.0,
    )
    method, ups = FedISCA(TASK, settings), uploads(settings)
    student = method.build(method.server_phase(ups, context(settings, "ab")).shared)
    data = shard("a", n=60, seed=9).train
    with torch.no_grad():
        assert float((student(to_input(data.images)).argmax(1) == data.labels).float().mean()) > 0.5


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("passes", [1, 2])
def test_the_ascent_equals_torch_s_sgd_from_noise_to_image_as_often_as_stated(passes: int) -> None:
    """Weights and BN statistics of a twin that learns t/T KD(E, S) + (1 - t/T) KD(Ẽ, S) for t = 1…T, again and again."""
    settings = replace(SMOKE, passes=passes, student_lr=0.01, temperature=4.0)
    images = torch.randn((3, 8, *TASK.image), generator=rng(1)) + torch.arange(3).view(-1, 1, 1, 1, 1)
    clean, noisy = 4 * torch.randn((2, 3, 8, 3), generator=rng(2))
    one = Lesson(Trajectory(images, (1 / 3, 2 / 3, 1.0), torch.arange(8) % 3), clean, noisy)
    learner, twin = (build_model("cnn-w4", TASK, rng(0)).train() for _ in range(2))
    optimizer = torch.optim.SGD(twin.parameters(), 0.01, momentum=0.9, weight_decay=5e-4)
    for t in [1, 2, 3] * passes:
        output = twin(images[t - 1])
        loss = t / 3 * kd_loss(clean[t - 1], output, 4.0) + (1 - t / 3) * kd_loss(noisy[t - 1], output, 4.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    FedISCA(TASK, settings)._train_along(Learner(learner, 4.0), [one], passes, 1.0)
    trained = named(learner, "model")
    assert all(torch.allclose(trained[name], tensor, atol=1e-4) for name, tensor in named(twin, "model").items())


def test_every_repetition_walks_forwards_as_often_as_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, places = replace(SMOKE, repetitions=2, passes=3, every=2), []
    gradient = Learner.gradient

    def noted(self: Learner, lessons: Sequence[Lesson], place: int) -> torch.Tensor:
        places.append(lessons[0].trajectory.times[place])
        return gradient(self, lessons, place)

    monkeypatch.setattr(Learner, "gradient", noted)
    FedISCA(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert places == [0.5, 1.0] * 3 * 2


def test_with_images_first_the_student_learns_behind_the_last_image_along_one_cosine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two repetitions, three passes, two kept steps: each pass goes along both, and the rate falls over all six turns."""
    settings = replace(SMOKE, repetitions=2, passes=3, every=2, order="images_first", student_schedule="cosine", student_lr=0.5)
    done: list[Any] = []
    gradient, step, make = Learner.gradient, Learner.step, Lessons._make

    def made(self: Lessons, task: Part) -> Lesson:
        done.append(f"images {task.payload.facts['repetition']}")
        return make(self, task)

    def noted(self: Learner, lessons: Sequence[Lesson], place: int) -> torch.Tensor:
        done.append((id(lessons[0]), lessons[0].trajectory.times[place]))
        return gradient(self, lessons, place)

    def rated(self: Learner, direction: torch.Tensor, lr: float, *options: float) -> None:
        done[-1] = (*done[-1], lr)
        step(self, torch.zeros_like(direction), 0.0)

    monkeypatch.setattr(Lessons, "_make", made)
    monkeypatch.setattr(Learner, "gradient", noted)
    monkeypatch.setattr(Learner, "step", rated)
    FedISCA(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert done[:2] == ["images 0", "images 1"]
    lessons, times, rates = zip(*done[2:], strict=True)
    assert times == (0.5, 1.0) * 6
    assert lessons == (*[lessons[0]] * 2, *[lessons[2]] * 2) * 3 and lessons[0] != lessons[2]
    expected = [0.25 * (1 + math.cos(math.pi * turn / 6)) for turn in range(6) for _ in range(2)]
    assert rates == pytest.approx(expected)


def test_trajectories_that_are_too_large_to_hold_are_refused_before_the_round() -> None:
    held = replace(SMOKE, order="images_first", images=2**20, steps=500, repetitions=100)
    (problem,) = FedISCA(TASK, held).problems(3)
    assert "'order'" in problem and "at most 4 GiB" in problem
    assert FedISCA(TASK, replace(held, order="interleaved")).problems(3) == []


def test_lessons_made_ahead_are_the_same_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the student learns, the next stretch is made; too large to wait in memory, or after a resume, it is made later."""
    settings = replace(SMOKE, repetitions=5)
    method, ups = FedISCA(TASK, settings), uploads(settings)
    made: list[int] = []
    make = Lessons._make

    def counted(self: Lessons, task: Part) -> Lesson:
        made.append(task.payload.facts["repetition"])
        return make(self, task)

    monkeypatch.setattr(Lessons, "_make", counted)
    ahead = method.server_phase(ups, context(settings, "ab")).shared.tensors
    assert made == [0, 1, 2, 3, 4]
    monkeypatch.setattr(trajectories, "_AHEAD_BYTES", 0)
    late = method.server_phase(ups, context(settings, "ab")).shared.tensors
    assert made == [0, 1, 2, 3, 4] * 2
    assert all(torch.equal(ahead[name], late[name]) for name in ahead)


def test_settings_that_cannot_work_are_named() -> None:
    wrong = replace(SMOKE, steps=0, repetitions=0, temperature=0.0, epochs=0)
    named = {word.split("'")[1] for word in FedISCA(TASK, wrong).problems(3)}
    assert named == {"steps", "repetitions", "temperature", "epochs"}
    mixed = replace(SMOKE, architecture="a:cnn-w4,*:resnet18-w8", init="average")
    assert any("'init'" in word for word in FedISCA(TASK, mixed).problems(3))
