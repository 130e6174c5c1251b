"""FedISCA's own parts: the walk, its variants, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from osfl.ingredients import trajectories
from osfl.ingredients.trajectories import Lesson, Lessons, Teacher
from osfl.methods.fedisca import FedISCA, Settings
from osfl.plan import resolve_settings
from osfl.protocol import Upload
from osfl.workers import compute_threads

from .conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(FedISCA, "smoke")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As the walk runs: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def uploads(settings: Settings, clients: str = "ab") -> list[Upload]:
    method = FedISCA(TASK, settings)
    return [Upload(c, "", method.client_phase(shard(c, seed=i), context(settings, clients))) for i, c in enumerate(clients)]


def test_defaults_are_the_published_ones() -> None:
    s = Settings()
    assert (s.repetitions, s.steps, s.images, s.pixel_lr, s.tv, s.bn, s.roll) == (100, 500, 256, 0.05, 2.5e-5, 10.0, 2)
    assert (s.temperature, s.server_lr, s.server_momentum, s.server_decay) == (20.0, 1e-3, 0.9, 5e-4)


@pytest.mark.parametrize(
    "change",
    [{"invert": "clients"}, {"invert": "clients", "guides": "makers"}, {"noise_teacher": "batch_stats"},
     {"combine": "class_count", "labels": "seen"}, {"every": 2}, {"init": "average"}],
)  # fmt: skip
def test_variants_run(change: dict[str, str]) -> None:
    settings = replace(SMOKE, repetitions=1, **change)  # type: ignore[arg-type]
    release = FedISCA(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert all(bool(t.isfinite().all()) for t in release.shared.tensors.values() if t.is_floating_point())


def test_counts_travel_only_when_asked_for() -> None:
    assert "class_counts" not in uploads(SMOKE)[0].payload.facts
    assert "class_counts" in uploads(replace(SMOKE, combine="class_count"))[0].payload.facts


def test_cnn_and_resnet_clients_together() -> None:
    settings = replace(SMOKE, architecture="a:cnn-w4,*:resnet18-w8", student="cnn-w4", repetitions=1)
    release = FedISCA(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert release.shared.facts["architecture"] == "cnn-w4"


def test_the_student_learns_from_noise_alone() -> None:
    """Not a benchmark: on an easy task the student must answer as its teachers do, more often than chance."""
    settings = replace(SMOKE, epochs=15, batch_size=8, images=32, steps=30, repetitions=4, server_lr=0.02, temperature=4.0,
                       pixel_lr=0.1, server_schedule="cosine", server_clip=5.0)  # fmt: skip
    method, ups = FedISCA(TASK, settings), uploads(settings)
    student = method.build(method.server_phase(ups, context(settings, "ab")).shared)
    from osfl.models.inputs import to_input

    data = shard("a", n=60, seed=9).train
    with torch.no_grad():
        assert float((student(to_input(data.images)).argmax(1) == data.labels).float().mean()) > 0.5


def test_lessons_made_ahead_are_the_same_and_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the student walks, the next stretch is made; too large to wait in memory, or after a resume, it is made later."""
    settings = replace(SMOKE, repetitions=5)
    method, ups = FedISCA(TASK, settings), uploads(settings)
    made: list[int] = []
    make = Lessons._make

    def counted(self: Lessons, task: tuple[int, Teacher]) -> Lesson:
        made.append(task[0])
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
