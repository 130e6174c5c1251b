"""FedFTG's equations."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.ingredients.generators.synthesis import draw_labels
from osfl.ingredients.statistics.averaging import average
from osfl.methods.fedftg import FedFtg, Tuning, diversity, shares
from osfl.models.folding import freeze
from osfl.models.naming import named
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMALL = resolve_settings(FedFtg, "smoke")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As a run computes; small layers only wait for each other with more."""
    with compute_threads(1):
        yield


def uploads_of(method: Any, clients: str = "ab") -> list[Upload]:
    ctx = context(method.settings, list(clients))
    return [Upload(client, "", method.client_phase(shard(client, seed=i), ctx)) for i, client in enumerate(clients)]


def counted(method: Any, *counts: list[int]) -> list[Upload]:
    """Uploads of clients that say to have so many images of each class."""
    found = uploads_of(method, "abcdef"[: len(counts)])
    return [
        replace(upload, payload=replace(upload.payload, facts={**upload.payload.facts, "class_counts": output}))
        for upload, output in zip(found, counts, strict=True)
    ]


def uncapped(ctx: Context) -> Context:
    """The paper's weights: claimed counts are relied on as they are."""
    return replace(ctx, plan=replace(ctx.plan, limits=replace(ctx.plan.limits, share=1.0)))


def test_shares_of_clients_sum_to_one_for_classes_that_anyone_has() -> None:
    counts = torch.tensor([[30.0, 0, 2, 0], [10, 0, 2, 5]], dtype=torch.float64)
    found = shares(counts, torch.tensor([0, 2, 3, 0, 1]))
    assert torch.allclose(found[:, :4].sum(0), torch.ones(4)) and torch.equal(found[:, 4], torch.zeros(2))
    assert torch.allclose(found[0, :3], torch.tensor([0.75, 0.5, 0.0]))


def test_labels_follow_the_classes_of_all_clients() -> None:
    counts = torch.tensor([[30.0, 0, 5], [10, 0, 5]])
    found = torch.bincount(draw_labels(20000, counts.sum(0), torch.Generator().manual_seed(0)), minlength=3) / 20000
    assert found[1] == 0 and abs(float(found[0]) - 0.8) < 0.015


def test_uploads_carry_class_counts() -> None:
    assert uploads_of(FedFtg(TASK, SMALL))[0].payload.facts["class_counts"] == [8, 8, 8]


def test_the_student_starts_as_fedavg() -> None:
    method = FedFtg(TASK, SMALL)
    uploads = uploads_of(method)
    tuning = Tuning(method, uploads, context(SMALL, "ab"))
    mean = average([upload.payload.tensors for upload in uploads], [1, 1])
    assert all(torch.equal(value, mean[name]) for name, value in named(tuning.student, "model").items())


def test_diversity_is_one_for_equal_images_and_falls_with_distance() -> None:
    z = torch.randn((5, 4), generator=torch.Generator().manual_seed(0))
    x = torch.randn((5, 1, 3, 3), generator=torch.Generator().manual_seed(1))
    assert float(diversity(z, x[:1].expand(5, -1, -1, -1))) == pytest.approx(1)
    pairs = [((z[i] - z[j]).square().mean() * (x[i] - x[j]).abs().mean()) for i in range(5) for j in range(5)]
    assert torch.allclose(diversity(z, x), (-torch.stack(pairs).mean()).exp(), atol=1e-5)
    assert float(diversity(z, 3 * x)) < float(diversity(z, x)) < 1


def test_objective_weighs_each_sample_by_the_client_that_knows_its_class() -> None:
    method = FedFtg(TASK, replace(SMALL, diverse=0.0))
    tuning = Tuning(method, uploads_of(method), context(method.settings, "ab"))
    labels, z = torch.tensor([0, 1, 2, 0]), torch.randn((4, 16), generator=torch.Generator().manual_seed(0))
    weight, student = torch.tensor([1.0, 0.0, 0.5, 0.0]), freeze(tuning.student)
    x = tuning.draw(z, labels)
    reported, output = tuning.members[0](x), student(x)
    each = functional.cross_entropy(reported, labels, reduction="none") - (output - reported).abs().mean(1)
    assert torch.allclose(tuning.objective(tuning.members[0], student, z, labels, weight), (weight * each).mean(), atol=1e-5)
    assert float(tuning.objective(tuning.members[0], student, z, labels, torch.zeros(4))) == 0


