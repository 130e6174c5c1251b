"""FedFTG's equations (methods sheet, test 34)."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.ingredients.averaging import average
from osfl.ingredients.synthesis import draw_labels
from osfl.methods.fedftg import FedFtg, Tuning, diversity, shares
from osfl.models.folding import freeze
from osfl.models.naming import named
from osfl.plan import resolve_settings
from osfl.protocol import Upload
from osfl.workers import compute_threads

from .conftest import TASK, context, shard

SMALL = resolve_settings(FedFtg, "smoke")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the walk computes; small layers only wait for each other with more."""
    with compute_threads(1):
        yield


def uploads_of(method: Any, clients: str = "ab") -> list[Upload]:
    ctx = context(method.settings, list(clients))
    return [Upload(client, "", method.client_phase(shard(client, seed=i), ctx)) for i, client in enumerate(clients)]


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
    told, said = tuning.members[0](x), student(x)
    each = functional.cross_entropy(told, labels, reduction="none") - (said - told).abs().mean(1)
    assert torch.allclose(tuning.objective(tuning.members[0], student, z, labels, weight), (weight * each).mean(), atol=1e-5)
    assert float(tuning.objective(tuning.members[0], student, z, labels, torch.zeros(4))) == 0


def test_mixed_architectures_are_refused_before_the_round() -> None:
    problems = FedFtg(TASK, replace(SMALL, architecture="a:cnn-w4,*:resnet18-w8")).problems(2)
    assert len(problems) == 1 and "one architecture" in problems[0]


@pytest.mark.parametrize(
    "setting", ["iterations", "generator_steps", "student_steps", "synthesis_batch", "noise", "generator_lr", "student_lr"]
)
def test_nothing_starts_with_zero(setting: str) -> None:
    problems = FedFtg(TASK, replace(SMALL, **{setting: 0})).problems(2)
    assert len(problems) == 1 and f"'{setting}'" in problems[0]
