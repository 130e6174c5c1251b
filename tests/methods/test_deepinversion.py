"""DeepInversion as a federated baseline: who makes images, who answers, and what is refused."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.ingredients.inversion.pixels import disagreement
from osfl.methods.deepinversion import DeepInversion, Settings
from osfl.models.build import build_model
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(DeepInversion, "smoke")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As in a run: more threads would only wait for each other on layers this small."""
    with compute_threads(1):
        yield


def uploads(settings: Settings, clients: str = "ab") -> list[Upload]:
    method = DeepInversion(TASK, settings)
    return [Upload(c, "", method.client_phase(shard(c, seed=i), context(settings, clients))) for i, c in enumerate(clients)]


def test_defaults_are_the_published_ones() -> None:
    s = Settings()
    assert (s.steps, s.images, s.pixel_lr, s.bn, s.tv, s.roll) == (2000, 256, 0.05, 10.0, 2.5e-5, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"invert": "clients", "guides": "makers"},
        {"invert": "clients", "ensemble": "class_count"},
        {"labels": "counts"},
        {"init": "average"},
    ],
)
def test_variants_run(change: dict[str, str]) -> None:
    settings = replace(SMOKE, **change)  # type: ignore[arg-type]
    release = DeepInversion(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert all(bool(t.isfinite().all()) for t in release.shared.tensors.values() if t.is_floating_point())


def test_the_adaptive_term_acts_from_the_second_round_on() -> None:
    ups = uploads(SMOKE)

    def model(**change: float) -> torch.Tensor:
        settings = replace(SMOKE, **change)  # type: ignore[arg-type]
        return DeepInversion(TASK, settings).server_phase(ups, context(settings, "ab")).shared.tensors["model/head.weight"]

    assert not torch.equal(model(adi=0.0), model(adi=10.0))
    assert torch.equal(model(adi=0.0, rounds=1), model(adi=10.0, rounds=1))


def test_adaptive_images_are_those_that_the_student_gets_wrong() -> None:
    """The first round has nothing to disagree with; from the second on, the student of that moment is sought out."""
    student = build_model("cnn-w8", TASK, torch.Generator().manual_seed(9)).eval()
    settings = replace(SMOKE, steps=20, pixel_lr=0.1, bn=0.0, tv=0.0, roll=0)
    ups = uploads(settings)
    with torch.no_grad():
        student.head.weight.mul_(8)  # type: ignore[union-attr, operator]

    def gap(adi: float, number: int) -> float:
        method, ctx = DeepInversion(TASK, replace(settings, adi=adi)), context(settings, "ab")
        pool = method._images(ups, [method.build(u.payload) for u in ups], student, "cnn-w8", number, {}, ctx)
        with torch.no_grad():
            return float(disagreement(student(pool.inputs), pool.teacher))

    assert gap(10.0, 0) == gap(0.0, 0)
    assert gap(10.0, 1) > 1.5 * gap(0.0, 1)


def test_cnn_and_resnet_clients_together() -> None:
    settings = replace(SMOKE, architecture="a:cnn-w4,*:resnet18-w8", student="cnn-w4")
    release = DeepInversion(TASK, settings).server_phase(uploads(settings), context(settings, "ab"))
    assert release.shared.facts["architecture"] == "cnn-w4"


def test_settings_that_cannot_work_are_named() -> None:
    wrong = replace(SMOKE, steps=0, rounds=0, server_epochs=0, adi=-1.0, epochs=0)
    named = {word.split("'")[1] for word in DeepInversion(TASK, wrong).problems(3)}
    assert named == {"steps", "rounds", "server_epochs", "adi", "epochs"}
