"""DAFL's equations."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.methods.dafl import Dafl, Featured, Game, entropy_term
from osfl.models.build import build_model
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMALL = resolve_settings(Dafl, "smoke")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run computes; small layers only wait for each other with more."""
    with compute_threads(1):
        yield


def uploads_of(method: Any, clients: str = "ab") -> list[Upload]:
    ctx = context(method.settings, list(clients))
    return [Upload(client, "", method.client_phase(shard(client, seed=i), ctx)) for i, client in enumerate(clients)]


@pytest.mark.parametrize("classes", [2, 8, 100])
def test_the_entropy_term_is_lowest_when_all_classes_come_equally_often(classes: int) -> None:
    even = 50 * torch.eye(classes, dtype=torch.float64)  # sure of each sample, and every class once
    assert float(entropy_term(even)) == pytest.approx(-math.log10(classes), abs=1e-9)
    assert float(entropy_term(even[:1].expand(classes, -1))) == pytest.approx(0, abs=1e-9)  # one class only
    other = torch.randn((5, classes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(entropy_term(other)) > -math.log10(classes)


@pytest.mark.parametrize("architecture", ["cnn-w4", "resnet18-w8"])
@pytest.mark.parametrize("watch", [True, False])
def test_features_are_what_the_head_is_given(architecture: str, watch: bool) -> None:
    model = build_model(architecture, TASK, torch.Generator().manual_seed(0)).eval()
    x = torch.randn((4, *TASK.image), generator=torch.Generator().manual_seed(1))
    logits, size, term = Featured(model, watch)(x)
    assert torch.allclose(logits, model(x), atol=1e-4) and torch.allclose(size, model.features(x).abs().mean(), atol=1e-4)
    assert (float(term) > 0) is watch


def test_objective_is_the_sum_of_its_terms() -> None:
    method = Dafl(TASK, replace(SMALL, one_hot=0.5, entropy=2.0, activation=0.25))
    uploads = uploads_of(method)
    game = Game(method, uploads, context(method.settings, "ab"))
    x = torch.randn((6, *TASK.image), generator=torch.Generator().manual_seed(1))
    teacher, loss = game.objective(x)
    clients = [method.build(upload.payload) for upload in uploads]
    mean = torch.stack([client(x) for client in clients]).mean(0)
    assert torch.allclose(teacher, mean, atol=1e-4)
    features = torch.stack([client.features(x).abs().mean() for client in clients]).mean()  # type: ignore[operator]
    expected = 0.5 * functional.cross_entropy(mean, mean.argmax(-1)) + 2 * entropy_term(mean) - 0.25 * features
    assert torch.allclose(loss, expected, atol=1e-4)


def test_both_move_at_every_turn() -> None:
    method = Dafl(TASK, SMALL)
    game = Game(method, uploads_of(method), context(SMALL, "ab"))
    before = game.generator.conv1.weight.detach().clone(), next(game.student.parameters()).detach().clone()
    game.play(0)
    assert not torch.equal(before[0], game.generator.conv1.weight)
    assert not torch.equal(before[1], next(game.student.parameters()))


def test_the_students_rate_falls_to_a_tenth_at_two_fifths_and_at_four_fifths() -> None:
    """At epochs 800 and 1600 of 2000; the generator's stays."""
    method = Dafl(TASK, replace(SMALL, server_epochs=2000, server_steps=1, student_lr=0.1))
    game = Game(method, uploads_of(method), context(method.settings, "ab"))
    game.turn = lambda z: torch.zeros(())  # type: ignore[method-assign]
    rates = {}
    for epoch in (0, 799, 800, 1599, 1600, 1999):
        game.play(epoch)
        rates[epoch] = game.learner.param_groups[0]["lr"]
        assert game.maker.param_groups[0]["lr"] == method.settings.generator_lr
    assert rates == pytest.approx({0: 0.1, 799: 0.1, 800: 0.01, 1599: 0.01, 1600: 0.001, 1999: 0.001})


def test_a_turn_is_one_step_of_adam_and_one_of_sgd_at_the_temperature() -> None:
    """The first step of Adam moves a weight by its rate; the student's gradient is tau (q - p) / B in its answers."""
    plain = {"student_lr": 0.1, "student_momentum": 0.0, "student_decay": 0.0}
    method = Dafl(TASK, replace(SMALL, generator_lr=0.125, temperature=4.0, **plain))
    uploads = uploads_of(method)
    game = Game(method, uploads, context(method.settings, "ab"))
    z = torch.randn((8, 16), generator=torch.Generator().manual_seed(1))
    x, twin, start = game.draw(z).detach(), copy.deepcopy(game.student).train(), game.generator.conv1.weight.detach().clone()
    game.student.train()
    game.turn(z)
    assert float((game.generator.conv1.weight - start).abs().median()) == pytest.approx(0.125, rel=1e-2)

    teacher, answer = torch.stack([method.build(upload.payload)(x) for upload in uploads]).mean(0), twin(x)
    answer.backward(4 * ((answer / 4).softmax(-1) - (teacher / 4).softmax(-1)).detach() / 8)
    for now, before in zip(game.student.parameters(), twin.parameters(), strict=True):
        assert before.grad is not None and torch.allclose(now, before - 0.1 * before.grad, atol=1e-5)


@pytest.mark.parametrize(
    "setting", ["server_epochs", "server_steps", "synthesis_batch", "latent_dim", "generator_lr", "student_lr"]
)
def test_nothing_starts_with_zero(setting: str) -> None:
    problems = Dafl(TASK, replace(SMALL, **{setting: 0})).problems(2)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]