def test_diversity_and_the_bn_term_are_shared_among_the_clients() -> None:
    z, labels = torch.randn((4, 16), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0])
    method = FedFtg(TASK, replace(SMALL, diverse=2.0, bn=0.5))
    tuning = Tuning(method, counted(method, [8, 8, 8], [8, 8, 8], [8, 8, 8]), context(method.settings, "abc"))
    x = tuning.draw(z, labels)
    _, term = tuning.members[1](x)
    found = tuning.objective(tuning.members[1], freeze(tuning.student), z, labels, torch.zeros(4))
    assert float(term.detach()) > 0.1 and torch.allclose(found, (2 * diversity(z, x) + 0.5 * term) / 3, rtol=1e-4)


def test_an_iteration_draws_labels_by_all_class_counts_and_weighs_clients_by_their_own() -> None:
    method = FedFtg(TASK, replace(SMALL, synthesis_batch=6000, generator_steps=2))
    tuning = Tuning(method, counted(method, [30, 0, 5], [10, 0, 15]), uncapped(context(method.settings, "ab")))
    received: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    taught: list[tuple[torch.Tensor, torch.Tensor]] = []

    def objective(member: Any, student: Any, z: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        received.append((member, labels, weight))
        return tuning.generator.conv1.weight.sum()

    def teach(z: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, iteration: int) -> torch.Tensor:
        taught.append((labels, share))
        return torch.zeros(())

    tuning.objective, tuning._teach = objective, teach  # type: ignore[method-assign]
    tuning.iterate(0)
    ((labels, share),) = taught
    often = torch.bincount(labels, minlength=3) / 6000
    assert often[1] == 0 and float(often[0]) == pytest.approx(2 / 3, abs=0.02)
    by_class = torch.tensor([[0.75, 0, 0.25], [0.25, 0, 0.75]])
    assert torch.allclose(share, by_class[:, labels])
    assert [member for member, _, _ in received] == [tuning.members[k] for k in (0, 0, 1, 1)]
    assert all(
        torch.equal(seen, labels) and torch.equal(weight, share[k])
        for (_, seen, weight), k in zip(received, (0, 0, 1, 1), strict=True)
    )


def test_the_student_steps_towards_the_clients_that_have_the_class() -> None:
    """The gradient of its loss to its answers is (softmax(S) - sum_k a_k(y) softmax(T_k)) / B."""
    method = FedFtg(TASK, replace(SMALL, student_steps=1, student_lr=0.1, student_decay=0.0))
    uploads = counted(method, [9, 1, 0], [1, 4, 5])
    tuning = Tuning(method, uploads, uncapped(context(method.settings, "ab")))
    z, labels = torch.randn((6, 16), generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    twin, x = copy.deepcopy(tuning.student).train(), tuning.draw(z, labels).detach()
    tuning._teach(z, labels, shares(tuning.counts, labels), 0)

    reported = [method.build(upload.payload)(x).softmax(-1) for upload in uploads]
    a = torch.tensor([0.9, 0.2, 0.0, 0.9, 0.2, 0.0])[:, None]
    answer = twin(x)
    answer.backward((answer.softmax(-1) - a * reported[0] - (1 - a) * reported[1]).detach() / 6)
    for now, before in zip(tuning.student.parameters(), twin.parameters(), strict=True):
        assert before.grad is not None and torch.allclose(now, before - 0.1 * before.grad, atol=1e-5)


def test_mixed_architectures_are_refused_before_the_round() -> None:
    problems = FedFtg(TASK, replace(SMALL, architecture="a:cnn-w4,*:resnet18-w8")).problems(2)
    assert len(problems) == 1 and "one architecture" in problems[0]


@pytest.mark.parametrize(
    "setting", ["iterations", "generator_steps", "student_steps", "synthesis_batch", "latent_dim", "generator_lr", "student_lr"]
)
def test_nothing_starts_with_zero(setting: str) -> None:
    problems = FedFtg(TASK, replace(SMALL, **{setting: 0})).problems(2)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]
