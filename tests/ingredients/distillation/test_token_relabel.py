"""Token relabel: its three terms by hand, the teacher asked once, and the measured theorem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from osfl.core.errors import UsageError
from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.distillation.token_relabel import (
    KD_ONLY,
    Pool,
    Pools,
    Terms,
    as_vit,
    gradient_norms,
    label_table,
    label_weights,
    lipschitz,
    norm_figure,
    relabel_terms,
    taken_table,
    weighted,
)
from osfl.ingredients.inversion.sparse import dropped
from osfl.models.build import build_model
from osfl.models.vit import Vit
from osfl.reports.figures import figure_views
from osfl.runtime.workers import compute_threads

TASK = Task("t", ("a", "b", "c"), (1, 8, 8))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


def vit(seed: int = 0) -> Vit:
    return as_vit(build_model("vit-p2-w16-d2-h2", TASK, torch_generator(seed, "vit")).eval())


def pool(teacher: Vit, n: int = 5) -> Pool:
    rng = torch_generator(0, "pool")
    images = torch.randn((n, *TASK.image), generator=rng).half()
    keep = torch.stack([torch.randperm(16, generator=rng)[:11] for _ in range(n)]).sort().values
    drop, labels = dropped(keep, 16), torch.arange(n) % 3
    with torch.no_grad():
        whole, rest = teacher(images.float()), teacher(images.float(), drop)
    return Pool(images, labels, torch.zeros(n, dtype=torch.int64), keep, drop, whole, rest)


def every(found: Pool) -> Pool:
    return found.take(torch.arange(len(found)), torch.device("cpu"))


def test_the_terms_by_hand() -> None:
    student, part = vit(), every(pool(vit(1)))
    values = relabel_terms(student, part, Terms(1.0, 0.5, 0.25), temperature=2.0)
    x = part.images
    by_hand = [
        kd_loss(part.whole, student(x), 2.0),
        functional.cross_entropy(student(x, part.keep), part.labels),
        kd_loss(part.rest, student(x, part.drop), 2.0),
    ]
    assert values.tolist() == [float(term.detach()) for term in by_hand]
    assert weighted(values, Terms(1.0, 0.5, 0.25)).item() == pytest.approx((values @ torch.tensor([1.0, 0.5, 0.25])).item())


def test_a_student_like_its_only_teacher_has_nothing_to_learn() -> None:
    student = vit()
    terms = Terms(1.0, 0.0, 1.0)
    loss = weighted(relabel_terms(student, every(pool(student)), terms), terms)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    assert max(float(g.abs().max()) for g in torch.autograd.grad(loss, list(student.parameters()))) < 1e-6


def test_terms_without_weight_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    forward = Vit.forward

    def counted(self: Vit, x: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(0)
        return forward(self, x, keep)

    monkeypatch.setattr(Vit, "forward", counted)
    part = every(pool(vit(1)))
    seen.clear()
    assert relabel_terms(vit(), part, KD_ONLY)[1:].tolist() == [0.0, 0.0] and len(seen) == 1
    nothing_dropped = replace(part, drop=torch.empty(5, 0, dtype=torch.int64))
    assert float(relabel_terms(vit(), nothing_dropped, Terms(0.0, 0.0, 1.0))[2]) == 0 and len(seen) == 1


def test_pools_join_and_part() -> None:
    pools = [pool(vit(1), count) for count in (5, 1, 3)]
    both = Pools(pools)
    assert len(both) == 9
    order = torch.tensor([6, 0, 5, 8, 4, 0])
    part = both.take(order, torch.device("cpu"))
    for name, value in part.tensors().items():
        whole = torch.cat([one.tensors()[name] for one in pools])[order]
        assert torch.equal(value, whole.float() if name == "images" else whole)
    assert part.images.dtype == torch.float32


def test_gradient_norms_are_of_single_images_with_losses_of_equal_weight() -> None:
    student, part = vit(), every(pool(vit(1), 2))
    norms = gradient_norms(student, part, Terms(1.0, 0.2, 0.2))
    one = part.take(torch.tensor([1]), torch.device("cpu"))
    hard = functional.cross_entropy(student(one.images), one.labels)
    soft = 0.5 * functional.cross_entropy(student(one.images, one.keep), one.labels) + 0.5 * kd_loss(
        one.rest, student(one.images, one.drop)
    )
    printed = functional.cross_entropy(student(one.images, one.keep), one.labels) + 0.2 * kd_loss(
        one.rest, student(one.images, one.drop)
    )
    for place, loss in enumerate((hard, soft, printed)):
        flat = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(student.parameters()))])
        assert float(norms[1, place]) == pytest.approx(float(flat.norm()), rel=1e-5)


def test_the_theorem_is_stated_plainly() -> None:
    norms = torch.tensor([[3.0, 1.0, 4.0], [1.0, 2.0, 0.0]])
    assert lipschitz(norms) == {
        **{"L_DI": 3.0, "L_Fed": 2.0, "L_Eq17": 4.0, "mean_DI": 2.0, "mean_Fed": 1.5, "mean_Eq17": 2.0},
        **{"images": 2, "held": True, "held_Eq17": False},
    }
    assert not lipschitz(norms[:, [1, 0, 2]])["held"] and lipschitz(1e-5 * norms)["held"]  # however small, before it is rounded
    figure = norm_figure(norms[:, [1, 0, 2]], Terms(1.0, 0.6, 0.2))
    assert "75% cross-entropy on kept patches and 25% KL on dropped ones" in figure["note"]  # L_Fed owes much to these shares
    assert "held: no" in figure["note"] and [sum(counts) for counts in figure["series"].values()] == [2, 2, 2]
    assert not figure_views({"norms": figure, "labels": label_table(pool(vit(1)), ["north"], TASK.classes)})[0]["problem"]


def test_whom_labels_are_drawn_for() -> None:
    counts = torch.tensor([[5.0, 0.0, 1.0]])
    assert label_weights("uniform", counts).tolist() == [[1, 1, 1]]
    assert label_weights("seen", counts).tolist() == [[1, 0, 1]]
    assert label_weights("counts", counts).tolist() == [[5, 0, 1]]


def test_networks_without_patches_are_refused() -> None:
    with pytest.raises(UsageError, match="no patches to drop"):
        as_vit(build_model("cnn-w4", TASK))


def test_tables_count_what_images_are_made_and_taken_for() -> None:
    found = replace(pool(vit(1), 3), whole=torch.eye(3)[[1, 1, 2]], makers=torch.tensor([0, 0, 1]))  # made for 0, 1 and 2
    assert label_table(found, ["north", "south"], TASK.classes)["values"] == [[1, 1, 0], [0, 0, 1]]
    table = taken_table(found, ["north", "south"], TASK.classes)
    assert table["values"] == [[0, 2, 0], [0, 0, 1]] and "67% are what" in table["note"]
